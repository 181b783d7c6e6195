"""Commands with a deadline, and what their processes use.

A server under test may hang, and whoever touches its mount then hangs with it where no signal reaches. So nothing
here waits without a limit: a command past its deadline is killed and left behind, and its caller aborts the mount.

Concurrency: sync; `PeakMemory` samples in one thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SAMPLE_SECONDS = 0.1
"""A walk over /proc takes 1-2 ms, so sampling costs both contestants a little over 1 % of one core."""


class CommandError(Exception):
    """A command failed, or did not end in time."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended with 0."""

    output: str
    seconds: float
    """Wall time of the whole process, start of the process included."""


def run(
    command: Sequence[str | Path],
    seconds_max: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    discard_output: bool = False,
) -> Finished:
    """Run a command to its end, with its output in a file: a daemon it leaves behind cannot hold up a pipe.

    Raises CommandError with the last lines of stderr.
    """
    name = Path(command[0]).name
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if discard_output else output,
            stderr=errors,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            ended = wait_for(process, seconds_max)
            seconds = time.perf_counter() - begin
        except BaseException:
            kill_group(process)
            raise
        if not ended:
            kill_group(process)
            raise CommandError(f"{name} did not end within {seconds_max:g} s")
        errors.seek(0)
        if process.returncode:
            last_lines = errors.read().decode(errors="replace").strip().splitlines()[-3:]
            raise CommandError(f"{name} ended with {process.returncode}: {' | '.join(last_lines)}")
        output.seek(0)
        return Finished(output.read().decode(errors="replace"), seconds)


def wait_for(process: subprocess.Popen[bytes], seconds_max: float) -> bool:
    """Whether the process ended in time.

    `Popen.wait` with a timeout sleeps up to 50 ms between two looks, which would be a good part of the figures here.
    """
    if process.poll() is not None:
        return True
    descriptor = os.pidfd_open(process.pid)
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(seconds_max * 1000):
            return False
    finally:
        os.close(descriptor)
    process.wait()
    return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process started with a session of its own, and its children, without waiting long.

    A process that hangs in a dead mount takes the signal only once that mount is aborted.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    wait_for(process, 2.0)


def end_on_sigterm() -> None:
    """Make SIGTERM run the cleanup of every `with` and `finally`, as Control-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def pin(pids: Iterable[int], cpu: int) -> None:
    """Bind every thread of these processes to one processor; what they start later inherits it."""
    for pid in pids:
        for thread in _numbers(Path(f"/proc/{pid}/task")):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, {cpu})


def private_bytes(pid: int) -> int:
    """What the process costs alone: its private pages and its page tables (a shared mapping has its own tables)."""
    rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    private = sum(size for name, size in rollup.items() if name.startswith("Private_"))
    return private + _fields(Path(f"/proc/{pid}/status")).get("VmPTE", 0)


class PeakMemory:
    """Samples the resident memory of all processes of a session: the sum over the tree, which no rusage gives.

    Pages that processes share are counted in each, so the figure is an upper bound. A process that peaks between two
    samples is still seen whole: its high-water mark counts as well.
    """

    def __init__(self, session: int) -> None:
        self.peak_bytes = 0
        self._session = session
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            statuses = [_fields(Path(f"/proc/{pid}/status")) for pid in _session_members(self._session)]
            resident = sum(status.get("VmRSS", 0) for status in statuses)
            high_water = max((status.get("VmHWM", 0) for status in statuses), default=0)
            self.peak_bytes = max(self.peak_bytes, resident, high_water)
            if self._stop.wait(SAMPLE_SECONDS):
                return


def _session_members(session: int) -> Iterator[int]:
    for pid in _numbers(Path("/proc")):
        with contextlib.suppress(OSError):
            # The name stands in parentheses and may hold anything, so fields are counted after the last one.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                yield pid


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    """The "Name: N kB" lines of a /proc file, in bytes; nothing once the process is gone."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {word[0].rstrip(":"): int(word[1]) * 1024 for word in words if len(word) == 3 and word[2] == "kB"}
