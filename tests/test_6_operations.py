"""What does a caller, and what does the mount, see of an error inside a handler?

A real mount whose tree raises on demand: this file, run as a program, is the `accelfs` command with a tree between
the handlers and the real one that raises what a name asks for (`read-KeyError`), or, where the kernel gives no name,
what a file in the trigger folder asks for.  Every handler must turn every exception into EIO for the one
call that met it, and go on serving.

The readers use O_DIRECT: through the page cache the kernel asks a second time when the first answer was an error.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mounts
import pytest
from conftest import wait_until

if TYPE_CHECKING:
    from accelfs.dataset.tree import Attributes, Child, Tree
    from accelfs.format.catalog import Header

ROOT_NODE = 1
GOOD = b"what every other file holds"
LISTED_BEFORE = 3
ANSWER_SECONDS = 10.0
"""What no answer within this long means: there will be none."""
NO_ERRNO = 600
"""The kernel takes no errno above 511 and leaves the caller waiting."""


class OwnError(Exception):
    """An exception that nobody below pytest's eyes has heard of."""


class OwnBaseError(BaseException):
    """Neither an Exception, like trio's and asyncio's cancellations."""


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def out_of_memory() -> None:
    bytearray(1 << 62)


def fail_as(name: str) -> None:
    """Raise the exception of this name the way it comes about."""
    ways: dict[str, Callable[[], object]] = {
        "ZeroDivisionError": lambda: 1 // 0,
        "RecursionError": recurse,
        "MemoryError": out_of_memory,
        "KeyError": lambda: dict[str, int]()["missing"],
        "AttributeError": lambda: None.missing,  # type: ignore[attr-defined]
        "StopIteration": lambda: next(iter(())),
        "OSError": functools.partial(_raise, OSError(errno.EACCES, "of the server's own making")),
        "ENOENT": lambda: os.stat("/no/such/file"),
        "OwnError": functools.partial(_raise, OwnError("with\nsome\tlines and a \udcff")),
        "SystemExit": lambda: sys.exit(0),
        "OwnBaseError": functools.partial(_raise, OwnBaseError()),
    }
    ways[name]()


def _raise(error: BaseException) -> None:
    raise error


UNKNOWN = (
    "ZeroDivisionError RecursionError MemoryError KeyError AttributeError StopIteration OSError ENOENT OwnError"
).split()
"""What no code of ours raises on purpose, so that it is a bug with a traceback."""
NAMED = {"OSError": "PermissionError", "ENOENT": "FileNotFoundError"}
NOT_EXCEPTIONS = ["SystemExit", "OwnBaseError"]
BY_NAME = ["lookup", "read", "readlink", "readdir", "readdir_later"]
BY_TRIGGER = ["getattr", "statfs"]
OPERATIONS = [*BY_NAME, *BY_TRIGGER]


# --- The program: a mount whose tree raises ------------------------------------------------------


class FailingTree:
    """The real tree, but for names of the form `operation-exception` and for triggers."""

    def __init__(self, tree: Tree, triggers: Path) -> None:
        self._tree = tree
        self._triggers = triggers
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "header":
            raise AttributeError(name)  # the property below has raised it
        return getattr(self._tree, name)

    @property
    def header(self) -> Header:
        self._by_trigger("statfs")
        return self._tree.header

    def attributes(self, node: int) -> Attributes:
        self._by_trigger("getattr")
        return self._tree.attributes(node)

    def lookup(self, directory: int, name: bytes) -> Attributes | None:
        text = os.fsdecode(name)
        self._fail("lookup", text)
        found = self._tree.lookup(directory, name)
        if found is not None:
            self._names[found[0]] = text
        return found

    def read(self, node: int, offset: int, size: int) -> bytes | memoryview:
        self._by_node("read", node)
        return self._tree.read(node, offset, size)

    def readlink(self, node: int) -> bytes:
        self._by_node("readlink", node)
        return self._tree.readlink(node)

    def list(self, directory: int, start: int = 0) -> Iterator[Child]:
        self._by_node("readdir", directory)
        for count, child in enumerate(self._tree.list(directory, start)):
            if start + count == LISTED_BEFORE:
                self._by_node("readdir_later", directory)
            self._names[child[2][0]] = os.fsdecode(child[1])
            yield child

    def _by_node(self, operation: str, node: int) -> None:
        self._fail(operation, self._names.get(node, ""))

    def _by_trigger(self, operation: str) -> None:
        try:
            what = (self._triggers / operation).read_text()
        except FileNotFoundError:
            return
        self._fail(operation, f"{operation}-{what}")

    def _fail(self, operation: str, name: str) -> None:
        from accelfs.errors import DamagedError, NotFoundError, TreeError

        wanted, _, what = name.partition("-")
        if wanted != operation:
            return
        if what == "DamagedError":
            raise DamagedError(f"{name}: is damaged")
        if what == "NotFoundError":
            raise NotFoundError(f"{name}: is missing from the store")
        if what == "TreeError":
            raise TreeError(f"{name}: is no such thing", errno.ENOTDIR)
        if what == "NoErrno":
            raise TreeError(f"{name}: with a number that is no errno", NO_ERRNO)
        fail_as(what)


def main(triggers: Path) -> None:
    """Be the `accelfs` command, with a tree that fails."""
    from accelfs.cli import app
    from accelfs.dataset.versions import Version

    open_tree = Version.open_tree

    def open_failing(version: Version) -> Tree:
        if (triggers / "open").exists():
            (triggers / "open").read_bytes()  # a FIFO: this takes as long as the test wants
        return FailingTree(open_tree(version), triggers)  # type: ignore[return-value]  # all that a mount asks for

    Version.open_tree = open_failing  # type: ignore[assignment, method-assign]
    app.main()


# --- Fixtures ------------------------------------------------------------------------------------


class Failing:
    """A mount of this file's program."""

    def __init__(self, node: mounts.Node, engine: str, triggers: Path) -> None:
        self.node = node
        self.triggers = triggers
        self._engine = engine
        self._missing = 0
        source = node.folder / "source"
        _write_source(source)
        node.pack(source, "failing")
        self.server = self.start()

    def start(self) -> mounts.Foreground:
        mount = ["mount", "failing", "--foreground", "--workers", "1", "--engine", self._engine]
        return self.node.foreground("failing", command=[sys.executable, __file__, self.triggers, *mount])

    def wait_ready(self) -> None:
        assert self.server.line() == f"failing version 1 is mounted at {self.path}\n"

    def make_ready(self) -> None:
        """A test that found a bug may have ended the server: the next one gets another."""
        if self.server.process.poll() is not None:
            self.node.new_records()
            self.server = self.start()
            self.wait_ready()

    @property
    def path(self) -> Path:
        return self.node.root / "failing"

    def trigger(self, operation: str, what: str) -> None:
        temporary = self.triggers / ".new"
        temporary.write_text(what)
        temporary.replace(self.triggers / operation)

    def release(self, operation: str) -> None:
        (self.triggers / operation).unlink()

    def provoke(self, operation: str, what: str) -> int:
        """Make one call that the operation answers; return its errno."""
        if operation in BY_TRIGGER:
            self.trigger(operation, what)
        try:
            path = self.path / f"{operation}-{what}"
            return mounts.errno_of(functools.partial(_call, operation, path), ANSWER_SECONDS)
        finally:
            if operation in BY_TRIGGER:
                self.release(operation)

    def check_that_it_serves(self, operation: str) -> None:
        """The same call on what is not cursed, and a read, both succeed."""
        good = self.path / ("good" if operation == "read" else f"good-{operation}")
        if operation == "lookup":
            self._missing += 1  # what the kernel knows it does not ask
            good = self.path / f"missing-{self._missing}"
        fine = errno.ENOENT if operation == "lookup" else 0
        assert mounts.errno_of(functools.partial(_call, operation, good), ANSWER_SECONDS) == fine
        assert mounts.call(lambda: mounts.read_direct(self.path / "good", 100)) == GOOD


def _write_source(source: Path) -> None:
    source.mkdir()
    (source / "good").write_bytes(GOOD)
    kinds = [*UNKNOWN, *NOT_EXCEPTIONS, "DamagedError", "NotFoundError", "TreeError", "NoErrno"]
    for operation in OPERATIONS:
        for name in (f"good-{operation}", *(f"{operation}-{what}" for what in kinds)):
            if operation == "readlink":
                (source / name).symlink_to("good")
            elif operation.startswith("readdir"):
                (source / name).mkdir()
                for number in range(2 * LISTED_BEFORE):
                    (source / name / f"child{number}").touch()
            else:
                (source / name).write_bytes(b"bytes of " + name.encode())


def _call(operation: str, path: Path) -> None:
    """The system call that the kernel hands to this operation, every time it is made."""
    if operation == "lookup":
        os.lstat(path)
    elif operation == "read":
        mounts.read_direct(path, 100)
    elif operation == "readlink":
        os.readlink(path)
    elif operation.startswith("readdir"):
        if len(os.listdir(path)) != 2 * LISTED_BEFORE:
            raise AssertionError(f"{path}: a listing that is not whole")
    elif operation == "statfs":
        os.statvfs(path.parent)
    else:
        _stat_from_the_server(path)


def _stat_from_the_server(path: Path) -> None:
    """statx(2) with AT_STATX_FORCE_SYNC: what the kernel remembers does not count."""
    at_fdcwd, force_sync, basic_stats = -100, 0x2000, 0x7FF
    buffer = ctypes.create_string_buffer(256)
    if mounts.libc.statx(at_fdcwd, os.fsencode(path), force_sync, basic_stats, buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@pytest.fixture(scope="module", params=["fast", "pyfuse3"])
def served(request: pytest.FixtureRequest) -> Iterator[Failing]:
    with mounts.node() as node:
        triggers = node.folder / "triggers"
        triggers.mkdir()
        made = Failing(node, request.param, triggers)
        made.wait_ready()
        yield made


@pytest.fixture
def failing(served: Failing) -> Iterator[Failing]:
    served.make_ready()
    before = served.server.children()
    yield served
    assert served.server.children() == before, "a worker died of it"
    served.node.check_log()


# --- Tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", UNKNOWN)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_unknown_exception_is_eio_for_that_call_and_the_mount_goes_on(
    failing: Failing, operation: str, what: str
) -> None:
    failing.node.expect_log("Traceback", count=1)
    failing.node.expect_log(rf" ERROR .*\nTraceback .*\n(__main__\.)?{NAMED.get(what, what)}\b", count=1)
    assert failing.provoke(operation, what) == errno.EIO
    failing.check_that_it_serves(operation)


@pytest.mark.parametrize("what", NOT_EXCEPTIONS)
@pytest.mark.parametrize("operation", ["read", "lookup"])
def test_what_is_no_exception_does_not_end_the_worker_either(failing: Failing, operation: str, what: str) -> None:
    """Cancellations and exits derive from BaseException, and a handler meets them like anything else."""
    failing.node.expect_log(rf" ERROR .*\nTraceback .*\n(__main__\.)?{what}\b", count=1)
    assert failing.provoke(operation, what) == errno.EIO
    failing.check_that_it_serves(operation)


@pytest.mark.parametrize("operation", BY_NAME)
@pytest.mark.parametrize("what", ["DamagedError", "NotFoundError"])
def test_damage_is_eio_and_said_once_without_traceback(failing: Failing, operation: str, what: str) -> None:
    """Above all it is not ENOENT: a missing file is a hole in a training set, and the kernel would remember it."""
    failing.node.expect_log(rf" ERROR [^\n]*{operation}-{what}: is (damaged|missing from the store)\n\Z", count=1)
    for _ in range(3):
        assert failing.provoke(operation, what) == errno.EIO
    failing.check_that_it_serves(operation)


@pytest.mark.parametrize("operation", BY_NAME)
def test_what_the_tree_does_not_have_is_its_errno_and_not_logged(failing: Failing, operation: str) -> None:
    assert failing.provoke(operation, "TreeError") == errno.ENOTDIR
    failing.check_that_it_serves(operation)


@pytest.mark.parametrize("operation", BY_NAME)
def test_number_that_the_kernel_takes_for_no_errno_is_eio(failing: Failing, operation: str) -> None:
    """The kernel refuses such an answer, and the caller would wait for another one for ever."""
    failing.node.expect_log(r" (WARNING|ERROR) ")
    assert failing.provoke(operation, "NoErrno") == errno.EIO
    failing.check_that_it_serves(operation)


def test_status_says_that_a_mount_does_not_answer_and_when_it_does_again(failing: Failing) -> None:
    failing.node.expect_log("Traceback .*KeyError")
    failing.trigger("statfs", "KeyError")
    try:
        row = failing.node.row("failing")
        text = failing.node.cli("status").stdout.decode()
    finally:
        failing.release("statfs")
    assert row is not None
    assert row["ready"] is False
    assert "NOT READY" in text
    row = failing.node.row("failing")
    assert row is not None
    assert row["ready"] is True


def test_ready_is_said_only_after_a_call_through_the_mount_has_succeeded() -> None:
    with mounts.node() as node:
        triggers = node.folder / "triggers"
        triggers.mkdir()
        fifo, next_fifo = triggers / "open", triggers / "next"
        os.mkfifo(fifo)
        os.mkfifo(next_fifo)
        made = Failing(node, "fast", triggers)
        # The command itself opens the tree first, to say what is wrong with it; then a worker does.
        held = _opened_for_writing(fifo)
        next_fifo.rename(fifo)
        os.close(held)
        held = _opened_for_writing(fifo)
        try:
            # The worker is about to open the tree: nobody serves the mount yet, and no path shows it.
            assert node.home.mountpoints() == []
            assert made.server.is_silent(1.0)
        finally:
            os.close(held)
        made.wait_ready()
        assert mounts.call(lambda: mounts.read_direct(made.path / "good", 100)) == GOOD


def _opened_for_writing(fifo: Path) -> int:
    """Wait until somebody reads from the FIFO, and become its writer."""
    opened: list[int] = []

    def attempt() -> bool:
        try:
            opened.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        return bool(opened)

    wait_until(attempt, "a worker to open the tree")
    return opened[0]


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
