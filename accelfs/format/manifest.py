"""What makes a version visible?

A manifest is one JSON document (UTF-8), written last and never changed.  It stays small at any scale: it
names the catalog and the report by hash and holds totals; the catalog names the shards.

Format version 1; unknown fields are refused, since a reader that ignores what it does not know could
serve wrong bytes.  Sizes are bytes, times are seconds since 1970 (UTC).

Concurrency: sync, stateless.
"""

from __future__ import annotations

from pathlib import PurePath

import msgspec

from accelfs.errors import DamagedError, UnknownVersionError
from accelfs.format import lmdbfile

FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 1 << 20
"""A reader refuses a larger document before it parses it."""


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An immutable object of the slot: named by the SHA-256 (hex) of its bytes."""

    hash: str
    bytes: int


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was packed.  `fingerprint` is the SHA-256 of the listing: names, sizes, times, kinds."""

    url: str
    fingerprint: str


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names in the tree by kind; `skipped` are names of the source that the report lists instead."""

    files: int
    directories: int
    symlinks: int
    hard_links: int
    skipped: int


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over the version: `data_bytes` as the tree shows them, `stored_bytes` as the shards hold them."""

    data_bytes: int
    stored_bytes: int
    shards: int
    shard_bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One version of a slot."""

    format: int
    engine: str
    page_bytes: int
    slot: str
    version: int
    created: int
    release: str
    source: Source
    profile: str
    counts: Counts
    totals: Totals
    tree_digest: str
    catalog: StoredObject
    report: StoredObject


class _Format(msgspec.Struct):
    format: int
    engine: str = ""
    page_bytes: int = 0


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode(document: bytes, name: PurePath | str) -> Manifest:
    """Parse and check a manifest; `name` is for the error's text.  Raises FormatError."""
    if len(document) > MANIFEST_BYTES_MAX:
        raise DamagedError(f"{name}: a manifest of {len(document)} bytes; at most {MANIFEST_BYTES_MAX} are read")
    try:
        format_ = msgspec.json.decode(document, type=_Format)
        if format_.format != FORMAT_VERSION:
            raise UnknownVersionError(
                f"{name}: manifest format {format_.format}; this release reads {FORMAT_VERSION}: update accelfs"
            )
        manifest = msgspec.json.decode(document, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedError(f"{name}: not a manifest: {error}") from error
    if manifest.engine != lmdbfile.ENGINE or manifest.page_bytes != lmdbfile.PAGE_BYTES:
        raise UnknownVersionError(
            f"{name}: written for {manifest.engine} with pages of {manifest.page_bytes} bytes; "
            f"this release reads {lmdbfile.ENGINE} with {lmdbfile.PAGE_BYTES}"
        )
    for stored in (manifest.catalog, manifest.report):
        if len(stored.hash) != 64 or set(stored.hash) - set("0123456789abcdef") or stored.bytes < 0:
            raise DamagedError(f"{name}: {stored.hash!r} is not an object's hash")
    return manifest
