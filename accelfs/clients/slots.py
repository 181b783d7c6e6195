"""Where is a slot mounted, and how does another program get it mounted?

    from accelfs.clients import slots

    photos = slots.ensure("photos")         # mounts it if it is not mounted
    photos.mountpoint, photos.version       # PosixPath('/mnt/accel/photos'), 3

Hides the `accelfs` command: every call runs it as a process of its own, reads its JSON and turns its
exit code back into the error tree, with the command's own line as the message.  So a caller needs
no daemon, no library of the mount and no particular event loop.

Concurrency: plain blocking calls, each bounded by a deadline; safe from several threads and
processes at once.  Two callers that mount one slot at the same time both get the one mount.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import accelfs
from accelfs.errors import AccelfsError, BusyError, MountError, NotFoundError, UsageError
from accelfs.store.layout import DEFAULT_INSTANCE, parse_slot

__all__ = ["AccelfsError", "MountedSlot", "canonical", "default_mountpoint", "ensure", "find", "mount", "mounted"]

# `status` asks each mount through a child with a deadline of its own; this one is for all of them.
STATUS_SECONDS_MAX = 30.0
# The first mount on a node reads and hashes the whole catalog: about 1.5 GB for 10^7 files.
MOUNT_SECONDS_MAX = 120.0
# A mount that others use may be slow to answer on a busy machine; one that is silent for so long is not.
READY_SECONDS_MAX = 5.0
# What a command that was told to stop gets to take back a half-made mount.
STOP_SECONDS_MAX = 5.0
POLL_SECONDS = 0.05

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class MountedSlot:
    """One slot version at one mount point, as `accelfs status --json` tells it."""

    slot: str
    mountpoint: Path
    version: int
    ready: bool
    """A call through the mount was answered.  False while it starts, and after its daemon died."""
    master_pid: int | None
    worker_pids: tuple[int, ...]
    agent_pid: int | None

    def require_at(self, path: Path) -> None:
        """Raises MountError if it is mounted anywhere else."""
        if os.path.realpath(self.mountpoint) != os.path.realpath(path):
            raise MountError(
                f"slot {self.slot} is mounted at {self.mountpoint}, not at {path}: "
                f"use it there, or `accelfs umount {self.slot}` first"
            )


def canonical(slot: str) -> str:
    """Return the slot's one name: `photos` for `default/photos`.  UsageError for what is no slot name."""
    return str(parse_slot(slot))


def default_mountpoint(slot: str) -> Path:
    """Return where `accelfs mount SLOT` mounts, mounted or not."""
    name = parse_slot(slot)
    root = Path(os.path.abspath(os.path.expanduser(os.environ.get("ACCELFS_MOUNT_ROOT") or "/mnt/accel")))
    return root / name.name if name.instance == DEFAULT_INSTANCE else root / name.instance / name.name


def mounted() -> tuple[MountedSlot, ...]:
    """List the mounts of this node."""
    return _status()


def find(slot: str) -> MountedSlot | None:
    """Return the mount of `slot`, or None if it can be mounted and is not.

    Raises NotFoundError for a slot that does not exist, and the command's other errors for one that cannot be read.
    """
    mounts = _status(slot)
    if not mounts:
        # The root of its tree: reads no more than a mount does at its start.
        _command("stat", "--json", "--", slot, ".", seconds_max=MOUNT_SECONDS_MAX)
    return mounts[0] if mounts else None


def ensure(slot: str, at: Path | None = None, *, seconds_max: float = MOUNT_SECONDS_MAX) -> MountedSlot:
    """Return a mount of `slot` that is ready; mount it first if there is none.

    Without `at` any mount point will do, and a new mount goes where `accelfs mount` puts it.
    With `at` the mount must be there: MountError if the slot is mounted elsewhere.
    """
    mounts = _status(slot)
    return _placed(mounts[0], at) if mounts and mounts[0].ready else mount(slot, at, seconds_max=seconds_max)


def mount(slot: str, at: Path | None = None, *, seconds_max: float = MOUNT_SECONDS_MAX) -> MountedSlot:
    """Mount `slot` and return the mount, ready; a dead mount of it is replaced.

    The same as `ensure`, without the look at what is mounted that usually makes it cheaper.
    """
    place = [] if at is None else [os.path.abspath(at)]
    deadline = time.monotonic() + seconds_max
    while True:
        try:
            text = _command("mount", "--json", "--", slot, *place, seconds_max=deadline - time.monotonic())
        except BusyError:
            # Somebody else is mounting it.
            if time.monotonic() + POLL_SECONDS > deadline:
                raise
            time.sleep(POLL_SECONDS)
        except AccelfsError:
            # Somebody else may have mounted it.
            found = _wait_ready(slot)
            if found is None:
                raise
            return _placed(found, at)
        else:
            return _parsed("mount", text, _mounted_slot)


def _wait_ready(slot: str) -> MountedSlot | None:
    """Return the slot's mount as soon as it is ready, None if it has none; MountError if it does not answer."""
    deadline = time.monotonic() + READY_SECONDS_MAX
    while mounts := _status(slot):
        if mounts[0].ready:
            return mounts[0]
        if time.monotonic() > deadline:
            raise MountError(
                f"slot {slot} is mounted at {mounts[0].mountpoint} and does not answer: "
                f"`accelfs umount {slot} --force` takes it down"
            )
        time.sleep(POLL_SECONDS)
    return None


def _placed(found: MountedSlot, at: Path | None) -> MountedSlot:
    if at is not None:
        found.require_at(at)
    return found


def _status(*slot: str) -> tuple[MountedSlot, ...]:
    text = _command("status", "--json", "--", *slot, seconds_max=STATUS_SECONDS_MAX)
    return _parsed("status", text, lambda document: tuple(map(_mounted_slot, document["mounts"])))


def _parsed(verb: str, text: str, parse: Callable[[Any], Parsed]) -> Parsed:
    try:
        return parse(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise AccelfsError(f"accelfs {verb} --json gave another document than it should: {error!r}") from error


def _mounted_slot(row: dict[str, Any]) -> MountedSlot:
    return MountedSlot(
        slot=str(row["slot"]),
        mountpoint=Path(row["mountpoint"]),
        version=int(row["version"]),
        ready=bool(row["ready"]),
        master_pid=row["master_pid"],
        worker_pids=tuple(row["worker_pids"]),
        agent_pid=row["agent_pid"],
    )


def _command(*arguments: str, seconds_max: float) -> str:
    """Run `accelfs` with these arguments, return its stdout, raise what its exit code means."""
    # Files, not pipes: a daemon that inherits a pipe keeps it open, and reading to its end would
    # wait for the daemon instead of the command.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "accelfs", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=_environment(),
        )
        try:
            code = process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise MountError(f"accelfs {arguments[0]} gave no answer in {seconds_max:.0f} s") from None
        finally:
            _stop(process)
        stdout.seek(0)
        stderr.seek(0)
        if code != 0:
            raise _translate(code, arguments[0], stderr.read().decode(errors="replace"))
        return stdout.read().decode()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _translate(code: int, verb: str, stderr: str) -> AccelfsError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [line.removeprefix("accelfs: ") for line in lines if line.startswith("accelfs: ")]
    line = (own or lines or [f"accelfs {verb} ended with exit code {code}"])[-1]
    if code == UsageError.exit_code:
        return UsageError(line)
    if code == BusyError.exit_code:
        return BusyError(line)
    # Exit code 1 stands for every other class; this one callers tell apart, and so does its line.
    if " has no version" in line:
        return NotFoundError(line)
    return MountError(line) if verb == "mount" else AccelfsError(line)


def _environment() -> dict[str, str]:
    # `python -m` puts the working directory first on the module path, and there a researcher's
    # `random.py` would replace the standard library's: so that is switched off (Python >= 3.11),
    # and a checkout that was found through the working directory is named instead.
    environment = dict(os.environ, PYTHONSAFEPATH="1")
    home = str(Path(accelfs.__file__).resolve().parent.parent)
    if Path(home).name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), home)))
    return environment
