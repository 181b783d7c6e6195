"""Which mounts does this node have, and who serves them?

    <run>/<instance>+<slot>.lock    held (flock) by the master as long as it lives
    <run>/<instance>+<slot>.json    what it serves, replaced atomically by the master

A state file without a held lock is that of a master that was killed: its workers may still serve the mount.

Concurrency: sync; the master writes its own slot's files, anybody reads.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from accelfs.errors import BusyError, MountError
from accelfs.store.filesystem import ACCELFS_TYPE, mounted_at
from accelfs.store.layout import SlotName


class MountState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one master serves, and what its successor needs.

    `device` is the mount's `major:minor`, as in /proc/self/mountinfo; `workers` how many were asked for; the INIT
    messages are in hex.
    """

    slot: str
    mountpoint: str
    made_folders: int
    version: int
    device: str
    master_pid: int
    worker_pids: list[int]
    agent_pid: int | None = None
    engine: str
    workers: int
    init_request: str
    init_answer: str


_Document = TypeVar("_Document", bound=msgspec.Struct)


def encode(document: msgspec.Struct) -> bytes:
    """One line of JSON in ASCII: paths may hold bytes that are no text, which msgspec's own encoder refuses."""
    return json.dumps(msgspec.to_builtins(document)).encode("ascii")


def decode(line: bytes, type_: type[_Document]) -> _Document:
    """Raises ValueError for what `encode` did not write.

    The writer may have had another locale, where the same bytes are other characters.
    """
    return msgspec.convert(_in_our_locale(json.loads(line)), type_)


def _in_our_locale(value: object) -> object:
    if isinstance(value, str):
        return os.fsdecode(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, dict):
        return {key: _in_our_locale(item) for key, item in value.items()}
    return value


class SlotState:
    """The two files of one slot."""

    def __init__(self, run: Path, slot: SlotName) -> None:
        self._slot = slot
        self._run = run
        self._lock = run / f"{slot.file_name}.lock"
        self._path = run / f"{slot.file_name}.json"

    def hold(self) -> int:
        """Become the slot's master: return the locked descriptor.  MountError or BusyError if there is one."""
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MountError(f"{self._run}: {error.strerror}; set ACCELFS_HOME to a folder you may write") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            state = self.read()
            if state is None:
                raise BusyError(f"{self._slot} is being mounted by another process; wait for it") from None
            raise MountError(
                f"{self._slot} is mounted already: version {state.version} at {state.mountpoint}; "
                f"accelfs umount {self._slot} first"
            ) from None
        return descriptor

    def hold_soon(self, seconds: float) -> int:
        """Hold the slot as soon as its master lets go of it.  MountError if it does not in time."""
        deadline = time.monotonic() + seconds
        while self.held() and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.hold()

    def held(self) -> bool:
        """Is there a living master?"""
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def wait_ended(self, master_pid: int, seconds: float) -> bool:
        """Wait until the master has ended and let go of the slot; False if it did not in time."""
        try:
            descriptor = os.pidfd_open(master_pid)
        except ProcessLookupError:
            return not self.held()
        try:
            ready, _, _ = select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)
        return bool(ready) and not self.held()

    def read(self) -> MountState | None:
        try:
            return decode(self._path.read_bytes(), MountState)
        except (OSError, ValueError):
            return None

    def write(self, state: MountState) -> None:
        temporary = self._path.with_suffix(".new")
        temporary.write_bytes(encode(state))
        temporary.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def slots(run: Path) -> list[SlotName]:
    """Every slot that has a state file, sorted."""
    names = sorted(path.stem for path in run.glob("*+*.json"))
    return [SlotName(*name.split("+", 1)) for name in names]


def is_mounted(state: MountState) -> bool:
    """Is the kernel mount of this state still there?  Looks at the mount table only."""
    row = mounted_at(Path(state.mountpoint))
    return row is not None and row.type == ACCELFS_TYPE and row.device == state.device
