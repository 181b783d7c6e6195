"""In which order are files packed, and which of them are compressed?

    profile   order    compression               for
    image     mixed    files that shrink         classification: classes mixed, so a shard is a random sample
    text      path     all that shrink, with a   many small documents: neighbours together
                       dictionary
    video     path     none                      long files that are read from front to back
    raw       path     none                      anything, as fast as it can be copied
    auto                                         one of these, from the names and a sample of the bytes

`auto` reads at most SAMPLE_FILES files spread over the listing, SAMPLE_BYTES of each.

Concurrency: sync, in the packing process, before the workers start.
"""

from __future__ import annotations

import os
import random
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from accelfs.format.codec import CHUNK_BYTES, RAW, Compressor, train_dictionary
from accelfs.pack.source import Opener

if TYPE_CHECKING:
    from accelfs.pack.listing import Listing, ListingWriter

ProfileName = Literal["auto", "image", "text", "video", "raw"]
PROFILES: tuple[ProfileName, ...] = ("auto", "image", "text", "video", "raw")
SAMPLE_FILES = 256
SAMPLE_BYTES = 64 << 10
LEVEL = 3
"""zstd's own default: decoding speed does not depend on it, and packing stays close to the disk's speed."""

_KINDS: dict[str, frozenset[bytes]] = {
    "image": frozenset(b"jpg jpeg png webp gif bmp tif tiff ppm pgm pnm heic avif jp2 exr dng".split()),
    "video": frozenset(b"mp4 mkv avi mov webm mpg mpeg m4v ts flac mp3 ogg opus wav m4a aac".split()),
    "text": frozenset(
        b"txt json jsonl csv tsv xml html htm md rst yaml yml py c h cpp java js log tex conll srt".split()
    ),
}
# Formats that are compressed already.  By their first bytes, since names lie: JPEG, PNG, GIF, gzip, zip (and npz,
# docx …), zstd, xz, bzip2, Matroska, FLAC, Ogg, MP3 with a tag.
_COMPRESSED_MAGIC = (
    b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh",
    b"\x1a\x45\xdf\xa3", b"fLaC", b"OggS", b"ID3",
)  # fmt: skip
_SEED = 20_240_601


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pack does with every file."""

    profile: str
    order: Literal["mixed", "path"]
    compression: Literal["none", "zstd"]
    dictionary: bytes
    reason: str


def is_compressed(head: bytes) -> bool:
    """Do these first bytes (12 or more) belong to a format that zstd cannot shrink?"""
    return head.startswith(_COMPRESSED_MAGIC) or head[4:8] == b"ftyp" or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def plan(profile: ProfileName, listing: Listing, written: ListingWriter, root: int) -> Plan:
    """Decide; `auto` samples, and so does compression, for its dictionary."""
    if profile in ("video", "raw"):
        return Plan(profile, "path", "none", b"", f"--profile {profile}")
    samples = _samples(listing, written, root)
    shrinks = _shrinks(samples)
    reason = f"--profile {profile}"
    name: str = profile
    if profile == "auto":
        name, reason = _guess(samples, shrinks)
    order: Literal["mixed", "path"] = "mixed" if name == "image" else "path"
    if name in ("video", "raw") or (not shrinks and profile == "auto"):
        return Plan(name, order, "none", b"", reason)
    return Plan(name, order, "zstd", _dictionary(samples, written), reason)


def order(plan_: Plan, count: int) -> array[int] | range:
    """The order in which the files of the listing (by their index) are packed: the same for the same count."""
    if plan_.order == "path":
        return range(count)
    indexes = array("Q", range(count))
    random.Random(_SEED).shuffle(indexes)
    return indexes


def _samples(listing: Listing, written: ListingWriter, root: int) -> list[tuple[bytes, bytes]]:
    """(file extension in lower case, first bytes) of files spread evenly over the listing."""
    count = len(written.files)
    step = max(1, count // SAMPLE_FILES)
    samples = []
    opener = Opener(root)
    for index in range(0, count, step):
        record = listing.record(written.files[index])
        path = listing.path(record)
        try:
            descriptor = opener.open(path)
        except OSError:
            continue  # the worker that reads it says what is wrong
        try:
            data = os.pread(descriptor, SAMPLE_BYTES, 0)
        except OSError:
            continue
        finally:
            os.close(descriptor)
        _, dot, extension = path.rpartition(b"/")[2].rpartition(b".")
        samples.append((extension.lower() if dot else b"", data))
    opener.close()
    return samples[: SAMPLE_FILES + 1]


def _shrinks(samples: list[tuple[bytes, bytes]]) -> bool:
    """Would compression save more than a few per cent of these bytes?"""
    compressor = Compressor(LEVEL)
    total = stored = 0
    for _, data in samples:
        total += len(data)
        _codec, kept = (RAW, data) if is_compressed(data) else compressor.compress(data)
        stored += len(kept)
    return stored < 0.97 * total


def _guess(samples: list[tuple[bytes, bytes]], shrinks: bool) -> tuple[str, str]:
    if not samples:
        return "raw", "auto: no file has bytes"
    votes: Counter[str] = Counter()
    for extension, _ in samples:
        for kind, extensions in _KINDS.items():
            votes[kind] += extension in extensions
    kind, count = votes.most_common(1)[0]
    share = count / len(samples)
    if share > 0.5:
        return kind, f"auto: {share:.0%} of {len(samples)} sampled names are {kind} files"
    if shrinks:
        return "text", f"auto: the names tell no kind; a sample of {len(samples)} files shrinks"
    return "raw", f"auto: the names tell no kind; a sample of {len(samples)} files does not shrink"


def _dictionary(samples: list[tuple[bytes, bytes]], written: ListingWriter) -> bytes:
    """A dictionary pays where files are small, so that zstd finds nothing to refer to within one."""
    count = len(written.sizes)
    if count < 64 or sum(written.sizes) / count > CHUNK_BYTES // 16:
        return b""
    useful = [data for _, data in samples if len(data) >= 64 and not is_compressed(data)]
    return train_dictionary(useful)
