"""How are the requests that training sends answered without a detour?

A worker reads each request from its clone of the device, answers what stands in `_HANDLERS` straight from the tree
with one writev, and hands every other request, as it is, to pyfuse3 over a socketpair that sits on the session's
descriptor; the answer is relayed.  So pyfuse3 stays the implementation of the whole protocol, and both engines can be
compared.

OPEN and OPENDIR are refused once with ENOSYS: READ and READDIRPLUS carry the node, so the kernel keeps pages and
listings by itself, never opens or releases, and a second pass over a file reaches no worker.

The errno boundary is total, as in `operations`.  An answer that the kernel refuses (EINVAL: a wrong length; EFAULT)
would leave its caller waiting for ever, so it is answered again with EIO.  ENOENT means that nobody waits any more: the
request was interrupted, or answered by another worker after RESEND.

Concurrency: one request at a time, in a worker; no locks.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from accelfs.errors import AccelfsError, TreeError
from accelfs.mount import protocol
from accelfs.mount.operations import BLOCK_BYTES, DOTS, FOREVER_SECONDS, errno_of
from accelfs.mount.protocol import (
    ATTR_REPLY,
    DIRENT,
    DIRENTPLUS,
    ENTRY_REPLY,
    IN_HEADER,
    IN_HEADER_HEAD,
    LSEEK_IN,
    LSEEK_OUT,
    OUT_HEADER,
    READ_IN_HEAD,
    REQUEST_BYTES_MAX,
    STATFS_OUT,
    Opcode,
)

if TYPE_CHECKING:
    from accelfs.dataset.tree import Attributes, Tree
    from accelfs.mount.operations import Operations

log = logging.getLogger(__name__)

HANDED_OVER_BYTES_MAX = 128 << 10
"""What certainly fits the socketpair.  Only a WRITE is longer, and the mount is read-only."""
_HEADER_BYTES = IN_HEADER.size
_BLOCK_SIZE = 4096

_Answer = bytes | tuple[bytes, bytes | memoryview] | None


class FastPath:
    """Serves one clone of the device."""

    def __init__(
        self, session: int, device: int, operations: Operations, serving: Coroutine[Any, Any, None], tree: Tree
    ) -> None:
        self._session = session
        self._device = device
        self._operations = operations
        self._serving = serving
        self._tree = tree
        self._buffer = bytearray(REQUEST_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._handlers: dict[int, Callable[[int, int, int], _Answer]] = {
            Opcode.READ: self._read,
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.READDIR: self._readdir,
            Opcode.READLINK: self._readlink,
            Opcode.STATFS: self._statfs,
            Opcode.LSEEK: self._lseek,
            Opcode.IOCTL: self._not_a_terminal,
            Opcode.FORGET: self._nothing,
            Opcode.BATCH_FORGET: self._nothing,
            Opcode.INTERRUPT: self._nothing,
            # Each of these is sent once for the whole mount: the kernel remembers that there is no such call.
            Opcode.OPEN: self._no_such_call,
            Opcode.OPENDIR: self._no_such_call,
            Opcode.FLUSH: self._no_such_call,
            Opcode.ACCESS: self._no_such_call,
            Opcode.GETXATTR: self._no_such_call,
            Opcode.LISTXATTR: self._no_such_call,
            Opcode.STATX: self._no_such_call,
        }

    def serve(self) -> None:
        """Until the connection is over (ENODEV)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.dup2(theirs.fileno(), self._session)
        theirs.close()
        self._rest = ours
        device, request, handlers = self._device, self._buffer, self._handlers
        buffer = (request,)
        unpack, readv, write, writev = IN_HEADER_HEAD.unpack_from, os.readv, os.write, os.writev
        while True:
            try:
                length = readv(device, buffer)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue  # ENOENT: the request was interrupted before we had it
                if error.errno == errno.ENODEV:
                    return
                raise
            _, opcode, unique, node = unpack(request)
            try:
                handler = handlers.get(opcode)
                answer = self._hand_over(unique, length) if handler is None else handler(unique, node, length)
                if answer is None:
                    continue
                if type(answer) is tuple:
                    writev(device, answer)
                else:
                    write(device, answer)  # type: ignore[arg-type]  # not a tuple, not None
            except OSError as error:
                self._not_taken(unique, error)
            except TreeError as error:
                self._fail(unique, error.errno)
            except AccelfsError as error:
                self._operations.log_once(str(error))
                self._fail(unique, errno_of(error))
            except Exception:
                log.exception("request %d of node %d failed; answered EIO", opcode, node)
                self._fail(unique, errno.EIO)

    def _read(self, unique: int, node: int, length: int) -> _Answer:
        offset, size = READ_IN_HEAD.unpack_from(self._buffer, _HEADER_BYTES)
        data = self._tree.read(node, offset, size)
        return OUT_HEADER.pack(16 + len(data), 0, unique), data

    def _lookup(self, unique: int, node: int, length: int) -> _Answer:
        found = self._tree.lookup(node, self._view[_HEADER_BYTES : length - 1].tobytes())
        if found is None:
            return _missing(unique)
        return ENTRY_REPLY.pack(144, 0, unique, *_entry(found))

    def _getattr(self, unique: int, node: int, length: int) -> _Answer:
        found = self._tree.attributes(node)
        return ATTR_REPLY.pack(120, 0, unique, FOREVER_SECONDS, 0, 0, *_attr(found))

    def _readdirplus(self, unique: int, node: int, length: int) -> _Answer:
        return self._listing(unique, node, plus=True)

    def _readdir(self, unique: int, node: int, length: int) -> _Answer:
        return self._listing(unique, node, plus=False)

    def _listing(self, unique: int, node: int, *, plus: bool) -> _Answer:
        offset, room = READ_IN_HEAD.unpack_from(self._buffer, _HEADER_BYTES)
        tree = self._tree
        parts: list[bytes] = []
        used = 0
        fixed = DIRENTPLUS.size if plus else DIRENT.size

        def add(name: bytes, found: Attributes, position: int) -> bool:
            nonlocal used
            padding = -len(name) % 8
            used += fixed + len(name) + padding
            if used > room:
                used -= fixed + len(name) + padding
                return False
            tail = (found.node, position, len(name), found.mode >> 12)
            parts.append(DIRENTPLUS.pack(*_entry(found), *tail) if plus else DIRENT.pack(*tail))
            parts.append(name + bytes(padding) if padding else name)
            return True

        if offset < 1 and not add(b".", tree.attributes(node), 1):
            return self._error(unique, errno.EINVAL)
        if offset < DOTS and not add(b"..", tree.attributes(tree.parent(node)), DOTS):
            return OUT_HEADER.pack(16 + used, 0, unique), b"".join(parts)
        for child in tree.list(node, max(0, offset - DOTS)):
            if not add(child.name, child.attributes, child.position + DOTS + 1):
                break
        return OUT_HEADER.pack(16 + used, 0, unique), b"".join(parts)

    def _readlink(self, unique: int, node: int, length: int) -> _Answer:
        target = self._tree.readlink(node)
        return OUT_HEADER.pack(16 + len(target), 0, unique), target

    def _statfs(self, unique: int, node: int, length: int) -> _Answer:
        header = self._tree.header
        return OUT_HEADER.pack(16 + STATFS_OUT.size, 0, unique) + STATFS_OUT.pack(
            header.data_blocks, 0, 0, header.entries, 0, BLOCK_BYTES, 255, BLOCK_BYTES, 0
        )

    def _lseek(self, unique: int, node: int, length: int) -> _Answer:
        _, offset, whence, _ = LSEEK_IN.unpack_from(self._buffer, _HEADER_BYTES)
        found = self._tree.seek(node, offset, whence)
        return OUT_HEADER.pack(16 + LSEEK_OUT.size, 0, unique) + LSEEK_OUT.pack(found)

    def _not_a_terminal(self, unique: int, node: int, length: int) -> _Answer:
        """Python's `open` asks each file for its terminal settings."""
        return self._error(unique, errno.ENOTTY)

    def _no_such_call(self, unique: int, node: int, length: int) -> _Answer:
        return self._error(unique, errno.ENOSYS)

    def _nothing(self, unique: int, node: int, length: int) -> _Answer:
        """No answer is expected: nodes are never recycled, and no request waits here to be interrupted."""
        return None

    def _hand_over(self, unique: int, length: int) -> _Answer:
        """Let pyfuse3 answer."""
        if length > HANDED_OVER_BYTES_MAX:
            return self._error(unique, errno.EROFS)
        self._rest.send(self._view[:length])
        self._serving.send(None)  # it takes exactly this request and waits again
        try:
            return self._rest.recv(REQUEST_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None  # a request without an answer

    def _error(self, unique: int, number: int) -> bytes:
        return OUT_HEADER.pack(16, -number, unique)

    def _fail(self, unique: int, number: int) -> None:
        try:
            os.write(self._device, OUT_HEADER.pack(16, -number, unique))
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.error("an error could not be answered: %s", error.strerror)

    def _not_taken(self, unique: int, error: OSError) -> None:
        """The kernel refused the answer, or the tree met an OSError that it should have named."""
        if error.errno == errno.ENOENT:
            return
        log.error("an answer was refused (%s); answered EIO", error.strerror)
        self._fail(unique, errno.EIO)


def _attr(found: Attributes) -> tuple[int, ...]:
    node, size, blocks, seconds, nanoseconds, mode, nlink, uid, gid = found
    return (
        node, size, blocks, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds,
        mode, nlink, uid, gid, 0, _BLOCK_SIZE, 0,
    )  # fmt: skip


def _entry(found: Attributes) -> tuple[int, ...]:
    return (found.node, 0, FOREVER_SECONDS, FOREVER_SECONDS, 0, 0, *_attr(found))


def _missing(unique: int) -> bytes:
    """Node 0 with a validity: the kernel remembers that there is no such name."""
    return ENTRY_REPLY.pack(144, 0, unique, 0, 0, FOREVER_SECONDS, FOREVER_SECONDS, 0, 0, *_NO_ATTR)


_NO_ATTR = (0,) * 16

assert stat.S_IFDIR >> 12 == 4, "a dirent's type is the mode's top four bits, as DT_DIR"
assert protocol.FUSE_ROOT_ID == 1
