"""accel-train run: the job hears each signal once, with a terminal and without, and outlives no launcher."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

SECONDS_MAX = 60
ACCEL_TRAIN = (sys.executable, "-m", "trainer", "run", "--")

# Says what it hears, in the order of the signals' numbers, and ends with 42 on TERM.
LISTENER = """
import os, signal
heard = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
os.write(1, b"ready\\n")
while True:
    number = signal.sigwait(heard)
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
    if number == signal.SIGTERM:
        os._exit(42)
"""
LISTEN = (sys.executable, "-c", LISTENER)


class Lines:
    """The lines that come out of a descriptor, each with a deadline."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.rest = b""

    def next(self) -> str:
        """The next line; empty at the end of the stream."""
        deadline = time.monotonic() + SECONDS_MAX
        with selectors.DefaultSelector() as selector:
            selector.register(self.descriptor, selectors.EVENT_READ)
            while b"\n" not in self.rest:
                assert selector.select(max(0.0, deadline - time.monotonic())), f"no line came; so far {self.rest!r}"
                piece = os.read(self.descriptor, 4096)
                if not piece:
                    return ""
                self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        return line.decode().rstrip("\r")


@contextlib.contextmanager
def started(*job: str, own_session: bool = False) -> Iterator[tuple[subprocess.Popen[bytes], Lines]]:
    command = [*ACCEL_TRAIN, *job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=own_session) as launcher:
        assert launcher.stdout is not None
        try:
            yield launcher, Lines(launcher.stdout.fileno())
        finally:
            launcher.kill()


@contextlib.contextmanager
def started_on_a_terminal(*job: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Lines]]:
    """The same as the foreground job of a new terminal; gives the terminal's other end too."""
    keyboard, terminal = os.openpty()
    command = ["setsid", "--ctty", *ACCEL_TRAIN, *job]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as launcher:
        os.close(terminal)
        try:
            yield launcher, keyboard, Lines(keyboard)
        finally:
            launcher.kill()
            os.close(keyboard)


def test_signals_reach_the_job_and_its_own_code_comes_back() -> None:
    with started(*LISTEN) as (launcher, lines):
        assert lines.next() == "ready"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            launcher.send_signal(number)
            assert lines.next() == number.name
        assert launcher.wait(SECONDS_MAX) == 42
        assert lines.next() == ""


def test_job_that_a_passed_signal_ends_gives_128_and_its_number() -> None:
    with started("sh", "-c", "echo ready; exec tail -f /dev/null") as (launcher, lines):
        assert lines.next() == "ready"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(SECONDS_MAX) == 128 + signal.SIGTERM


def test_without_a_terminal_a_signal_for_the_whole_group_comes_once() -> None:
    with started(*LISTEN, own_session=True) as (launcher, lines):
        assert lines.next() == "ready"
        os.killpg(launcher.pid, signal.SIGINT)
        assert lines.next() == "SIGINT"
        # Passed on after an INT that would have been passed on twice.
        os.killpg(launcher.pid, signal.SIGUSR1)
        assert lines.next() == "SIGUSR1"
        launcher.send_signal(signal.SIGTERM)
        assert lines.next() == "SIGTERM"


def test_ctrl_c_on_a_terminal_comes_once_and_the_job_decides() -> None:
    with started_on_a_terminal(*LISTEN) as (launcher, keyboard, lines):
        assert lines.next() == "ready"
        for character, name in ((b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")):
            os.write(keyboard, character)
            # The terminal echoes the key (^C) in front of what the job says.
            assert lines.next().endswith(name)
            launcher.send_signal(signal.SIGUSR1)
            assert lines.next() == "SIGUSR1"
        launcher.send_signal(signal.SIGINT)
        assert lines.next() == "SIGINT"
        launcher.send_signal(signal.SIGTERM)
        assert lines.next() == "SIGTERM"
        assert launcher.wait(SECONDS_MAX) == 42


def test_ctrl_c_ends_a_job_that_does_not_care() -> None:
    with started_on_a_terminal("sh", "-c", "echo ready; exec tail -f /dev/null") as (launcher, keyboard, lines):
        assert lines.next() == "ready"
        os.write(keyboard, b"\x03")
        assert launcher.wait(SECONDS_MAX) == 128 + signal.SIGINT


def test_job_reads_the_terminal() -> None:
    ask = "import os; print(os.isatty(0), os.tcgetpgrp(0) == os.getpgrp(), flush=True); print('heard', input())"
    with started_on_a_terminal(sys.executable, "-c", ask) as (launcher, keyboard, lines):
        assert lines.next() == "True True"
        os.write(keyboard, b"hello\n")
        assert lines.next() == "hello"  # the echo
        assert lines.next() == "heard hello"
        assert launcher.wait(SECONDS_MAX) == 0


def test_job_is_told_when_the_launcher_is_killed() -> None:
    with started(*LISTEN) as (launcher, lines):
        assert lines.next() == "ready"
        launcher.kill()
        assert lines.next() == "SIGTERM"
        # The job held the last copy of the pipe.
        assert lines.next() == ""


@pytest.mark.parametrize("before", [(), ("env", "--ignore-signal=INT", "--ignore-signal=HUP")], ids=["plain", "nohup"])
def test_job_inherits_blocked_and_ignored_signals_as_they_were(before: Sequence[str]) -> None:
    show = ("grep", "^Sig[BI]", "/proc/self/status")
    with_launcher = subprocess.run([*before, *ACCEL_TRAIN, *show], capture_output=True, timeout=SECONDS_MAX)
    without = subprocess.run([*before, *show], capture_output=True, timeout=SECONDS_MAX)
    assert with_launcher.stdout == without.stdout
    assert b"SigBlk" in without.stdout


def test_exit_code_survives_a_parent_that_ignores_its_children() -> None:
    command = ["env", "--ignore-signal=CHLD", *ACCEL_TRAIN, "sh", "-c", "exit 7"]
    assert subprocess.run(command, timeout=SECONDS_MAX).returncode == 7
