"""How does a job find its slots?

`--slot NAME[=PATH]` becomes a mount that is ready and a variable ACCEL_SLOT_<NAME> with its path.
A slot that the launcher mounts stays mounted: other jobs may have found it in the meantime.
A slot that is mounted already is used where it is; a PATH that says otherwise is refused, because
moving a mount would pull it from under the jobs that read it.

Concurrency: plain functions, run before the job starts.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from accelfs.clients import slots
from trainer.errors import StartError

VARIABLE_CHARACTERS = frozenset(string.ascii_letters + string.digits)


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """One `--slot`, as it was asked for."""

    slot: str
    at: Path | None

    @property
    def variable(self) -> str:
        name = "".join(char.upper() if char in VARIABLE_CHARACTERS else "_" for char in self.slot)
        return f"ACCEL_SLOT_{name}"


@dataclass(frozen=True, slots=True)
class Attached:
    """One slot of a job: where the job finds it, and whether it is there already."""

    slot: str
    variable: str
    path: Path
    mounted: bool
    version: int | None
    """The version that is mounted; None for a slot that is not."""


def parse(texts: Iterable[str]) -> tuple[SlotRequest, ...]:
    """Read the values of `--slot`; refuse two that the job could not tell apart."""
    requests: dict[str, SlotRequest] = {}
    for text in texts:
        request = _parse_one(text)
        other = requests.setdefault(request.variable, request)
        if other is not request:
            if other.slot == request.slot:
                raise StartError(f"--slot {request.slot} is given twice")
            raise StartError(f"slots {other.slot} and {request.slot} would both be {request.variable}: rename one")
    return tuple(requests.values())


def foresee(requests: Iterable[SlotRequest]) -> tuple[Attached, ...]:
    """Say where the job would find its slots; StartError or the client's error if one cannot be there."""
    return tuple(_foresee_one(request) for request in requests)


def attach(requests: Iterable[SlotRequest], say: Callable[[str], None]) -> tuple[Attached, ...]:
    """Mount what is not mounted and return where the job finds its slots; tell `say` about each mount made."""
    requests = tuple(requests)
    # All are looked up before one is mounted, so that a misspelt name leaves no mount of the others.
    foreseen = foresee(requests)
    return tuple(was if was.mounted else _mount(request, say) for request, was in zip(requests, foreseen, strict=True))


def _foresee_one(request: SlotRequest) -> Attached:
    found = slots.find(request.slot)
    if found is None or not found.ready:
        path = request.at or slots.default_mountpoint(request.slot)
        return Attached(request.slot, request.variable, path, False, None)
    if request.at is not None:
        found.require_at(request.at)
    return Attached(request.slot, request.variable, found.mountpoint, True, found.version)


def _mount(request: SlotRequest, say: Callable[[str], None]) -> Attached:
    now = slots.mount(request.slot, request.at)
    say(f"mounted {now.slot} at {now.mountpoint} (version {now.version}); it stays mounted")
    return Attached(request.slot, request.variable, now.mountpoint, True, now.version)


def _parse_one(text: str) -> SlotRequest:
    name, separator, path = text.partition("=")
    if not name or name.startswith("-"):
        raise StartError(f"--slot {text}: a slot name is missing, as in --slot photos or --slot photos=/data/photos")
    if "@" in name:
        raise StartError(f"--slot {text}: a version cannot be chosen here, the mounted or current one is used")
    if separator and not path:
        raise StartError(f"--slot {text}: the path after = is missing, as in --slot {name}=/data/{name}")
    return SlotRequest(slots.canonical(name), Path(os.path.abspath(path)) if separator else None)
