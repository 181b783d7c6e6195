"""What every test of accelfs stands on: a home of its own, the command line, and small helpers.

`home` is a node of its own, `cli` runs commands on it as an operator would; `mounts` makes mounts.  Whatever a test
does, no process and no mount of its home is left when it ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts a command in the background makes it ignore SIGINT, and so would every process that a test starts
# and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


ROOT = Path(__file__).resolve().parent.parent
# Far above what any command here takes on a busy machine, far below the test's own limit.
SECONDS_MAX = 60.0
POLL_SECONDS = 0.002
DEADLY_MAX = 20

Step = TypeVar("Step")

# Packing and mounting take as long as the disk wants to; a failure prints what reproduces it.
settings.register_profile(
    "accelfs", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("accelfs")


def wait_until(condition: Callable[[], bool], what: str, seconds_max: float = SECONDS_MAX) -> None:
    """Poll until the condition holds; fail, saying what was waited for, at the deadline."""
    deadline = time.monotonic() + seconds_max
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds_max} s in vain for: {what}"
        pause.wait(POLL_SECONDS)


def deadly(steps: Iterable[Step], act: Callable[[Step], object]) -> list[Step]:
    """Do `act` for each step in a child process; return the steps at which a signal killed it.

    For what must refuse damage and might crash the process instead: SIGBUS ends no test run then.  An
    exception in the child is printed and fails the test here.
    """
    waiting = list(steps)
    found: list[Step] = []
    while waiting and len(found) < DEADLY_MAX:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _do_steps(waiting, act, write)
        os.close(write)
        with open(read, "rb") as lines:
            begun = int(lines.read().split()[-1])
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, f"at {waiting[begun]!r}; its traceback is on stderr"
            break
        found.append(waiting[begun])
        del waiting[: begun + 1]
    return found


def _do_steps(steps: list[Step], act: Callable[[Step], object], write: int) -> NoReturn:
    status = 1
    try:
        for index, step in enumerate(steps):
            os.write(write, b"%d\n" % index)
            act(step)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# --- home ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Home:
    """The folders of one node, and the environment that makes commands use them."""

    path: Path
    mount_root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Whole: what the caller's shell happens to set must not change a test."""
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "PYTEST"))},
            "ACCELFS_HOME": str(self.path),
            "ACCELFS_MOUNT_ROOT": str(self.mount_root),
            # Nothing needs to be installed, from whatever folder a command is run.
            "PYTHONPATH": str(ROOT),
        }

    @property
    def store(self) -> Path:
        return self.path / "store"

    def slot(self, name: str) -> Path:
        """The folder in which the embedded store holds a slot of the default instance."""
        return self.store / "default" / "slots" / name

    def scratch(self, name: str) -> Path:
        """Where a pack of the slot works before anything is published."""
        return self.path / "scratch" / f"default+{name}"

    def processes(self) -> set[int]:
        """Processes that were started on this home and live: the commands, their workers, their daemons."""
        wanted = os.fsencode(f"ACCELFS_HOME={self.path}")
        found = set()
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                environment = Path("/proc", entry, "environ").read_bytes()
                state = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(") ")[2][:1]
            except OSError:
                continue  # it has ended, or is somebody else's
            if wanted in environment.split(b"\0") and state not in "ZX":
                found.add(int(entry))
        return found

    def mountpoints(self) -> list[str]:
        """What is mounted at or below the home and the mount root, the last one first."""
        found = []
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as rows:
            for row in rows:
                path = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), row.split(" ")[4])
                if any(Path(path).is_relative_to(folder) for folder in (self.path.parent, self.mount_root)):
                    found.append(path)
        return found[::-1]

    def end_processes(self) -> None:
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        wait_until(lambda: not self.processes(), "the processes of the test's home to end")

    def clear(self) -> None:
        """End every process and every mount of this home, the hard way."""
        self.end_processes()
        for path in self.mountpoints():
            subprocess.run(["umount", "--lazy", path], timeout=SECONDS_MAX, check=False)
        assert not self.mountpoints()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home", tmp_path / "mnt")
    yield made
    made.clear()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, for tests that fill it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "small"
    path.mkdir()
    resize_disk(path, 4, remount=False)
    yield path
    subprocess.run(["umount", "--lazy", path], timeout=SECONDS_MAX, check=True)


def resize_disk(path: Path, megabytes: int, *, remount: bool = True) -> None:
    options = f"size={megabytes}m,mode=0700" + (",remount" if remount else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "accelfs-test", path], timeout=SECONDS_MAX, check=True)


# --- cli -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.stdout)

    @property
    def line(self) -> str:
        """What the command said of its failure, checked to be one line without a traceback."""
        assert self.stderr.startswith("accelfs: "), self.stderr
        assert self.stderr.endswith("\n"), self.stderr
        assert self.stderr.count("\n") == 1, self.stderr
        return self.stderr.removeprefix("accelfs: ").rstrip("\n")


class Running:
    """A command that runs in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        try:
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []

    def ended(self) -> bool:
        return self.process.poll() is not None

    def signal_group(self, number: signal.Signals) -> None:
        """As a terminal does; also reaches what is left of the group when the command has ended."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def finish(self, seconds_max: float = SECONDS_MAX) -> Finished:
        stdout, stderr = self.process.communicate(timeout=seconds_max)
        return Finished(self.process.returncode, stdout, stderr.decode(errors="surrogateescape"))


class Cli:
    """Run `accelfs` commands on one home."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.started: list[Running] = []

    def __call__(
        self,
        *arguments: str | bytes | Path,
        code: int | None = 0,
        prefix: tuple[str, ...] = (),
        cwd: Path | None = None,
        seconds_max: float = SECONDS_MAX,
    ) -> Finished:
        """Run to the end and check the exit code, unless it is None; `prefix` is a command that runs the command."""
        finished = self.start(*arguments, prefix=prefix, cwd=cwd).finish(seconds_max)
        if code is not None:
            assert finished.code == code, f"exit code {finished.code}, expected {code}:\n{finished.stderr}"
        return finished

    def start(self, *arguments: str | bytes | Path, prefix: tuple[str, ...] = (), cwd: Path | None = None) -> Running:
        """Start and return at once."""
        running = Running(
            subprocess.Popen(
                [*prefix, sys.executable, "-m", "accelfs", *arguments],
                env=self.home.environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # A shell that runs the tests in its background has them ignore what a terminal sends.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        self.started.append(running)
        return running


@pytest.fixture
def cli(home: Home) -> Iterator[Cli]:
    made = Cli(home)
    yield made
    # Also what outlived its command, which would hold the other ends of our pipes.
    home.end_processes()
    for running in made.started:
        running.process.communicate(timeout=SECONDS_MAX)
