"""How does pyfuse3 read a tree?

Thin: each handler asks `dataset.tree` and shapes the answer; the tree knows no FUSE, this module no storage.
Nodes are the tree's.  `open` and `opendir` answer the node as handle, since pyfuse3's `read` and `readdir` are
given nothing else.  Data never changes under a node, so the kernel may keep everything for ever, names that do
not exist included.

The errno boundary is total: a handler may raise only FUSEError, anything else would end pyfuse3's main loop and
with it the mount.  What is not expected is logged with its traceback, answered EIO, and serving goes on.

Concurrency: one request at a time, in a worker.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyfuse3

from accelfs.errors import AccelfsError, TreeError

if TYPE_CHECKING:
    from accelfs.dataset.tree import Attributes, Tree

log = logging.getLogger(__name__)

FOREVER_SECONDS = 365 * 86400
BLOCK_BYTES = 512
_KERNEL_ERRNO_END = 512  # fs/fuse/dev.c refuses an answer with another one
_LOGGED_MAX = 1024
# Directory positions: 1 is behind ".", 2 behind "..", n + 3 behind child n.
DOTS = 2

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def _guarded(handler: Handler) -> Handler:
    """The errno boundary around one handler."""

    @functools.wraps(handler)
    async def guarded(self: Operations, *arguments: Any, **keywords: Any) -> Any:
        try:
            return await handler(self, *arguments, **keywords)
        except pyfuse3.FUSEError:
            raise
        except TreeError as error:
            raise pyfuse3.FUSEError(errno_of(error)) from None
        except AccelfsError as error:
            self.log_once(str(error))
            raise pyfuse3.FUSEError(errno_of(error)) from None
        except BaseException as error:  # nothing that a request meets may end the worker
            log.error("%s%r failed; answered EIO", handler.__name__, arguments[:2], exc_info=error)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return guarded  # type: ignore[return-value]  # the wrapper has the handler's own face


def errno_of(error: AccelfsError) -> int:
    """What the kernel hears.

    What the catalog promises and the store lacks is EIO, never "no such file": only TreeError says that a name does
    not exist.  A number that the kernel takes for no errno would leave the caller waiting.
    """
    if error.errno == errno.ENOENT and not isinstance(error, TreeError):
        return errno.EIO
    if 0 < error.errno < _KERNEL_ERRNO_END:
        return error.errno
    log.error("%s: %d is no errno that the kernel takes; answered EIO", error, error.errno)
    return errno.EIO


class Operations(pyfuse3.Operations):
    """pyfuse3's handlers over one tree.  The tree is opened by each worker after its fork."""

    supports_dot_lookup = False

    def __init__(self) -> None:
        super().__init__()
        self.initialized = False
        self.tree: Tree | None = None
        self._logged: set[str] = set()

    def log_once(self, text: str) -> None:
        """Damage is said once, however often it is read."""
        if text not in self._logged:
            if len(self._logged) >= _LOGGED_MAX:
                self._logged.clear()
            self._logged.add(text)
            log.error("%s", text)

    def init(self) -> None:
        self.initialized = True

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Nodes are never recycled: nothing to count."""

    @_guarded
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        found = self._tree.lookup(parent_inode, name)
        if found is None:
            missing = pyfuse3.EntryAttributes()
            missing.st_ino = 0  # the kernel remembers that there is no such name
            missing.entry_timeout = FOREVER_SECONDS
            return missing
        return _entry(found)

    @_guarded
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return _entry(self._tree.attributes(inode))

    @_guarded
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return self._tree.readlink(inode)

    @_guarded
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    @_guarded
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return self._tree.read(fh, off, size)  # type: ignore[return-value]  # any buffer will do

    @_guarded
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        return inode

    @_guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        tree = self._tree
        if start_id < 1 and not pyfuse3.readdir_reply(token, b".", _entry(tree.attributes(fh)), 1):
            return
        if start_id < DOTS and not pyfuse3.readdir_reply(token, b"..", _entry(tree.attributes(tree.parent(fh))), 2):
            return
        for child in tree.list(fh, max(0, start_id - DOTS)):
            if not pyfuse3.readdir_reply(token, child.name, _entry(child.attributes), child.position + DOTS + 1):
                return

    @_guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        header = self._tree.header
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = header.data_blocks
        data.f_bfree = data.f_bavail = 0
        data.f_files = header.entries
        data.f_ffree = data.f_favail = 0
        data.f_namemax = 255
        return data

    async def flush(self, fh: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)  # the kernel never asks again

    async def release(self, fh: int) -> None: ...

    async def releasedir(self, fh: int) -> None: ...

    async def fsync(self, fh: int, datasync: bool) -> None: ...

    async def fsyncdir(self, fh: int, datasync: bool) -> None: ...

    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        return True  # default_permissions: the kernel has decided before it asks

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        # `ls -l` asks for two attributes a file, every time; refused once, it costs nothing.
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def _read_only(self, *arguments: object, **keywords: object) -> Any:
        """The mount is read-only, so the kernel refuses these itself; a server must not trust that."""
        raise pyfuse3.FUSEError(errno.EROFS)

    setattr = mknod = mkdir = unlink = rmdir = symlink = rename = link = write = create = _read_only
    setxattr = removexattr = _read_only

    @property
    def _tree(self) -> Tree:
        assert self.tree is not None, "the worker opens its tree before it serves"
        return self.tree


def _entry(attributes: Attributes) -> pyfuse3.EntryAttributes:
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attributes.node
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_size = attributes.size
    entry.st_blocks = attributes.blocks
    entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = attributes.mtime_ns
    entry.entry_timeout = entry.attr_timeout = FOREVER_SECONDS
    return entry
