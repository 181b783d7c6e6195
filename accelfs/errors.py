"""What can go wrong, and what do the kernel and the shell hear of it?

    AccelfsError                EIO     1   anything below, caught at an edge
      UsageError                EINVAL  2   the command or its arguments cannot work
      BusyError                 EBUSY   75  somebody else holds it: the same call may work later
      SourceError               EIO     1   the tree to be packed cannot be read as asked
      StoreError                EIO     1   the store refused, or what it holds is missing
        NotFoundError           ENOENT  1   no such slot, version or object
        FullError               ENOSPC  1   no space left where we write
      FormatError               EIO     1   bytes on disk are not what the format promises
        UnknownVersionError     EIO     1   written by a newer release
        DamagedError            EIO     1   a checksum, a size or a place does not hold
      TreeError                 (own)   1   a path that the tree does not have, or not as that kind
      MountError                EIO     1   the kernel mount could not be made, kept or ended

Raise low, translate once: `mount` turns a class into its errno, `cli` into its exit code and one
line on stderr.  A message is one line that says what to do; it never holds a secret.
"""

from __future__ import annotations

import errno


class AccelfsError(Exception):
    """Base of every error that accelfs raises on purpose."""

    errno: int = errno.EIO
    exit_code: int = 1


class UsageError(AccelfsError):
    errno = errno.EINVAL
    exit_code = 2


class BusyError(AccelfsError):
    errno = errno.EBUSY
    exit_code = 75


class SourceError(AccelfsError):
    pass


class StoreError(AccelfsError):
    pass


class NotFoundError(StoreError):
    errno = errno.ENOENT


class FullError(StoreError):
    errno = errno.ENOSPC


class FormatError(AccelfsError):
    pass


class UnknownVersionError(FormatError):
    pass


class DamagedError(FormatError):
    pass


class TreeError(AccelfsError):
    """A path or node that the tree does not have, or that is of another kind.

    `number` is the errno that a file system call would give: ENOENT, ENOTDIR, EISDIR, EINVAL …
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.errno = number


class MountError(AccelfsError):
    pass
