"""How does a mount start, stay and end?

The master mounts through pyfuse3, carries INIT, opens each worker's clone of the device before it forks the
worker, and keeps it.  It restarts workers that die, and RESEND gives their unanswered requests to the others.  It
never reads a request and never touches its own mount: a child asks whether it answers.

    SIGTERM, SIGINT     unmount (detach if in use), give readers DRAIN_SECONDS, end
    umount from outside the workers see the connection end; so does the master

If the master itself is killed, the workers go on serving; the next master takes the connection over from them.  The
same way a new release replaces a living one.

Concurrency: single-threaded; signals are blocked and taken one at a time by sigtimedwait.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accelfs.errors import BusyError, MountError, NotFoundError
from accelfs.mount import connection, device, mountpoint, worker
from accelfs.mount.connection import Connection, Handshake
from accelfs.mount.state import MountState, SlotState, is_mounted
from accelfs.store.filesystem import ACCELFS_TYPE, mounted_at

if TYPE_CHECKING:
    from accelfs.dataset.tree import Tree
    from accelfs.store.layout import SlotName

log = logging.getLogger(__name__)

WORKERS_MAX = 16
READY_SECONDS = 30.0
DRAIN_SECONDS = 5.0
END_SECONDS = 5.0
READ_AHEAD_BYTES = 1 << 20
RESTART_DELAY_SECONDS_MAX = 5.0
# A worker that served this long did not die of what it met at its start.
_STEADY_SECONDS = 10.0
_IDLE_SECONDS = 3600.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


Mode = Literal["mount", "replace", "switch"]
"""mount: at a free path, or from a dead master; replace: from a living one too; switch: another version."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be mounted, where and how.  `open_tree` runs in each worker, after its fork."""

    slot: SlotName
    version: int
    mountpoint: Path
    create_mountpoint: bool
    workers: int
    engine: worker.Engine
    run: Path
    mode: Mode
    open_tree: Callable[[], Tree]


@dataclass(frozen=True, slots=True)
class _Worker:
    index: int
    started: float


def serve(request: Request, on_ready: Callable[[MountState], None]) -> None:
    """Mount, call `on_ready` when a statvfs through the mount has succeeded, and serve until unmounted.

    Raises UsageError, BusyError or MountError if it cannot be mounted; nothing is left behind then.
    """
    device.check_available()
    logging.getLogger("pyfuse3").addFilter(_is_worth_logging)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _Master(request, SlotState(request.run, request.slot)).run(on_ready)


def _check_same(request: Request, living: MountState) -> None:
    """A mount keeps its place and version for life, whoever serves it."""
    path = Path(living.mountpoint)
    if path != mountpoint.resolved(request.mountpoint):
        raise MountError(f"{living.slot} is mounted at {path}; umount it first, or mount it there again")
    if living.version != request.version:
        raise MountError(
            f"{path} shows version {living.version}; a mount keeps its version for life: "
            f"accelfs umount {living.slot}, then mount version {request.version}"
        )


class _Master:
    """One mount's life; its state is what the phases share."""

    def __init__(self, request: Request, state: SlotState) -> None:
        self._request = request
        self._state_file = state
        self._path = mountpoint.resolved(request.mountpoint)
        self._made_folders = 0
        self._device = ""
        self._session = -1
        self._connection: Connection | None = None
        self._clones: list[int] = []
        """The workers' devices, by worker index.  Every process of the mount holds them all."""
        self._alive: list[tuple[int, int]] = []
        """A pipe for each worker, read end and write end: see worker.watch."""
        self._workers: dict[int, _Worker] = {}
        """By process number."""
        self._restarts: dict[int, float] = {}
        """Worker index -> when (monotonic) it is started again."""
        self._delay_seconds = 0.0
        self._question: int | None = None
        """The child that asks whether the mount answers."""
        self._ready = False
        self._over = False
        self._retired = False
        self._lock = -1
        """Held as long as the slot is ours."""

    def run(self, on_ready: Callable[[MountState], None]) -> None:
        found = self._state_file.read()
        mode = self._request.mode
        try:
            if mode == "switch":
                self._switch(found)
            else:
                if mode == "replace" and found is not None and self._state_file.held():
                    _check_same(self._request, found)
                    # Its workers serve on, and hand their connection over like those of any dead master.
                    device.end(found.master_pid, END_SECONDS)
                self._lock = self._state_file.hold()
                self._begin(found)
            self._state_file.write(self._state())
            on_ready(self._state())
            self._supervise()
        finally:
            self._take_down()

    def _begin(self, found: MountState | None) -> None:
        """Serve at a path that shows nothing yet, or take over what a dead master left there."""
        orphaned = found is not None and is_mounted(found)
        if orphaned and self._request.mode == "mount":
            log.warning("the master of %s at %s was killed; replacing it", self._request.slot, self._path)
        if found is not None and orphaned and self._take_over(found):
            self._start_workers()
            self._wait_ready(self._path)
            return
        if found is not None:
            self._clear(found)
        # A dead mount stays until ours stands beneath it: without it the path would show an empty folder.
        stale = mountpoint.is_stale(self._path)
        if stale and not mountpoint.can_exchange():
            mountpoint.remove_stale(self._path)
            stale = False
        if not stale:
            self._made_folders += mountpoint.prepare(self._path, create=self._request.create_mountpoint)
        mount = self._connect()
        self._start_workers()
        # A detached mount gets its path only when it answers: nobody ever meets one that does not.
        self._wait_ready(self._path if mount is None else mount)
        if mount is not None:
            (mountpoint.exchange if stale else mountpoint.attach)(mount, self._path)
            os.close(mount)
        self._attached()

    def _switch(self, found: MountState | None) -> None:
        """Serve another version in the place of the one that is mounted."""
        slot, version = self._request.slot, self._request.version
        if found is None or not is_mounted(found):
            raise NotFoundError(f"{slot} is not mounted; accelfs mount {slot}")
        if found.version == version:
            raise MountError(f"{found.mountpoint} shows version {version} already")
        self._path = Path(found.mountpoint)
        mount = self._connect()
        if mount is None:
            raise MountError(f"{self._path}: only root can exchange a mount in place: umount and mount")
        self._start_workers()
        self._wait_ready(mount)
        if self._state_file.held():
            os.kill(found.master_pid, signal.SIGUSR1)  # retire: the slot is ours, its readers stay its own
        self._lock = self._state_file.hold_soon(END_SECONDS)
        mountpoint.exchange(mount, self._path)
        os.close(mount)
        self._made_folders = found.made_folders
        self._attached()

    def _start_workers(self) -> None:
        while len(self._clones) < self._request.workers:
            self._clones.append(device.clone(self._session))
        while len(self._alive) < len(self._clones):
            self._alive.append(os.pipe())
        device.resend(self._session)
        for index in range(self._request.workers):
            self._start_worker(index)

    def _take_over(self, orphan: MountState) -> bool:
        """Serve the mount of a dead master, whose workers hold the connection; False if nobody does.

        All their devices are duplicated first, so that none is closed with requests in flight, which would fail.  The
        old workers are ended only when libfuse knows the connection here.  What they had read and not answered is sent
        again: their readers wait a moment and see no error.
        """
        processes = device.holders(orphan.device) or [orphan.master_pid, *orphan.worker_pids]
        duplicates = [descriptor for process in processes for descriptor in device.duplicate(process, orphan.device)]
        if not duplicates:
            return False
        _check_same(self._request, orphan)
        handshake = Handshake(bytes.fromhex(orphan.init_request), bytes.fromhex(orphan.init_answer))
        self._session = os.dup(duplicates[0])
        self._connection = connection.adopt(self._session, handshake, self._name)
        self._device, self._made_folders = orphan.device, orphan.made_folders
        log.info("%s: taking over from the processes %s", self._path, processes)
        for process in processes:
            device.end(process, END_SECONDS)
        device.resend(self._session)
        for descriptor in duplicates:
            os.close(descriptor)
        return True

    def _clear(self, orphan: MountState) -> None:
        """Remove what a dead mount of the slot left behind."""
        path = Path(orphan.mountpoint)
        if path == self._path:
            self._made_folders = orphan.made_folders  # they are still there, and still ours to remove
        else:
            if is_mounted(orphan):
                mountpoint.unmount(path, lazy=True)
            mountpoint.remove_folders(path, orphan.made_folders)
        self._state_file.remove()

    def _connect(self) -> int | None:
        """Make the connection; return its detached mount, or None if it shows at its path already."""
        made = self._connection = connection.make(self._path, self._name)
        self._session = made.session
        return made.mount

    def _attached(self) -> None:
        """Note what the mount table says of the path that shows the mount now."""
        row = mounted_at(self._path)
        if row is None:
            raise MountError(f"{self._path}: the mount vanished while it was made")
        self._device = row.device
        device.set_read_ahead(row.device, READ_AHEAD_BYTES)

    @property
    def _name(self) -> str:
        """What the mount table shows as the source."""
        return f"accelfs:{self._request.slot}@{self._request.version}"

    def _start_worker(self, index: int) -> None:
        made = self._connection
        assert made is not None
        pid = os.fork()
        if pid == 0:
            code = worker.FAILED
            try:
                if self._request.engine == "pyfuse3":
                    made.loop.hold = bool  # from here on it blocks in read(2) instead of suspending
                code = worker.run(
                    self._session, self._clones, self._alive, index, self._request.engine, made.operations,
                    made.serving, self._request.open_tree,
                )  # fmt: skip
            finally:
                logging.shutdown()
                os._exit(code)
        self._workers[pid] = _Worker(index, time.monotonic())

    def _wait_ready(self, mount: Path | int) -> None:
        """Until a child has got an answer through the mount."""
        deadline = time.monotonic() + READY_SECONDS
        self._question = device.ask(mount)
        while self._is_unanswered():
            if not self._workers and not self._restarts:
                raise MountError(f"{self._path}: no worker could open the version; the log says why")
            left = deadline - time.monotonic()
            if left <= 0:
                raise MountError(f"{self._path}: the mount does not answer within {READY_SECONDS:.0f} s; see the log")
            if self._restarts:
                left = max(0.0, min(left, min(self._restarts.values()) - time.monotonic()))
            signal.sigtimedwait((signal.SIGCHLD,), left)
            self._reap()
            self._restart_due()
        self._ready = True

    def _is_unanswered(self) -> bool:
        return self._question is not None

    def _supervise(self) -> None:
        """Until the connection is over, or a signal asks to end it."""
        while self._workers or self._restarts:
            seconds = max(0.0, min(self._restarts.values()) - time.monotonic()) if self._restarts else _IDLE_SECONDS
            received = signal.sigtimedwait(_SIGNALS, seconds)
            if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
                log.info("%s: ending on signal %d", self._path, received.si_signo)
                self._drain()
                return
            if received is not None and received.si_signo == signal.SIGUSR1:
                self._retire()
            self._reap()
            self._restart_due()

    def _reap(self) -> None:
        """Take every ended child and arrange for the dead workers' successors."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._question:
                self._question = None
                if status != 0:
                    raise MountError(f"{self._path}: the mount answers an error; the log says why")
            elif pid in self._workers:
                self._worker_ended(pid, os.waitstatus_to_exitcode(status))

    def _worker_ended(self, pid: int, code: int) -> None:
        ended = self._workers.pop(pid)
        served_seconds = time.monotonic() - ended.started
        if code == worker.ENDED:
            self._over = True
            self._restarts.clear()
        elif not self._over and (self._ready or code != worker.CANNOT_OPEN):
            if served_seconds >= _STEADY_SECONDS:
                self._delay_seconds = 0.0
            elif code != -signal.SIGKILL:  # it ended by what it met; a SIGKILL comes from outside
                self._delay_seconds = min(RESTART_DELAY_SECONDS_MAX, 2 * self._delay_seconds + 0.05)
            log.warning(
                "worker %d ended with code %d after %.1f s; the next starts in %.2f s",
                pid, code, served_seconds, self._delay_seconds,
            )  # fmt: skip
            self._restarts[ended.index] = time.monotonic() + self._delay_seconds
            self._requeue(ended.index)

    def _requeue(self, index: int) -> None:
        """What the worker had read and not answered goes to the others."""
        if device.can_resend():
            device.resend(self._session)
        else:
            # An older kernel ends these requests when the device is closed everywhere, and page reads are tried again.
            os.close(self._clones[index])
            self._clones[index] = device.clone(self._session)

    def _restart_due(self) -> None:
        now = time.monotonic()
        due = [index for index, moment in self._restarts.items() if moment <= now]
        if due and not self._over:
            for index in due:
                del self._restarts[index]
                self._start_worker(index)
            if self._ready and not self._retired:
                self._state_file.write(self._state())

    def _retire(self) -> None:
        """Another master has the slot now; serve those who still use this version until the last has left."""
        log.info("%s: version %d is being replaced", self._path, self._request.version)
        self._retired = True
        os.close(self._lock)
        self._lock = -1

    def _drain(self) -> None:
        """Unmount; readers of open files get DRAIN_SECONDS before their connection ends."""
        try:
            if not self._retired:
                mountpoint.unmount(self._path, lazy=False)
        except BusyError:
            log.warning("%s is in use: detached; open files stay readable for %.0f s", self._path, DRAIN_SECONDS)
            mountpoint.unmount(self._path, lazy=True)
        except MountError as error:
            log.warning("%s", error)  # somebody else has unmounted it already
        self._over = True
        self._restarts.clear()
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._workers and time.monotonic() < deadline:
            signal.sigtimedwait((signal.SIGCHLD,), max(0.0, deadline - time.monotonic()))
            self._reap()

    def _take_down(self) -> None:
        """Leave nothing behind: no mount, no worker, no folder that we made, no state."""
        row = mounted_at(self._path)
        if row is not None and row.type == ACCELFS_TYPE and row.device == self._device:
            mountpoint.unmount(self._path, lazy=True)
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self._question is not None:
            os.kill(self._question, signal.SIGKILL)  # it goes when the connection does
        if self._session >= 0:
            os.close(self._session)
        if self._lock < 0:
            return  # the slot is not, or no longer, ours
        mountpoint.remove_folders(self._path, self._made_folders)
        if self._device:
            self._state_file.remove()
        os.close(self._lock)

    def _state(self) -> MountState:
        made = self._connection
        assert made is not None
        return MountState(
            slot=str(self._request.slot), mountpoint=str(self._path), made_folders=self._made_folders,
            version=self._request.version, device=self._device, master_pid=os.getpid(),
            worker_pids=sorted(self._workers), engine=self._request.engine, workers=self._request.workers,
            init_request=made.handshake.request.hex(), init_answer=made.handshake.answer.hex(),
        )  # fmt: skip


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """pyfuse3 complains when an answer finds no request: it was interrupted, or answered after RESEND."""
    return not record.getMessage().endswith(os.strerror(errno.ENOENT))
