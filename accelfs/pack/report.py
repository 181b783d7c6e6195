"""What about a source did not become part of the version, and why?

The report is a file of JSON lines, one object a line with `kind` and, where it is about one name, `path`
(bytes that are not UTF-8 as `\\udcXX` escapes).  It is stored with the version, named by its hash.

Concurrency: sync; written by the packing process alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Literal

from accelfs.format.codec import file_hash
from accelfs.format.manifest import StoredObject

Kind = Literal["fifo", "socket", "device", "unreadable", "changed", "xattrs", "acls", "capabilities"]

SKIPPED: tuple[Kind, ...] = ("fifo", "socket", "device", "unreadable")
"""Kinds of names that the source has and the version has not."""


class Report:
    """Collects lines in a file and counts them by kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", encoding="ascii")
        self.counts: Counter[Kind] = Counter()

    def name(self, kind: Kind, path: bytes, reason: str = "") -> None:
        """One line about one name of the source."""
        self.counts[kind] += 1
        line = {"kind": kind, "path": os.fsdecode(path)}
        if reason:
            line["reason"] = reason
        self._file.write(json.dumps(line) + "\n")

    def total(self, kind: Kind, count: int) -> None:
        """One line about how many names have something that a version does not keep."""
        if count:
            self.counts[kind] += count
            self._file.write(json.dumps({"kind": kind, "count": count}) + "\n")

    @property
    def skipped(self) -> int:
        return sum(self.counts[kind] for kind in SKIPPED)

    def finish(self) -> StoredObject:
        """Make the file durable and return what the manifest says of it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return StoredObject(file_hash(self.path), self.path.stat().st_size)

    def close(self) -> None:
        self._file.close()
