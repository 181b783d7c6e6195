"""How does a mount run in the background, and how does its starter learn that it is ready?

The starter forks; the child leaves its session and terminal, logs to a file and says on a pipe either that it is
ready or why it cannot be.  The starter waits for that word, so `accelfs mount` returns 0 only when a statvfs through
the mount has succeeded.

Concurrency: sync; must be called before the process has any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from accelfs.errors import AccelfsError, MountError
from accelfs.mount import master, worker
from accelfs.mount.state import MountState, decode, encode

LOG_BYTES_MAX = 10 << 20
"""At the start of a mount a longer log is moved aside, to `….log.1`."""
_LOG_LINES_SHOWN = 5


class _Word(msgspec.Struct, frozen=True):
    """What the child says: the state when ready, else the error that it met."""

    state: MountState | None = None
    message: str = ""
    exit_code: int = 0


class _StartError(MountError):
    """The child's own error, with its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def log_to(stream_descriptor: int) -> None:
    """Send this process's log to an open descriptor, one line a record."""
    handler = logging.StreamHandler(os.fdopen(os.dup(stream_descriptor), "w", buffering=1, errors="backslashreplace"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def notify_ready() -> None:
    """Tell a service manager that started this process that it serves now (sd_notify(3), READY=1)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager,
        contextlib.suppress(OSError),
    ):
        manager.sendto(b"READY=1", address)


def start(request: master.Request, log_path: Path) -> MountState:
    """Serve in the background; return when the mount is ready.  Raises MountError and what `serve` raises."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if log_path.stat().st_size > LOG_BYTES_MAX:
                log_path.replace(log_path.with_name(log_path.name + ".1"))
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise MountError(f"{log_path}: {error.strerror}; set ACCELFS_HOME to a folder you may write") from error
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _become_daemon(log, theirs)
        _run(lambda said: _say(theirs, said), request)
    os.close(theirs)
    os.close(log)
    with os.fdopen(ours, "rb") as pipe:
        word = pipe.readline()
    if not word:
        _, status = os.waitpid(child, 0)
        raise MountError(
            f"{request.slot}: the daemon ended with code {os.waitstatus_to_exitcode(status)} before it was ready; "
            f"{log_path} ends with: {_tail(log_path)}"
        )
    said = decode(word, _Word)
    if said.state is None:
        os.waitpid(child, 0)
        raise _StartError(said.message, said.exit_code)
    return said.state


def _become_daemon(log: int, pipe: int) -> None:
    """Keep nothing of the starter's but the pipe: an open file of the mount itself would make it busy for ever."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    worker.close_all_but({0, 1, 2, pipe})
    log_to(2)


def _run(say: Callable[[_Word], None], request: master.Request) -> None:
    """The child's whole life; does not return."""
    code = 1
    try:
        master.serve(request, lambda state: say(_Word(state)))
        code = 0
    except AccelfsError as error:
        logging.getLogger(__name__).error("%s", error)
        say(_Word(None, str(error), error.exit_code))
    except Exception as error:
        logging.getLogger(__name__).exception("the master failed")
        say(_Word(None, f"{request.slot}: {type(error).__name__}: {error} (the log has the details)", 1))
    finally:
        logging.shutdown()
        os._exit(code)


def _say(pipe: int, said: _Word) -> None:
    """Once: afterwards nobody listens."""
    with contextlib.suppress(OSError):
        os.write(pipe, encode(said) + b"\n")
        os.close(pipe)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="backslashreplace").splitlines()
    return " | ".join(lines[-_LOG_LINES_SHOWN:]) or "nothing"
