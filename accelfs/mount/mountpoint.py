"""May we mount at this path, and how is a mount taken down?

After a crash the path must answer an error, never show an empty folder: so nothing here unmounts what is served,
except on request, and a stale mount of ours (ENOTCONN) is only replaced by a new one.

The mount table is read instead of the path wherever a mount could hang who touches it.

Concurrency: sync, stateless.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
from pathlib import Path

from accelfs.errors import BusyError, MountError, UsageError
from accelfs.mount import device
from accelfs.store.filesystem import ACCELFS_TYPE, mounted_at

_MNT_DETACH = 2
_UNMOUNT_SECONDS = 10.0
_MAKE_TRIES = 10
_STALE_MAX = 16
_STALE_SECONDS = 5.0
# <linux/mount.h>; the system calls have these numbers on every architecture.
_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_BENEATH = 0x4, 0x200
_AT_FDCWD = -100


def resolved(path: Path) -> Path:
    """The path as the mount table shows it: absolute, without symbolic links.

    The last component is looked at only if nothing is mounted there.
    """
    path = Path(os.path.abspath(path))
    path = Path(os.path.realpath(path.parent)) / path.name
    return path if mounted_at(path) is not None else Path(os.path.realpath(path))


def prepare(path: Path, *, create: bool) -> int:
    """Make sure that a mount can be made here; return how many folders were made for it, parents included.

    Raises UsageError or MountError with what to do.
    """
    row = mounted_at(path)
    if row is not None:
        raise MountError(
            f"{path}: {row.source} ({row.type}) is mounted here already; unmount it or name another folder"
        )
    made = 0
    try:
        if create:
            made = _make_folders(path)
        status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{path}: is not a folder; a mount needs an empty folder")
        if any(os.scandir(path)):
            raise UsageError(f"{path}: is not empty, and a mount would hide what it holds; name an empty folder")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such folder; make it first: mkdir -p {path}") from None
    except OSError as error:
        raise MountError(f"{path}: {error.strerror}") from error
    return made


def remove_folders(path: Path, made: int) -> None:
    """Remove the folders that `prepare` made, from the last one up; somebody may have put something there since."""
    try:
        for folder in (path, *path.parents)[:made]:
            folder.rmdir()
    except OSError:
        return


def _make_folders(path: Path) -> int:
    """Make the missing folders of a path; another mount may make or remove the same ones at the same time."""
    made = 0
    for _ in range(_MAKE_TRIES):
        try:
            path.mkdir()
            return made + 1
        except FileExistsError:
            return made
        except FileNotFoundError:
            made = _make_folders(path.parent)
    raise MountError(f"{path}: cannot be made: {path.parent} is removed again and again")


def detached(descriptor: int, name: str) -> int | None:
    """Make a mount of the connection behind an open /dev/fuse that no path shows yet; return its descriptor.

    None where it cannot be made that way: without root, or where a sandbox knows only mount(2).  Linux 5.2.
    """
    if os.geteuid() != 0:
        return None
    options = {
        "source": name, "subtype": ACCELFS_TYPE.partition(".")[2], "fd": str(descriptor), "rootmode": "40000",
        "user_id": "0", "group_id": "0",
    }  # fmt: skip
    try:
        context = _call(_SYS_FSOPEN, b"fuse", _FSOPEN_CLOEXEC)
        try:
            for key, value in options.items():
                _call(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
            for flag in (b"ro", b"allow_other", b"default_permissions"):
                _call(_SYS_FSCONFIG, context, _FSCONFIG_SET_FLAG, flag, None, 0)
            _call(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
            return _call(
                _SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
            )
        finally:
            os.close(context)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise MountError(f"a FUSE mount cannot be made: {error.strerror}") from error


def attach(mount: int, path: Path) -> None:
    """Let `path` show a detached mount."""
    try:
        _call(_SYS_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(path), _MOVE_MOUNT_F_EMPTY_PATH)
    except OSError as error:
        raise MountError(f"{path}: cannot be mounted: {error.strerror}") from error


def can_exchange() -> bool:
    """Are we root on a kernel with MOVE_MOUNT_BENEATH (Linux 6.5)?"""
    return os.geteuid() == 0 and device.kernel_release() >= (6, 5)


def exchange(mount: int, path: Path) -> None:
    """Let `path` show a detached mount instead of the one it shows, with no moment in between.

    Open files, working directories and scans stay in the old mount, whose connection ends with its last user.
    """
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_BENEATH
    try:
        _call(_SYS_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(path), flags)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            raise MountError(
                f"{path}: this kernel cannot exchange a mount in place (Linux 6.5 can): umount and mount"
            ) from error
        raise MountError(f"{path}: cannot be exchanged: {error.strerror}") from error
    unmount(path, lazy=True)


def unmount(path: Path, *, lazy: bool) -> None:
    """Take down the mount at this path.  BusyError if it is in use and not `lazy`."""
    if os.geteuid() == 0:
        _umount2(path, lazy)
        return
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_UNMOUNT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MountError(f"{path}: cannot be unmounted: {error}") from error
    if done.returncode != 0:
        text = done.stderr.strip()
        if "busy" in text:
            raise BusyError(_busy(path))
        raise MountError(f"{path}: cannot be unmounted: {text}")


def remove_folder(path: Path) -> None:
    """Remove a mount point that `prepare` made; somebody may have put something there since."""
    try:
        path.rmdir()
    except OSError:
        return


def _call(number: int, *arguments: int | bytes | None) -> int:
    """One system call that glibc 2.36 has no function for; raise OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _umount2(path: Path, lazy: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(path), _MNT_DETACH if lazy else 0) == 0:
        return
    number = ctypes.get_errno()
    if number == errno.EBUSY:
        raise BusyError(_busy(path))
    raise MountError(f"{path}: cannot be unmounted: {os.strerror(number)}")


def _busy(path: Path) -> str:
    return (
        f"{path}: is in use; end the programs that use it (fuser -vm {path} lists them), or detach it with --force: "
        "open files stay readable, the path is gone at once"
    )


def is_stale(path: Path) -> bool:
    """Does the path show a mount of ours whose processes are gone?  It answers ENOTCONN to everything."""
    row = mounted_at(path)
    return row is not None and row.type == ACCELFS_TYPE and device.answer(path, _STALE_SECONDS) == errno.ENOTCONN


def remove_stale(path: Path) -> None:
    """Take down what `is_stale`; a few such mounts may lie on top of each other."""
    for _ in range(_STALE_MAX):
        if not is_stale(path):
            return
        unmount(path, lazy=True)
