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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelfs
from accelfs.errors import AccelfsError, BusyError, MountError, UsageError
from accelfs.store.layout import DEFAULT_INSTANCE, parse_slot

__all__ = ["AccelfsError", "MountedSlot", "canonical", "default_mountpoint", "ensure", "find", "mounted"]

# `status` asks each mount through a child with a deadline of its own; this one is for all of them.
STATUS_SECONDS_MAX = 30.0
# The first mount on a node reads and hashes the whole catalog: about 1.5 GB for 10^7 files.
MOUNT_SECONDS_MAX = 120.0
# What a command that was told to stop gets to take back a half-made mount.
STOP_SECONDS_MAX = 5.0
POLL_SECONDS = 0.05


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
    """Return the mount of `slot`, or None if the slot exists and is not mounted.

    Raises NotFoundError for a slot that does not exist.
    """
    mounts = _status(slot)
    return mounts[0] if mounts else None


def ensure(slot: str, at: Path | None = None, *, seconds_max: float = MOUNT_SECONDS_MAX) -> MountedSlot:
    """Return a mount of `slot` that is ready; mount it first if there is none.

    Without `at` any mount point will do, and a new mount goes where `accelfs mount` puts it.
    With `at` the mount must be there: MountError if the slot is mounted elsewhere.
    """
    if at is not None:
        at = Path(os.path.abspath(at))
    deadline = time.monotonic() + seconds_max
    while True:
        found = find(slot)
        if found is not None and found.ready:
            return _placed(found, at)
        try:
            # A mount that is there without being ready is either starting, then this call says
            # that it is busy, or dead, then this call replaces it.
            _command("mount", "--", slot, *([] if at is None else [str(at)]), seconds_max=deadline - time.monotonic())
        except BusyError:
            if time.monotonic() + POLL_SECONDS > deadline:
                raise
            time.sleep(POLL_SECONDS)
        except AccelfsError:
            # Somebody else may have mounted it between the two calls.
            found = find(slot)
            if found is None or not found.ready:
                raise
            return _placed(found, at)
        else:
            break
    found = find(slot)
    if found is None or not found.ready:
        raise MountError(f"slot {slot} was mounted and does not answer: see `accelfs status {slot}`")
    return _placed(found, at)


def _placed(found: MountedSlot, at: Path | None) -> MountedSlot:
    if at is not None:
        found.require_at(at)
    return found


def _status(*slot: str) -> tuple[MountedSlot, ...]:
    text = _command("status", "--json", "--", *slot, seconds_max=STATUS_SECONDS_MAX)
    try:
        return tuple(_parse(mount) for mount in json.loads(text)["mounts"])
    except (ValueError, KeyError, TypeError) as error:
        raise AccelfsError(f"accelfs status --json is not the document it should be: {error!r}") from error


def _parse(mount: dict[str, Any]) -> MountedSlot:
    return MountedSlot(
        slot=str(mount["slot"]),
        mountpoint=Path(mount["mountpoint"]),
        version=int(mount["version"]),
        ready=bool(mount["ready"]),
        master_pid=mount["master_pid"],
        worker_pids=tuple(mount["worker_pids"]),
        agent_pid=mount["agent_pid"],
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
    lines = [line for line in stderr.splitlines() if line.strip()]
    line = lines[-1].strip().removeprefix("accelfs: ") if lines else f"accelfs {verb} ended with exit code {code}"
    if code == UsageError.exit_code:
        return UsageError(line)
    if code == BusyError.exit_code:
        return BusyError(line)
    return MountError(line)


def _environment() -> dict[str, str]:
    # `python -m` puts the working directory first on the module path, and there a researcher's
    # `random.py` would replace the standard library's: so that is switched off (Python >= 3.11),
    # and a checkout that was found through the working directory is named instead.
    environment = dict(os.environ, PYTHONSAFEPATH="1")
    home = str(Path(accelfs.__file__).resolve().parent.parent)
    if Path(home).name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), home)))
    return environment
