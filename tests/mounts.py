"""Real mounts for tests: made through the command line, watched, always taken down.

    with mounts.node() as node:
        node.pack(source, "photos")
        path = node.mount("photos")
        ...

When the block ends, everything has to be as it was before: no process, no mount, no mount point, no state file, and
nothing in a daemon's log that the test did not declare with `expect_log`.  What is left is taken down all the same,
by ever harder means, and fails the test.

Who touches a mount that hangs may never come back, so a test never does that itself: `in_child` runs the test's body
in a forked child with a deadline.  A child that hangs is freed by ending the mount's processes, which ends the
connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import mmap
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import pytest
from conftest import SECONDS_MAX, Cli, Finished, Home, wait_until

P = ParamSpec("P")
Result = TypeVar("Result")
Test = TypeVar("Test", bound=Callable[..., None])

NOBODY = 65534
CHILD_SECONDS = 60.0
# A process that was killed is gone within this, unless it hangs in the kernel.
KILLED_SECONDS = 2.0
# And once the connection has ended, within this.
FREED_SECONDS = 10.0
MNT_DETACH = 2
MS_RDONLY, MS_REMOUNT, MS_NOSUID, MS_NODEV = 1, 32, 2, 4

libc = ctypes.CDLL(None, use_errno=True)

# "2026-03-01 12:00:00,123 WARNING 4711 accelfs.mount.master: text"
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) \d+ [\w.]+: ")
_QUIET_LEVELS = ("DEBUG", "INFO")
_ANY = -1


SOAK_SECONDS = 1800.0


def soak(test: Test) -> Test:
    """Mark a test that takes minutes: the short form leaves it out, the long one gives it time."""
    marked: Test = pytest.mark.soak(pytest.mark.timeout(SOAK_SECONDS)(test))
    return marked


def require_fuse(device: Path = Path("/dev/fuse")) -> None:
    """Where nothing can be mounted a test is skipped, in CI it fails: a green run must mean that mounts work."""
    if os.access(device, os.R_OK | os.W_OK):
        return
    message = f"{device} is missing or closed: nothing can be mounted"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


# --- A node --------------------------------------------------------------------------------------


class Node:
    """The folders of one node, its commands, its mounts and its logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home", folder / "mnt")
        self.cli = Cli(self.home)
        self.root = self.home.mount_root
        self._foregrounds: list[Foreground] = []
        self._expected: list[tuple[re.Pattern[str], int | None]] = []
        self._read: dict[Path, int] = {}

    def pack(self, source: Path, slot: str, *options: str) -> Any:
        """Pack and return the document that `--json` prints."""
        return self.cli("pack", source, slot, *options, "--json").json

    def mount(self, slot: str, *arguments: str | Path) -> Path:
        """Mount in the background; return the mount point."""
        return Path(self.cli("mount", slot, *arguments, "--json").json["mountpoint"])

    def umount(self, slot: str, *options: str) -> None:
        self.cli("umount", slot, *options)

    def row(self, slot: str) -> dict[str, Any] | None:
        """What `status` says of one slot."""
        rows: list[dict[str, Any]] = self.cli("status", slot, "--json").json["mounts"]
        assert len(rows) <= 1, rows
        return rows[0] if rows else None

    def worker_pids(self, slot: str) -> list[int]:
        row = self.row(slot)
        assert row is not None, f"{slot} is not mounted"
        return list(row["worker_pids"])

    def foreground(self, slot: str, *arguments: str | Path, command: Sequence[str | Path] = ()) -> Foreground:
        """Start `accelfs mount --foreground`, or another command that serves in the same way."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        argv = [*command] or [sys.executable, "-m", "accelfs", "mount", slot, *arguments, "--foreground"]
        log = self.log_folder / f"foreground-{time.monotonic_ns()}.log"
        started = Foreground(argv, self.home.environment, log)
        self._foregrounds.append(started)
        return started

    def refused(self, code: int, *arguments: str | Path) -> str:
        """Run a `mount` that fails in the daemon: return its one line, which the log must hold too."""
        line = only_line(self.cli("mount", *arguments, code=None), code)
        self.expect_log(rf"ERROR \d+ accelfs\.mount\.daemon: {re.escape(line)}\n", count=1)
        return line

    # --- the log

    @property
    def log_folder(self) -> Path:
        return self.home.path / "log"

    def expect_log(self, pattern: str, count: int | None = None) -> None:
        """Declare records of a daemon's log: exactly `count`, or at least one."""
        self._expected.append((re.compile(pattern, re.DOTALL), count))

    def allow_log(self, pattern: str) -> None:
        """Declare records that may come or not."""
        self._expected.append((re.compile(pattern, re.DOTALL), _ANY))

    def check_log(self) -> None:
        """Fail on what was logged since the last check and not declared, and on what was declared and not logged."""
        expected, self._expected = self._expected, []
        counts = Counter(dict.fromkeys(range(len(expected)), 0))
        unexpected = []
        for record in self.new_records():
            found = [index for index, (pattern, _) in enumerate(expected) if pattern.search(record)]
            counts.update(found)
            match = _RECORD.match(record)
            loud = match is None or match[1] not in _QUIET_LEVELS or "Traceback" in record
            if loud and not found:
                unexpected.append(record)
        assert not unexpected, "unexpected in a daemon's log:\n" + "".join(unexpected)
        for index, (pattern, count) in enumerate(expected):
            right = count == _ANY or (counts[index] > 0 if count is None else counts[index] == count)
            assert right, f"{counts[index]} records of a daemon's log match {pattern.pattern!r}, not {count or 'some'}"

    def new_records(self) -> list[str]:
        """Log records since the last call, each with the lines that follow it.  Lines outside of any record, which
        libraries and the interpreter write to stderr, are records of their own."""
        records: list[str] = []
        for path in sorted(self.log_folder.glob("*.log*")):
            text = path.read_bytes()[self._read.get(path, 0) :].decode(errors="backslashreplace")
            self._read[path] = path.stat().st_size
            fresh = True
            for line in text.splitlines(keepends=True):
                if _RECORD.match(line) or fresh:
                    records.append(line)
                else:
                    records[-1] += line
                fresh = False
        return records

    # --- the end

    def leftovers(self) -> list[str]:
        """What a node must not have when nothing is mounted, in words."""
        found = [f"mount at {path}" for path in self.home.mountpoints()]
        if self.root.is_dir() and not found:
            found += [f"mount point {path}" for path in self.root.rglob("*")]
        # A lock file stays: two could hold it, if one removed it while another waits for it.
        run = self.home.path / "run"
        found += [f"state {path}" for path in run.glob("**/*") if path.suffix != ".lock"]
        for pid in self.home.processes():
            with contextlib.suppress(OSError):
                found.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        return found

    def settle(self) -> None:
        """Take down what is mounted as an operator would; AssertionError if anything is left then, or in a log."""
        trouble: list[str] = []
        try:
            for state in sorted((self.home.path / "run").glob("*+*.json")):
                done = self.cli("umount", state.stem.replace("+", "/", 1), code=None)
                if done.code != 0:
                    trouble.append(f"umount ended with code {done.code}: {done.stderr}")
            for foreground in self._foregrounds:
                foreground.process.wait(SECONDS_MAX)
            trouble += self.leftovers()
        except Exception as error:
            trouble.append(f"{type(error).__name__}: {error}")
        finally:
            self.force_down()
        try:
            self.check_log()
        except AssertionError as error:
            trouble.append(str(error))
        assert not trouble, "the node was not left as it was found:\n" + "\n".join(trouble)

    def force_down(self) -> None:
        """No mount, process or state of this node is left when this returns, however they behave."""
        for path in self.home.mountpoints():
            libc.umount2(os.fsencode(path), MNT_DETACH)
        self.kill_all()
        for state in (self.home.path / "run").glob("*.json"):
            state.unlink()
        for folder in sorted(self.root.rglob("*"), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        while self._foregrounds:
            self._foregrounds.pop().close()
        while self.cli.started:
            running = self.cli.started.pop()
            if not running.ended():
                running.signal_group(signal.SIGKILL)
                running.process.communicate(timeout=FREED_SECONDS)
        assert not self.home.mountpoints()

    def kill_all(self) -> None:
        """End every process of this node, and with the last server every call that hangs in a mount."""

        # Those that serve first, by the state that they have written: looking through all processes of the machine can
        # block at one that hangs in a mount, and these free it.
        for pid in self._serving():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        def is_empty() -> bool:
            # Again and again: a master may start a worker while we look.
            pids = self.home.processes()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(is_empty, "the node's processes to end", FREED_SECONDS)

    def _serving(self) -> list[int]:
        """The processes that the states name, as far as they are still ours."""
        pids: list[int] = []
        for path in (self.home.path / "run").glob("*+*.json"):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_bytes())
                pids += [state["master_pid"], *state["worker_pids"]]
        return [pid for pid in pids if _serves(pid)]

    def show_logs(self) -> None:
        """Print the logs, for the report of a failed test."""
        for path in sorted(self.log_folder.glob("*.log*")):
            print(f"--- {path.name}\n{path.read_text(errors='backslashreplace')}")


def _serves(pid: int) -> bool:
    """Does this process hold the device of a mount?  Its number may be another's by now."""
    try:
        descriptors = Path(f"/proc/{pid}/fd")
        return any(os.readlink(descriptors / name) == "/dev/fuse" for name in os.listdir(descriptors))
    except OSError:
        return False


_nodes: list[Node] = []


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """A node whose folders every user of this machine may enter, checked and removed at the end."""
    require_fuse()
    folder = Path(tempfile.mkdtemp(prefix="accelfs-test-"))
    folder.chmod(0o755)
    made = Node(folder)
    _nodes.append(made)
    try:
        yield made
    except BaseException:
        made.show_logs()
        raise
    else:
        made.settle()
    finally:
        made.force_down()
        _nodes.remove(made)
        shutil.rmtree(folder, ignore_errors=True)


class Foreground:
    """A server that runs as our child: its ready line on a pipe, its log in a file."""

    def __init__(self, argv: Sequence[str | Path], environment: dict[str, str], log: Path) -> None:
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        self.log = log
        assert self.process.stdout is not None
        self._stdout = self.process.stdout.fileno()

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> set[int]:
        """The processes that it has started."""
        return set(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))

    def line(self, seconds: float = SECONDS_MAX) -> str:
        """The next line of stdout; empty at its end."""
        text = b""
        deadline = time.monotonic() + seconds
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no line within {seconds} s; so far {text!r}; the log: {self.log.read_text()}"
            piece = os.read(self._stdout, 1)
            if not piece:
                break
            text += piece
        return text.decode()

    def is_silent(self, seconds: float) -> bool:
        """True if nothing comes out of stdout for this long."""
        return not select.select([self._stdout], [], [], seconds)[0]

    def end(self, number: signal.Signals, *, group: bool, seconds: float = SECONDS_MAX) -> int:
        """Send a signal, to the whole process group as a terminal does, or to the one process; return the exit code."""
        self.signal(number, group=group)
        return self.process.wait(seconds)

    def signal(self, number: signal.Signals, *, group: bool) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(FREED_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


# --- Children that touch a mount -----------------------------------------------------------------


def in_child(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test's body in a child with a deadline; its failure is the test's."""

    @functools.wraps(test)
    def run(*arguments: P.args, **keywords: P.kwargs) -> None:
        call(lambda: test(*arguments, **keywords))

    return run


def call(body: Callable[[], Result], seconds: float = CHILD_SECONDS) -> Result:
    """What `body` returns in a forked child; AssertionError with its traceback if it raises there."""
    child = Child(body)
    try:
        result: Result = child.result(seconds)
        return result
    finally:
        child.close()


def errno_of(body: Callable[[], object], seconds: float = CHILD_SECONDS) -> int:
    """The errno that `body` meets in a child; 0 if none."""

    def attempt() -> int:
        try:
            body()
        except OSError as error:
            return error.errno or -1
        return 0

    return call(attempt, seconds)


class Child:
    """A forked child that runs one function."""

    def __init__(self, body: Callable[[], object]) -> None:
        ours, theirs = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns where threads could hold locks; pytest's watchdog thread holds none of ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_child(body, theirs)
        os.close(theirs)
        self._pipe = ours
        self._pidfd = os.pidfd_open(self.pid)
        self._ended = False

    def result(self, seconds: float = CHILD_SECONDS) -> Any:
        """Wait for the end of the function."""
        data = b""
        deadline = time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._hangs(seconds)
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                break
            data += piece
        assert self._wait(FREED_SECONDS), "the child has spoken and does not end"
        assert data, "the child ended without a word"
        fine, value = pickle.loads(data)
        if not fine:
            raise AssertionError(f"in a child:\n{value}")
        return value

    def close(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)
            if not self._wait(KILLED_SECONDS):
                _free_everybody()
                assert self._wait(FREED_SECONDS), f"process {self.pid} cannot be killed"
        os.close(self._pipe)
        os.close(self._pidfd)

    def _hangs(self, seconds: float) -> NoReturn:
        where = []
        for name in ("wchan", "syscall", "stack"):
            with contextlib.suppress(OSError):
                where.append(Path(f"/proc/{self.pid}/{name}").read_text().strip())
        raise AssertionError(f"a child gave no answer within {seconds} s; it hangs in: " + "\n".join(where))

    def _wait(self, seconds: float) -> bool:
        if not self._ended and select.select([self._pidfd], [], [], seconds)[0]:
            os.waitpid(self.pid, 0)
            self._ended = True
        return self._ended


def _free_everybody() -> None:
    """A call that a living server never answers cannot be interrupted; it ends with the server."""
    for each in _nodes:
        each.kill_all()


def _run_child(body: Callable[[], object], pipe: int) -> NoReturn:
    try:
        try:
            said = (True, body())
        except BaseException:
            said = (False, traceback.format_exc())
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(said, file)
    finally:
        os._exit(0)


def become_nobody() -> None:
    """Give up root in this child for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


# --- Readers that go on while something happens --------------------------------------------------


_LIES = ("wrong bytes", "an empty folder", "a name that is none", f"read: {os.strerror(errno.ENOENT)}")


@dataclass
class Findings:
    """What the readers of a `Readers` met in all."""

    rounds: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def lies(self) -> dict[str, int]:
        """What must not be met even where errors are due: each would be a hole in a training set."""
        return {what: count for what, count in self.errors.items() if what in _LIES}


class Readers:
    """Children that read files, list a folder and look up missing names, again and again, past the kernel's caches.

    `contents` are the right bytes of each file below the mount point.  `advance` waits until every reader has made
    so many more rounds: so a test knows that calls went on after what it did.
    """

    _COUNT_BYTES = 8

    def __init__(self, mountpoint: Path, contents: dict[str, bytes], count: int = 4) -> None:
        self._mountpoint = mountpoint
        self._contents = contents
        self._count = count
        # A counter for each reader, and then the word to stop.
        self._shared = mmap.mmap(-1, self._COUNT_BYTES * (count + 1))
        self._children: list[Child] = []

    def __enter__(self) -> Readers:
        for number in range(self._count):
            self._children.append(Child(functools.partial(self._read, number)))
        return self

    def __exit__(self, *exception: object) -> None:
        self._set(self._count, 1)
        for child in self._children:
            child.close()

    def advance(self, rounds: int, seconds: float = CHILD_SECONDS) -> None:
        wanted = [self._get(number) + rounds for number in range(self._count)]
        wait_until(
            lambda: all(self._get(number) >= wanted[number] for number in range(self._count)),
            f"{self._count} readers to make {rounds} rounds more",
            seconds,
        )

    def stop(self) -> Findings:
        self._set(self._count, 1)
        whole = Findings()
        for child in self._children:
            found = child.result()
            whole.rounds += found.rounds
            whole.errors += found.errors
        return whole

    def _get(self, index: int) -> int:
        start = index * self._COUNT_BYTES
        return int.from_bytes(self._shared[start : start + self._COUNT_BYTES], "little")

    def _set(self, index: int, value: int) -> None:
        start = index * self._COUNT_BYTES
        self._shared[start : start + self._COUNT_BYTES] = value.to_bytes(self._COUNT_BYTES, "little")

    def _read(self, number: int) -> Findings:
        found = Findings()
        names = sorted(self._contents)
        while not self._get(self._count):
            name = names[(found.rounds * 7 + number) % len(names)]
            path = f"{self._mountpoint}/{name}"
            try:
                if read_direct(path, len(self._contents[name]) + 1) != self._contents[name]:
                    found.errors["wrong bytes"] += 1
            except OSError as error:
                found.errors[f"read: {error.strerror}"] += 1
            try:
                os.stat(f"{path}-{number}-{found.rounds}")
                found.errors["a name that is none"] += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                found.errors[f"lookup: {error.strerror}"] += 1
            try:
                if not os.listdir(self._mountpoint):
                    found.errors["an empty folder"] += 1
            except OSError as error:
                found.errors[f"readdir: {error.strerror}"] += 1
            found.rounds += 1
            self._set(number, found.rounds)
        return found


def read_direct(path: str | bytes | Path, size: int, offset: int = 0) -> bytes:
    """Read up to `size` bytes past the page cache: each call asks the server."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        parts = []
        while size > 0:
            part = os.pread(descriptor, size, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


class Holder:
    """A child that uses a mount: it holds a file of it open, or has it as its working folder."""

    def __init__(self, path: Path) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._child = Child(functools.partial(_hold, path, self._ours, theirs))
        theirs.close()
        self._answer()

    def read(self) -> int:
        """Ask the server for the first bytes of what is held; return the errno, 0 if there is none."""
        self._ours.send(b"read")
        return self._answer()

    def _answer(self) -> int:
        ready, _, _ = select.select([self._ours], [], [], CHILD_SECONDS)
        assert ready, "the holder of a file gives no answer"
        answer = self._ours.recv(16)
        assert answer, "the holder of a file has failed"
        return int(answer)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ours.close()
        self._child.close()


def _hold(path: Path, ours: socket.socket, theirs: socket.socket) -> None:
    ours.close()
    is_folder = path.is_dir()
    descriptor = os.open(path, os.O_RDONLY | (0 if is_folder else os.O_DIRECT))
    if is_folder:
        os.chdir(path)
    theirs.send(b"0")
    while theirs.recv(16):
        number = 0
        try:
            # Of a folder the server is asked for something that the kernel does not remember.
            os.statvfs(".") if is_folder else os.pread(descriptor, 100, 0)
        except OSError as error:
            number = error.errno or 0
        theirs.send(b"%d" % number)


# --- Small things --------------------------------------------------------------------------------


def only_line(finished: Finished, code: int) -> str:
    """What a refused command said: one line, nothing on stdout."""
    assert finished.code == code, (finished.code, finished.stderr)
    assert finished.stdout == b"", finished.stdout
    return finished.line


def run(*argv: str | bytes | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> bytes:
    """Run a program that touches a mount; return its stdout.  It must end with 0, in time, and say nothing else."""
    finished = run_any(*argv, env=env, cwd=cwd)
    assert (finished.code, finished.stderr) == (0, ""), f"{argv}: {finished.code}: {finished.stderr}"
    return finished.stdout


def run_any(*argv: str | bytes | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Finished:
    """Run a program that touches a mount, whatever it ends with."""
    process = subprocess.Popen(
        argv, env={**os.environ, "LC_ALL": "C", **(env or {})}, cwd=cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.communicate(timeout=KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            _free_everybody()
            process.communicate(timeout=FREED_SECONDS)
        raise AssertionError(f"{argv} did not end within {SECONDS_MAX} s") from None
    return Finished(process.returncode, stdout, stderr.decode(errors="surrogateescape"))


def remount(path: Path, *, read_only: bool) -> None:
    """What `mount -o remount,rw` does, without its helper programs."""
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    if libc.mount(None, os.fsencode(path), None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


class Dirent(NamedTuple):
    """One name as getdents64(2) gives it; `offset` is where the listing goes on behind it."""

    ino: int
    offset: int
    type: int
    name: bytes


_DIRENT = struct.Struct("=QqHB")


def getdents(descriptor: int, room: int = 32768) -> list[Dirent]:
    """The names that one getdents64(2) returns; none at the end of the folder."""
    buffer = ctypes.create_string_buffer(room)
    count = libc.getdents64(descriptor, buffer, room)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    data = buffer.raw[:count]
    found = []
    start = 0
    while start < count:
        ino, offset, length, type_ = _DIRENT.unpack_from(data, start)
        name = data[start + _DIRENT.size : start + length].partition(b"\0")[0]
        found.append(Dirent(ino, offset, type_, name))
        start += length
    return found


def all_dents(descriptor: int, room: int = 32768) -> list[Dirent]:
    """The names from the descriptor's position to the end of the folder."""
    found = []
    while some := getdents(descriptor, room):
        found += some
    return found
