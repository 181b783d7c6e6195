"""How do the kernel, libfuse and we agree on a FUSE connection, new or taken over from another process?

The INIT handshake goes through our hands.  First, since libfuse leaves max_background at 12 and pyfuse3 cannot set
it: 16 readers that wait would block every other large read.  Second, since the kernel sends INIT once in a
connection's life and libfuse answers EIO to everything before it has seen one: whoever takes a connection over
replays the INIT that the first process noted.

Concurrency: sync, in the master, before any worker is forked.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelfs.errors import MountError
from accelfs.mount import device, mountpoint
from accelfs.mount.loop import BlockingLoop, load_pyfuse3
from accelfs.mount.protocol import OUT_HEADER, REQUEST_BYTES_MAX

if TYPE_CHECKING:
    from accelfs.mount.operations import Operations

MAX_BACKGROUND = 4096
# The two u16 of fuse_init_out that libfuse gets wrong: max_background and congestion_threshold.
_INIT_BACKGROUND = struct.Struct("=HH")
_INIT_BACKGROUND_OFFSET = OUT_HEADER.size + 16


@dataclass(frozen=True, slots=True)
class Handshake:
    """INIT as the kernel sent it, and the answer that it got: what a successor needs."""

    request: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection that libfuse knows.

    `session` is the descriptor that pyfuse3 reads; `mount` the detached mount, or None if its path shows it already.
    """

    session: int
    mount: int | None
    handshake: Handshake
    operations: Operations
    serving: Coroutine[Any, Any, None]
    loop: BlockingLoop


def make(path: Path, name: str) -> Connection:
    """Make a new connection, with a detached mount where that is possible, else mounted at `path`.

    `name` is what the mount table will show as its source.  Raises MountError.
    """
    session = os.open(device.DEVICE, os.O_RDWR | os.O_CLOEXEC)
    mount = mountpoint.detached(session, name)
    if mount is None:
        os.close(session)
        before = set(device.descriptors("self"))
        loop, operations = _start_libfuse(str(path), name)
        (session,) = set(device.descriptors("self")) - before
    else:
        loop, operations = _start_libfuse(f"/dev/fd/{session}", name)
    serving = _serving()
    kernel = os.dup(session)
    request = os.read(kernel, REQUEST_BYTES_MAX)
    answer = _answer(kernel, session, request, serving)
    os.write(kernel, answer)
    os.close(kernel)
    return Connection(session, mount, Handshake(request, answer), operations, serving, loop)


def adopt(descriptor: int, handshake: Handshake, name: str) -> Connection:
    """Make libfuse serve a connection that another process made; the kernel notices nothing.

    Raises MountError where this release would have answered INIT in another way: the kernel keeps to the first
    answer, so the connection must be served by what gave it.
    """
    loop, operations = _start_libfuse(f"/dev/fd/{descriptor}", name)
    serving = _serving()
    kernel = os.dup(descriptor)
    answer = _answer(kernel, descriptor, handshake.request, serving)
    os.close(kernel)
    if answer != handshake.answer:
        raise MountError(f"{name}: this release speaks FUSE differently from the one that mounted it; umount and mount")
    return Connection(descriptor, None, handshake, operations, serving, loop)


def _start_libfuse(mountpoint: str, name: str) -> tuple[BlockingLoop, Operations]:
    loop = load_pyfuse3()
    import pyfuse3

    from accelfs.mount.operations import Operations

    operations = Operations()
    loop.hold = lambda: operations.initialized
    options = {f"fsname={name}", "subtype=accelfs", "ro", "default_permissions"}
    if os.geteuid() == 0:
        options.add("allow_other")
    try:
        pyfuse3.init(operations, mountpoint, options)
    except RuntimeError as error:
        hint = "; a container needs --cap-add SYS_ADMIN and --device /dev/fuse"
        if os.geteuid() != 0:
            hint = "; without root, fusermount3 (package fuse3) must be installed"
        raise MountError(f"{mountpoint}: cannot be mounted: {error}{hint}") from error
    return loop, operations


def _serving() -> Coroutine[Any, Any, None]:
    import pyfuse3

    serving: Coroutine[Any, Any, None] = pyfuse3.main(1, 1)
    return serving


def _answer(kernel: int, session: int, request: bytes, serving: Coroutine[Any, Any, None]) -> bytes:
    """Let libfuse process INIT on a socketpair in the session's place; return its answer with our max_background."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        os.dup2(theirs.fileno(), session)
        ours.send(request)
        serving.send(None)  # answers, and suspends before the next request
        answer = bytearray(ours.recv(4096))
        os.dup2(kernel, session, inheritable=False)
    _INIT_BACKGROUND.pack_into(answer, _INIT_BACKGROUND_OFFSET, MAX_BACKGROUND, MAX_BACKGROUND)
    return bytes(answer)
