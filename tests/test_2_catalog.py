"""Catalogs: every name, attribute and place is found again, at a fixed cost a file, and damage is refused."""

from __future__ import annotations

import os
import random
import stat
import struct
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import pytest
from conftest import deadly
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import GIGA, names

from accelfs.errors import DamagedError, FormatError, StoreError, UnknownVersionError
from accelfs.format.catalog import EXTENTS, LINK, ROOT, Catalog, CatalogWriter, Entry, Header, Place, ShardInfo
from accelfs.format.codec import name_hash
from accelfs.format.shard import ShardWriter

HEADER_MAGIC = b"accelCAT"
BYTES_A_FILE_MAX = 130


# --- The model: a tree of names and what the writer is told of it ---------------------------------


@dataclass
class Node:
    """One name.  `children` is None of what is no directory."""

    name: bytes
    entry: Entry
    target: bytes = b""
    children: list[Node] | None = None
    extents: dict[int, Place] = field(default_factory=dict)
    number: int = 0
    parent: int = ROOT


def entry_of(mode: int = stat.S_IFREG | 0o644, **values: Any) -> Entry:
    """An entry; what is not given is zero."""
    blank = Entry(0, 0, 0, mode, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, bytes(16))
    return blank._replace(**values)


def numbered(root: Node) -> list[Node]:
    """All nodes by ascending number: breadth first, children in the order of their names' bytes."""
    order = [root]
    queue = deque([root])
    root.number = ROOT
    while queue:
        folder = queue.popleft()
        children = sorted(folder.children or [], key=lambda node: node.name)
        for child in children:
            child.number, child.parent = len(order) + 1, folder.number
            order.append(child)
            if child.children is not None:
                queue.append(child)
        folder.children = children
    for node in order:
        node.entry = node.entry._replace(name_bytes=len(node.name))
        if node.children is not None:
            first = node.children[0].number if node.children else 0
            node.entry = node.entry._replace(position=first, extra=len(node.children), parent_or_crc=node.parent)
    return order


def write(
    path: Path, order: list[Node], shards: tuple[ShardInfo, ...] = (), dictionaries: tuple[tuple[str, int], ...] = ()
) -> Header:
    name_bytes = sum(len(node.name) + len(node.target) for node in order)
    extents = sum(len(node.extents) for node in order)
    with CatalogWriter(path, entries=len(order), name_bytes=name_bytes, extents=extents) as writer:
        for node in order:
            writer.add(node.number, node.entry, node.name, node.target)
            for chunk, place in sorted(node.extents.items()):
                writer.add_extent(node.number, chunk, place)
        for node in order:
            if node.children:
                writer.add_names(node.number, [child.name for child in node.children])
        for number, info in enumerate(shards):
            writer.add_shard(number, info)
        for number, (digest, size) in enumerate(dictionaries, 1):
            writer.add_dictionary(number, digest, size)
        return writer.finish()


def folder_of(*children: Node, name: bytes = b"", mtime_seconds: int = 0) -> Node:
    entry = entry_of(stat.S_IFDIR | 0o755, nlink=2, mtime_seconds=mtime_seconds)
    return Node(name, entry, children=list(children))


def lookup(catalog: Catalog, folder: Node, name: bytes) -> int | None:
    found = catalog.lookup(folder.number, folder.entry.position, name)
    if found is None:
        return None
    number, record = found
    assert Catalog.name(record) == name
    return number


def listed(catalog: Catalog, folder: Node, start: int) -> list[tuple[int, bytes]]:
    scan = catalog.children(folder.entry.position + start, folder.entry.extra - start)
    return [(number, Catalog.name(record)) for number, record in scan]


_U32 = st.integers(0, 2**32 - 1)
_U64 = st.integers(0, 2**64 - 1)
# The header sums these up in 64 bits.
_SUMMED = st.integers(0, 2**58)
_PLACES = st.builds(Place, _U64, _U32, _U32, _U32, st.integers(0, 255), st.integers(0, 255))


def _attributes(mode: int) -> st.SearchStrategy[Entry]:
    return st.builds(
        Entry,
        size=_SUMMED,
        mtime_seconds=st.integers(-(2**63), 2**63 - 1),
        mtime_nanoseconds=st.integers(0, GIGA - 1),
        mode=st.integers(0, 0o7777).map(lambda bits: mode | bits),
        uid=_U32,
        gid=_U32,
        nlink=_U32,
        codec=st.integers(0, 255),
        flags=st.just(0),
        name_bytes=st.just(0),
        dictionary=st.integers(0, 255),
        position=_U64,
        extra=_U64,
        parent_or_crc=_U64,
        content_hash=st.binary(min_size=16, max_size=16),
    )


@st.composite
def _leaves(draw: st.DrawFn) -> Node:
    kind = draw(st.sampled_from(["file", "file", "large", "link", "symlink"]))
    if kind == "symlink":
        return Node(b"", draw(_attributes(stat.S_IFLNK)), draw(st.binary(min_size=1, max_size=4095)))
    entry = draw(_attributes(stat.S_IFREG))
    if kind == "link":
        return Node(b"", entry._replace(flags=LINK))
    if kind == "large":
        extents = draw(st.dictionaries(st.integers(0, 2**44), _PLACES, max_size=4))
        return Node(b"", entry._replace(flags=EXTENTS, extra=draw(_SUMMED)), extents=extents)
    return Node(b"", entry)


def _named(children: dict[bytes, Node]) -> list[Node]:
    for name, node in children.items():
        node.name = name
    return list(children.values())


@st.composite
def _folders(draw: st.DrawFn, children: st.SearchStrategy[Node]) -> Node:
    entry = draw(_attributes(stat.S_IFDIR))
    return Node(b"", entry, children=_named(draw(st.dictionaries(names(), children, max_size=8))))


def model_trees() -> st.SearchStrategy[Node]:
    return _folders(st.recursive(_leaves(), _folders, max_leaves=25))


_SHARDS = st.lists(
    st.builds(ShardInfo, st.binary(min_size=32, max_size=32).map(bytes.hex), _U64, _U64), max_size=5
).map(tuple)
_DICTIONARIES = st.lists(st.tuples(st.binary(min_size=32, max_size=32).map(bytes.hex), _U64), max_size=3).map(tuple)


# --- What was written is found -------------------------------------------------------------------


@given(model_trees(), _SHARDS, _DICTIONARIES, st.lists(names(), max_size=5))
@settings(max_examples=60)
def test_everything_is_found_again(
    root: Node, shards: tuple[ShardInfo, ...], dictionaries: tuple[tuple[str, int], ...], other_names: list[bytes]
) -> None:
    order = numbered(root)
    every_name = {node.name for node in order} | set(other_names)
    with tempfile.TemporaryDirectory() as temporary:
        header = write(Path(temporary, "catalog"), order, shards, dictionaries)
        with Catalog(Path(temporary, "catalog")) as catalog:
            assert catalog.header == header
            for node in order:
                assert catalog.entry(node.number) == node.entry
                assert Catalog.name(catalog.record(node.number)) == node.name
                if node.target:
                    assert Catalog.target(catalog.record(node.number)) == node.target
            for folder in order:
                if folder.children is None:
                    continue
                expected = [(child.number, child.name) for child in folder.children]
                for start in range(len(expected) + 2):
                    assert listed(catalog, folder, start) == expected[start:]
                of_name = {child.name: child.number for child in folder.children}
                assert {name: lookup(catalog, folder, name) for name in every_name} == {
                    name: of_name.get(name) for name in every_name
                }
            for node in order:
                for chunk in {0, 1, *node.extents, *(chunk + 1 for chunk in node.extents)}:
                    assert catalog.extent(node.number, chunk) == node.extents.get(chunk)
            assert catalog.shards() == list(shards)
            for number, dictionary in enumerate(dictionaries, 1):
                assert catalog.dictionary(number) == dictionary


def test_totals_count_each_node_once(tmp_path: Path) -> None:
    one = entry_of(size=1000, extra=7 << 32, position=5000)
    two = entry_of(size=3000, flags=EXTENTS, extra=3)
    root = folder_of(
        Node(b"a", one),
        Node(b"b", one._replace(flags=LINK, position=2, extra=0)),
        Node(b"c", two, extents={0: Place(0, 0, 11, 0, 0, 0), 2: Place(0, 0, 13, 0, 0, 0)}),
        Node(b"d", entry_of(stat.S_IFLNK | 0o777, size=6), b"target"),
        folder_of(name=b"e"),
    )
    header = write(tmp_path / "catalog", numbered(root))
    assert (header.entries, header.files, header.data_bytes, header.stored_bytes) == (6, 3, 4000, 7 + 11 + 13)
    assert header.data_blocks == 2 + 3


def colliding_names() -> list[list[bytes]]:
    """Groups of names with equal hashes, found by trying: half a million names share 2^32 hashes."""
    groups = defaultdict(list)
    for number in range(500_000):
        name = b"%x" % number
        groups[name_hash(name)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def test_names_with_equal_hashes_are_told_apart(tmp_path: Path) -> None:
    groups = colliding_names()
    assert len(groups) >= 5, "the birthday paradox promises about 29"
    # Of half the groups the second name is missing: it must not be taken for the first.
    present = [name for number, group in enumerate(groups) for name in (group if number % 2 else group[:1])]
    absent = [name for number, group in enumerate(groups) if not number % 2 for name in group[1:]]
    folder = folder_of(*(Node(name, entry_of()) for name in present), name=b"folder")
    root = folder_of(folder, *(Node(name, entry_of()) for name in absent))
    write(tmp_path / "catalog", numbered(root))

    with Catalog(tmp_path / "catalog") as catalog:
        assert folder.children is not None
        assert {child.name: lookup(catalog, folder, child.name) for child in folder.children} == {
            child.name: child.number for child in folder.children
        }
        assert [lookup(catalog, folder, name) for name in absent] == [None] * len(absent)


@given(st.sets(names(), min_size=1, max_size=40), st.integers(1, 3))
@settings(max_examples=40)
def test_any_number_of_collisions_is_told_apart(every: set[bytes], hashes: int) -> None:
    """The same with a hash so weak that nearly all names collide."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as temporary:
        patch.setattr("accelfs.format.catalog.name_hash", lambda name: sum(name) % hashes)
        root = folder_of(*(Node(name, entry_of()) for name in sorted(every)[::2]))
        order = numbered(root)
        write(Path(temporary, "catalog"), order)
        with Catalog(Path(temporary, "catalog")) as catalog:
            assert root.children is not None
            of_name = {child.name: child.number for child in root.children}
            assert {name: lookup(catalog, root, name) for name in every} == {name: of_name.get(name) for name in every}


def test_a_file_costs_at_most_130_bytes_and_its_name(tmp_path: Path) -> None:
    source = random.Random(5)
    folders = [
        folder_of(
            *(
                Node(
                    b"image_%07d_%s.jpg" % (number, b"x" * source.randrange(20)),
                    entry_of(size=source.randrange(20_000), position=source.randrange(1 << 27), extra=number << 32),
                )
                for number in range(200)
            ),
            name=b"class_%03d" % index,
        )
        for index in range(100)
    ]
    order = numbered(folder_of(*folders))
    path = tmp_path / "catalog"
    write(path, order)
    assert len(order) == 20_101
    bytes_a_file = (os.path.getsize(path) - sum(len(node.name) for node in order)) / len(order)
    assert bytes_a_file <= BYTES_A_FILE_MAX  # DESIGN 4


def test_opening_and_lookups_do_not_depend_on_the_number_of_files(tmp_path: Path) -> None:
    """A lookup deep in a large catalog touches few of its pages, and opening it even fewer."""
    folder = folder_of(*(Node(b"%06d" % number, entry_of()) for number in range(60_000)), name=b"folder")
    path = tmp_path / "catalog"
    write(path, numbered(folder_of(folder)))

    def few_pages(name: bytes) -> None:
        with Catalog(path) as catalog:
            # The kernel maps up to 16 pages around each one that is touched.
            assert _resident_pages(path) <= 3 * 16
            assert lookup(catalog, folder, name) is not None
            assert _resident_pages(path) <= 14 * 16

    assert path.stat().st_size > 1500 * 4096
    assert deadly([b"000000", b"031234", b"059999"], few_pages) == []


def _resident_pages(path: Path) -> int:
    """Pages of this file that this process has touched through its map."""
    pages = 0
    with open("/proc/self/smaps", encoding="utf-8") as rows:
        inside = False
        for row in rows:
            if "-" in row.split(" ")[0]:
                inside = row.rstrip("\n").endswith(str(path))
            elif inside and row.startswith("Rss:"):
                pages += int(row.split()[1]) // 4
    return pages


# --- The tree digest -----------------------------------------------------------------------------


def sample() -> Node:
    """A little of everything; each call gives a new one."""
    content = bytes(range(16))
    return folder_of(
        Node(b"file", entry_of(size=10, mtime_seconds=5, uid=7, gid=8, nlink=2, extra=10 << 32, content_hash=content)),
        Node(b"further", entry_of(size=10, mtime_seconds=5, uid=7, gid=8, nlink=2, content_hash=content)),
        folder_of(
            Node(b"large", entry_of(size=5 << 20, flags=EXTENTS, extra=9, content_hash=content)),
            Node(b"symlink", entry_of(stat.S_IFLNK | 0o777, size=6), b"target"),
            name=b"folder",
        ),
    )


def digest_of(folder: Path, root: Node) -> str:
    order = numbered(root)
    by_name = {node.name: node for node in order}
    further = by_name.get(b"further")
    if further is not None and further.entry.flags & LINK:
        further.entry = further.entry._replace(position=by_name[b"file"].number)
    path = folder / f"catalog-{len(os.listdir(folder))}"
    return write(path, order).tree_digest


def find(root: Node, name: bytes) -> Node:
    return next(node for node in numbered(root) if node.name == name)


CHANGES: dict[str, Callable[[Node], object]] = {
    "size": lambda root: _replace(root, b"file", size=11),
    "content": lambda root: _replace(root, b"file", content_hash=bytes(16)),
    "content of a large file": lambda root: _replace(root, b"large", content_hash=bytes(16)),
    "seconds": lambda root: _replace(root, b"file", mtime_seconds=6),
    "seconds before 1970": lambda root: _replace(root, b"file", mtime_seconds=-5),
    "nanoseconds": lambda root: _replace(root, b"file", mtime_nanoseconds=1),
    "mode": lambda root: _replace(root, b"file", mode=stat.S_IFREG | 0o645),
    "setuid": lambda root: _replace(root, b"file", mode=stat.S_IFREG | 0o4644),
    "uid": lambda root: _replace(root, b"file", uid=9),
    "gid": lambda root: _replace(root, b"file", gid=9),
    "name": lambda root: _rename(root, b"file", b"filf"),
    "longer name": lambda root: _rename(root, b"symlink", b"symlinkt"),
    "target": lambda root: _rename(root, b"symlink", b"symlink", b"targeu"),
    "split of name and target": lambda root: _rename(root, b"symlink", b"symlinkt", b"arget"),
    "time of a folder": lambda root: _replace(root, b"folder", mtime_seconds=1),
    "mode of a folder": lambda root: _replace(root, b"folder", mode=stat.S_IFDIR | 0o700),
    "time of the root": lambda root: _replace(root, b"", mtime_seconds=1),
    "a hard link": lambda root: _replace(root, b"further", flags=LINK),
    "a file more": lambda root: (root.children or []).append(Node(b"more", entry_of())),
    "an empty folder more": lambda root: (root.children or []).append(folder_of(name=b"more")),
    "a file less": lambda root: (root.children or []).pop(1),
    "a file moved up": lambda root: _move_up(root),
}  # fmt: skip


def _replace(root: Node, name: bytes, **values: Any) -> None:
    node = find(root, name)
    node.entry = node.entry._replace(**values)


def _rename(root: Node, name: bytes, new: bytes, target: bytes | None = None) -> None:
    node = find(root, name)
    node.name = new
    node.target = node.target if target is None else target


def _move_up(root: Node) -> None:
    folder = find(root, b"folder")
    assert folder.children is not None
    assert root.children is not None
    root.children.append(folder.children.pop())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_tree_digest_tells_any_change(tmp_path: Path, change: Callable[[Node], object]) -> None:
    before = digest_of(tmp_path, sample())
    assert digest_of(tmp_path, sample()) == before
    root = sample()
    change(root)
    assert digest_of(tmp_path, root) != before


def test_tree_digest_tells_which_folder_holds_a_file(tmp_path: Path) -> None:
    """Where nothing else changes, not even a number."""
    digests = [
        digest_of(tmp_path, folder_of(folder_of(*first, name=b"first"), folder_of(*second, name=b"second")))
        for first, second in (([Node(b"file", entry_of())], []), ([], [Node(b"file", entry_of())]))
    ]
    assert digests[0] != digests[1]


def test_tree_digest_does_not_tell_how_the_bytes_are_stored(tmp_path: Path) -> None:
    before = digest_of(tmp_path, sample())
    root = sample()
    _replace(root, b"file", codec=1, dictionary=1, position=77, extra=(9 << 32) | 3, parent_or_crc=99)
    _replace(root, b"large", extra=1)
    find(root, b"large").extents = {0: Place(1, 2, 3, 4, 0, 0)}
    # Of a directory the size is its file system's own affair.
    _replace(root, b"folder", size=4096)
    assert digest_of(tmp_path, root) == before


# --- What is refused -----------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    root = folder_of(*(Node(b"%05d" % number, entry_of()) for number in range(3000)))
    write(tmp_path / "catalog", numbered(root))
    return tmp_path / "catalog"


def changed(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def header_at(path: Path) -> int:
    return path.read_bytes().rindex(HEADER_MAGIC)


@pytest.mark.parametrize("version", [0, 2, 0xFFFFFFFF])
@pytest.mark.parametrize(("field_offset", "what"), [(8, "catalog format"), (12, "shard format")])
def test_unknown_version_is_refused(path: Path, field_offset: int, what: str, version: int) -> None:
    changed(path, header_at(path) + field_offset, struct.pack("<I", version))
    with pytest.raises(UnknownVersionError, match=f"{what} {version};") as caught:
        Catalog(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("page", [0, 1])
def test_unknown_lmdb_version_is_refused(path: Path, page: int) -> None:
    changed(path, page * 4096 + 20, struct.pack("<I", 2))
    with pytest.raises(UnknownVersionError, match="LMDB data version 2"):
        Catalog(path)


@pytest.mark.parametrize("offset", [*range(8), *range(88, 96)])
def test_damaged_header_is_refused(path: Path, offset: int) -> None:
    start = header_at(path)
    before = path.read_bytes()[start + offset]
    changed(path, start + offset, bytes((before ^ 1,)))
    with pytest.raises(DamagedError) as caught:
        Catalog(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(path: Path) -> None:
    size = path.stat().st_size
    cuts = {0, 1, 4095, 4096, 8191, 8192, size - 1, *range(0, size, 4096 * 3)}

    def cut(length: int) -> None:
        os.truncate(path, length)
        with pytest.raises(FormatError):
            Catalog(path)

    assert deadly(sorted(cuts, reverse=True), cut) == []


def test_what_is_no_catalog_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shard")
    writer.add(b"entry")
    writer.finish()
    with lmdb.open(str(tmp_path / "empty"), subdir=False, lock=False, map_size=1 << 20, lib_version=0) as env:
        env.sync()
    with lmdb.open(
        str(tmp_path / "other engine"), subdir=False, lock=False, map_size=1 << 20, lib_version=1
    ) as env, env.begin(write=True) as txn:  # fmt: skip
        txn.put(b"key", b"value")
    (tmp_path / "text").write_bytes(b"text " * 5000)
    (tmp_path / "nothing").write_bytes(b"")
    for name in os.listdir(tmp_path):
        with pytest.raises(FormatError) as caught:
            Catalog(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(StoreError, match="No such file"):
        Catalog(tmp_path / "missing")
    with pytest.raises(StoreError, match="directory"):
        Catalog(tmp_path)


def test_unfinished_catalog_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog"
    # More than one commit, so that the file holds most of it already.
    with CatalogWriter(path, entries=150_000, name_bytes=10**6, extents=0) as writer:
        writer.add(1, entry_of(stat.S_IFDIR | 0o755, position=2, extra=149_999), b"")
        for number in range(2, 150_001):
            writer.add(number, entry_of(name_bytes=6), b"%06d" % number)
    assert path.stat().st_size > 8 << 20
    with pytest.raises(FormatError):
        Catalog(path)


def test_entry_that_is_missing_is_damage_not_absence(tmp_path: Path) -> None:
    """What the catalog promises and does not hold must not look like the end of a directory."""
    root = folder_of(Node(b"a", entry_of()), Node(b"b", entry_of()))
    order = numbered(root)
    order[0].entry = order[0].entry._replace(extra=3)  # it promises one child more than follows
    with CatalogWriter(tmp_path / "catalog", entries=3, name_bytes=10, extents=0) as writer:
        for node in order:
            writer.add(node.number, node.entry, node.name)
        writer.add_names(ROOT, [b"a", b"b", b"c"])
        writer.finish()
    with Catalog(tmp_path / "catalog") as catalog:
        assert lookup(catalog, root, b"b") == 3
        with pytest.raises(DamagedError):
            catalog.lookup(ROOT, 2, b"c")
        with pytest.raises(DamagedError):
            listed(catalog, order[0], 0)
        with pytest.raises(DamagedError):
            catalog.record(9)
        with pytest.raises(DamagedError):
            catalog.shard(0)
        with pytest.raises(DamagedError):
            catalog.dictionary(1)


def test_file_holds_nothing_of_the_writers_memory(tmp_path: Path) -> None:
    secret = b"never to be published "
    junk = [bytearray(secret * 200) for _ in range(5000)]
    del junk
    root = folder_of(*(Node(b"%05d" % number, entry_of()) for number in range(20_000)))
    write(tmp_path / "catalog", numbered(root))
    leaked = (tmp_path / "catalog").read_bytes().count(secret)
    assert leaked == 0
