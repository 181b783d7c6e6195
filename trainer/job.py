"""What will be run: which command, with which slots and GPUs attached?

`prepare` attaches them, `foresee` only tells; both give the same value, so that a dry run shows what a run
would use.

Concurrency: plain functions, run before the job starts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelfs.clients import slots
from trainer import gpus, sandbox


@dataclass(frozen=True, slots=True)
class Job:
    """A command and all that is attached to it."""

    command: tuple[str, ...]
    slots: tuple[sandbox.Attached, ...]
    gpus: gpus.Gpus

    @property
    def additions(self) -> dict[str, str]:
        """What the job finds in its environment besides what the launcher had in its own."""
        return {attached.variable: str(attached.path) for attached in self.slots} | self.gpus.environment

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ) | self.additions

    def document(self) -> dict[str, Any]:
        return {
            "command": list(self.command),
            "environment": self.additions,
            "slots": [
                {
                    "slot": attached.slot,
                    "variable": attached.variable,
                    "path": str(attached.path),
                    "mounted": attached.mounted,
                    "version": attached.version,
                }
                for attached in self.slots
            ],
            "gpus": {"asked": self.gpus.asked, "on_machine": self.gpus.on_machine, "note": self.gpus.note},
        }

    def script(self) -> str:
        """Return the job as a shell script that does the same without the launcher."""
        lines = []
        for attached in self.slots:
            if attached.mounted:
                lines.append(f"# slot {attached.slot}: version {attached.version} is mounted")
            else:
                given = [] if attached.path == slots.default_mountpoint(attached.slot) else [str(attached.path)]
                lines.append(f"accelfs mount {shlex.join([attached.slot, *given])}")
        if self.gpus.note is not None:
            lines.append(f"# {self.gpus.note}")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.additions.items()]
        return "\n".join([*lines, shlex.join(self.command)])


def prepare(
    command: tuple[str, ...], slots: tuple[sandbox.SlotRequest, ...], gpus_asked: int | None, say: Callable[[str], None]
) -> Job:
    """Choose the GPUs and mount what is not mounted; tell `say` what a user should know, a line each."""
    # What only reads comes first: a job that cannot have its GPUs must not leave mounts behind.
    chosen = gpus.choose(gpus_asked, os.environ)
    attached = sandbox.attach(slots, say)
    if chosen.note is not None:
        say(chosen.note)
    return Job(command, attached, chosen)


def foresee(command: tuple[str, ...], slots: tuple[sandbox.SlotRequest, ...], gpus_asked: int | None) -> Job:
    """Return the job that `prepare` would give, and change nothing."""
    chosen = gpus.choose(gpus_asked, os.environ)
    return Job(command, sandbox.foresee(slots), chosen)
