"""Trees: a version reads as its source did, by whatever door, and damage is an error that names its shard."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trees
from conftest import Cli, Home
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import CHUNK, Content, File, Folder, differences, hostile_tree, packed, slot_walk, tree_walk, walk

from accelfs.dataset import versions
from accelfs.errors import AccelfsError, FormatError, StoreError, TreeError
from accelfs.format.catalog import ROOT
from accelfs.pack import build
from accelfs.pack.profile import PROFILES, ProfileName
from accelfs.service.node import Node
from accelfs.store.layout import parse_slot

if TYPE_CHECKING:
    from accelfs.dataset.tree import Tree

SLOT = parse_slot("photos")


def open_tree(home: Home, version: int | None = None) -> Tree:
    node = Node.from_environment(home.environment)
    return versions.find(node.store, SLOT, version, node.trusted).open_tree()


@contextlib.contextmanager
def home_in(folder: str) -> Iterator[Home]:
    made = Home(Path(folder, "home"), Path(folder, "mnt"))
    yield made
    made.clear()


def pack(source: Path, home: Home, profile: ProfileName = "auto", jobs: int = 2) -> build.Packed:
    node = Node.from_environment(home.environment)
    return build.pack(
        str(source), SLOT, node.store, node.scratch(SLOT), profile=profile, jobs=jobs, skip_unreadable=False,
        observe=lambda _: None,
    )  # fmt: skip


# --- The model: any tree is what its source was ---------------------------------------------------


def read_everywhere(tree: Tree, source: Path, spots: list[tuple[float, int]]) -> None:
    """Read each file at some offsets, given as a share of its size, and compare with pread of the source."""
    for folder, _, files in os.walk(os.fsencode(source)):
        for name in files:
            path = folder + b"/" + name
            if os.path.islink(path):
                continue
            node = tree.walk(os.path.relpath(path, os.fsencode(source))).node
            size = os.path.getsize(path)
            file = os.open(path, os.O_RDONLY)
            try:
                for share, length in spots:
                    offset = int(share * size)
                    assert bytes(tree.read(node, offset, length)) == os.pread(file, length, offset), (path, offset)
            finally:
                os.close(file)


def look_everywhere(tree: Tree, expected: trees.Walk) -> None:
    """Look names up, list from any position, and ask for what is not there."""
    folders = [path for path, seen in expected.items() if seen.type == "folder"]
    every_name = {path.rpartition(b"/")[2] for path in expected} - {b"."}
    for path in folders:
        folder = tree.walk(path)
        children = list(tree.list(folder.node))
        assert [child.position for child in children] == list(range(len(children)))
        for start in range(len(children) + 2):
            assert list(tree.list(folder.node, start)) == children[start:]
        found = {child.name: child.attributes for child in children}
        assert {name: tree.lookup(folder.node, name) for name in every_name} == {
            name: found.get(name) for name in every_name
        }
        parent = path.rpartition(b"/")[0] or b"."
        assert tree.parent(folder.node) == (ROOT if path == b"." else tree.walk(parent).node)


_SPOTS = st.lists(
    st.tuples(st.floats(0, 1.2), st.one_of(st.integers(0, 5000), st.integers(0, 3 * CHUNK))), min_size=1, max_size=6
)


def check_model(tree: Folder, profile: ProfileName, jobs: int, spots: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, home_in(folder) as home:
        source = Path(folder, "source")
        trees.make(tree, source)
        expected = packed(walk(source))
        done = pack(source, home, profile, jobs)
        with open_tree(home) as opened:
            # Before and after the rest: the first read of an entry checks it, the later ones take another way.
            read_everywhere(opened, source, spots)
            assert differences(expected, tree_walk(opened)) == []
            look_everywhere(opened, expected)
            read_everywhere(opened, source, spots)
            header = opened.header
        counts, totals = done.manifest.counts, done.manifest.totals
        of_type = [seen.type for seen in expected.values()]
        nodes = {seen.first_name: seen for seen in expected.values()}.values()
        counted = (counts.files, counts.directories, counts.symlinks)
        assert counted == tuple(map(of_type.count, ("file", "folder", "symlink")))
        assert counts.hard_links == len(expected) - len(nodes)
        assert totals.data_bytes == header.data_bytes == sum(seen.size for seen in nodes if seen.type == "file")
        assert header.data_blocks == sum(seen.blocks for seen in nodes)
        assert header.entries == len(expected)


@given(trees.trees(), st.sampled_from(PROFILES), st.sampled_from([1, 3]), _SPOTS)
@settings(max_examples=60)
def test_tree_is_its_source(tree: Folder, profile: ProfileName, jobs: int, spots: list[tuple[float, int]]) -> None:
    check_model(tree, profile, jobs, spots)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@given(trees.trees(), st.sampled_from(PROFILES), st.sampled_from([1, 3]), _SPOTS)
@settings(max_examples=5000)
def test_many_trees_are_their_sources(
    tree: Folder, profile: ProfileName, jobs: int, spots: list[tuple[float, int]]
) -> None:
    check_model(tree, profile, jobs, spots)


@given(
    st.integers(1, 5 * CHUNK), st.sets(st.integers(0, 4)), st.sampled_from(["random", "text", "zeros"]), st.data()
)  # fmt: skip
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much])
def test_holes_are_found_where_they_are(size: int, holes: set[int], kind: str, data: st.DataObject) -> None:
    """SEEK_DATA and SEEK_HOLE as lseek(2) defines them, and as the source's file system answers to the chunk."""
    with tempfile.TemporaryDirectory() as folder, home_in(folder) as home:
        source = Path(folder, "source")
        content = Content(kind, size, 0)
        mode = 0o644
        trees.make(Folder({b"file": File(content, mode, 0, (-1, -1), tuple(holes))}, 0o755, 0, (-1, -1)), source)
        pack(source, home, "raw")
        bytes_of = (source / "file").read_bytes()
        with open_tree(home) as tree:
            node = tree.walk(b"file").node
            for _ in range(5):
                offset = data.draw(st.integers(0, size - 1))
                hole = tree.seek(node, offset, os.SEEK_HOLE)
                assert offset <= hole <= size
                try:
                    found = tree.seek(node, offset, os.SEEK_DATA)
                except TreeError as error:
                    assert error.errno == errno.ENXIO  # noqa: PT017 - one of two allowed answers
                    found = size
                assert offset <= found <= size
                # What is called a hole holds nothing but zeros, and everything is one or the other.
                assert not any(bytes_of[offset:found])
                assert (hole == offset) == (found > offset) or offset == size
                if found < size:
                    after = tree.seek(node, found, os.SEEK_HOLE)
                    assert after > found
            # A chunk that the source does not have is a hole here too.
            with (source / "file").open("rb") as file:
                for chunk in range(-(-size // CHUNK)):
                    start, end = chunk * CHUNK, min(size, (chunk + 1) * CHUNK)
                    source_hole = _first_data(file.fileno(), start, size) >= end
                    assert (tree.seek(node, start, os.SEEK_HOLE) == start) == source_hole
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                for offset in (-1, size, size + 1):
                    with pytest.raises(TreeError) as caught:
                        tree.seek(node, offset, whence)
                    assert caught.value.errno == errno.ENXIO


def _first_data(file: int, offset: int, size: int) -> int:
    try:
        return os.lseek(file, offset, os.SEEK_DATA)
    except OSError:
        return size


# --- The hostile tree, by every door without a mount -----------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, Path, trees.Walk]]:
    """(home, source, what the slot must show), packed once for the tests that only read it."""
    folder = tmp_path_factory.mktemp("hostile")
    with home_in(str(folder)) as home:
        hostile_tree(folder / "source")
        Cli(home)("pack", folder / "source", "photos")
        yield home, folder / "source", packed(walk(folder / "source"))


def test_hostile_tree_is_its_source(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, expected = hostile
    assert differences(expected, slot_walk(home.environment, "photos")) == []


def test_hostile_tree_reads_anywhere(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, source, _ = hostile
    spots = random.Random(1)
    with open_tree(home) as tree:
        for name in (b"largest", b"holes between", b"hole behind", b"random 3145729", b"text"):
            node = tree.walk(b"sizes/" + name).node
            size = os.path.getsize(os.fsencode(source) + b"/sizes/" + name)
            with open(os.fsencode(source) + b"/sizes/" + name, "rb") as file:
                edges = [0, size - 1, size, size + 5, CHUNK - 3, 7 * CHUNK - 10, size // 2 - 10]
                for offset in edges + [spots.randrange(size) for _ in range(40)]:
                    length = spots.choice([0, 1, 20, 4096, CHUNK, 3 * CHUNK])
                    expected = os.pread(file.fileno(), length, offset)
                    assert bytes(tree.read(node, offset, length)) == expected, (name, offset, length)


def test_hostile_tree_is_extracted_as_it_was(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, expected = hostile
    copy = home.path.parent / "copy"
    Cli(home)("extract", "photos", ".", copy)
    found = packed(walk(copy))
    assert differences(trees.without_blocks(expected), trees.without_blocks(found)) == []
    # Holes stay holes, to the chunk: five gigabytes of them would fill a disk.
    assert found[b"sizes/largest"].size == 5 << 30
    assert found[b"sizes/largest"].blocks * trees.BLOCK <= 4 * CHUNK


def test_hostile_tree_is_listed_as_it_is(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, expected = hostile
    cli = Cli(home)
    listed = cli("ls", "-R", "photos").stdout
    for path in expected.keys() - {b"."}:
        assert path + b"\n" in listed
    # Names with newlines make more lines, so the whole is compared without them.
    assert sorted(listed.replace(b"\n", b"")) == sorted(b"".join(expected.keys() - {b"."}).replace(b"\n", b""))
    below = cli("ls", "-R", "photos", "links").stdout.splitlines()
    assert set(below) == {
        line for path in expected if path.startswith(b"links/") for line in path.removeprefix(b"links/").split(b"\n")
    }
    of_root = sorted(path for path in expected if b"/" not in path and path != b".")
    assert cli("ls", "photos").stdout.split(b"\n")[:-1] == of_root
    assert cli("ls", "photos", "links/file").stdout == b"links/file\n"


@pytest.mark.parametrize("folder", ["modes", "times", "kinds"])
def test_long_listing_shows_attributes(hostile: tuple[Home, Path, trees.Walk], folder: str) -> None:
    home, _, expected = hostile
    shown: dict[bytes, tuple[str, int, int, int, int]] = {}
    for row in Cli(home)("ls", "-l", "photos", folder).stdout.splitlines():
        mode, *numbers, _, _, name = row.split(None, 7)
        nlink, uid, gid, size = map(int, numbers)
        shown[name] = (mode.decode(), nlink, uid, gid, size)
    for path, seen in expected.items():
        if path.rpartition(b"/")[0] != folder.encode():
            continue
        name = path.rpartition(b"/")[2] + (b" -> " + seen.target if seen.type == "symlink" else b"")
        kind = {"file": stat.S_IFREG, "folder": stat.S_IFDIR, "symlink": stat.S_IFLNK}[seen.type]
        size = shown[name][4] if seen.type == "folder" else seen.size
        assert shown.pop(name) == (stat.filemode(kind | seen.mode), seen.nlink, seen.uid, seen.gid, size)
    assert shown == {}


def test_every_kind_of_file_is_written_out(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, source, _ = hostile
    names = [b"text", b"random 3145729", b"holes between", b"random 0"]
    files = [*(b"sizes/" + name for name in names), b"names/" + b"\xff" * 255]
    contents = [(source / os.fsdecode(path)).read_bytes() for path in files]
    assert [Cli(home)("cat", "photos", path).stdout for path in files] == contents
    assert Cli(home)("cat", "photos", files[0], files[4], files[0]).stdout == contents[0] + contents[4] + contents[0]


def test_stat_shows_what_the_source_shows(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, expected = hostile
    nodes: dict[bytes, int] = {}
    paths = [
        b".", b"links", b"links/file", b"links/file again", b"links/not UTF-8", b"names/\xff", b"names/new\nline",
        b"sizes/largest", b"sizes/only a hole", b"sizes/random 1048577", b"modes/file 4755", b"modes/file 0000",
        b"times/2+999999999", b"times/7+1", b"kinds/empty folder",
    ]  # fmt: skip
    for path in paths:
        document = Cli(home)("stat", "photos", path, "--json").json
        seen = expected[path]
        assert document["slot"] == "photos"
        assert document["version"] == 1
        assert os.fsencode(document["path"]) == path
        assert document["type"] == {"folder": "directory"}.get(seen.type, seen.type)
        assert (int(document["mode"], 8), document["uid"], document["gid"]) == (seen.mode, seen.uid, seen.gid)
        assert (document["nlink"], document["mtime_ns"]) == (seen.nlink, seen.mtime_ns)
        assert seen.type == "folder" or document["size"] == seen.size
        assert seen.type != "file" or document["blocks"] == seen.blocks
        assert document.get("xxh3_128", "") == seen.content
        assert os.fsencode(document.get("target", "")) == seen.target
        nodes[path] = document["node"]
        if seen.type == "file":
            assert all({"shard", "offset", "length", "codec", "crc32c"} <= row.keys() for row in document["stored"])
    assert nodes[b"."] == ROOT
    assert nodes[b"links/file"] == nodes[b"links/file again"]
    assert len(set(nodes.values())) == len(nodes) - 1


@pytest.mark.parametrize("path", [b"names/\xff", b"names/new\nline", b"links/not UTF-8", b"sizes/largest"])
def test_stat_for_people_takes_any_name(hostile: tuple[Home, Path, trees.Walk], path: bytes) -> None:
    home, _, _ = hostile
    finished = Cli(home)("stat", "photos", path)
    assert b"mtime_ns" in finished.stdout
    assert finished.stderr == ""


def test_stored_places_can_be_read_from_the_shard_files(hostile: tuple[Home, Path, trees.Walk]) -> None:
    """What `stat` says is enough to fetch one entry with a range request."""
    home, source, _ = hostile
    document = Cli(home)("stat", "photos", "sizes/random 3145729", "--json").json
    data = b""
    for row in document["stored"]:
        shard = (home.slot("photos") / "shards" / f"{row['shard']}.lmdb").read_bytes()
        assert row["codec"] == "raw"
        data += shard[row["offset"] :][: row["length"]]
    assert data == (source / "sizes" / "random 3145729").read_bytes()


@pytest.mark.parametrize(
    ("path", "number", "words"),
    [
        ("missing", errno.ENOENT, "No such file or directory"),
        ("missing/below", errno.ENOENT, "No such file or directory"),
        ("links/file/below", errno.ENOTDIR, "Not a directory"),
        ("links/to a folder/0 file", errno.ENOTDIR, "Not a directory"),
        ("links/file/", errno.ENOTDIR, "Not a directory"),
        ("links/file/.", errno.ENOTDIR, "Not a directory"),
        ("links/file/..", errno.ENOTDIR, "Not a directory"),
        ("n" * 256, errno.ENOENT, "No such file or directory"),
        ("missing\nwith a newline", errno.ENOENT, "No such file or directory"),
    ],
)
def test_wrong_path_is_one_line(hostile: tuple[Home, Path, trees.Walk], path: str, number: int, words: str) -> None:
    home, _, _ = hostile
    with open_tree(home) as tree, pytest.raises(TreeError) as caught:
        tree.walk(path.encode())
    assert caught.value.errno == number
    for command in ("ls", "cat", "stat"):
        assert words in Cli(home)(command, "photos", path, code=1).line


def test_dots_lead_where_they_lead_in_the_kernel(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, _ = hostile
    with open_tree(home) as tree:
        links = tree.walk(b"links")
        for path in (
            b"links/.",
            b"./links//",
            b"links/a folder/..",
            b"/links",
            b"../links",
            b"../links/a folder/.././.",
        ):
            assert tree.walk(path) == links
        for path in (b"", b".", b"/", b"..", b"links/..", b"links/a folder/../.."):
            assert tree.walk(path).node == ROOT


def test_wrong_kind_is_one_line(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, _ = hostile
    cli = Cli(home)
    for path in ("links", "links/dangling"):
        assert path in cli("cat", "photos", path, code=1).line
    with open_tree(home) as tree:
        file, folder, link = (tree.walk(path).node for path in (b"links/file", b"links", b"links/dangling"))
        for act, number in (
            (lambda: tree.read(folder, 0, 1), errno.EISDIR),
            (lambda: tree.read(link, 0, 1), errno.EINVAL),
            (lambda: tree.readlink(file), errno.EINVAL),
            (lambda: tree.readlink(folder), errno.EINVAL),
            (lambda: list(tree.list(file)), errno.ENOTDIR),
            (lambda: tree.lookup(file, b"name"), errno.ENOTDIR),
            (lambda: tree.lookup(link, b"name"), errno.ENOTDIR),
            (lambda: tree.parent(file), errno.ENOTDIR),
            (lambda: tree.seek(folder, 0, os.SEEK_DATA), errno.EINVAL),
            (lambda: tree.attributes(0), errno.ENOENT),
            (lambda: tree.attributes(tree.header.entries + 1), errno.ENOENT),
            (lambda: tree.attributes(2**64 - 1), errno.ENOENT),
            (lambda: tree.read(0, 0, 1), errno.ENOENT),
        ):
            with pytest.raises(TreeError) as caught:
                act()
            assert caught.value.errno == number
        assert tree.read(file, 0, 0) == b""
        assert tree.read(file, 10**15, 10) == b""


def test_reader_that_has_enough_ends_the_command_quietly(hostile: tuple[Home, Path, trees.Walk]) -> None:
    home, _, _ = hostile
    running = Cli(home).start("cat", "photos", "sizes/largest")
    assert running.process.stdout is not None
    running.process.stdout.read(10)
    running.process.stdout.close()
    running.process.stdout = None
    finished = running.finish()
    assert finished.stderr == ""


# --- Extract ---------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "folder" / "sub").mkdir(parents=True)
    for number in range(4):
        (path / "folder" / f"file{number}").write_bytes(random.Random(number).randbytes(5000 + number))
    (path / "text").write_bytes(b"the same line again\n" * 200)
    (path / "folder" / "link").symlink_to("file0")
    os.link(path / "text", path / "folder" / "text again")
    os.utime(path / "folder", ns=(0, -5))
    return path


def test_part_of_a_tree_is_extracted(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli("pack", source, "photos")
    cli("extract", "photos", "folder", tmp_path / "copy")
    assert differences(packed(walk(source / "folder")), packed(walk(tmp_path / "copy"))) == []
    cli("extract", "photos@1", "folder/file1", tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == (source / "folder" / "file1").read_bytes()
    assert (tmp_path / "one").stat().st_mtime_ns == (source / "folder" / "file1").stat().st_mtime_ns
    cli("extract", "photos", "folder/link", tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "file0"
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/not UTF-8 \xff"))
    assert cli("extract", "photos", "folder/sub", odd).stderr == ""
    assert odd.is_dir()


def test_extract_overwrites_nothing(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli("pack", source, "photos")
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "folder", "dangling"):
        assert "exists already" in cli("extract", "photos", ".", tmp_path / name, code=2).line
    assert "no such folder" in cli("extract", "photos", ".", tmp_path / "missing" / "copy", code=2).line
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert os.listdir(tmp_path / "folder") == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("chunks", [4, 8])
def test_extract_to_a_full_disk_says_so(cli: Cli, small_disk: Path, tmp_path: Path, chunks: int) -> None:
    """Also where only a part of the last write fits, which is no error of that write(2)."""
    (small_disk / "filler").write_bytes(bytes(100_000))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(random.Random(1).randbytes(chunks * CHUNK))
    cli("pack", tmp_path / "source", "photos")
    assert "no space left" in cli("extract", "photos", ".", small_disk / "copy", code=1).line


# --- Damaged shards --------------------------------------------------------------------------------


class Damaged:
    """A slot of two shards, each the work of one process, and what a reader makes of them."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.home, self.source = cli, cli.home, folder / "source"
        self.source.mkdir()
        for number in range(60):
            (self.source / f"raw{number:02}").write_bytes(random.Random(number).randbytes(100_000))
            (self.source / f"text{number:02}").write_bytes(f"{number} the same line again\n".encode() * 4000)
        (self.source / "large").write_bytes(random.Random(99).randbytes(3 * CHUNK + 5))
        document = cli("pack", self.source, "photos", "--profile", "text", "--jobs", "2", "--json").json
        assert document["totals"]["shards"] == 2
        self.files = sorted(os.listdir(self.source))
        self.places = {name: self._places(name) for name in self.files}

    def _places(self, name: str) -> list[dict[str, Any]]:
        with open_tree(self.home) as tree:
            locations = list(tree.locations(tree.walk(name.encode()).node))
        return [{**where.place._asdict(), "shard": where.shard} for where in locations]

    def shard(self, name: str) -> Path:
        """The file that holds the first bytes of this one."""
        return self.home.slot("photos") / "shards" / f"{self.places[name][0]['shard']}.lmdb"

    def users(self, shard: Path) -> set[str]:
        return {name for name in self.files if any(row["shard"] == shard.stem for row in self.places[name])}

    def failures(self) -> dict[str, AccelfsError]:
        """Read every file whole; those that cannot be read, with why."""
        failed: dict[str, AccelfsError] = {}
        with open_tree(self.home) as tree:
            for name in self.files:
                node = tree.walk(name.encode()).node
                data = (self.source / name).read_bytes()
                try:
                    parts = [bytes(tree.read(node, offset, CHUNK)) for offset in range(0, len(data), CHUNK)]
                    assert b"".join(parts) == data, f"{name} was read wrongly"
                except (FormatError, StoreError) as error:
                    failed[name] = error
                    with pytest.raises(type(error)):  # and not served the second time either
                        [tree.read(node, offset, CHUNK) for offset in range(0, len(data), CHUNK)]
        return failed


@pytest.fixture
def damaged(cli: Cli, tmp_path: Path) -> Damaged:
    return Damaged(cli, tmp_path)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes((before[0] ^ 0x20,)))


def assert_names_the_shard(failed: dict[str, AccelfsError], shard: Path) -> None:
    assert all(str(shard) in str(error) and "\n" not in str(error) for error in failed.values()), failed


@pytest.mark.parametrize("name", ["raw07", "text07"])
def test_flipped_byte_is_an_error_of_that_file_alone(damaged: Damaged, name: str) -> None:
    (place,) = damaged.places[name]
    assert place["codec"] == (1 if name.startswith("text") else 0)
    for within in (0, place["length"] // 2, place["length"] - 1):
        flip(damaged.shard(name), place["offset"] + within)
        failed = damaged.failures()
        assert failed.keys() == {name}
        assert_names_the_shard(failed, damaged.shard(name))
        flip(damaged.shard(name), place["offset"] + within)
    assert damaged.failures() == {}


def test_flipped_byte_in_one_chunk_of_a_large_file(damaged: Damaged) -> None:
    place = damaged.places["large"][1]
    shard = damaged.home.slot("photos") / "shards" / f"{place['shard']}.lmdb"
    flip(shard, place["offset"] + 5)
    failed = damaged.failures()
    assert failed.keys() == {"large"}
    assert_names_the_shard(failed, shard)
    data = (damaged.source / "large").read_bytes()
    with open_tree(damaged.home) as tree:
        node = tree.walk(b"large").node
        assert tree.read(node, 0, CHUNK) == data[:CHUNK]
        with pytest.raises(FormatError):
            tree.read(node, CHUNK - 1, 2)
        with pytest.raises(FormatError):
            tree.read(node, CHUNK, 1)
        assert tree.read(node, 2 * CHUNK, 2 * CHUNK) == data[2 * CHUNK :]


def test_command_says_in_one_line_what_is_damaged(damaged: Damaged, tmp_path: Path) -> None:
    flip(damaged.shard("raw07"), damaged.places["raw07"][0]["offset"])
    assert str(damaged.shard("raw07")) in damaged.cli("cat", "photos", "raw07", code=1).line
    assert str(damaged.shard("raw07")) in damaged.cli("extract", "photos", ".", tmp_path / "copy", code=1).line
    assert damaged.cli("cat", "photos", "raw08").stdout == (damaged.source / "raw08").read_bytes()
    assert damaged.cli("stat", "photos", "raw07").code == 0


@pytest.mark.parametrize("left", ["nothing", "a page", "half", "all but a byte"])
def test_truncated_shard_is_an_error_of_its_files_alone(damaged: Damaged, left: str) -> None:
    shard = damaged.shard("raw07")
    size = shard.stat().st_size
    os.truncate(shard, {"nothing": 0, "a page": 4096, "half": size // 2, "all but a byte": size - 1}[left])
    failed = damaged.failures()
    assert failed.keys() == damaged.users(shard) != set(damaged.files)
    assert_names_the_shard(failed, shard)


def test_shard_that_is_truncated_while_it_is_open(damaged: Damaged) -> None:
    shard = damaged.shard("raw07")
    size = shard.stat().st_size
    with open_tree(damaged.home) as tree:
        nodes = {name: tree.walk(name.encode()).node for name in damaged.files}
        # Half of the raw entries were read before, so that they count as checked.
        for name in damaged.files[::2]:
            if name.startswith("raw"):
                tree.read(nodes[name], 0, CHUNK)
        os.truncate(shard, size // 2)
        beyond = {name for name in damaged.users(shard) if damaged.places[name][0]["offset"] >= size // 2}
        across = {
            name
            for name in damaged.users(shard)
            if any(row["offset"] + row["length"] > size // 2 for row in damaged.places[name])
        }
        assert beyond
        for name in damaged.files:
            data = (damaged.source / name).read_bytes()[:CHUNK]
            if name in beyond:
                with pytest.raises((FormatError, StoreError), match=shard.stem):
                    tree.read(nodes[name], 0, CHUNK)
            elif name not in across:
                assert tree.read(nodes[name], 0, CHUNK) == data


def test_missing_shard_is_an_error_of_its_files_alone(damaged: Damaged) -> None:
    shard = damaged.shard("raw07")
    shard.unlink()
    failed = damaged.failures()
    assert failed.keys() == damaged.users(shard) != set(damaged.files)
    assert_names_the_shard(failed, shard)
    assert str(shard) in damaged.cli("cat", "photos", "raw07", code=1).line
    # The tree itself is all there: names and attributes come from the catalog.
    assert len(damaged.cli("ls", "photos").stdout.splitlines()) == len(damaged.files)


def test_what_is_no_file_in_the_place_of_a_shard(damaged: Damaged) -> None:
    shard = damaged.shard("raw07")
    for make in (lambda: shard.mkdir(), lambda: shard.symlink_to("nowhere"), lambda: shard.write_bytes(b"x" * 9999)):
        shard.unlink() if shard.is_file() or shard.is_symlink() else shutil.rmtree(shard, ignore_errors=True)
        make()
        failed = damaged.failures()
        assert failed.keys() == damaged.users(shard)
        assert_names_the_shard(failed, shard)


@pytest.mark.parametrize("page", [0, 1])
def test_shard_of_an_unknown_lmdb_version_is_refused(damaged: Damaged, page: int) -> None:
    shard = damaged.shard("raw07")
    with shard.open("r+b") as file:
        file.seek(page * 4096 + 20)
        file.write(struct.pack("<I", 2))
    failed = damaged.failures()
    assert failed.keys() == damaged.users(shard) != set(damaged.files)
    assert_names_the_shard(failed, shard)
    assert all("LMDB data version 2" in str(error) for error in failed.values())


def test_any_flipped_byte_in_a_shard_is_noticed_or_harmless(damaged: Damaged) -> None:
    """Wrong bytes are never served; those files fail that own the byte, or all of the shard's if it is its head."""
    shard = damaged.shard("raw07")
    size = shard.stat().st_size
    source = random.Random(3)
    places = [(row, name) for name in damaged.files for row in damaged.places[name] if row["shard"] == shard.stem]
    for offset in [16, 20, 4096 + 20, *(source.randrange(size) for _ in range(6))]:
        flip(shard, offset)
        hit = {name for row, name in places if row["offset"] <= offset < row["offset"] + row["length"]}
        failed = damaged.failures()
        assert failed.keys() in (hit, damaged.users(shard) if offset < 2 * 4096 else hit)
        assert_names_the_shard(failed, shard)
        flip(shard, offset)


# --- Damaged catalogs and manifests ----------------------------------------------------------------


def catalog_of(home: Home) -> Path:
    (path,) = (home.slot("photos") / "catalogs").iterdir()
    return path


def assert_refused(home: Home, words: str) -> None:
    with pytest.raises((FormatError, StoreError)) as caught:
        open_tree(home)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_door_refuses_a_damaged_catalog_in_one_line(cli: Cli, source: Path, tmp_path: Path) -> None:
    cli("pack", source, "photos")
    catalog = catalog_of(cli.home)
    flip(catalog, catalog.stat().st_size // 2)
    for command in (["ls", "photos"], ["cat", "photos", "a"], ["stat", "photos", "a"], ["extract", "photos", ".", "x"]):
        assert str(catalog) in cli(*command, code=1, cwd=tmp_path).line


def test_flipped_byte_in_the_catalog_is_refused(cli: Cli, source: Path) -> None:
    cli("pack", source, "photos")
    catalog = catalog_of(cli.home)
    places = random.Random(4)
    size = catalog.stat().st_size
    for offset in [0, 16, 20, 4096, size - 1, *(places.randrange(size) for _ in range(20))]:
        flip(catalog, offset)
        with pytest.raises(FormatError) as caught:
            open_tree(cli.home)
        assert str(catalog) in str(caught.value)
        flip(catalog, offset)
        with open_tree(cli.home) as tree:
            assert tree.walk(b"text").size == 4000


@pytest.mark.parametrize("left", ["nothing", "a page", "half", "all but a byte", "a byte more"])
def test_catalog_of_another_length_is_refused(cli: Cli, source: Path, left: str) -> None:
    cli("pack", source, "photos")
    catalog = catalog_of(cli.home)
    size = catalog.stat().st_size
    sizes = {"nothing": 0, "a page": 4096, "half": size // 2, "all but a byte": size - 1, "a byte more": size + 1}
    os.truncate(catalog, sizes[left])
    assert_refused(cli.home, str(catalog))


def test_missing_catalog_is_refused(cli: Cli, source: Path) -> None:
    cli("pack", source, "photos")
    catalog = catalog_of(cli.home)
    catalog.unlink()
    assert_refused(cli.home, str(catalog))
    catalog.mkdir()
    assert_refused(cli.home, str(catalog))


def test_older_version_is_read_when_the_newest_is_damaged(cli: Cli, source: Path) -> None:
    cli("pack", source, "photos")
    (source / "more").write_bytes(b"more")
    digest = cli("pack", source, "photos", "--json").json["catalog"]["hash"]
    flip(cli.home.slot("photos") / "catalogs" / f"{digest}.lmdb", 9000)
    assert_refused(cli.home, digest)
    assert b"text\n" in cli("ls", "photos@1").stdout


def change_a_byte(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def change_a_byte_and_the_time_back(path: Path) -> None:
    status = path.stat()
    change_a_byte(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_by_a_changed_copy(path: Path) -> None:
    status = path.stat()
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    change_a_byte(copy)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("change", [change_a_byte, change_a_byte_and_the_time_back, replace_by_a_changed_copy])
@pytest.mark.parametrize("trusted_by", ["the pack", "a reader"])
def test_catalog_that_changes_after_it_was_trusted_is_noticed(
    cli: Cli, source: Path, change: Callable[[Path], object], trusted_by: str
) -> None:
    cli("pack", source, "photos")
    if trusted_by == "a reader":
        shutil.rmtree(cli.home.path / "trusted")
        with open_tree(cli.home):
            pass
    assert len(list((cli.home.path / "trusted").iterdir())) == 1, "the node remembers what it has verified"
    catalog = catalog_of(cli.home)
    change(catalog)
    assert_refused(cli.home, str(catalog))


def test_catalog_is_verified_again_without_its_marker(cli: Cli, source: Path) -> None:
    """What remembers may be lost, damaged or forged without harm."""
    cli("pack", source, "photos")
    trusted = cli.home.path / "trusted"
    (marker,) = trusted.iterdir()
    catalog = catalog_of(cli.home)
    for damage in (marker.unlink, lambda: marker.write_bytes(b"\xff{"), lambda: marker.write_text("[1, 2]")):
        damage()
        with open_tree(cli.home) as tree:
            assert tree.walk(b"text").size == 4000
        assert marker.exists()
        flip(catalog, 9000)
        damage()
        with pytest.raises(FormatError):
            open_tree(cli.home)
        flip(catalog, 9000)
        with open_tree(cli.home):
            pass
    shutil.rmtree(trusted)
    trusted.write_bytes(b"in the place of the folder")
    with open_tree(cli.home) as tree:
        assert tree.walk(b"text").size == 4000


def test_verified_catalog_is_not_read_whole_again(cli: Cli, tmp_path: Path) -> None:
    """Opening costs the same for any number of files: the marker saves the second hash."""
    (tmp_path / "source").mkdir()
    for number in range(3000):
        (tmp_path / "source" / f"{number:04}{'n' * 200}").touch()
    cli("pack", tmp_path / "source", "photos")
    catalog = catalog_of(cli.home)
    assert catalog.stat().st_size > 800_000

    def read_bytes() -> int:
        rows = Path("/proc/self/io").read_text().splitlines()
        return int(next(row.split()[1] for row in rows if row.startswith("rchar:")))

    before = read_bytes()
    with open_tree(cli.home) as tree:
        assert tree.header.files == 3000
    assert read_bytes() - before < 300_000
    (cli.home.path / "trusted" / catalog.stem).unlink()
    before = read_bytes()
    with open_tree(cli.home):
        pass
    assert read_bytes() - before > 800_000


MANIFEST_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format of tomorrow": (lambda document: document.update(format=2), "manifest format 2"),
    "format of tomorrow with new fields": (lambda document: document.update(format=2, more={}), "manifest format 2"),
    "other engine": (lambda document: document.update(engine="lmdb-1.0"), "lmdb-1.0"),
    "other pages": (lambda document: document.update(page_bytes=16384), "16384"),
    "unknown field": (lambda document: document.update(more=1), "not a manifest"),
    "missing field": (lambda document: document.pop("totals"), "not a manifest"),
    "no format": (lambda document: document.pop("format"), "not a manifest"),
    "wrong type": (lambda document: document.update(version="1"), "not a manifest"),
    "traversal": (lambda document: document["catalog"].update(hash="../../../../etc/passwd"), "hash"),
    "short hash": (lambda document: document["catalog"].update(hash="abc"), "hash"),
    "upper-case hash": (lambda document: document["report"].update(hash="A" * 64), "hash"),
    "negative size": (lambda document: document["catalog"].update(bytes=-1), "hash"),
    "other catalog": (lambda document: document["catalog"].update(hash="0" * 64), "catalog is missing"),
}


@pytest.mark.parametrize(("damage", "words"), MANIFEST_DAMAGE.values(), ids=MANIFEST_DAMAGE.keys())
def test_manifest_that_is_not_ours_is_refused(
    cli: Cli, source: Path, damage: Callable[[dict[str, Any]], object], words: str
) -> None:
    cli("pack", source, "photos")
    path = cli.home.slot("photos") / "versions" / "000001.json"
    document = json.loads(path.read_bytes())
    damage(document)
    path.write_text(json.dumps(document))
    assert_refused(cli.home, words)
    assert_refused(cli.home, "0" * 64 if "catalog is missing" in words else "000001.json")


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"\xff" * 100, b"{}" + b" " * (1 << 20), b"[" * 100_000])
def test_manifest_that_is_no_manifest_is_refused(cli: Cli, source: Path, data: bytes) -> None:
    cli("pack", source, "photos")
    path = cli.home.slot("photos") / "versions" / "000001.json"
    path.write_bytes(data)
    assert_refused(cli.home, "000001.json")


# --- Many files at once ----------------------------------------------------------------------------


def test_descriptors_are_bounded_and_given_back(cli: Cli, damaged: Damaged) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with open_tree(damaged.home) as tree:
            for name in damaged.files:
                tree.read(tree.walk(name.encode()).node, 0, 100)
            assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_trees_of_two_versions_in_one_process(cli: Cli, source: Path, home: Home) -> None:
    cli("pack", source, "photos")
    (source / "text").write_bytes(b"another text")
    cli("pack", source, "photos")
    with open_tree(home, 1) as first, open_tree(home, 2) as second:
        for _, tree in itertools.product(range(2), (first, second)):
            data = bytes(tree.read(tree.walk(b"text").node, 0, 10_000))
            assert data == (b"another text" if tree is second else b"the same line again\n" * 200)


def test_times_and_sizes_at_the_edges(tmp_path: Path, home: Home) -> None:
    """The edges of what the file system of the source holds, whatever they are."""
    moments = [-(2**31) * 10**9, -1, 0, 2**31 * 10**9, 2**32 * 10**9 + 1, 15_000_000_000 * 10**9 + 999_999_999]
    file = File(Content("random", 10, 0), 0o644, 0, (-1, -1))
    children = {b"%d" % number: replace(file, mtime_ns=moment) for number, moment in enumerate(moments)}
    trees.make(Folder(dict(children), 0o755, 0, (-1, -1)), tmp_path / "source")
    pack(tmp_path / "source", home)
    assert differences(packed(walk(tmp_path / "source")), slot_walk(home.environment, "photos")) == []
