"""What does one serving process do?

It opens the tree, puts its own clone of the device in the session's place and resumes the coroutine that the
master suspended behind INIT.  It ends with code 0 when the connection is over (unmounted), and with another code
when it could not serve: the master then starts the next one.

Concurrency: a forked process; a plain blocking loop, no threads, garbage collector off: what a request makes is
freed by reference counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal

from accelfs.errors import AccelfsError
from accelfs.mount import device
from accelfs.mount.fast import FastPath

if TYPE_CHECKING:
    from accelfs.dataset.tree import Tree
    from accelfs.mount.operations import Operations

log = logging.getLogger(__name__)

Engine = Literal["fast", "pyfuse3"]

ENDED = 0
CANNOT_OPEN = 3
FAILED = 4


def run(
    session: int,
    clones: list[int],
    alive: list[tuple[int, int]],
    index: int,
    engine: Engine,
    operations: Operations,
    serving: Coroutine[Any, Any, None],
    open_tree: Callable[[], Tree],
) -> int:
    """Serve `clones[index]` until the connection is over; return the process's exit code.

    The other workers' devices stay open here too: whoever of the mount's processes is left keeps their requests.
    """
    clone = clones[index]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the terminal's; the master decides what they mean
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kept = clones if device.can_resend() else [clone]
    ends = [alive[index][1], *(read for other, (read, _) in enumerate(alive) if other != index)]
    if engine == "pyfuse3":
        os.dup2(clone, session, inheritable=False)
    close_all_but({0, 1, 2, session, *kept, *ends, *_log_descriptors()})
    if device.can_resend():
        watch(ends[1:], clone)
    try:
        operations.tree = tree = open_tree()
    except AccelfsError as error:
        log.error("%s", error)
        return CANNOT_OPEN
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        if engine == "pyfuse3":
            serving.send(None)
        else:
            FastPath(session, clone, operations, serving, tree).serve()
            return ENDED
    except StopIteration:
        return ENDED
    except Exception:
        log.exception("the serving loop failed")
    return FAILED


def watch(others: list[int], clone: int) -> None:
    """Have SIGIO come when another worker dies and no master is left to notice.

    The write end of a worker's pipe is held by it and by the master: when both are gone the pipe hangs up, and whoever
    is left has the kernel queue the dead worker's requests again.
    """
    signal.signal(signal.SIGIO, lambda *_: device.resend(clone))
    for read in others:
        fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)


def close_all_but(kept: set[int]) -> None:
    """Close what a new process inherited: locks, pipes, other workers' clones, files of whoever started it."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _log_descriptors() -> list[int]:
    handlers = logging.getLogger().handlers
    return [handler.stream.fileno() for handler in handlers if isinstance(handler, logging.StreamHandler)]
