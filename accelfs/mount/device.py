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
    """The numbers of a process's open /dev/fuse descriptors; none if it is gone or not ours to look at."""
    found = []
    try:
        names = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return []
    for name in names:
        try:
            if os.readlink(f"/proc/{process}/fd/{name}") == str(DEVICE):
                found.append(int(name))
        except OSError:
            continue
    return found


def holders(mount_device: str) -> list[int]:
    """Every other process that has a descriptor on the connection of a mount (`major:minor`).

    Empty where the kernel does not show a descriptor's connection (before Linux 6.4).
    """
    own = os.getpid()
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]
    return [process for process in processes if _on_connection(process, mount_device)]


def duplicate(process: int, mount_device: str) -> list[int]:
    """Descriptors of our own for all that another process has on a connection.  Needs the right to trace it."""
    try:
        handle = os.pidfd_open(process)
    except OSError:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    found = []
    try:
        for number in _on_connection(process, mount_device) or descriptors(process):
            descriptor = int(libc.syscall(_SYS_PIDFD_GETFD, handle, number, 0))
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
                found.append(descriptor)
    finally:
        os.close(handle)
    return found


def _on_connection(process: int, mount_device: str) -> list[int]:
    """Those of a process's descriptors that the kernel says are on this connection."""
    minor = mount_device.partition(":")[2]
    found = []
    for number in descriptors(process):
        try:
            lines = Path(f"/proc/{process}/fdinfo/{number}").read_text().splitlines()
        except OSError:
            continue
        if any(name == "fuse_connection" and value.strip() == minor for name, _, value in _split(lines)):
            found.append(number)
    return found


def _split(lines: list[str]) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in lines]


def wait(process: int, seconds: float) -> bool:
    """Wait until a process that need not be our child is gone; False if it is not in time."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


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
    return kernel_release() >= _RESEND_SINCE


def kernel_release() -> tuple[int, int]:
    """Major and minor number of the running kernel; (0, 0) if it does not tell."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


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


def ask(mount: Path | int) -> int:
    """Start a child that asks for statvfs through a mount, at its path or by a descriptor on it.

    The answer is never cached by the kernel, so a worker must give it.  A child asks, since whoever touches a mount
    that nobody serves does not come back.  Its exit code is 0, or the errno of the failure.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.statvfs(mount)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(min(code, 255))
    return child


def answer(mount: Path | int, seconds: float) -> int | None:
    """`ask`, and wait: 0 if the mount answers, the errno if it fails, None if nothing came in time."""
    child = ask(mount)
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor], [], [], seconds)
    finally:
        os.close(descriptor)
    if not ready:
        os.kill(child, signal.SIGKILL)  # it may stay in the kernel for a while; init reaps it
        return None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def answers(mount: Path | int, seconds: float) -> bool:
    """Does a statvfs through the mount succeed in time?"""
    return answer(mount, seconds) == 0
