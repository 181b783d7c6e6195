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
from collections.abc import Callable, Coroutine, Iterator
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
_OUT_BYTES = OUT_HEADER.size
_PADDING = [bytes(count) for count in range(8)]
_READ = int(Opcode.READ)
_LOOKUP = int(Opcode.LOOKUP)
_BLOCK_SIZE = 4096


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
        self._handlers: dict[int, Callable[[int, int], bytes | None]] = {
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
        device, request, view, handlers = self._device, self._buffer, self._view, self._handlers
        buffer = (request,)
        unpack, readv, write, writev = IN_HEADER_HEAD.unpack_from, os.readv, os.write, os.writev
        unpack_read, pack_header = READ_IN_HEAD.unpack_from, OUT_HEADER.pack
        read, lookup = self._tree.read, self._tree.lookup
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
            answering = False
            try:
                # The two requests that a file costs at its first read stand here, since a call and a look-up in
                # the table are a tenth of what they take.
                if opcode == _READ:
                    data = read(node, *unpack_read(request, _HEADER_BYTES))
                    answering = True
                    writev(device, (pack_header(_OUT_BYTES + len(data), 0, unique), data))
                    continue
                if opcode == _LOOKUP:
                    found = lookup(node, view[_HEADER_BYTES : length - 1].tobytes())
                    answer: bytes | None = _missing(unique) if found is None else _entry_reply(unique, found)
                else:
                    handler = handlers.get(opcode)
                    answer = self._hand_over(unique, length) if handler is None else handler(unique, node)
                if answer is not None:
                    answering = True
                    write(device, answer)
            except BaseException as error:  # nothing that a request meets may end the worker
                if answering:
                    self._not_taken(unique, error)
                else:
                    self._failed(opcode, unique, node, error)

    def _getattr(self, unique: int, node: int) -> bytes | None:
        found = self._tree.attributes(node)
        return ATTR_REPLY.pack(ATTR_REPLY.size, 0, unique, FOREVER_SECONDS, 0, 0, *_attr(found))

    def _readdirplus(self, unique: int, node: int) -> bytes | None:
        return self._listing(unique, node, plus=True)

    def _readdir(self, unique: int, node: int) -> bytes | None:
        return self._listing(unique, node, plus=False)

    def _listing(self, unique: int, node: int, *, plus: bool) -> bytes:
        """As many names from the requested position on as the caller has room for."""
        start, room = READ_IN_HEAD.unpack_from(self._buffer, _HEADER_BYTES)
        fixed = DIRENTPLUS.size if plus else DIRENT.size
        parts = [b""]
        used = 0
        for position, name, found in self._names(node, start):
            target, size, blocks, seconds, nanoseconds, mode, nlink, uid, gid = found
            length = len(name)
            padding = -length % 8
            used += fixed + length + padding
            if used > room:
                used -= fixed + length + padding
                break
            if plus:
                head = DIRENTPLUS.pack(
                    target, 0, FOREVER_SECONDS, FOREVER_SECONDS, 0, 0,
                    target, size, blocks, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds,
                    mode, nlink, uid, gid, 0, _BLOCK_SIZE, 0,
                    target, position, length, mode >> 12,
                )  # fmt: skip
            else:
                head = DIRENT.pack(target, position, length, mode >> 12)
            parts += (head, name, _PADDING[padding])
        parts[0] = OUT_HEADER.pack(_OUT_BYTES + used, 0, unique)
        return b"".join(parts)

    def _names(self, node: int, start: int) -> Iterator[tuple[int, bytes, Attributes]]:
        """(position behind the name, name, attributes) of ".", ".." and the children."""
        tree = self._tree
        if start < 1:
            yield 1, b".", tree.attributes(node)
        if start < DOTS:
            yield DOTS, b"..", tree.attributes(tree.parent(node))
        for position, name, found in tree.list(node, max(0, start - DOTS)):
            yield position + DOTS + 1, name, found

    def _readlink(self, unique: int, node: int) -> bytes | None:
        target = self._tree.readlink(node)
        return OUT_HEADER.pack(_OUT_BYTES + len(target), 0, unique) + target

    def _statfs(self, unique: int, node: int) -> bytes | None:
        header = self._tree.header
        return OUT_HEADER.pack(_OUT_BYTES + STATFS_OUT.size, 0, unique) + STATFS_OUT.pack(
            header.data_blocks, 0, 0, header.entries, 0, BLOCK_BYTES, 255, BLOCK_BYTES, 0
        )

    def _lseek(self, unique: int, node: int) -> bytes | None:
        _, offset, whence, _ = LSEEK_IN.unpack_from(self._buffer, _HEADER_BYTES)
        found = self._tree.seek(node, offset, whence)
        return OUT_HEADER.pack(_OUT_BYTES + LSEEK_OUT.size, 0, unique) + LSEEK_OUT.pack(found)

    def _not_a_terminal(self, unique: int, node: int) -> bytes | None:
        """Python's `open` asks each file for its terminal settings."""
        return self._error(unique, errno.ENOTTY)

    def _no_such_call(self, unique: int, node: int) -> bytes | None:
        return self._error(unique, errno.ENOSYS)

    def _nothing(self, unique: int, node: int) -> bytes | None:
        """No answer is expected: nodes are never recycled, and no request waits here to be interrupted."""
        return None

    def _hand_over(self, unique: int, length: int) -> bytes | None:
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
        return OUT_HEADER.pack(_OUT_BYTES, -number, unique)

    def _failed(self, opcode: int, unique: int, node: int, error: BaseException) -> None:
        """No answer could be made: say which errno, and in the log what is wrong."""
        if isinstance(error, AccelfsError):
            if not isinstance(error, TreeError):
                self._operations.log_once(str(error))
            number = errno_of(error)
        else:
            log.error("request %d of node %d failed; answered EIO", opcode, node, exc_info=error)
            number = errno.EIO
        self._fail(unique, number)

    def _not_taken(self, unique: int, error: BaseException) -> None:
        """The kernel refused an answer."""
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            return  # nobody waits any more
        log.error("an answer was refused (%s); answered EIO", error)
        self._fail(unique, errno.EIO)

    def _fail(self, unique: int, number: int) -> None:
        try:
            os.write(self._device, OUT_HEADER.pack(_OUT_BYTES, -number, unique))
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.error("an error could not be answered: %s", error.strerror)


def _attr(found: Attributes) -> tuple[int, ...]:
    """The fields of fuse_attr."""
    node, size, blocks, seconds, nanoseconds, mode, nlink, uid, gid = found
    return (
        node, size, blocks, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds,
        mode, nlink, uid, gid, 0, _BLOCK_SIZE, 0,
    )  # fmt: skip


def _entry_reply(unique: int, found: Attributes) -> bytes:
    """A found name, valid for ever, since nothing ever changes under a node."""
    node, size, blocks, seconds, nanoseconds, mode, nlink, uid, gid = found
    return ENTRY_REPLY.pack(
        _ENTRY_BYTES, 0, unique, node, 0, FOREVER_SECONDS, FOREVER_SECONDS, 0, 0,
        node, size, blocks, seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds,
        mode, nlink, uid, gid, 0, _BLOCK_SIZE, 0,
    )  # fmt: skip


def _missing(unique: int) -> bytes:
    """Node 0 with a validity: the kernel remembers that there is no such name."""
    return ENTRY_REPLY.pack(_ENTRY_BYTES, 0, unique, 0, 0, FOREVER_SECONDS, FOREVER_SECONDS, 0, 0, *_NO_ATTR)


_ENTRY_BYTES = ENTRY_REPLY.size
_NO_ATTR = (0,) * 16

assert stat.S_IFDIR >> 12 == 4, "a dirent's type is the mode's top four bits, as DT_DIR"
assert protocol.FUSE_ROOT_ID == 1
