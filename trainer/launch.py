"""How does the command of a job become a process that behaves as if no launcher stood before it?

- Its exit code is ours; 128+N when signal N ended it.
- TERM, INT, HUP, QUIT, USR1 and USR2 sent to the launcher are passed on, each once and only to the
  job's own process: what its helpers should hear is the job's business, and a USR1 that asks for a
  checkpoint would kill helpers that do not handle it.
- With a controlling terminal the job stays in the launcher's process group, so it may read the
  terminal, pipelines and surrounding scripts see Ctrl-C, and Ctrl-Z stops both.  The terminal sends
  Ctrl-C to that whole group, so the job has it already: the launcher recognises such a signal by its
  origin (SI_KERNEL) and does not pass it on.  (`kill` on the whole group of an interactive shell's
  job looks like one on the launcher, and reaches the job twice.)
- Without a terminal (a service, a batch system, CI) the job gets a process group of its own, and a
  kill of the launcher's group also reaches it once.
- When the launcher dies without a word (kill -9) the kernel sends the job TERM.  Only its own process
  hears that, and not if it has become another user by a set-uid program.

Concurrency: one thread, the main one: the kernel's death signal fires at the end of the *thread* that
forked.  The signals are blocked and taken one by one with sigwaitinfo, so there are no handlers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from trainer.errors import NOT_EXECUTABLE, NOT_FOUND, NOT_STARTED, StartError

PASSED_ON = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2},
)
# <asm-generic/siginfo.h>: sent by the kernel itself.  kill(2), sigqueue(3) and tgkill(2) give others.
SI_KERNEL = 0x80
# <linux/prctl.h>
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    exit_code: int
    killed_by: signal.Signals | int | None
    """The signal that ended it, if one did."""
    expected: bool
    """That signal came through the launcher or from the terminal."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run the command to its end.  Raises StartError if it could not be executed.

    The passed-on signals stay blocked in the launcher afterwards: one that arrives after the job's
    end must not replace the job's exit code.
    """
    assert threading.current_thread() is threading.main_thread()
    # A parent that ignores SIGCHLD would make the kernel throw the job's exit code away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    own_group = not _has_terminal()
    # Loaded before the fork, so that the child only calls.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    launcher = os.getpid()
    report, reported = os.pipe()
    job = os.fork()
    if job == 0:
        _become(command, environment, mask, own_group, prctl, launcher, reported)
    os.close(reported)
    seen, status = _wait(job, own_group)
    with open(report, "rb") as pipe:
        failure = pipe.read()
    if failure:
        raise _start_error(command[0], int(failure))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Ended(128 + number, _named(number), number in seen)
    return Ended(os.WEXITSTATUS(status), None, True)


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: Iterable[int],
    own_group: bool,
    prctl: Callable[..., int],
    launcher: int,
    reported: int,
) -> NoReturn:
    """In the child: become the command, or report the errno and end."""
    try:
        if own_group:
            os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != launcher:
            # It died before it could be asked for; no signal will come.
            os._exit(128 + signal.SIGTERM)
        # Python ignores these two for itself, and an ignored signal stays ignored over exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        # A Ctrl-C before the exec must end this process like the command, not raise in it; but one that was
        # ignored from the start (`command &` in a script) stays ignored.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(reported, str(error.errno).encode())
    finally:
        # Whatever happened, this copy of the launcher must not run on.
        os._exit(NOT_STARTED)


def _wait(job: int, own_group: bool) -> tuple[set[int], int]:
    """Pass signals on until the job ends; return the signals that came, and the job's status."""
    seen: set[int] = set()
    while True:
        info = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(job, os.WNOHANG)
            if ended:
                return seen, status
            continue
        seen.add(info.si_signo)
        if own_group or info.si_code != SI_KERNEL:
            # The job is not waited for yet, so its number cannot have gone to another process.
            os.kill(job, info.si_signo)


def _has_terminal() -> bool:
    """Say whether this process has a controlling terminal, whatever its descriptors are."""
    with open("/proc/self/stat", "rb") as file:
        # The name in the second field may hold spaces and parentheses; the numbers follow the last one.
        fields = file.read().rpartition(b")")[2].split()
    return fields[4] != b"0"


def _start_error(name: str, number: int) -> StartError:
    if number == errno.ENOENT and "/" in name and os.path.lexists(name):
        return StartError(f"{name}: the interpreter in its first line is not found", NOT_FOUND)
    if number == errno.ENOENT:
        return StartError(f"{name}: command not found", NOT_FOUND)
    if number == errno.ENOEXEC:
        return StartError(f"{name}: not a program (a script needs a first line such as #!/bin/sh)", NOT_EXECUTABLE)
    if os.path.isdir(name):
        return StartError(f"{name}: is a folder, not a program", NOT_EXECUTABLE)
    return StartError(f"{name}: {os.strerror(number)}", NOT_EXECUTABLE)


def _named(number: int) -> signal.Signals | int:
    try:
        return signal.Signals(number)
    except ValueError:
        return number  # a real-time signal
