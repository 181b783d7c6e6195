"""What do we ask of /dev/fuse ourselves, beside what libfuse does?

Each worker gets a clone of the device, hence a list of requests in flight of its own; the master keeps every clone
open, so that the requests of a dead worker stay with the kernel until RESEND queues them again.  A connection lives as
long as any descriptor on it is open: a new master takes one from whoever still has it.

Structures and numbers are those of <linux/fuse.h>, protocol 7.x.

Concurrency: sync; used by the master, and `clone` before each fork.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import select
import signal
import struct
from pathlib import Path

from accelfs.errors import MountError
from accelfs.mount.protocol import FUSE_DEV_IOC_CLONE, FUSE_NOTIFY_RESEND, OUT_HEADER

DEVICE = Path("/dev/fuse")
_SYS_PIDFD_GETFD = 438  # the same on every architecture
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


def descriptors(process: int | str) -> list[int]:
    """The numbers of a process's open /dev/fuse descriptors."""
    found = []
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            if os.readlink(f"/proc/{process}/fd/{name}") == str(DEVICE):
                found.append(int(name))
        except FileNotFoundError:
            continue
    return found


def duplicate(process: int, mount_device: str) -> int | None:
    """A descriptor of our own on the connection that another process serves, or None if it serves none.

    `mount_device` (`major:minor`) tells which connection is meant, since a process number may have gone to somebody
    else; kernels that do not show a device's connection are believed.  Needs the right to trace the process.
    """
    try:
        handle = os.pidfd_open(process)
    except OSError:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        for number in descriptors(process):
            descriptor = int(libc.syscall(_SYS_PIDFD_GETFD, handle, number, 0))
            if descriptor < 0:
                continue
            os.set_inheritable(descriptor, False)
            if _serves(descriptor, mount_device):
                return descriptor
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None
    finally:
        os.close(handle)
    return None


def _serves(descriptor: int, mount_device: str) -> bool:
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "fuse_connection":
            return value.strip() == mount_device.partition(":")[2]
    return True


def end(process: int, seconds: float) -> None:
    """SIGKILL a process that need not be our child, and wait until it is gone."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], seconds)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


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
