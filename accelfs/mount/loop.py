"""How does pyfuse3 run in a process that only serves FUSE requests?

pyfuse3 looks its event loop up as the module global `pyfuse3.trio` (its own `pyfuse3.asyncio` replaces that
global in the same way).  `BlockingLoop` stands in for it: waiting for the device returns at once, and libfuse's
read(2) then blocks in the kernel until a request arrives.  No scheduler, no epoll: a third of trio's cost a
request, and trio itself, 170 ms and 20 MB of imports, is never loaded.

The one place where the coroutine of `pyfuse3.main` can suspend is `wait_readable` while `hold()` is true: so the
master stops after INIT, forks, and each worker resumes its own copy.

Concurrency: one coroutine, driven by `send(None)`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any


class BlockingLoop(types.ModuleType):
    """The part of trio's face that pyfuse3 3.4 and 3.5 use."""

    class ClosedResourceError(Exception):
        """Never raised: nobody closes the device under a waiting reader."""

    class Lock:
        """There is one task, so nothing is ever contended."""

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *exception: object) -> None: ...

    class _Nursery:
        def __init__(self) -> None:
            self._pending: list[tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]] = []

        def start_soon(self, function: Callable[..., Awaitable[None]], *arguments: Any, name: object = None) -> None:
            self._pending.append((function, arguments))

        async def __aenter__(self) -> BlockingLoop._Nursery:
            return self

        async def __aexit__(self, *exception: object) -> None:
            while self._pending:
                function, arguments = self._pending.pop(0)
                await function(*arguments)

    def __init__(self) -> None:
        super().__init__("trio")
        self.lowlevel = self.from_thread = self
        self.hold: Callable[[], bool] = bool

    def open_nursery(self) -> _Nursery:
        return self._Nursery()

    def current_task(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="fuse")

    def current_trio_token(self) -> None:
        return None

    def notify_closing(self, descriptor: int) -> None: ...

    async def wait_readable(self, descriptor: int) -> None:
        if self.hold():
            await _suspend()


@types.coroutine
def _suspend() -> Generator[None, None, None]:
    yield


def load_pyfuse3() -> BlockingLoop:
    """Import pyfuse3 on a BlockingLoop and return the loop.

    `import trio` inside pyfuse3 finds the stand-in; `sys.modules` is put back afterwards, so that code which
    really wants trio gets trio.
    """
    loop = BlockingLoop()
    real = sys.modules.get("trio")
    sys.modules["trio"] = loop
    try:
        import pyfuse3
    finally:
        if real is None:
            del sys.modules["trio"]
        else:
            sys.modules["trio"] = real
    pyfuse3.trio = loop  # type: ignore[attr-defined]
    return loop
