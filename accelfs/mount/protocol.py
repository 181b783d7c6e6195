"""Which structures and numbers does the kernel's FUSE protocol use?

One table, with the kernel's own names, from <linux/fuse.h> (protocol 7.41).  Everything is in the byte order of the
machine; the sizes are asserted, since an answer of a wrong length leaves its caller waiting for ever.

Concurrency: constants only.
"""

from __future__ import annotations

import enum
import struct


class Opcode(enum.IntEnum):
    """enum fuse_opcode."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52


FUSE_ROOT_ID = 1
FUSE_NOTIFY_RESEND = 7
FUSE_UNIQUE_RESEND = 1 << 63
"""Set in the `unique` of a request that the kernel has queued again."""
REQUEST_BYTES_MAX = (1 << 20) + 8192
"""Room for max_write and the headers: the kernel refuses a read(2) with less."""
FUSE_DEV_IOC_CLONE = 0x8004E500  # _IOR(229, 0, uint32_t)

IN_HEADER = struct.Struct("=IIQQIIIHH")  # len opcode unique nodeid uid gid pid total_extlen padding
IN_HEADER_HEAD = struct.Struct("=IIQQ")
"""What every request is told apart by: taken apart for each, so no more than is needed."""
OUT_HEADER = struct.Struct("=IiQ")  # len error unique
READ_IN = struct.Struct("=QQIIQII")  # fh offset size read_flags lock_owner flags padding; READDIR(PLUS) too
READ_IN_HEAD = struct.Struct("=8xQI")  # offset size
LSEEK_IN = struct.Struct("=QQII")  # fh offset whence padding
LSEEK_OUT = struct.Struct("=Q")  # offset
ATTR = struct.Struct("=3Q3q10I")
"""fuse_attr: ino size blocks, atime mtime ctime (s64 in the kernel's own use), their nanoseconds, mode nlink uid gid
rdev blksize flags."""
ENTRY_OUT_HEAD = struct.Struct("=4Q2I")  # nodeid generation entry_valid attr_valid, their nanoseconds
ATTR_OUT_HEAD = struct.Struct("=QII")  # attr_valid attr_valid_nsec dummy
DIRENT = struct.Struct("=QQII")  # ino off namelen type; the name follows, padded to 8 bytes
STATFS_OUT = struct.Struct("=5Q4I24x")  # blocks bfree bavail files ffree, bsize namelen frsize padding
INIT_IN = struct.Struct("=4I")  # major minor max_readahead flags
INIT_OUT = struct.Struct("=4IHHIIHHI28x")
"""fuse_init_out: major minor max_readahead flags, max_background congestion_threshold, max_write time_gran, max_pages
map_alignment, flags2."""

ENTRY_REPLY = struct.Struct(OUT_HEADER.format + ENTRY_OUT_HEAD.format[1:] + ATTR.format[1:])
"""A whole answer to LOOKUP: out header, entry_out, attr."""
ATTR_REPLY = struct.Struct(OUT_HEADER.format + ATTR_OUT_HEAD.format[1:] + ATTR.format[1:])
"""A whole answer to GETATTR."""
DIRENTPLUS = struct.Struct(ENTRY_OUT_HEAD.format + ATTR.format[1:] + DIRENT.format[1:])
"""One name of READDIRPLUS without the name itself."""

assert (IN_HEADER.size, OUT_HEADER.size, READ_IN.size) == (40, 16, 40)
assert (ATTR.size, ENTRY_OUT_HEAD.size, ATTR_OUT_HEAD.size) == (88, 40, 16)
assert (DIRENT.size, STATFS_OUT.size, INIT_OUT.size) == (24, 80, 64)
assert (ENTRY_REPLY.size, ATTR_REPLY.size, DIRENTPLUS.size) == (144, 120, 152)
