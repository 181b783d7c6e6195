"""What do we say to /dev/fuse ourselves, beside what libfuse says?

The INIT handshake goes through our hands, since libfuse leaves max_background at 12 and pyfuse3 cannot set it:
16 readers that wait would block every other large read.  Each worker gets a clone of the device, hence a list of
requests in flight of its own; the master keeps every clone open, so that the requests of a dead worker stay with
the kernel until RESEND queues them again.

Structures and numbers are those of <linux/fuse.h>, protocol 7.x.

Concurrency: sync; used by the master, and `clone` before each fork.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from accelfs.errors import MountError
from accelfs.mount.protocol import FUSE_DEV_IOC_CLONE, FUSE_NOTIFY_RESEND, OUT_HEADER, REQUEST_BYTES_MAX

DEVICE = Path("/dev/fuse")
MAX_BACKGROUND = 4096
# The two u16 of fuse_init_out that libfuse gets wrong: max_background and congestion_threshold.
_INIT_BACKGROUND = struct.Struct("=HH")
_INIT_BACKGROUND_OFFSET = OUT_HEADER.size + 16
_RESEND_SINCE = (6, 9)


def check_available() -> None:
    """Raise MountError, saying what to do, where this machine cannot mount with FUSE."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise MountError(
            f"{DEVICE} is missing: load the module (modprobe fuse), or start the container with --device {DEVICE}"
        ) from None
    except PermissionError:
        raise MountError(
            f"{DEVICE} may not be opened: run as root, or allow it (in a container: --device {DEVICE} "
            "--cap-add SYS_ADMIN)"
        ) from None
    except OSError as error:
        raise MountError(f"{DEVICE}: {error.strerror}") from error


def session_descriptor() -> int:
    """The descriptor that libfuse has just opened: the only /dev/fuse of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == str(DEVICE):
                found.append(int(name))
        except FileNotFoundError:
            continue
    assert len(found) == 1, f"one session, one descriptor: {found}"
    return found[0]


def handshake(session: int, answer_init: Callable[[], object]) -> None:
    """Carry INIT from the kernel to libfuse and its answer, with our max_background, back to the kernel.

    `answer_init` lets libfuse process one request that waits on the session's descriptor.
    """
    kernel = os.dup(session)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        request = os.read(kernel, REQUEST_BYTES_MAX)
        os.dup2(theirs.fileno(), session)
        ours.send(request)
        answer_init()
        answer = bytearray(ours.recv(4096))
        _INIT_BACKGROUND.pack_into(answer, _INIT_BACKGROUND_OFFSET, MAX_BACKGROUND, MAX_BACKGROUND)
        os.write(kernel, answer)
        os.dup2(kernel, session, inheritable=False)
    os.close(kernel)


def clone(session: int) -> int:
    """A new descriptor on the same connection, with requests in flight of its own."""
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, FUSE_DEV_IOC_CLONE, struct.pack("=I", session))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def can_resend() -> bool:
    """Does this kernel know FUSE_NOTIFY_RESEND (Linux 6.9)?"""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return match is not None and (int(match[1]), int(match[2])) >= _RESEND_SINCE


def resend(session: int) -> None:
    """Queue every request again that was read and not answered; a second answer is ignored by the kernel."""
    try:
        os.write(session, OUT_HEADER.pack(OUT_HEADER.size, FUSE_NOTIFY_RESEND, 0))
    except OSError as error:
        if error.errno != errno.ENODEV:  # unmounted in between
            raise


def set_read_ahead(device: str, read_ahead_bytes: int) -> None:
    """Set the mount's read-ahead where we may; without it large files are read in pieces of 128 KB."""
    try:
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(read_ahead_bytes >> 10))
    except OSError:
        return  # not root, or sysfs is read-only in this container


def answers(mountpoint: Path, seconds: float) -> bool:
    """Does a statvfs through the mount succeed in time?

    It is never cached by the kernel, so a worker must answer it.  A child asks, since whoever touches a mount
    that nobody serves does not come back.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.statvfs(mountpoint)
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    if not ready:
        os.kill(child, 9)
        return False  # it may stay in the kernel for a while; init reaps it, or our own SIGCHLD handling
    return os.waitpid(child, 0)[1] == 0
