"""Which files are read: seeded trees on local disk, each with a listing that the C programs understand.

A tree is written once per kind, count and seed, and found again by later runs. Its listing is written last, so a tree
without one is left over from an interrupted run and is made anew.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SEED = 20240601
DEFAULT_WORK = Path("/var/tmp/accelfs-benchmarks")
"""Trees stay here from run to run. Not /tmp, which may be memory: packers write their images here as well."""
TEXT_POOL_BYTES = 32 << 20
"""Texts are slices of one pool. At 32 MiB two texts within one 128 KiB block of a peer overlap once in a few hundred
pairs, so a block compressor finds little that a real corpus would not show it."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """One tree on disk."""

    name: str
    tree: Path
    listing: Path
    """`d 0 PATH` and `f SIZE PATH` lines, parents before children."""
    file_count: int
    byte_count: int
    first_file: str
    """A path below the tree, for a first read."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the files of a tree are like."""

    suffix: str
    bytes_min: int
    bytes_max: int
    files_per_folder: int


KINDS = {
    "incompressible": Kind(".bin", 2_000, 20_000, 200),
    "text": Kind(".txt", 2_000, 20_000, 200),
    "tiny": Kind(".bin", 16, 256, 1_000),
}


def provide(kind_name: str, file_count: int, work: Path, *, seconds_max: float = 600.0) -> DataSet:
    """The data set of this kind and count, made if it is not there.

    Raises TimeoutError when making it takes longer than `seconds_max`; what was made until then is removed.
    """
    name = f"{kind_name}-{file_count}"
    folder = work / "data" / name
    if not (folder / "listing.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _write(KINDS[kind_name], _content(kind_name), file_count, folder, time.monotonic() + seconds_max)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return _load(name, folder)


def remove(dataset: DataSet) -> None:
    """Give the disk back: for trees too large to keep."""
    shutil.rmtree(dataset.tree.parent)


def _write(kind: Kind, content: Callable[[int], bytes], file_count: int, folder: Path, deadline: float) -> None:
    sizes = random.Random(SEED)
    lines = []
    for first in range(0, file_count, kind.files_per_folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{first} of {file_count} files were written when the time was up")
        directory = f"class_{first // kind.files_per_folder:04d}"
        path = folder / "tree" / directory
        path.mkdir(parents=True)
        lines.append(f"d 0 {directory}\n")
        for number in range(first, min(first + kind.files_per_folder, file_count)):
            size = sizes.randint(kind.bytes_min, kind.bytes_max)
            file_name = f"sample_{number:07d}{kind.suffix}"
            # Bare descriptors: buffered file objects would cost more than the writes of a million tiny files.
            descriptor = os.open(path / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(descriptor, content(size))
            os.close(descriptor)
            lines.append(f"f {size} {directory}/{file_name}\n")
    unfinished = folder / "listing.unfinished"
    unfinished.write_text("".join(lines), encoding="ascii")
    unfinished.rename(folder / "listing.txt")


def _content(kind_name: str) -> Callable[[int], bytes]:
    source = random.Random(SEED + 1)
    if kind_name != "text":
        return source.randbytes
    pool = _text(source, TEXT_POOL_BYTES)

    def slice_of_pool(size: int) -> bytes:
        start = source.randrange(len(pool) - size)
        return pool[start : start + size]

    return slice_of_pool


def _text(source: random.Random, byte_count: int) -> bytes:
    """Lines of words that follow Zipf's law, as natural language does: it compresses to about a third."""
    syllables = [
        consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in ("a", "e", "i", "o", "u", "er", "on")
    ]
    words = ["".join(source.choices(syllables, k=source.choice((1, 1, 2, 2, 3, 4)))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    chunks: list[bytes] = []
    left = byte_count
    while left > 0:
        line = " ".join(source.choices(words, weights, k=12)) + ".\n"
        chunks.append(line.encode("ascii"))
        left -= len(line)
    return b"".join(chunks)


def _load(name: str, folder: Path) -> DataSet:
    listing = folder / "listing.txt"
    file_count = byte_count = 0
    first_file = ""
    with listing.open(encoding="ascii") as lines:
        for line in lines:
            mark, size, path = line.rstrip("\n").split(" ", 2)
            if mark == "f":
                file_count += 1
                byte_count += int(size)
                first_file = first_file or path
    return DataSet(name, folder / "tree", listing, file_count, byte_count, first_file)
