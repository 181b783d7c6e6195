"""What must a store be able to do?

Keys are relative paths of `layout`, with `/` between components.  No object is ever modified: it is created
whole, once, and later perhaps deleted.

Concurrency: sync; an implementation may be used by several threads and processes at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """A place for immutable objects.  Methods raise StoreError, NotFoundError or FullError."""

    def list(self, prefix: str) -> list[str]:
        """Names of the objects right below `prefix` (no trailing slash), sorted; empty if there are none."""
        ...

    def read(self, key: str, bytes_max: int) -> bytes:
        """The whole object; StoreError if it is larger than `bytes_max`."""
        ...

    def upload(self, source: Path, key: str) -> None:
        """Make the finished local file an object, durably, before this returns.

        The file may be moved: it belongs to the store afterwards.  An object that is already there under this
        key has the same content (keys are content hashes) and is kept.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Create the object if there is none, durably; False if somebody else was first."""
        ...

    def delete(self, key: str) -> None:
        """Delete the object; no error if it is gone."""
        ...

    def local_path(self, key: str) -> Path:
        """The file that holds the object, for reading in place.  Only stores on a local file system have it."""
        ...
