"""How are the bytes of one entry stored, and how are they brought back?

Each entry is coded by itself, so no read ever decodes a neighbour.  RAW entries are the source's
bytes.  ZSTD entries are one zstd frame (RFC 8878) whose header states the content size.

Concurrency: sync.  A `Compressor` or `Decoder` belongs to one thread; the functions are stateless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import crc32c
import xxhash
import zstandard

from accelfs.errors import DamagedError

RAW = 0
ZSTD = 1
CODEC_NAMES = {RAW: "raw", ZSTD: "zstd"}

CHUNK_BYTES = 1 << 20
"""Files above this size are stored as chunks of this size, so a random read decodes at most this much."""

# Below this gain a compressed entry only costs: it is decoded at each read and cannot be served from
# the map.  JPEG, PNG and MP4 gain 0-2 %.
_STORED_SHARE_MAX = 0.95
_SHRINKABLE_BYTES_MIN = 64

DICTIONARY_BYTES_MAX = 112 << 10
"""zstd's own advice (ZDICT_CONTENTSIZE 110 KB); a reader refuses dictionaries above DICTIONARY_READ_BYTES_MAX."""
DICTIONARY_READ_BYTES_MAX = 1 << 20


class Compressor:
    """Compress entries with zstd at one level; entries that do not shrink stay raw.

    With a dictionary (its own bytes, see train_dictionary) the frames can only be decoded with it.
    """

    def __init__(self, level: int, dictionary: bytes = b"") -> None:
        trained = zstandard.ZstdCompressionDict(dictionary) if dictionary else None
        self._zstd = zstandard.ZstdCompressor(
            level=level, dict_data=trained, write_checksum=False, write_content_size=True, write_dict_id=False
        )

    def compress(self, data: bytes | memoryview) -> tuple[int, bytes | memoryview]:
        """Return (codec, stored bytes); RAW gives `data` back.  Releases the GIL while it works."""
        if len(data) < _SHRINKABLE_BYTES_MIN:
            return RAW, data
        stored = self._zstd.compress(data)
        if len(stored) > len(data) * _STORED_SHARE_MAX:
            return RAW, data
        return ZSTD, stored


class Decoder:
    """Bring stored bytes back.  `load` gives the bytes of a dictionary by its number, at first use."""

    def __init__(self, load: Callable[[int], bytes]) -> None:
        self._load = load
        self._zstd: dict[int, zstandard.ZstdDecompressor] = {}

    def decode(self, codec: int, dictionary: int, stored: bytes | memoryview, size: int) -> bytes | memoryview:
        """Return the `size` bytes that were stored; raise DamagedError when they cannot be had.

        The frame's own content size is checked first: a forged frame must not make us allocate.
        """
        if codec == RAW:
            if len(stored) != size:
                raise DamagedError(f"a raw entry holds {len(stored)} bytes where {size} were promised")
            return stored
        if codec != ZSTD:
            raise DamagedError(f"codec {codec} is unknown to this release")
        try:
            if zstandard.frame_content_size(stored) != size:
                raise DamagedError(f"a zstd entry does not hold the {size} bytes that were promised")
            return self._decompressor(dictionary).decompress(stored, max_output_size=size)
        except zstandard.ZstdError as error:
            raise DamagedError(f"a zstd entry cannot be decoded: {error}") from error

    def _decompressor(self, dictionary: int) -> zstandard.ZstdDecompressor:
        """Made at first use: the tables cost memory that a mount of raw files never needs."""
        found = self._zstd.get(dictionary)
        if found is None:
            trained = zstandard.ZstdCompressionDict(self._load(dictionary)) if dictionary else None
            found = self._zstd[dictionary] = zstandard.ZstdDecompressor(dict_data=trained)
        return found


def train_dictionary(samples: list[bytes]) -> bytes:
    """Train a zstd dictionary of at most DICTIONARY_BYTES_MAX from typical entries; empty if they are too few."""
    total = sum(map(len, samples))
    size = min(DICTIONARY_BYTES_MAX, total // 8)
    if len(samples) < 8 or size < 1024:
        return b""
    try:
        # k and d given: one pass, no search over parameters, which takes 40 times as long for 1 % of size.
        return zstandard.train_dictionary(size, list[bytes | bytearray | memoryview](samples), k=256, d=8).as_bytes()
    except zstandard.ZstdError:
        return b""  # the samples have nothing in common


checksum = crc32c.crc32c
"""CRC32C (RFC 3720, Castagnoli) of stored bytes: what a worker checks at an entry's first read."""

content_hash = xxhash.xxh3_128_digest
"""XXH3-128 of a file's own bytes, 16 bytes, canonical (big-endian) form as `xxh128sum` prints it."""


ContentHash = xxhash.xxh3_128
"""The same hash for bytes that come in pieces: `update(data)`, `digest()`."""


def file_hash(path: Path) -> str:
    """SHA-256 of a whole file, hex: the name of a shard, catalog or report (what `sha256sum` prints)."""
    digest = hashlib.sha256()
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def sha256(data: bytes) -> str:
    """The name, in hex, of an object that is small enough to be held in memory."""
    return hashlib.sha256(data).hexdigest()


def name_hash(name: bytes) -> int:
    """The low 32 bits of XXH3-64 of a name: the key of the catalog's `names` within one directory."""
    return xxhash.xxh3_64_intdigest(name) & 0xFFFFFFFF
