"""Which versions does a slot have, and how is one of them opened for reading?

Concurrency: sync.  `find` may run before a fork, `open_tree` after it: the tree's environment and maps belong to
one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelfs.dataset import trust
from accelfs.dataset.tree import Tree
from accelfs.errors import NotFoundError, StoreError
from accelfs.format import manifest as manifest_format
from accelfs.store import filesystem, layout

if TYPE_CHECKING:
    from accelfs.format.manifest import Manifest
    from accelfs.store.layout import SlotName
    from accelfs.store.protocol import Store


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a slot whose objects lie on this node, its catalog verified."""

    slot: SlotName
    manifest: Manifest
    store: Store

    @property
    def number(self) -> int:
        return self.manifest.version

    def open_tree(self) -> Tree:
        """Open for reading in this process.  Raises FormatError or StoreError."""
        catalog = self.store.local_path(layout.catalog_key(self.slot, self.manifest.catalog.hash))
        return Tree.open(catalog, self._shard_path, self._dictionary)

    def _shard_path(self, digest: str) -> Path:
        return self.store.local_path(layout.shard_key(self.slot, digest))

    def _dictionary(self, digest: str, bytes_max: int) -> bytes:
        return self.store.read(layout.dictionary_key(self.slot, digest), bytes_max)


def numbers(store: Store, slot: SlotName) -> list[int]:
    """The slot's version numbers, ascending."""
    found = (layout.version_number(name) for name in store.list(layout.versions_prefix(slot)))
    return sorted(number for number in found if number is not None)


def manifest(store: Store, slot: SlotName, number: int | None = None) -> Manifest:
    """The manifest of one version, by default of the newest.  Raises NotFoundError or FormatError."""
    known = numbers(store, slot)
    if not known:
        raise NotFoundError(f"slot {slot} has no version; make one: accelfs pack SOURCE {slot}")
    wanted = known[-1] if number is None else number
    if wanted not in known:
        raise NotFoundError(f"slot {slot} has no version {wanted}; it has {_ranges(known)}")
    key = layout.manifest_key(slot, wanted)
    return manifest_format.decode(store.read(key, manifest_format.MANIFEST_BYTES_MAX), key)


def find(store: Store, slot: SlotName, number: int | None, trusted: Path) -> Version:
    """Find a version (by default the newest) and verify its catalog, once per node.

    Raises NotFoundError, FormatError, or StoreError where the store must not be read in place.
    """
    found = manifest(store, slot, number)
    path = store.local_path(layout.catalog_key(slot, found.catalog.hash))
    trust.verify(path, found.catalog, trusted)
    system = filesystem.file_system_of(path)
    if system is not None and filesystem.is_remote(system.type):
        raise StoreError(
            f"the store lies on {system.type} ({system.mountpoint}), and shards are read in place only from a local "
            "file system: set ACCELFS_HOME to a local folder and pack there"
        )
    return Version(slot, found, store)


def _ranges(known: list[int]) -> str:
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"
