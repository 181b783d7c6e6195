"""Shards: what was added is read back at its place, the file is what the format says, and damage is refused."""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from conftest import deadly
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accelfs.errors import DamagedError, FormatError, StoreError, UnknownVersionError
from accelfs.format import lmdbfile, shard
from accelfs.format.codec import CHUNK_BYTES
from accelfs.format.shard import FinishedShard, Segment, ShardWriter

PAGE = 4096
SEGMENT_HEADER = 32
SEGMENT_MAGIC = b"accelSEG"
TRAILER_MAGIC = b"accelSHD"
LMDB_VERSION_AT = 20
"""Of both meta pages: page header (16 bytes), magic, version."""


def written(path: Path, entries: list[bytes], reserved_bytes: int = 0) -> tuple[FinishedShard, list[int]]:
    """A finished shard, and the offset of each entry in its file.

    With `reserved_bytes` more room than needed is asked for and filled, as by data that compression shrinks.
    """
    writer = ShardWriter(path)
    places = []
    try:
        for entry in entries:
            if reserved_bytes:
                room = writer.reserve(min(len(entry) + reserved_bytes, shard.PAYLOAD_BYTES_MAX))
                room[:] = b"\xee" * len(room)
                room[: len(entry)] = entry
                places.append(writer.commit(len(entry)))
            else:
                places.append(writer.add(entry))
        done = writer.finish()
    finally:
        writer.close()
    return done, [done.payload_offsets[ordinal] + delta for ordinal, delta in places]


def entries_of(sizes: list[int], seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(size) for size in sizes]


def sizes_up_to_a_chunk() -> st.SearchStrategy[list[int]]:
    edges = [0, 1, 7, 8, 9, 4047, 4048, 4049, PAGE, CHUNK_BYTES - 1, CHUNK_BYTES]
    size = st.one_of(st.integers(0, 300), st.sampled_from(edges), st.integers(0, CHUNK_BYTES))
    return st.lists(size, max_size=25)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A shard of two segments of equal size, the first one of which fills its pages to the last byte."""
    path = tmp_path / "small"
    size = CHUNK_BYTES // 2
    done, _ = written(path, entries_of([size, size, size, size]))
    assert len(done.payload_offsets) == 2
    return path


# --- What goes in comes out ----------------------------------------------------------------------


@given(sizes_up_to_a_chunk(), st.integers(0, 3), st.sampled_from([0, 1, 5000, CHUNK_BYTES]))
@settings(max_examples=40)
@example([], 0, 0)
@example([0], 0, 0)
@example([CHUNK_BYTES] * 10, 0, 0)
@example([shard.PAYLOAD_BYTES_MAX - CHUNK_BYTES, CHUNK_BYTES, 1], 0, 0)
@example([shard.PAYLOAD_BYTES_MAX - 3, 0, 0], 0, 0)
def test_every_entry_is_read_back_by_its_offset(sizes: list[int], seed: int, reserved_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        entries = entries_of(sizes, seed)
        done, offsets = written(Path(folder, "shard"), entries, reserved_bytes)

        stored = done.path.read_bytes()
        found = shard.check(done.path)

        assert [stored[offset : offset + len(entry)] for entry, offset in zip(entries, offsets, strict=True)] == entries
        assert all(offset % shard.ALIGN_BYTES == 0 for offset in offsets)
        assert done.file_bytes == len(stored)
        assert done.entry_bytes == sum(sizes)
        assert [segment.offset for segment in found] == done.payload_offsets
        assert sum(segment.entries for segment in found) == len(entries)
        assert all(segment.payload_bytes <= shard.PAYLOAD_BYTES_MAX for segment in found)
        payloads = [(segment.offset, segment.offset + segment.payload_bytes) for segment in found]
        for offset, size in zip(offsets, sizes, strict=True):
            assert any(start <= offset and offset + size <= end for start, end in payloads)


@pytest.mark.parametrize("reserved_bytes", [0, 100])
def test_gaps_between_entries_are_zero(tmp_path: Path, reserved_bytes: int) -> None:
    entries = [b"\xff" * size for size in (1, 9, 1090, 13)]
    done, offsets = written(tmp_path / "shard", entries, reserved_bytes)
    (segment,) = shard.check(done.path)
    payload = bytearray(done.path.read_bytes()[segment.offset : segment.offset + segment.payload_bytes])
    for entry, offset in zip(entries, offsets, strict=True):
        payload[offset - segment.offset : offset - segment.offset + len(entry)] = bytes(len(entry))
    assert not any(payload)


def test_name_is_the_hash_of_the_file(tmp_path: Path) -> None:
    import hashlib

    done, _ = written(tmp_path / "shard", entries_of([10, 5000]))
    assert done.hash == hashlib.sha256(done.path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("smallest", "largest"),
    [(512, 512), (2_000, 20_000), (115_000, 115_000), (300_000, 700_000), (600_000, 600_000), (1 << 20, 1 << 20)],
)
def test_stored_bytes_are_at_most_2_per_cent_more_than_the_entries(tmp_path: Path, smallest: int, largest: int) -> None:
    source = random.Random(largest)
    sizes: list[int] = []
    while sum(sizes) < 9 << 20:
        sizes.append(source.randint(smallest, largest))
    done, _ = written(tmp_path / "shard", entries_of(sizes))
    assert os.path.getsize(done.path) <= 1.02 * sum(sizes)


def test_tiny_entries_cost_no_more_than_their_alignment(tmp_path: Path) -> None:
    sizes = [1 + number % 60 for number in range(300_000)]
    done, _ = written(tmp_path / "shard", [b"x" * size for size in sizes])
    assert sum(sizes) >= 8 << 20
    assert os.path.getsize(done.path) <= 1.02 * sum(-(-size // 8) * 8 for size in sizes)


def test_file_holds_nothing_of_the_writers_memory(tmp_path: Path) -> None:
    """Whatever lay in the heap before, the unused ends of pages do not carry it into a store."""
    secret = b"never to be published "
    junk = [bytearray(secret * 200) for _ in range(5000)]
    del junk
    done, _ = written(tmp_path / "shard", [b"\0" * size for size in (10, 700_000, 600_000, 5000, 1 << 20, 3)] * 4)
    leaked = done.path.read_bytes().count(secret)
    assert leaked == 0


# --- The file format is pinned -------------------------------------------------------------------


def test_container_is_an_lmdb_file_of_version_0_9(tmp_path: Path) -> None:
    done, _ = written(tmp_path / "shard", entries_of([100]))
    data = done.path.read_bytes()
    for number in (0, 1):
        page, pad, flags, _, magic, version = struct.unpack_from("<QHHIII", data, number * PAGE)
        assert (page, pad, flags, magic, version) == (number, 0, 0x08, 0xBEEFC0DE, 1)
        # MDB_meta goes on: address, map size, then the free list's MDB_db, whose first field is the page size.
        (page_bytes,) = struct.unpack_from("<I", data, number * PAGE + 16 + 24)
        assert page_bytes == PAGE
    assert len(data) % PAGE == 0


def test_any_lmdb_0_9_reader_finds_the_segments(tmp_path: Path) -> None:
    entries = entries_of([10, CHUNK_BYTES, 300])
    done, _ = written(tmp_path / "shard", entries)
    data = done.path.read_bytes()
    with lmdb.open(str(done.path), subdir=False, lock=False, readonly=True, lib_version=0) as env, env.begin() as txn:
        rows = list(txn.cursor())
    *segments, (last_key, trailer) = rows
    assert last_key == b"accelfs.shard"
    assert trailer == struct.pack(
        "<8sIIQQQ", TRAILER_MAGIC, 1, PAGE, len(segments), sum(map(len, entries)), len(entries)
    )
    for number, (key, value) in enumerate(segments):
        assert key == number.to_bytes(8, "big")
        magic, version, _, ordinal, payload_bytes = struct.unpack_from("<8sIIQQ", value)
        assert (magic, version, ordinal, payload_bytes) == (SEGMENT_MAGIC, 1, number, len(value) - SEGMENT_HEADER)
        assert value[SEGMENT_HEADER:] == data[done.payload_offsets[number] :][:payload_bytes]


def test_file_of_the_other_lmdb_engine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20, lib_version=1) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(bytes(8), b"value")
    with pytest.raises(FormatError) as caught:
        shard.check(path)
    assert str(path) in str(caught.value)


# --- Unknown versions ----------------------------------------------------------------------------


def changed(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("version", [0, 2, 999])
def test_unknown_lmdb_version_is_refused(small: Path, page: int, version: int) -> None:
    changed(small, page * PAGE + LMDB_VERSION_AT, struct.pack("<I", version))
    with pytest.raises(UnknownVersionError, match=str(version)) as caught:
        shard.check(small)
    assert str(small) in str(caught.value)


@pytest.mark.parametrize("version", [0, 2, 0xFFFFFFFF])
@pytest.mark.parametrize("magic", [SEGMENT_MAGIC, TRAILER_MAGIC])
def test_unknown_format_version_is_refused(small: Path, magic: bytes, version: int) -> None:
    # The last copy: an earlier one of the trailer may lie in a page that is no longer used.
    changed(small, small.read_bytes().rindex(magic) + 8, struct.pack("<I", version))
    with pytest.raises(UnknownVersionError, match=str(version)) as caught:
        shard.check(small)
    assert str(small) in str(caught.value)


def test_other_page_size_is_refused(small: Path) -> None:
    changed(small, small.read_bytes().rindex(TRAILER_MAGIC) + 12, struct.pack("<I", 16384))
    with pytest.raises(UnknownVersionError, match="16384"):
        shard.check(small)


# --- Damage --------------------------------------------------------------------------------------


def refused_or_unchanged(path: Path, segments: list[Segment]) -> bool:
    """True if the damage was noticed; anything but a FormatError and the same answer as before fails."""
    try:
        assert shard.check(path) == segments
    except FormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - where nothing is raised, the line above has decided
        return True
    return False


def structural_offsets(data: bytes) -> list[int]:
    """Every byte that is not a segment's payload: the meta pages, tree pages, page and segment headers."""
    offsets: list[int] = []
    page = 0
    while page * PAGE < len(data):
        _, _, flags, overflow = struct.unpack_from("<QHHI", data, page * PAGE)
        start = page * PAGE
        offsets.extend(range(start, start + (16 + SEGMENT_HEADER if flags == 4 else PAGE)))
        page += overflow if flags == 4 else 1
    return offsets


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    # More than one commit (8 MiB), so that the tree's root is not among the first pages.
    done, _ = written(tmp_path / "shard", entries_of([900_000] * 12))
    size = done.file_bytes
    cuts = {0, 1, 16, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, size - 1, size - 2}
    cuts |= set(range(0, size, 50 * PAGE)) | set(range(size - 8 * PAGE, size, PAGE // 2))
    copy = tmp_path / "copy"
    shutil.copyfile(done.path, copy)

    def cut(length: int) -> None:
        os.truncate(copy, length)
        with pytest.raises(FormatError):
            shard.check(copy)

    assert deadly(sorted(cuts, reverse=True), cut) == []


def test_flipped_bits_in_the_structure_are_refused_or_harmless(tmp_path: Path) -> None:
    done, _ = written(tmp_path / "shard", entries_of([100, 5000]))
    path = done.path
    segments = shard.check(path)
    data = path.read_bytes()
    source = random.Random(1)

    def flip(offset: int) -> None:
        changed(path, offset, bytes((data[offset] ^ 1 << source.randrange(8),)))
        refused_or_unchanged(path, segments)
        changed(path, offset, data[offset : offset + 1])

    assert deadly(structural_offsets(data), flip) == []


def test_every_byte_of_the_headers_is_checked(tmp_path: Path) -> None:
    done, _ = written(tmp_path / "shard", entries_of([100, 5000]))
    path = done.path
    segments = shard.check(path)
    data = path.read_bytes()
    # Two fields are statements that mislead nobody: how many entries a segment and how many bytes a shard holds.
    of_segment, of_trailer = [*range(12), *range(16, 32)], [*range(24), *range(32, 40)]
    for magic, checked in ((SEGMENT_MAGIC, of_segment), (TRAILER_MAGIC, of_trailer)):
        for field_byte in checked:
            offset = data.rindex(magic) + field_byte
            changed(path, offset, bytes((data[offset] ^ 0x10,)))
            assert refused_or_unchanged(path, segments), f"byte {field_byte} of {magic!r}"
            changed(path, offset, data[offset : offset + 1])


def swap_pages(data: bytearray) -> None:
    """Exchange the contents of the two segments: each lies, whole, where the other belongs."""
    pages = [page for page in range(len(data) // PAGE) if data[page * PAGE + 16 :].startswith(SEGMENT_MAGIC)]
    first, second = (page * PAGE + 16 for page in pages)
    length = SEGMENT_HEADER + CHUNK_BYTES
    data[first : first + length], data[second : second + length] = (
        data[second : second + length],
        data[first : first + length],
    )


def swap_pointers(data: bytearray) -> None:
    """Let the tree find each segment under the other's key; the pages themselves are as they were."""
    pages = [page for page in range(len(data) // PAGE) if data[page * PAGE + 16 :].startswith(SEGMENT_MAGIC)]
    places = [data.rindex(struct.pack("<Q", page), 2 * PAGE) for page in pages]
    # rindex may find the page's own number at its start; the tree's pointer is the other place.
    places = [
        place if place % PAGE else data.rindex(struct.pack("<Q", page), 2 * PAGE, place)
        for place, page in zip(places, pages, strict=True)
    ]
    for place, page in zip(places, reversed(pages), strict=True):
        struct.pack_into("<Q", data, place, page)


def drop_a_segment(data: bytearray) -> None:
    """Turn the second segment's first page into one that begins nothing."""
    start = data.rindex(SEGMENT_MAGIC) - 16
    struct.pack_into("<H", data, start + 10, 0)


def leave_its_pages(data: bytearray) -> None:
    struct.pack_into("<Q", data, data.rindex(SEGMENT_MAGIC) + 24, 1 << 40)


def damage_the_segment_header(data: bytearray) -> None:
    data[data.rindex(SEGMENT_MAGIC) + 3] ^= 1


@pytest.mark.parametrize(
    "damage", [swap_pages, swap_pointers, drop_a_segment, leave_its_pages, damage_the_segment_header]
)
def test_check_finds_a_swapped_or_damaged_segment(small: Path, damage: Callable[[bytearray], None]) -> None:
    data = bytearray(small.read_bytes())
    damage(data)
    assert data != small.read_bytes()
    small.write_bytes(data)

    def refuse(whole: bool) -> None:
        with pytest.raises(DamagedError) as caught:
            shard.check(small, whole=whole)
        assert str(small) in str(caught.value)

    assert deadly([True, False], refuse) == []


def test_unfinished_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    writer = ShardWriter(path)
    for entry in entries_of([900_000] * 20):
        writer.add(entry)
    writer.close()
    assert path.stat().st_size > 8 << 20
    with pytest.raises(FormatError):
        shard.check(path)


def test_what_is_no_shard_at_all_is_refused(tmp_path: Path) -> None:
    contents = [b"", b"text", b"\0" * 100_000, b"\xff" * 100_000, random.Random(1).randbytes(50_000)]
    for number, data in enumerate(contents):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(FormatError):
            shard.check(path)
    with pytest.raises(StoreError, match="No such file"):
        shard.check(tmp_path / "missing")
    with pytest.raises(StoreError, match="directory"):
        shard.check(tmp_path)


def test_head_of_a_shard_is_enough_to_refuse_another_format(small: Path) -> None:
    """What a reader asks before it trusts any place in a file."""
    head, size = small.read_bytes()[: lmdbfile.HEAD_BYTES], small.stat().st_size
    lmdbfile.check_head(head, size, small)
    with pytest.raises(DamagedError):
        lmdbfile.check_head(head[:-1], size, small)
    with pytest.raises(DamagedError):
        lmdbfile.check_head(b"\x7fELF" + head[4:8] + bytes(len(head)), size, small)
