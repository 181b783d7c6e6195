"""Was this catalog verified whole on this node already?

LMDB walks the pages of a catalog without checking them, and a flipped bit in a tree page was seen to lose keys
in silence.  So a catalog is hashed once before it is first opened, and a marker remembers the file by device,
inode, size, mtime and ctime: opening it again costs one stat.  A file that was changed, replaced or copied since
is hashed again.

    <trusted>/<hash>        one JSON line: the five numbers

Concurrency: sync; several processes may verify and mark one catalog at once.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from accelfs.errors import DamagedError, NotFoundError, StoreError
from accelfs.format.codec import file_hash

if TYPE_CHECKING:
    from accelfs.format.manifest import StoredObject


def verify(path: Path, stored: StoredObject, trusted: Path) -> None:
    """Raise NotFoundError or DamagedError unless the file has the promised content."""
    try:
        identity = _identity(path)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: the version's catalog is missing from the store") from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    if _remembered(trusted / stored.hash) == identity:
        return
    if os.path.getsize(path) != stored.bytes:
        raise DamagedError(f"{path}: the catalog has {os.path.getsize(path)} bytes, {stored.bytes} were published")
    if file_hash(path) != stored.hash:
        raise DamagedError(f"{path}: the catalog does not have the content that was published; pack the slot again")
    _remember(trusted, stored.hash, identity)


def remember(path: Path, digest: str, trusted: Path) -> None:
    """Mark a catalog whose bytes this process has just hashed itself."""
    _remember(trusted, digest, _identity(path))


def _identity(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _remembered(marker: Path) -> object:
    try:
        return json.loads(marker.read_bytes())
    except (OSError, ValueError):
        return None


def _remember(trusted: Path, digest: str, identity: list[int]) -> None:
    """Without a marker the next opening hashes again, so failing to write one is no error."""
    temporary = trusted / f".{digest}.{os.getpid()}"
    try:
        trusted.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(identity))
        temporary.replace(trusted / digest)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
