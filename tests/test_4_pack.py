"""Packing: what becomes a version and how, what is reported, and that nothing else is ever visible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pty
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from conftest import SECONDS_MAX, Cli, Finished, Home, Running, deadly, resize_disk, wait_until
from trees import IS_ROOT, NEVER_PACKED, differences, packed, slot_walk, walk

from accelfs.errors import AccelfsError, SourceError
from accelfs.format import manifest as manifest_format
from accelfs.format.catalog import Catalog
from accelfs.pack import build
from accelfs.store.layout import parse_slot
from accelfs.store.posix import PosixStore

if TYPE_CHECKING:
    from accelfs.store.protocol import Store

MEBI = 1 << 20
# What is told to stop, or has lost its parent, is gone by then, also on a busy machine.
STOP_SECONDS_MAX = 10.0
# open(2) reads everything for root by two capabilities.  Without them root is a user like any other to it, and an
# interpreter that lies in root's home still starts.
ORDINARY_USER = (
    ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
    if IS_ROOT
    else ()
)
NOBODY = 65534
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"


# --- What a pack leaves --------------------------------------------------------------------------


def versions(home: Home, slot: str = "photos") -> list[int]:
    folder = home.slot(slot) / "versions"
    # A manifest that is being written has a name with a dot in front; `unnamed` finds what is left of one.
    names = [name for name in os.listdir(folder) if not name.startswith(".")] if folder.exists() else []
    return sorted(int(name.removesuffix(".json")) for name in names)


def unnamed(home: Home, slot: str = "photos") -> list[str]:
    """What lies in the slot's part of the store and no manifest names, directly or through its catalog."""
    folder = home.slot(slot)
    named = set()
    for number in versions(home, slot):
        document = folder / "versions" / f"{number:06d}.json"
        manifest = manifest_format.decode(document.read_bytes(), document)
        named |= {f"versions/{number:06d}.json", f"catalogs/{manifest.catalog.hash}.lmdb"}
        named.add(f"reports/{manifest.report.hash}.jsonl")
        with Catalog(folder / "catalogs" / f"{manifest.catalog.hash}.lmdb") as catalog:
            named |= {f"shards/{row.hash}.lmdb" for row in catalog.shards()}
            with contextlib.suppress(AccelfsError):
                named.add(f"dictionaries/{catalog.dictionary(1)[0]}")
    found = {os.path.relpath(Path(path, file), folder) for path, _, files in os.walk(folder) for file in files}
    assert named <= found, "a manifest names what the store does not hold"
    return sorted(found - named)


def scratch_left(home: Home, slot: str = "photos") -> list[str]:
    folder = home.scratch(slot)
    return sorted(name for name in os.listdir(folder) if name != "lock") if folder.exists() else []


def assert_nothing_published(home: Home, slot: str = "photos") -> None:
    assert versions(home, slot) == []
    assert [name for name in scratch_left(home, slot) if name != "uploads.json"] == []


def assert_equal(source: Path, home: Home, slot: str = "photos", version: int | None = None) -> None:
    assert differences(packed(walk(source)), slot_walk(home.environment, slot, version)) == []


def report_lines(home: Home, document: dict[str, Any], slot: str = "photos") -> list[dict[str, Any]]:
    path = home.slot(slot) / "reports" / f"{document['report']['hash']}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def write(path: Path, data: bytes = b"data", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


def text(size: int, seed: int = 0) -> bytes:
    words = (b"the ", b"shard ", b"of ", b"a slot ", b"holds ", b"entries\n")
    return b"".join(random.Random(seed).choices(words, k=size // 5 + 1))[:size]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small folder of ordinary files."""
    path = tmp_path / "source"
    for number in range(12):
        write(path / f"folder{number % 3}" / f"file{number}.dat", noise(500 * number, number))
    (path / "folder0" / "link").symlink_to("file0.dat")
    os.link(path / "folder1" / "file1.dat", path / "folder2" / "again.dat")
    return path


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A source that takes a minute to read and no space: for packs that are stopped on the way."""
    path = tmp_path / "endless"
    path.mkdir()
    for number in range(2):
        with (path / f"file{number}").open("wb") as file:
            file.truncate(1 << 40)
            file.write(b"not only a hole")
    return path


def workers_of(running: Running, count: int = 2) -> list[int]:
    """Wait until the pack has its workers, and with them the lock on its slot."""
    wait_until(lambda: len(running.children()) >= count or running.ended(), "the packing processes")
    assert not running.ended(), running.finish().stderr
    return running.children()


# --- Results -------------------------------------------------------------------------------------


def test_json_is_the_manifest_and_how_it_came_about(cli: Cli, home: Home, source: Path) -> None:
    finished = cli("pack", source, "photos", "--json")
    document = finished.json
    assert finished.stderr == ""
    stored = json.loads((home.slot("photos") / "versions" / "000001.json").read_bytes())
    assert {name: document[name] for name in stored} == stored
    assert (document["slot"], document["version"], document["format"]) == ("photos", 1, 1)
    assert (document["engine"], document["page_bytes"]) == ("lmdb-0.9", 4096)
    assert document["source"]["url"] == source.as_uri()
    assert document["counts"] == {"files": 13, "directories": 4, "symlinks": 1, "hard_links": 1, "skipped": 0}
    sizes = [500 * number for number in range(12)]
    assert document["totals"]["data_bytes"] == sum(sizes)
    shards = list((home.slot("photos") / "shards").iterdir())
    assert document["totals"]["shards"] == len(shards)
    assert document["totals"]["shard_bytes"] == sum(shard.stat().st_size for shard in shards)
    assert document["reported"] == {}
    assert_equal(source, home)
    assert unnamed(home) == []
    assert scratch_left(home) == []


def test_each_pack_is_the_next_version_and_changes_no_other(cli: Cli, home: Home, source: Path) -> None:
    before = packed(walk(source))
    cli("pack", source, "photos")
    write(source / "more", b"more")
    assert cli("pack", source, "photos", "--json").json["version"] == 2
    assert differences(before, slot_walk(home.environment, "photos", 1)) == []
    assert_equal(source, home, version=2)
    assert cli("pack", source, "team/photos", "--json").json["slot"] == "team/photos"
    assert versions(home) == [1, 2]


def test_relative_path_and_url_name_the_same_folder(cli: Cli, tmp_path: Path) -> None:
    odd = tmp_path / "a b%20ü"
    write(odd / "file")
    urls = [odd.as_uri(), odd.as_uri().replace("file://", "file://localhost"), odd.as_uri().replace("file", "FILE", 1)]
    documents = [cli("pack", url, "photos", "--json").json for url in urls]
    documents.append(cli("pack", ".", "photos", "--json", cwd=odd).json)
    documents.append(cli("pack", odd.name + "/", "photos", "--json", cwd=tmp_path).json)
    assert len({document["tree_digest"] for document in documents}) == 1
    assert documents[-1]["source"]["url"] == documents[-2]["source"]["url"] == odd.as_uri()


def test_url_may_name_any_folder(cli: Cli, home: Home, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/not UTF-8 \xff"))
    write(odd / "file")
    assert odd.as_uri().endswith("%FF")
    assert cli("pack", odd.as_uri(), "photos", "--json").json["source"]["url"] == odd.as_uri()
    assert cli("pack", odd, "photos", "--json").json["source"]["url"] == odd.as_uri()
    assert_equal(odd, home)


def test_terminal_shows_progress_and_the_result_follows(cli: Cli, home: Home, tmp_path: Path) -> None:
    # Enough work for the bar to be drawn again after its first tenth of a second.
    for number in range(20):
        write(tmp_path / "source" / str(number), noise(8 * MEBI, number))
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO when the last writer is gone
            while data := os.read(ours, 65536):
                seen.extend(data)

    reader = threading.Thread(target=read)
    process = subprocess.Popen(
        [sys.executable, "-m", "accelfs", "pack", tmp_path / "source", "photos", "--explain"],
        env={**home.environment, "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    reader.start()
    stdout, _ = process.communicate(timeout=SECONDS_MAX)
    reader.join(SECONDS_MAX)
    os.close(ours)
    assert process.returncode == 0
    assert b"photos version 1: 20 files in 1 folder," in stdout
    assert b"profile raw: path order, compression none" in stdout
    assert b"next: accelfs mount photos" in stdout
    assert b"files" in seen
    assert seen.count(b"\x1b[?25h") == seen.count(b"\x1b[?25l"), "the cursor is shown again"


# --- Profiles ------------------------------------------------------------------------------------


def kinds(path: Path, kind: str, count: int = 40) -> Path:
    """A folder of files of one kind, in ten folders whose order is that of their names."""
    for number in range(count):
        place = path / f"class{number * 10 // count}"
        if kind == "image":
            write(place / f"{number:03}.JPG", JPEG + noise(3000, number))
        elif kind == "bitmap":
            write(place / f"{number:03}.bmp", b"BM" + text(3000, number))
        elif kind == "video":
            write(place / f"{number:03}.mp4", b"\0\0\0\x18ftypisom" + noise(50_000, number))
        elif kind == "text":
            write(place / f"{number:03}.txt", text(3000, number))
        elif kind == "shrinks":
            write(place / f"{number:03}", text(3000, number))
        elif kind == "noise":
            write(place / f"{number:03}", noise(3000, number))
        else:
            write(place / f"{number:03}", b"")
    return path


@pytest.mark.parametrize(
    ("kind", "profile", "order", "compression"),
    [
        ("image", "image", "mixed", "none"),
        ("bitmap", "image", "mixed", "zstd"),
        ("video", "video", "path", "none"),
        ("text", "text", "path", "zstd"),
        ("shrinks", "text", "path", "zstd"),
        ("noise", "raw", "path", "none"),
        ("empty", "raw", "path", "none"),
    ],
)
def test_auto_looks_at_names_and_bytes(
    cli: Cli, home: Home, tmp_path: Path, kind: str, profile: str, order: str, compression: str
) -> None:
    path = kinds(tmp_path / "source", kind)
    document = cli("pack", path, "photos", "--json").json
    plan = document["plan"]
    assert (plan["profile"], plan["order"], plan["compression"]) == (profile, order, compression), plan["reason"]
    assert document["profile"] == profile
    assert plan["reason"].startswith("auto: ")
    assert_equal(path, home)


@pytest.mark.parametrize("profile", ["image", "text", "video", "raw"])
def test_profile_decides_order_and_compression(cli: Cli, home: Home, tmp_path: Path, profile: str) -> None:
    path = kinds(tmp_path / "source", "shrinks")
    kinds(path / "photos", "image")
    write(path / "large", text(3 * MEBI))
    document = cli("pack", path, "photos", "--profile", profile, "--jobs", "1", "--json").json
    assert (document["plan"]["profile"], document["plan"]["reason"]) == (profile, f"--profile {profile}")
    assert_equal(path, home)
    assert unnamed(home) == []

    stored = {file: stored_of(cli, file, path) for file in sorted(path.rglob("*")) if file.is_file()}
    codecs = {file.suffix: {row["codec"] for row in rows} for file, rows in stored.items()}
    small = "zstd" if profile in ("image", "text") else "raw"
    assert codecs == {"": {small}, ".JPG": {"raw"}}
    # Breadth first: the large file of the root comes before all others.
    path_order = [path / "large", *(file for file in stored if file.name != "large")]
    path_order.sort(key=lambda file: (len(file.parts), file))
    offsets = [stored[file][0]["offset"] for file in path_order]
    assert (offsets == sorted(offsets)) == (profile != "image")


def stored_of(cli: Cli, file: Path, root: Path) -> list[dict[str, Any]]:
    """Where the bytes of a file lie, as `accelfs stat` says, asked in this process: it is asked often."""
    machine_tree = open_tree(cli.home)
    with machine_tree as tree:
        node = tree.walk(os.fsencode(file.relative_to(root))).node
        return [
            {"codec": ("raw", "zstd")[where.place.codec], "offset": where.place.offset, "length": where.place.length}
            for where in tree.locations(node)
        ]


def open_tree(home: Home, slot: str = "photos") -> Any:
    from accelfs.dataset import versions as dataset_versions
    from accelfs.service.node import Node

    node = Node.from_environment(home.environment)
    return dataset_versions.find(node.store, parse_slot(slot), None, node.trusted).open_tree()


def test_mixed_order_makes_any_stretch_a_sample_of_all_classes(cli: Cli, home: Home, tmp_path: Path) -> None:
    path = kinds(tmp_path / "source", "image", count=400)
    cli("pack", path, "photos", "--jobs", "1")
    files = sorted(path.rglob("*.JPG"), key=lambda file: int(stored_of(cli, file, path)[0]["offset"]))
    for start in range(0, 400, 100):
        assert len({file.parent for file in files[start : start + 100]}) == 10


def test_small_texts_share_a_dictionary(cli: Cli, home: Home, tmp_path: Path) -> None:
    path = tmp_path / "source"
    for number in range(1000):
        label = "yes" if number % 3 else "no"
        record = {"id": number, "title": f"A title like the others {number * 7919}", "label": label, "tags": ["a", "b"]}
        write(path / f"{number}.json", json.dumps(record, indent=2).encode())
    document = cli("pack", path, "photos", "--json").json
    assert document["plan"]["dictionary_bytes"] > 0
    (dictionary,) = (home.slot("photos") / "dictionaries").iterdir()
    assert dictionary.stat().st_size == document["plan"]["dictionary_bytes"]
    # Without one, zstd finds little to refer to within 150 bytes.
    assert document["totals"]["stored_bytes"] < 0.6 * document["totals"]["data_bytes"]
    assert_equal(path, home)
    assert unnamed(home) == []


# --- What is left out ----------------------------------------------------------------------------


def test_what_is_no_file_is_left_out_and_reported(cli: Cli, home: Home, source: Path) -> None:
    os.mkfifo(source / "folder0" / "fifo")
    os.mkfifo(os.fsencode(source) + b"/not UTF-8 \xff\n")
    os.mknod(source / "socket", stat.S_IFSOCK | 0o600)
    expected = {("fifo", "folder0/fifo"), ("fifo", "not UTF-8 \udcff\n"), ("socket", "socket")}
    if IS_ROOT:
        os.mknod(source / "folder1" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(source / "loop", stat.S_IFBLK | 0o600, os.makedev(7, 0))
        expected |= {("device", "folder1/null"), ("device", "loop")}

    document = cli("pack", source, "photos", "--json").json

    assert {(line["kind"], line["path"]) for line in report_lines(home, document)} == expected
    kinds = [kind for kind, _ in expected]
    assert document["reported"] == {kind: kinds.count(kind) for kind in set(kinds)}
    assert document["counts"]["skipped"] == len(expected)
    assert_equal(source, home)
    said = cli("pack", source, "photos").stdout.decode()
    assert all(f"not packed: {kinds.count(kind)} x {kind}" in said for kind in set(kinds))
    assert set(kinds) <= set(NEVER_PACKED)


def test_attributes_that_a_version_does_not_keep_are_counted(cli: Cli, home: Home, source: Path) -> None:
    supported = set_attributes(source / "folder0" / "file0.dat")
    document = cli("pack", source, "photos", "--json").json
    assert document["reported"] == dict.fromkeys(supported, 1)
    assert report_lines(home, document) == [{"kind": kind, "count": 1} for kind in supported]
    assert document["counts"]["skipped"] == 0


def test_attributes_of_folders_count_too(cli: Cli, source: Path) -> None:
    supported = set_attributes(source / "folder0")
    assert cli("pack", source, "photos", "--json").json["reported"] == dict.fromkeys(supported, 1)


def set_attributes(path: Path) -> list[str]:
    """Give a name one attribute of each kind that the file system takes; return the kinds."""
    supported = []
    # linux/posix_acl_xattr.h: version 2, then (tag, permissions, id): owner, user 1, group, mask, others.
    rows = [(1, 6, -1), (2, 4, 1), (4, 4, -1), (0x10, 4, -1), (0x20, 4, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in rows)
    # linux/capability.h: revision 2, no capability that this test would like to see used.
    capability = struct.pack("<I4I", 0x02000000, 0, 0, 0, 0)
    attributes = [("xattrs", "user.test", b"value"), ("acls", "system.posix_acl_access", acl)]
    if path.is_file():
        attributes.append(("capabilities", "security.capability", capability))
    for kind, name, value in attributes:
        with contextlib.suppress(OSError):
            os.setxattr(path, name, value)
            supported.append(kind)
    assert supported, "this file system has no attributes at all"
    return supported


# --- What cannot be read -------------------------------------------------------------------------


def test_unreadable_file_is_an_error_and_nothing_is_published(cli: Cli, home: Home, source: Path) -> None:
    write(source / "folder1" / "secret\n.dat", noise(100), mode=0)
    line = cli("pack", source, "photos", code=1, prefix=ORDINARY_USER).line
    assert r"folder1/secret\n.dat" in line
    assert "Permission denied" in line
    assert "nothing was published" in line
    assert "--skip-unreadable" in line
    assert_nothing_published(home)
    assert home.store.exists() is False


def test_unreadable_names_are_left_out_when_asked_for(cli: Cli, home: Home, source: Path) -> None:
    expected = packed(walk(source))
    write(source / "folder1" / "secret.dat", noise(100), mode=0)
    os.link(source / "folder1" / "secret.dat", source / "folder2" / "secret again.dat")
    os.link(source / "folder1" / "secret.dat", source / "0 secret again.dat")
    write(source / "closed" / "inside.dat", noise(100))
    (source / "closed").chmod(0)
    expected |= {b"closed": packed(walk(source))[b"closed"]}
    expected = {path: seen for path, seen in expected.items() if path != b"closed/inside.dat"}
    # The folders have changed: their times are those that the pack has met.
    expected |= {path: packed(walk(source))[path] for path in (b".", b"folder1", b"folder2")}

    document = cli("pack", source, "photos", "--skip-unreadable", "--json", prefix=ORDINARY_USER).json

    lines = report_lines(home, document)
    assert {line["path"] for line in lines} == {
        "folder1/secret.dat", "folder2/secret again.dat", "0 secret again.dat", "closed",
    }  # fmt: skip
    assert {line["kind"] for line in lines} == {"unreadable"}
    assert all(line["reason"] for line in lines)
    assert document["reported"] == {"unreadable": 4}
    assert differences(expected, slot_walk(home.environment, "photos")) == []
    assert unnamed(home) == []


def test_unreadable_folder_is_an_error_and_nothing_is_published(cli: Cli, home: Home, source: Path) -> None:
    (source / "folder1").chmod(0)
    line = cli("pack", source, "photos", code=1, prefix=ORDINARY_USER).line
    assert "folder1: Permission denied" in line
    assert_nothing_published(home)


def test_source_that_cannot_be_read_at_all(cli: Cli, home: Home, source: Path) -> None:
    source.chmod(0)
    for options in ([], ["--skip-unreadable"]):
        line = cli("pack", source, "photos", *options, code=1, prefix=ORDINARY_USER).line
        assert str(source) in line
    assert_nothing_published(home)


def test_version_of_nothing_is_never_published(cli: Cli, home: Home, tmp_path: Path) -> None:
    """An empty version would be an empty data set to whoever trains from it."""
    write(tmp_path / "source" / "secret", mode=0)
    line = cli("pack", tmp_path / "source", "photos", "--skip-unreadable", code=1, prefix=ORDINARY_USER).line
    assert "nothing" in line
    assert_nothing_published(home)


@pytest.mark.skipif(not IS_ROOT, reason="becoming another user needs root")
def test_another_user_packs_what_it_may_read_and_keeps_the_owners(home: Home, source: Path) -> None:
    """In a child of this process, since that user need not be able to start our interpreter."""
    pack_here(source, home)  # loads whatever a pack loads
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        theirs = Home(Path(folder, "home"), Path(folder, "mnt"))
        shutil.copytree(source, Path(folder, "source"), symlinks=True)
        write(Path(folder, "source", "folder1", "secret"), mode=0o600)
        theirs.path.mkdir()
        os.chown(theirs.path, NOBODY, NOBODY)

        def pack(skip_unreadable: bool) -> None:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            if skip_unreadable:
                pack_here(Path(folder, "source"), theirs, skip_unreadable=True)
                return
            with pytest.raises(SourceError, match="'folder1/secret': Permission denied"):
                pack_here(Path(folder, "source"), theirs)
            assert_nothing_published(theirs)

        for skip_unreadable in (False, True):
            assert deadly([skip_unreadable], pack) == []
        expected = packed(walk(Path(folder, "source")))
        del expected[b"folder1/secret"]
        assert differences(expected, slot_walk(theirs.environment, "photos")) == []
        assert {seen.uid for seen in expected.values()} == {0}
        assert unnamed(theirs) == []


# --- What changes on the way ---------------------------------------------------------------------


def pack_here(
    source: Path,
    home: Home,
    change: Callable[[], object] = lambda: None,
    *,
    after_folders: int = 1,
    skip_unreadable: bool = False,
    store: Store | None = None,
) -> build.Packed:
    """Pack in this process, and call `change` when so many folders have been listed and no file has been read."""
    listed = 0

    def observe(progress: build.Progress) -> None:
        nonlocal listed
        if progress.phase == "walk":
            listed += 1
            if listed == after_folders:
                change()

    done = build.pack(
        str(source), parse_slot("photos"), store or PosixStore(home.store), home.scratch("photos"),
        profile="raw", jobs=2, skip_unreadable=skip_unreadable, observe=observe,
    )  # fmt: skip
    assert listed >= after_folders, "the change was never made"
    return done


def with_a_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * MEBI)
        file.write(b"data")


REPLACED = {
    "grows": lambda path: path.write_bytes(noise(900)),
    "grows beyond a chunk": lambda path: path.write_bytes(noise(3 * MEBI)),
    "shrinks": lambda path: path.write_bytes(b"x"),
    "becomes empty": lambda path: path.write_bytes(b""),
    "becomes sparse": with_a_hole,
    "keeps its size": lambda path: path.write_bytes(noise(path.stat().st_size, 9)),
    "gets another mode": lambda path: path.chmod(0o600),
    "gets another time": lambda path: os.utime(path, ns=(0, -1)),
    "is replaced": lambda path: (path.rename(path.parent.parent / "moved"), path.write_bytes(b"another file")),
}


@pytest.mark.parametrize("size", [0, 100, 3 * MEBI], ids=["empty", "small", "large"])
@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED.keys())
def test_file_that_changed_since_the_walk_is_packed_as_it_is_now(
    home: Home, tmp_path: Path, change: Callable[[Path], object], size: int
) -> None:
    source = tmp_path / "source"
    path = write(source / "file", noise(size))
    write(source / "other", b"other")
    os.link(source / "other", source / "third")
    status = source.stat()

    def change_it() -> None:
        change(path)
        os.utime(source, ns=(0, status.st_mtime_ns))  # a folder's own attributes are those of the walk

    pack_here(source, home, change_it)
    assert_equal(source, home)


GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "vanishes": (lambda _: None, "No such file"),
    "becomes a FIFO": (os.mkfifo, "no longer a regular file"),
    "becomes a folder": (Path.mkdir, "no longer a regular file"),
    "becomes a symlink": (lambda path: path.symlink_to("other"), os.strerror(errno.ELOOP)),
}


@pytest.mark.parametrize(("change", "reason"), GONE.values(), ids=GONE.keys())
def test_file_that_vanished_since_the_walk_is_never_a_silent_hole(
    home: Home, source: Path, change: Callable[[Path], object], reason: str
) -> None:
    path = write(source / "file", b"data")
    os.link(path, source / "further name")
    write(source / "other", b"other")

    def change_it() -> None:
        path.unlink()
        change(path)

    with pytest.raises(SourceError) as caught:
        pack_here(source, home, change_it, after_folders=4)
    assert "'file': " in str(caught.value)
    assert reason in str(caught.value)
    assert "nothing was published" in str(caught.value)
    assert_nothing_published(home)

    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    (source / "further name").unlink()
    write(path, b"data")
    os.link(path, source / "further name")
    done = pack_here(source, home, change_it, after_folders=4, skip_unreadable=True)
    assert done.report_counts == {"unreadable": 2}
    found = slot_walk(home.environment, "photos")
    expected = packed(walk(source))
    for name in (b"file", b"further name"):
        assert name not in found
        expected.pop(name, None)
    expected.pop(b".")
    found.pop(b".")
    assert differences(expected, found) == []


def test_folder_that_vanished_is_never_a_silent_hole(home: Home, source: Path) -> None:
    with pytest.raises(SourceError, match="folder1: No such file"):
        pack_here(source, home, lambda: shutil.rmtree(source / "folder1"))
    assert_nothing_published(home)


def swap_for_a_link(folder: Path, outside: Path) -> None:
    folder.rename(folder.with_name("moved away"))
    folder.symlink_to(outside)


@pytest.mark.parametrize("after_folders", [1, 2, 3], ids=["folder listed", "subfolder listed", "files read"])
def test_nothing_outside_the_source_is_ever_read(home: Home, tmp_path: Path, after_folders: int) -> None:
    """Who may write the source must not be able to have a packer, which may be root, read other people's files."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    for root, data in ((source, b"inside"), (outside, b"other people's secret")):
        write(root / "folder" / "file", data)
        write(root / "folder" / "sub" / "file", data)
    with contextlib.suppress(SourceError):
        pack_here(
            source, home, lambda: swap_for_a_link(source / "folder", outside / "folder"), after_folders=after_folders,
            skip_unreadable=True,
        )  # fmt: skip
    shards = home.slot("photos") / "shards"
    leaked = [shard.name for shard in (shards.iterdir() if shards.exists() else ()) if b"secret" in shard.read_bytes()]
    assert leaked == []


@contextlib.contextmanager
def appending(path: Path) -> Iterator[None]:
    """A process that appends to the file as fast as it can, at most for as long as a test may take."""
    program = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\nprint(flush=True)\n" + (
        "for _ in range(1 << 26): os.write(fd, b'x')"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            yield
            assert writer.poll() is None, "the writer ended too early"
        finally:
            writer.kill()


def test_file_that_keeps_changing_is_an_error(cli: Cli, home: Home, source: Path) -> None:
    path = write(source / "log", noise(24 * MEBI))
    with appending(path):
        line = cli("pack", source, "photos", code=1).line
        assert "'log': kept changing while it was read" in line
        assert_nothing_published(home)
        document = cli("pack", source, "photos", "--skip-unreadable", "--json").json
    assert document["reported"] == {"unreadable": 1}
    expected = packed(walk(source))
    del expected[b"log"]
    assert differences(expected, slot_walk(home.environment, "photos")) == []


# --- Sources that cannot be packed ---------------------------------------------------------------


@pytest.fixture
def bad(tmp_path: Path, home: Home) -> Path:
    """A folder in which every bad source of the table lies."""
    write(tmp_path / "file")
    write(tmp_path / "folder" / "file")
    (tmp_path / "empty").mkdir()
    (tmp_path / "only a fifo").mkdir()
    os.mkfifo(tmp_path / "only a fifo" / "fifo")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    home.path.mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", 1, "missing: no such folder"),
        ("missing\nwith a newline", 1, "no such folder"),
        ("file", 2, "is not a folder"),
        ("file/below", 1, "Not a directory"),
        ("fifo", 2, "is not a folder"),
        ("empty", 1, "holds nothing that can be packed"),
        ("only a fifo", 1, "holds nothing that can be packed"),
        ("link", 2, "is a symbolic link"),
        ("link/", 2, "is a symbolic link"),
        ("dangling", 2, "is a symbolic link"),
        (".", 2, "holds accelfs' own folder"),
        ("home", 2, "holds accelfs' own folder"),
        ("", 2, "empty"),
        ("n" * 300, 1, "too long"),
        ("oss://bucket/prefix", 2, "oss://"),
        ("s3://bucket/prefix", 2, "s3://"),
        ("http://host/folder", 2, "http://"),
        ("file://host/folder", 2, "path of this machine"),
        ("file://[", 2, "file://["),
        ("file://", 2, "file://"),
        ("file://localhost", 2, "file://localhost"),
        ("file://{here}/fol%00der", 2, "%00"),
        ("file://{here}/missing", 1, "no such folder"),
        ("file://{here}/folder?query", 2, "?query"),
        ("file://{here}/folder#fragment", 2, "#fragment"),
        ("file://{here}/folder/file", 2, "is not a folder"),
    ],
)  # fmt: skip
def test_bad_source_is_one_line(cli: Cli, home: Home, bad: Path, name: str, code: int, words: str) -> None:
    line = cli("pack", name.format(here=bad), "photos", code=code, cwd=bad).line
    assert words in line
    assert_nothing_published(home)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--profile", "sound"], ["--jobs", "0"], ["--jobs", "many"], ["--no-such-option"], ["more"]],
    ids=" ".join,
)
def test_wrong_usage_gives_2(cli: Cli, bad: Path, arguments: list[str]) -> None:
    start = ["pack", "folder", "photos"] if arguments else ["pack", "folder"]
    finished = cli(*start, *arguments, code=2, cwd=bad)
    assert "Traceback" not in finished.stderr
    assert finished.stdout == b""


def test_home_that_cannot_be_written_is_one_line(cli: Cli, home: Home, source: Path) -> None:
    write(home.path)
    line = cli("pack", source, "photos", code=1).line
    assert str(home.path) in line
    assert "ACCELFS_HOME" in line


# --- Equal trees ---------------------------------------------------------------------------------


def test_equal_trees_have_equal_digests(cli: Cli, home: Home, tmp_path: Path) -> None:
    path = tmp_path / "source"
    for number in range(60):
        write(path / f"folder{number % 7}" / f"{number}.txt", text(number * 4000, number))
    write(path / "large", text(3 * MEBI) + noise(2 * MEBI))
    os.link(path / "large", path / "folder1" / "large")
    documents = [
        cli("pack", path, f"slot{jobs}-{profile}", "--jobs", str(jobs), "--profile", profile, "--json").json
        for jobs, profile in ((1, "auto"), (2, "auto"), (4, "image"), (3, "raw"), (2, "text"))
    ]
    assert {document["totals"]["shards"] for document in documents} >= {1, 2}, "several processes were at work"
    assert len({document["tree_digest"] for document in documents}) == 1
    assert len({document["source"]["fingerprint"] for document in documents}) == 1

    cli("extract", "slot1-auto", ".", tmp_path / "copy")
    copied = cli("pack", tmp_path / "copy", "copy", "--json").json
    assert copied["tree_digest"] == documents[0]["tree_digest"]
    os.utime(path / "folder3" / "3.txt", ns=(0, 1))
    changed = cli("pack", path, "changed", "--json").json
    assert changed["tree_digest"] != documents[0]["tree_digest"]
    assert changed["source"]["fingerprint"] != documents[0]["source"]["fingerprint"]


def test_packing_the_same_again_makes_an_equal_version(cli: Cli, home: Home, tmp_path: Path) -> None:
    path = kinds(tmp_path / "source", "noise", count=200)
    first, second = (cli("pack", path, "photos", "--json").json for _ in range(2))
    assert (first["version"], second["version"]) == (1, 2)
    same = ("tree_digest", "counts", "source", "report")
    assert {name: first[name] for name in same} == {name: second[name] for name in same}
    assert_equal(path, home, version=1)
    assert_equal(path, home, version=2)
    assert unnamed(home) == []


# --- No space ------------------------------------------------------------------------------------


def test_full_disk_is_named_and_the_next_pack_works(small_disk: Path, tmp_path: Path) -> None:
    home = Home(small_disk / "home", tmp_path / "mnt")
    cli = Cli(home)
    path = tmp_path / "source"
    for number in range(40):
        write(path / str(number), noise(200_000, number))

    finished = cli("pack", path, "photos", code=1)
    assert "no space left" in finished.line
    assert str(home.path) in finished.line
    assert "nothing was published" in finished.line
    assert_nothing_published(home)

    resize_disk(small_disk, 64)
    cli("pack", path, "photos")
    assert versions(home) == [1]
    assert_equal(path, home)
    assert unnamed(home) == []
    assert scratch_left(home) == []


def test_disk_that_is_full_at_any_byte_publishes_all_or_nothing(small_disk: Path, tmp_path: Path) -> None:
    """From no byte at all to enough: the walk, the shards, the catalog, the upload and the manifest each meet it."""
    home = Home(small_disk / "home", tmp_path / "mnt")
    cli = Cli(home)
    path = tmp_path / "source"
    for number in range(300):
        write(path / str(number), text(3000, number))
    filler = small_disk / "filler"
    refused = 0
    for free in (0, 4, 8, 12, 40, 80, 100, 150, 200, 230, 260, 300, 400, 2000):
        with filler.open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, 4 * MEBI - (free << 10) - used_bytes(small_disk))
        before = versions(home)
        finished = cli("pack", path, "photos", code=None)
        if finished.code == 1:
            refused += 1
            assert "no space left" in finished.line.lower()
            assert versions(home) == before
            assert [name for name in scratch_left(home) if name != "uploads.json"] == []
        else:
            assert finished.code == 0, finished.stderr
            assert versions(home) == [*before, len(before) + 1]
            assert_equal(path, home)
        filler.unlink()
        if versions(home):
            shutil.rmtree(home.store)
    assert 5 <= refused < 14
    cli("pack", path, "photos")
    assert unnamed(home) == []
    assert scratch_left(home) == []


def used_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


# --- Killed, interrupted, at once ----------------------------------------------------------------


class DeadlyStore:
    """A store that kills its process before or after one of its calls: step 2n is before call n, 2n + 1 after it."""

    def __init__(self, store: Store, step: int) -> None:
        self._store = store
        self._steps_left = step

    def _step(self) -> None:
        if self._steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._steps_left -= 1

    def _call(self, call: Callable[..., Any], *arguments: object) -> Any:
        self._step()
        done = call(*arguments)
        self._step()
        return done

    def list(self, prefix: str) -> list[str]:
        return cast("list[str]", self._call(self._store.list, prefix))

    def read(self, key: str, bytes_max: int) -> bytes:
        return cast("bytes", self._call(self._store.read, key, bytes_max))

    def upload(self, source: Path, key: str) -> None:
        self._call(self._store.upload, source, key)

    def create(self, key: str, data: bytes) -> bool:
        return cast("bool", self._call(self._store.create, key, data))

    def delete(self, key: str) -> None:
        self._call(self._store.delete, key)

    def local_path(self, key: str) -> Path:
        return self._store.local_path(key)


def die_at_each_step(home: Home, source: Path, run: Callable[[int], object]) -> int:
    """Kill a pack at step 0, 1 … until one gets through: each leaves nothing or a whole version, and the next pack
    takes back what is unnamed.  `run` packs in a child process.  Return how many steps there were."""
    pack_here(source, home)
    published = packed(walk(source))
    for step in itertools.count():
        # Another content each time, so that nothing left behind gets a name later.
        write(source / "file", noise(5000, step))
        before = versions(home)
        killed = deadly([step], run)
        after = versions(home)
        assert after in (before, [*before, len(before) + 1])
        published = published if after == before else packed(walk(source))
        assert differences(published, slot_walk(home.environment, "photos")) == [], f"step {step}"

        write(source / "file", noise(5000, -step - 1))
        wait_until(lambda: not home_is_locked(home), "the workers of the killed pack to end", STOP_SECONDS_MAX)
        pack_here(source, home)
        published = packed(walk(source))
        assert versions(home) == [*after, len(after) + 1]
        assert unnamed(home) == [], f"step {step}"
        assert scratch_left(home) == [], f"step {step}"
        if not killed:
            break
    assert_equal(source, home)
    return step


def test_pack_that_is_killed_around_any_call_of_the_store(home: Home, source: Path) -> None:
    def run(step: int) -> None:
        pack_here(source, home, store=DeadlyStore(PosixStore(home.store), step))

    assert die_at_each_step(home, source, run) >= 12, "the objects, the manifest and the looks at what is there"


@pytest.mark.parametrize("across", [False, True], ids=["one file system", "two file systems"])
def test_pack_that_is_killed_before_anything_gets_its_name(home: Home, source: Path, across: bool) -> None:
    """Whatever is being written into the store then has a name that is no object's, and must not stay for ever."""
    link = os.link

    def run(step: int) -> None:
        links = itertools.count()

        def deadly_link(*arguments: Any, **keywords: Any) -> None:
            if next(links) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            link(*arguments, **keywords)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "link", deadly_link)
            pack_here(source, home)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if across:
            home.path.mkdir()
            home.store.symlink_to(elsewhere)
        assert die_at_each_step(home, source, run) >= 4, "a shard, the catalog, the report and the manifest"


def home_is_locked(home: Home) -> bool:
    with (home.scratch("photos") / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def busy_source(tmp_path: Path) -> Path:
    """Half a second of work for two processes: several shards, large files, a dictionary."""
    path = tmp_path / "busy"
    for number in range(1200):
        write(path / f"folder{number % 40}" / f"{number}.txt", text(4000, number))
    for number in range(6):
        write(path / "large" / str(number), noise(4 * MEBI, number))
    return path


@pytest.mark.parametrize("kills", [15, pytest.param(400, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_killed_pack_publishes_all_or_nothing_and_the_next_cleans_up(
    cli: Cli, home: Home, busy_source: Path, kills: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)
    started = time.monotonic()
    cli("pack", busy_source, "photos")
    seconds = time.monotonic() - started
    published = packed(walk(busy_source))
    for kill in range(kills):
        write(busy_source / "file", noise(1000, kill))
        before = versions(home)
        delay = source.uniform(0.25, 1.05) * seconds
        number = source.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        whole_group = source.random() < 0.5
        print(f"{number.name} after {delay:.3f} s, whole group: {whole_group}")
        running = cli.start("pack", busy_source, "photos")
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(delay)
        if whole_group:
            running.signal_group(number)
        else:
            running.process.send_signal(number)
        running.process.wait(SECONDS_MAX)

        after = versions(home)
        assert after in (before, [*before, len(before) + 1])
        published = published if after == before else packed(walk(busy_source))
        assert differences(published, slot_walk(home.environment, "photos")) == []
        # The workers of a killed packer end within moments; until then the slot is theirs.
        retry(lambda: cli("pack", busy_source, "photos", code=None))
        published = packed(walk(busy_source))
        assert versions(home) == [*after, len(after) + 1]
        assert unnamed(home) == []
        assert scratch_left(home) == []
    assert differences(published, slot_walk(home.environment, "photos")) == []


def retry(run: Callable[[], Finished], seconds_max: float = STOP_SECONDS_MAX) -> None:
    """As a script does that is told 75: again, but not for ever."""
    deadline = time.monotonic() + seconds_max
    while (finished := run()).code == 75:
        assert time.monotonic() < deadline, finished.stderr
    assert finished.code == 0, finished.stderr


def test_workers_end_with_their_packer(cli: Cli, home: Home, endless: Path) -> None:
    running = cli.start("pack", endless, "photos")
    workers = workers_of(running)
    running.process.kill()
    running.process.wait(SECONDS_MAX)
    wait_until(lambda: not set(workers) & home.processes(), "the workers of a killed packer to end", STOP_SECONDS_MAX)


@pytest.mark.parametrize("whole_group", [True, False])
def test_interrupted_pack_publishes_nothing(cli: Cli, home: Home, endless: Path, whole_group: bool) -> None:
    running = cli.start("pack", endless, "photos")
    workers_of(running)
    if whole_group:
        running.signal_group(signal.SIGINT)
    else:
        running.process.send_signal(signal.SIGINT)
    finished = running.finish(STOP_SECONDS_MAX)
    assert finished.code == 130
    assert finished.line == "interrupted; nothing was published"
    assert_nothing_published(home)
    assert home.processes() == set()


def test_interrupt_during_the_walk_publishes_nothing(cli: Cli, home: Home, tmp_path: Path) -> None:
    for number in range(300):
        write(tmp_path / "source" / str(number % 50) / str(number))
    running = cli.start("pack", tmp_path / "source", "photos")
    wait_until(lambda: (home.scratch("photos") / "work").exists() or running.ended(), "the pack's work folder")
    running.signal_group(signal.SIGINT)
    finished = running.finish()
    assert finished.code == 130
    assert finished.line == "interrupted; nothing was published"
    assert_nothing_published(home)


INTERRUPTED_STORE = """
import os, signal, sys
from accelfs.cli.app import main
from accelfs.store.posix import PosixStore

create = PosixStore.create

def interrupted(self, key, data):
    done = create(self, key, data)
    os.kill(os.getpid(), signal.SIGINT)
    return done

PosixStore.create = interrupted
main()
"""


def test_interrupt_right_after_publication_does_not_deny_it(home: Home, source: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_STORE, "pack", source, "photos"],
        env=home.environment, capture_output=True, text=True, timeout=SECONDS_MAX,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert versions(home) == [1]
    assert "nothing was published" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 130)
    assert_equal(source, home)


def test_killed_worker_is_an_error_and_nothing_is_published(cli: Cli, home: Home, endless: Path) -> None:
    running = cli.start("pack", endless, "photos")
    os.kill(workers_of(running)[0], signal.SIGKILL)
    finished = running.finish(STOP_SECONDS_MAX)
    assert finished.code == 1
    assert "nothing was published" in finished.line
    assert "-9" in finished.line
    assert_nothing_published(home)
    assert home.processes() == set()


def test_second_pack_of_a_slot_is_told_to_come_later(cli: Cli, home: Home, endless: Path, source: Path) -> None:
    running = cli.start("pack", endless, "photos")
    workers_of(running)
    line = cli("pack", source, "photos", code=75).line
    assert "another pack" in line
    # Another slot is nobody's business, and neither is the same name in another instance.
    cli("pack", source, "others")
    cli("pack", source, "team/photos")
    assert not running.ended()
    running.signal_group(signal.SIGINT)
    assert running.finish(STOP_SECONDS_MAX).code == 130
    cli("pack", source, "photos")
    assert versions(home) == [1]


def test_many_packs_of_a_slot_at_once_are_in_order(cli: Cli, home: Home, source: Path) -> None:
    running = [cli.start("pack", source, "photos", "--json") for _ in range(6)]
    finished = [one.finish() for one in running]
    assert {one.code for one in finished} <= {0, 75}
    numbers = sorted(one.json["version"] for one in finished if one.code == 0)
    assert numbers
    assert numbers == versions(home) == list(range(1, len(numbers) + 1))
    assert unnamed(home) == []
    assert_equal(source, home)


# --- Memory --------------------------------------------------------------------------------------


def many_files(path: Path, count: int, files_per_folder: int) -> None:
    for number in range(count):
        folder = path / f"folder{number // files_per_folder:05}"
        if number % files_per_folder == 0:
            folder.mkdir(parents=True)
        with open(f"{folder}/image_{number:08}.jpg", "wb") as file:
            file.write(b"%d" % number)


def peak_bytes(running: Running) -> int:
    """The most memory that the pack and its workers held, each at its own worst moment, added up."""
    peaks: dict[int, int] = {}
    while True:
        for pid in (running.pid, *running.children()):
            with contextlib.suppress(OSError, StopIteration):
                rows = Path(f"/proc/{pid}/status").read_text().splitlines()
                row = next(row for row in rows if row.startswith("VmHWM:"))
                peaks[pid] = int(row.split()[1]) << 10
        try:
            running.process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
        return sum(peaks.values())


def test_memory_hardly_grows_with_the_number_of_files(cli: Cli, tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 50_000):
        many_files(tmp_path / str(count), count, 5_000)
        running = cli.start("pack", tmp_path / str(count), f"slot{count}")
        peaks.append(peak_bytes(running))
        assert running.finish().code == 0
    # What remains of 400 MB for a million files when the processes themselves are subtracted, for 50,000 of them.
    allowed = (400 * 10**6 - peaks[0]) * 48_000 // 10**6
    assert peaks[1] - peaks[0] <= allowed


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files_per_folder", [1_000, 1_000_000])
def test_a_million_files_are_packed_in_400_megabytes(cli: Cli, home: Home, files_per_folder: int) -> None:
    folder = tempfile.mkdtemp()
    try:
        many_files(Path(folder, "source"), 10**6, files_per_folder)
        running = cli.start("pack", Path(folder, "source"), "photos", "--json")
        peak = peak_bytes(running)
        document = running.finish(1800).json
    finally:
        # It sorts by inode, which on a disk is minutes faster than the order of the names.
        subprocess.run(["rm", "-rf", folder], check=True)
    print(f"peak {peak} bytes in {document['seconds']} s")
    assert document["counts"]["files"] == 10**6
    assert peak <= 400 * 10**6
