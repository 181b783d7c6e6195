"""Is a mounted slot its source, to every program that reads it, and do the commands keep their word?

First what a mount shows: compared with its source by programs that everybody trusts, by a walk of our own, and call by
call, with both engines.  Then what every write meets, who may read, and the commands `mount`, `umount` and `status`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mounts
import pytest
import trees
from conftest import ROOT, SECONDS_MAX, wait_until
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mounts import NOBODY, SOAK_SECONDS, Holder, Node, in_child, only_line, run, run_any, soak

ENGINES = ["fast", "pyfuse3"]
MANY = 10_000
CHUNK = 1 << 20
DRAIN_SECONDS = 5.0
# What an ending of five seconds may take on a busy machine.
DRAINED_SECONDS = DRAIN_SECONDS + 10.0
LARGEST_BYTES = 5 << 30

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user or make namespaces")


# --- The harness itself --------------------------------------------------------------------------


def test_a_missing_device_is_a_failure_in_ci_and_a_skip_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Path("/no/such/device")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="nothing can be mounted"):
        mounts.require_fuse(missing)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="nothing can be mounted"):
        mounts.require_fuse(missing)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-01 00:00:00,000 WARNING 1 accelfs.x: trouble\n",
        "2026-01-01 00:00:00,000 ERROR 1 accelfs.x: trouble\n",
        "2026-01-01 00:00:00,000 INFO 1 accelfs.x: well\nTraceback (most recent call last):\n",
        "Fatal Python error: Segmentation fault\n",
    ],
)
def test_what_a_daemon_logs_fails_a_test_unless_it_was_declared(tmp_path: Path, text: str) -> None:
    node = Node(tmp_path)
    node.log_folder.mkdir(parents=True)
    log = node.log_folder / "default+photos.log"
    quiet = "2026-01-01 00:00:00,000 INFO 1 accelfs.x: all is well\n"
    log.write_text(quiet)
    node.check_log()
    log.write_text(quiet + text)
    with pytest.raises(AssertionError, match="unexpected in a daemon's log"):
        node.check_log()
    log.write_text(quiet + text + text)
    node.expect_log("trouble|Traceback|Fatal", count=1)
    node.check_log()
    node.expect_log("trouble")
    with pytest.raises(AssertionError, match="0 records"):
        node.check_log()


def test_a_child_that_fails_fails_its_test() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        mounts.call(lambda: 1 // 0)
    with pytest.raises(AssertionError, match="no answer within"):
        mounts.call(signal.pause, seconds=0.1)


# --- What a mount shows: the trees ---------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A source and the mount that must equal it."""

    node: Node
    source: Path
    path: Path


@pytest.fixture(scope="module")
def readers() -> Iterator[Node]:
    """The node of the tests that only read: each source is packed once and mounted with both engines."""
    with mounts.node() as node:
        yield node


def _pair(node: Node, name: str, engine: str, make: Callable[[Path], None]) -> Pair:
    source = node.folder / name
    if not source.exists():
        make(source)
    slot = f"{name}-{engine}"
    node.pack(source, slot)
    return Pair(node, source, node.mount(slot, "--engine", engine))


@pytest.fixture(scope="module", params=ENGINES)
def hostile_pair(readers: Node, request: pytest.FixtureRequest) -> Pair:
    return _pair(readers, "hostile", request.param, _make_hostile)


@pytest.fixture(scope="module", params=ENGINES)
def files_pair(readers: Node, request: pytest.FixtureRequest) -> Pair:
    return _pair(readers, "files", request.param, _make_files)


@pytest.fixture(scope="module", params=ENGINES)
def many_pair(readers: Node, request: pytest.FixtureRequest) -> Pair:
    return _pair(readers, "many", request.param, _make_many)


@pytest.fixture
def hostile(hostile_pair: Pair) -> Iterator[Pair]:
    """A tree with everything that a file system allows, as far as it is packed."""
    yield hostile_pair
    hostile_pair.node.check_log()


@pytest.fixture
def files(files_pair: Pair) -> Iterator[Pair]:
    """Files of all sizes, dense and with holes, raw and compressed, of several owners and modes."""
    yield files_pair
    files_pair.node.check_log()


@pytest.fixture
def many(many_pair: Pair) -> Iterator[Pair]:
    """One folder of MANY names."""
    yield many_pair
    many_pair.node.check_log()


def _make_hostile(source: Path) -> None:
    trees.hostile_tree(source, largest_bytes=64 << 20)
    drop_what_is_never_packed(source)


def drop_what_is_never_packed(source: Path) -> None:
    """FIFOs, sockets and devices: afterwards the mount has to equal the source to the last bit."""
    for path, seen in trees.walk(source).items():
        if seen.type in trees.NEVER_PACKED:
            folder = os.path.dirname(os.path.join(os.fsencode(source), path))
            before = os.stat(folder)
            os.unlink(os.path.join(os.fsencode(source), path))
            os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


SIZES = [
    0,
    1,
    100,
    511,
    512,
    4095,
    4096,
    4097,
    16384,
    16385,
    131071,
    131073,
    CHUNK - 1,
    CHUNK,
    CHUNK + 1,
    3 * CHUNK + 7,
]
HOLES = {
    "front": (300_000, [200_000]),
    "behind": (5 * CHUNK + 17, [0]),
    "between": (9 * CHUNK, [0, 4 * CHUNK - 3, 8 * CHUNK]),
    "only": (2 * CHUNK, []),
}


def _make_files(source: Path) -> None:
    source.mkdir()
    for size in SIZES:
        (source / f"random-{size}").write_bytes(random.Random(size).randbytes(size))
        (source / f"text-{size}").write_bytes((b"the same words again, and again\n" * (size // 32 + 1))[:size])
    for name, (size, places) in HOLES.items():
        with (source / f"hole-{name}").open("wb") as file:
            file.truncate(size)
            for place in places:
                file.seek(place)
                file.write(b"some data")
    folder = source / "folder"
    folder.mkdir()
    (folder / "inside").write_bytes(b"inside")
    (folder / "empty").mkdir()
    (source / "symlink").symlink_to("folder/inside")
    os.link(folder / "inside", source / "hard link")
    (source / "absolute").symlink_to("/etc/hostname")
    if os.geteuid() == 0:
        _make_owned(source / "owned")


def _make_owned(folder: Path) -> None:
    """Names that another user may read, and names that he may not, by every rule of mode bits."""
    folder.mkdir()
    for mode in (0o000, 0o400, 0o040, 0o004, 0o444, 0o600, 0o750, 0o111):
        for owner, group in ((0, 0), (NOBODY, 0), (0, NOBODY), (NOBODY, NOBODY)):
            name = f"{mode:04o}-{owner}-{group}"
            (folder / name).write_text("secret")
            os.chown(folder / name, owner, group)
            (folder / name).chmod(mode)
            below = folder / f"folder-{name}"
            below.mkdir()
            (below / "inside").write_text("secret")
            os.chown(below, owner, group)
            below.chmod(mode)


def _make_many(source: Path) -> None:
    source.mkdir()
    for number in range(MANY):
        os.close(os.open(source / f"{number * 7919 % MANY:05}-{'x' * (number % 40)}", os.O_CREAT | os.O_WRONLY, 0o644))


# --- Equality, as programs see it ----------------------------------------------------------------

TOO_DEEP = "deep"
"""Below it paths are longer than PATH_MAX: some programs cannot look there, the walk below can."""


def test_diff_finds_no_difference(hostile: Pair) -> None:
    assert run("diff", "-r", "--no-dereference", f"--exclude={TOO_DEEP}", hostile.source, hostile.path) == b""


def test_rsync_finds_nothing_to_do_either_way(hostile: Pair) -> None:
    """Names, types, sizes, bytes, modes, times, owners and hard links."""
    command = ["rsync", "-rltpogncHi", f"--exclude=/{TOO_DEEP}/"]
    assert run(*command, f"{hostile.source}/", f"{hostile.path}/") == b""
    assert run(*command, "--delete", f"{hostile.path}/", f"{hostile.source}/") == b""


def test_tar_makes_the_same_archive(hostile: Pair) -> None:
    assert _tar_digest(hostile.path) == _tar_digest(hostile.source)


def _tar_digest(folder: Path) -> str:
    command = ["tar", "--sort=name", "--format=posix", "--pax-option=delete=atime,delete=ctime", "-cf", "-", "."]
    # An archive of the tree is too large to be kept in memory.
    with tempfile.TemporaryFile() as archive:
        process = subprocess.run(
            command, cwd=folder, stdout=archive, stderr=subprocess.PIPE, timeout=SECONDS_MAX, check=False
        )
        assert (process.returncode, process.stderr) == (0, b"")
        archive.seek(0)
        digest = hashlib.sha256()
        while piece := archive.read(CHUNK):
            digest.update(piece)
        return digest.hexdigest()


def test_du_counts_the_same_bytes(hostile: Pair) -> None:
    def counted(folder: Path) -> list[bytes]:
        # With --count-links: else a file counts where its first name is found, and the order of folders decides.
        return sorted(run("du", "-b", "-a", "-l", "-0", ".", cwd=folder).split(b"\0"))

    assert counted(hostile.path) == counted(hostile.source)
    assert run("du", "-b", "-s", ".", cwd=hostile.path) == run("du", "-b", "-s", ".", cwd=hostile.source)


def test_find_shows_the_same_attributes(hostile: Pair) -> None:
    def found(folder: Path) -> list[bytes]:
        form = r"%P|%y|%m|%s|%T@|%n|%U|%G|%l\0"
        return sorted(run("find", ".", "-printf", form, cwd=folder).split(b"\0"))

    shown = found(hostile.path)
    assert shown == found(hostile.source)
    assert len(shown) > 400


def test_ls_shows_the_same_lines(hostile: Pair) -> None:
    def listed(folder: Path) -> list[bytes]:
        folders = [name for name in sorted(os.listdir(hostile.source)) if name != TOO_DEEP]
        lines = run("ls", "-laRn", "--time-style=full-iso", *folders, cwd=folder).split(b"\n")
        # Blocks are counted in another way than ext4 does.
        return [line for line in lines if not line.startswith(b"total ")]

    assert listed(hostile.path) == listed(hostile.source)


def test_readers_in_the_c_locale_get_the_bytes_of_every_name(hostile: Pair) -> None:
    """A name of any bytes goes through Python's strings and back."""
    code = "import os, sys; print(*(os.fsencode(name).hex() for name in sorted(os.listdir(sys.argv[1]))))"
    environment = {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    shown = run(sys.executable, "-c", code, hostile.path / "names", env=environment).split()
    assert [bytes.fromhex(name.decode()) for name in shown] == sorted(os.listdir(os.fsencode(hostile.source / "names")))


def test_git_finds_its_repository_whole(readers: Node) -> None:
    source = readers.folder / "repository"
    source.mkdir()
    environment = {
        "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip
    git = functools.partial(run, "git", "-C")
    git(source, "init", "--quiet", env=environment)
    for number in range(30):
        (source / f"file-{number % 7}").write_text(f"line {number}\n" * number)
        git(source, "add", ".", env=environment)
        git(source, "commit", "--quiet", "--message", f"change {number}", env=environment)
        if number == 20:
            git(source, "gc", "--quiet", env=environment)
    readers.pack(source, "repository")
    path = readers.mount("repository")
    assert git(path, "fsck", "--full", "--strict", "--no-progress", env=environment) == b""
    assert git(path, "log", "--patch", env=environment) == git(source, "log", "--patch", env=environment)
    readers.umount("repository")


# --- Equality, by our own walk -------------------------------------------------------------------


def differences(source: Path, path: Path) -> list[str]:
    expected = trees.packed(trees.walk(source))
    return mounts.call(lambda: trees.differences(expected, _walk(path)))


def _walk(path: Path) -> trees.Walk:
    """A mount need not tell where holes are (`test_holes_are_told_truly`); its blocks tell that there are some."""
    return {
        name: replace(seen, is_sparse=seen.type == "file" and seen.blocks * trees.BLOCK < seen.size)
        for name, seen in trees.walk(path).items()
    }


def test_hostile_tree_is_what_its_source_is(readers: Node) -> None:
    """With FIFOs and devices in the source, paths beyond PATH_MAX and a sparse file of 5 GB."""
    source = readers.folder / "most-hostile"
    trees.hostile_tree(source, largest_bytes=LARGEST_BYTES)
    readers.pack(source, "most-hostile")
    path = readers.mount("most-hostile")
    assert differences(source, path) == []
    bottom = b"/".join([b"deep", *[trees.DEEP_NAME] * trees.DEEP_LEVELS, b"bottom"])
    assert bottom in mounts.call(lambda: trees.walk(path))
    readers.umount("most-hostile")


def test_sparse_file_of_5_gb_has_its_bytes_at_their_places(readers: Node) -> None:
    source = readers.folder / "largest"
    source.mkdir()
    places = [0, 2**31 - 5, 2**32 - 5, 2**32 + CHUNK - 3, LARGEST_BYTES - 11]
    with (source / "file").open("wb") as file:
        file.truncate(LARGEST_BYTES)
        for place in places:
            file.seek(place)
            file.write(b"0123456789")
    readers.pack(source, "largest")
    path = readers.mount("largest")

    @in_child
    def check() -> None:
        with (source / "file").open("rb") as right, (path / "file").open("rb", buffering=0) as shown:
            assert os.fstat(shown.fileno()).st_size == LARGEST_BYTES
            assert 0 < os.fstat(shown.fileno()).st_blocks <= os.fstat(right.fileno()).st_blocks
            for place in [*places, 2**32, LARGEST_BYTES // 2, LARGEST_BYTES - 1, LARGEST_BYTES]:
                for offset in (max(0, place - 4096), max(0, place - 1), place):
                    expected = os.pread(right.fileno(), 300_000, offset)
                    assert _pread(shown.fileno(), 300_000, offset) == expected, offset

    check()
    readers.umount("largest")


@soak
@pytest.mark.parametrize("engine", ENGINES)
def test_diff_reads_a_sparse_file_of_5_gb(readers: Node, engine: str) -> None:
    source = readers.folder / f"soaked-{engine}"
    trees.hostile_tree(source, largest_bytes=LARGEST_BYTES)
    drop_what_is_never_packed(source)
    readers.pack(source, "soaked")
    path = readers.mount("soaked", "--engine", engine)
    command = ["diff", "-r", "--no-dereference", f"--exclude={TOO_DEEP}", str(source), str(path)]
    assert subprocess.run(command, capture_output=True, timeout=SOAK_SECONDS, check=True).stdout == b""
    assert differences(source, path) == []
    readers.umount("soaked")


_forests = st.lists(trees.trees(), min_size=1, max_size=10)
# A mount is too slow to make a failing forest small, or to try again what failed once; the trees are small by
# themselves, and what reproduces a failure is printed.
_no_shrinking = settings(
    max_examples=6, phases=[Phase.explicit, Phase.generate], database=None, report_multiple_bugs=False
)


@_no_shrinking
@given(forest=_forests, engine=st.sampled_from(ENGINES))
def test_any_trees_are_what_their_sources_are(readers: Node, forest: list[trees.Folder], engine: str) -> None:
    _compare_forest(readers, forest, engine)


@soak
@settings(_no_shrinking, max_examples=100)
@given(forest=_forests, engine=st.sampled_from(ENGINES))
def test_many_trees_are_what_their_sources_are(readers: Node, forest: list[trees.Folder], engine: str) -> None:
    _compare_forest(readers, forest, engine)


def _compare_forest(node: Node, forest: list[trees.Folder], engine: str) -> None:
    source = node.folder / "forest"
    source.mkdir()
    try:
        for number, tree in enumerate(forest):
            trees.make(tree, source / str(number))
        node.pack(source, "forest")
        path = node.mount("forest", "--engine", engine)
        try:
            assert differences(source, path) == []
        finally:
            node.umount("forest")
    finally:
        shutil.rmtree(source)


# --- Attributes ----------------------------------------------------------------------------------


@in_child
def test_blocks_are_those_of_the_size_and_those_of_the_source_where_there_are_holes(files: Pair) -> None:
    for name in sorted(os.listdir(files.source)):
        right, shown = os.lstat(files.source / name), os.lstat(files.path / name)
        if not stat.S_ISREG(right.st_mode):
            continue
        expected = -(-right.st_size // 512)
        if name.startswith("hole-"):
            expected = max(1, right.st_blocks)
            assert expected * 512 < right.st_size, "the source's file system makes no holes"
        assert shown.st_blocks == expected, name


@in_child
def test_links_and_types_of_every_name_are_as_lstat_tells(hostile: Pair) -> None:
    """d_ino and d_type of every folder, `.` and `..` included, and one inode for the names of one file."""
    root = os.stat(hostile.path)
    names: Counter[int] = Counter()
    links: dict[int, int] = {}
    folder = os.open(hostile.path, os.O_RDONLY | os.O_DIRECTORY)
    pending = [(folder, root.st_ino)]
    while pending:
        folder, parent = pending.pop()
        for dent in mounts.all_dents(folder):
            status = os.stat(dent.name, dir_fd=folder, follow_symlinks=False)
            assert dent.type == stat.S_IFMT(status.st_mode) >> 12, dent
            if dent.name == b"..":
                assert dent.ino == parent, dent
                continue
            assert dent.ino == status.st_ino, dent
            if dent.name == b".":
                continue
            names[status.st_ino] += 1
            if stat.S_ISDIR(status.st_mode):
                below = os.open(dent.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
                pending.append((below, os.fstat(folder).st_ino))
            else:
                links[status.st_ino] = status.st_nlink
        os.close(folder)
    assert {ino: names[ino] for ino in links} == links
    assert max(links.values()) >= 3


@in_child
def test_links_of_a_folder_are_two_and_its_subfolders(hostile: Pair) -> None:
    count = 0
    for folder, below, _ in os.walk(hostile.path):
        if os.path.relpath(folder, hostile.path).partition("/")[0] == TOO_DEEP:
            continue
        subfolders = [name for name in below if not os.path.islink(os.path.join(folder, name))]
        assert os.lstat(folder).st_nlink == 2 + len(subfolders), folder
        count += 1
    assert count > 20


@in_child
def test_statfs_tells_the_size_of_the_dataset(files: Pair) -> None:
    nodes = {}
    names = 1
    for folder, folders, below in os.walk(files.path):
        names += len(folders) + len(below)
        for name in below:
            status = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(status.st_mode):
                nodes[status.st_ino] = status.st_blocks
    found = os.statvfs(files.path)
    assert found.f_blocks * found.f_frsize == sum(nodes.values()) * 512
    assert found.f_files == names
    assert (found.f_bfree, found.f_bavail, found.f_ffree, found.f_favail) == (0, 0, 0, 0)
    assert found.f_namemax == 255
    assert found.f_flag & os.ST_RDONLY
    # The same from wherever one asks.
    inside = os.statvfs(files.path / "folder" / "inside")
    assert (inside.f_blocks, inside.f_files, inside.f_fsid) == (found.f_blocks, found.f_files, found.f_fsid)


def test_df_reads_it(files: Pair) -> None:
    assert b"100%" in run("df", files.path)


@in_child
def test_inode_numbers_are_the_same_whatever_way_one_comes(files: Pair) -> None:
    by_name = os.stat(files.path / "hard link")
    with (files.path / "folder" / "inside").open("rb") as file:
        assert os.fstat(file.fileno()).st_ino == by_name.st_ino
    assert os.stat(files.path / "symlink").st_ino == by_name.st_ino
    assert os.stat(files.path / "folder" / "..").st_ino == os.stat(files.path).st_ino
    assert by_name.st_nlink == 2


# --- Folders -------------------------------------------------------------------------------------


def test_ls_shows_dot_and_dot_dot_first(files: Pair) -> None:
    assert run("ls", "-a", files.path).split(b"\n")[:2] == [b".", b".."]
    assert run("ls", "-a", files.path / "folder" / "empty") == b".\n..\n"


@in_child
def test_listing_gives_each_name_once_whatever_the_room(many: Pair) -> None:
    expected = sorted([b".", b"..", *map(os.fsencode, os.listdir(many.source))])
    for room in (280, 1000, 4096, 32768, 1 << 20):
        folder = os.open(many.path, os.O_RDONLY)
        names = [dent.name for dent in mounts.all_dents(folder, room)]
        os.close(folder)
        assert len(names) == len(set(names))
        assert sorted(names) == expected
        assert names[:2] == [b".", b".."]


@in_child
def test_positions_in_a_folder_are_stable_and_can_be_sought(many: Pair) -> None:
    folder = os.open(many.path, os.O_RDONLY)
    dents = mounts.all_dents(folder)
    assert len({dent.offset for dent in dents}) == len(dents)
    chosen = [*random.Random(1).sample(range(len(dents) - 1), 60), 0, 1, 2, len(dents) - 2]
    for index in chosen:
        os.lseek(folder, dents[index].offset, os.SEEK_SET)
        assert mounts.getdents(folder, 280)[0] == dents[index + 1]
    os.lseek(folder, dents[-1].offset, os.SEEK_SET)
    assert mounts.getdents(folder) == []
    os.lseek(folder, 0, os.SEEK_SET)
    assert mounts.all_dents(folder, 1000) == dents
    # Another opening of the folder has the same positions.
    again = os.open(many.path, os.O_RDONLY)
    os.lseek(again, dents[5000].offset, os.SEEK_SET)
    assert mounts.getdents(again, 280)[0] == dents[5001]


@in_child
def test_telldir_and_seekdir_come_back_to_the_same_name(many: Pair) -> None:
    libc = mounts.libc
    libc.opendir.restype = libc.readdir64.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    stream = ctypes.c_void_p(libc.opendir(os.fsencode(many.path)))
    assert stream.value

    def following() -> bytes:
        # struct dirent: d_ino, d_off, d_reclen, d_type, d_name
        entry = libc.readdir64(stream)
        return ctypes.string_at(entry + 19) if entry else b""

    places = []
    for number in range(2 * MANY):
        place = libc.telldir(stream)
        name = following()
        if number % 997 == 0 or not name:
            places.append((place, name))
        if not name:
            break
    assert len(places) > 10
    assert places[-1][1] == b""
    for place, name in random.Random(2).sample(places, len(places)):
        libc.seekdir(stream, ctypes.c_long(place))
        assert following() == name
    libc.rewinddir(stream)
    assert following() == b"."
    libc.closedir(stream)


@in_child
def test_threads_list_a_large_folder_at_once(many: Pair) -> None:
    expected = sorted([b".", b"..", *map(os.fsencode, os.listdir(many.source))])
    own: list[list[bytes]] = []
    shared: list[bytes] = []
    folder = os.open(many.path, os.O_RDONLY)

    def list_by_oneself() -> None:
        mine = os.open(many.path, os.O_RDONLY)
        own.append(sorted(dent.name for dent in mounts.all_dents(mine, 4096)))
        os.close(mine)

    def list_together() -> None:
        shared.extend(dent.name for dent in mounts.all_dents(folder, 1000))

    for target, count in ((list_by_oneself, 6), (list_together, 4)):
        threads = [threading.Thread(target=target) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert own == [expected] * 6
    assert sorted(shared) == expected


@in_child
def test_a_name_that_is_none_is_enoent_each_time(files: Pair) -> None:
    for name in ("missing", "folder/missing", "RANDOM-0", "random-0 ", "\udcff", "m" * 255):
        for _ in range(2):
            assert not os.path.lexists(files.path / name)
    # Longer than any name; newer kernels ask the server for it.
    with pytest.raises(OSError, match=rf"Errno ({errno.ENOENT}|{errno.ENAMETOOLONG})\b"):
        os.lstat(files.path / ("m" * 256))
    for name in ("random-0/x", "symlink/x"):
        with pytest.raises(NotADirectoryError):
            os.lstat(files.path / name)
    with pytest.raises(IsADirectoryError):
        os.read(os.open(files.path / "folder", os.O_RDONLY), 1)
    with pytest.raises(OSError, match=rf"Errno {errno.EINVAL}\b"):
        os.readlink(files.path / "random-0")


# --- Bytes ---------------------------------------------------------------------------------------


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(descriptor, size, offset)):
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def _regular(pair: Pair) -> list[tuple[Path, bytes]]:
    """(path in the mount, right bytes) of every file of the top folder."""
    names = [path for path in sorted(pair.source.iterdir()) if path.is_file() and not path.is_symlink()]
    return [(pair.path / path.name, path.read_bytes()) for path in names]


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["cached", "direct"])
@in_child
def test_reads_at_every_kind_of_offset_and_size(files: Pair, flags: int) -> None:
    chooser = random.Random(3)
    for path, right in _regular(files):
        descriptor = os.open(path, os.O_RDONLY | flags)
        end = len(right)
        offsets = {
            0,
            1,
            4095,
            4096,
            131072,
            CHUNK - 1,
            CHUNK,
            end - 1,
            end,
            end + 1,
            end + CHUNK,
            chooser.randint(0, end),
        }
        for offset in sorted(offset for offset in offsets if offset >= 0):
            for size in (1, 7, 511, 4096, 4097, 131073, CHUNK + 1):
                assert _pread(descriptor, size, offset) == right[offset : offset + size], (path, offset, size)
        os.close(descriptor)


@in_child
def test_the_last_byte_and_the_end(files: Pair) -> None:
    """A read(2) at the end gives what is left, then nothing."""
    for path, right in _regular(files):
        descriptor = os.open(path, os.O_RDONLY)
        os.lseek(descriptor, -1 if right else 0, os.SEEK_END)
        assert os.read(descriptor, 100) == right[-1:]
        assert os.read(descriptor, 100) == b""
        os.lseek(descriptor, 1, os.SEEK_END)
        assert os.read(descriptor, 100) == b""
        os.close(descriptor)


@in_child
def test_maps_show_the_same_bytes(files: Pair) -> None:
    for path, right in _regular(files):
        if not right:
            continue
        with path.open("rb") as file:
            for flags, protection in ((mmap.MAP_SHARED, mmap.PROT_READ), (mmap.MAP_PRIVATE, mmap.PROT_READ)):
                with mmap.mmap(file.fileno(), 0, flags, protection) as mapped:
                    assert mapped[:] == right, path
            # Behind the end of the file a page is zero; a private map may be written.
            with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
                mapped[0] = right[0] ^ 1
        assert path.read_bytes() == right


@in_child
def test_the_kernel_copies_out_of_a_mount(files: Pair) -> None:
    """sendfile, splice and copy_file_range."""
    for path, right in _regular(files):
        with path.open("rb") as file, tempfile.TemporaryFile() as copy:
            offset = 0
            while count := os.sendfile(copy.fileno(), file.fileno(), offset, CHUNK + 7):
                offset += count
            assert os.pread(copy.fileno(), len(right) + 1, 0) == right
            os.ftruncate(copy.fileno(), 0)
            assert _copy_range(file.fileno(), copy.fileno(), len(right)) in (right, None)
    reader, writer = os.pipe()
    with (files.path / "random-16385").open("rb") as file:
        assert os.splice(file.fileno(), writer, 5000) == 5000
    assert os.read(reader, 6000) == random.Random(16385).randbytes(16385)[:5000]


def _copy_range(source: int, target: int, size: int) -> bytes | None:
    """The bytes that copy_file_range(2) copied; None where the kernel does not copy between file systems."""
    os.lseek(source, 0, os.SEEK_SET)
    os.lseek(target, 0, os.SEEK_SET)
    done = 0
    try:
        while done < size and (count := os.copy_file_range(source, target, size - done)):
            done += count
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP) and done == 0:
            return None
        raise
    return os.pread(target, size + 1, 0)


def test_cp_copies_a_mount(files: Pair, tmp_path: Path) -> None:
    run("cp", "-a", f"{files.path}/.", tmp_path / "copy")
    assert run("diff", "-r", "--no-dereference", files.source, tmp_path / "copy") == b""


@in_child
def test_holes_are_told_truly(files: Pair) -> None:
    """What SEEK_HOLE and SEEK_DATA call a hole is zero, all else is data, and there is nothing behind the end."""
    for path, right in _regular(files):
        descriptor = os.open(path, os.O_RDONLY)
        position = data_bytes = 0
        while position < len(right):
            start = _next_data(descriptor, position, len(right))
            assert not any(right[position:start]), (path, position, start)
            if start == len(right):
                break
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
            assert position > start
            data_bytes += position - start
        if not path.name.startswith("hole-"):
            assert data_bytes == len(right)
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            with pytest.raises(OSError, match=rf"Errno {errno.ENXIO}\b"):
                os.lseek(descriptor, len(right), whence)
        os.close(descriptor)


def _next_data(descriptor: int, position: int, end: int) -> int:
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        raise


@pytest.mark.parametrize("files_pair", ["fast"], indirect=True)  # pyfuse3 knows no lseek: there it is all data
def test_the_fast_engine_tells_holes(readers: Node, files_pair: Pair) -> None:
    """So that `cp` and `tar --sparse` do not read gigabytes of zeros."""
    size, _ = HOLES["behind"]

    def first_hole() -> int:
        descriptor = os.open(files_pair.path / "hole-behind", os.O_RDONLY)
        return os.lseek(descriptor, 0, os.SEEK_HOLE)

    assert 0 < mounts.call(first_hole) <= CHUNK < size
    readers.check_log()


@in_child
def test_threads_read_one_file_at_once(files: Pair) -> None:
    right = (files.source / f"random-{3 * CHUNK + 7}").read_bytes()
    wrong: list[int] = []

    def read(seed: int) -> None:
        chooser = random.Random(seed)
        descriptor = os.open(files.path / f"random-{3 * CHUNK + 7}", os.O_RDONLY | (os.O_DIRECT if seed % 2 else 0))
        for _ in range(50):
            offset, size = chooser.randint(0, len(right)), chooser.randint(1, 200_000)
            if _pread(descriptor, size, offset) != right[offset : offset + size]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- Extended attributes -------------------------------------------------------------------------


@in_child
def test_extended_attributes_are_not_supported(files: Pair) -> None:
    """Refused once, they cost `ls -l` nothing: an answer "none" would be asked for again for each file."""
    for name in ("random-100", "folder", "."):
        path = files.path / name
        for attribute in ("user.x", "security.capability", "trusted.overlay.opaque"):
            with pytest.raises(OSError, match=rf"Errno {errno.ENOTSUP}\b"):
                os.getxattr(path, attribute)
        # The kernel answers for ACLs itself: there is none.
        with pytest.raises(OSError, match=rf"Errno ({errno.ENODATA}|{errno.ENOTSUP})\b"):
            os.getxattr(path, "system.posix_acl_access")
        with pytest.raises(OSError, match=rf"Errno {errno.ENOTSUP}\b"):
            os.listxattr(path)


# --- Every write is refused ----------------------------------------------------------------------


def _libc(name: str, *arguments: object) -> None:
    if getattr(mounts.libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _bind(path: Path) -> None:
    # Relative, since the path of a socket is short.
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
# What changes the tree, by a name that is there or not.  `file` and `folder` exist, `new` does not.
WRITES: dict[str, Callable[[Path, Path, Path], object]] = {
    "open(O_WRONLY)": lambda file, folder, new: os.open(file, os.O_WRONLY),
    "open(O_RDWR)": lambda file, folder, new: os.open(file, os.O_RDWR),
    "open(O_WRONLY|O_APPEND)": lambda file, folder, new: os.open(file, os.O_WRONLY | os.O_APPEND),
    "open(O_WRONLY|O_TRUNC)": lambda file, folder, new: os.open(file, os.O_WRONLY | os.O_TRUNC),
    "open(O_RDONLY|O_TRUNC)": lambda file, folder, new: os.open(file, os.O_RDONLY | os.O_TRUNC),
    "open(O_CREAT)": lambda file, folder, new: os.open(new, os.O_RDONLY | os.O_CREAT),
    "open(O_CREAT|O_EXCL|O_WRONLY)": lambda file, folder, new: os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL),
    "open(O_TMPFILE)": lambda file, folder, new: os.open(folder, os.O_RDWR | os.O_TMPFILE),
    "mkdir": lambda file, folder, new: os.mkdir(new),
    "mknod(file)": lambda file, folder, new: os.mknod(new),
    "mknod(FIFO)": lambda file, folder, new: os.mkfifo(new),
    "bind": lambda file, folder, new: _bind(new),
    "symlink": lambda file, folder, new: os.symlink("x", new),
    "link": lambda file, folder, new: os.link(file, new),
    "unlink": lambda file, folder, new: os.unlink(file),
    "rmdir": lambda file, folder, new: os.rmdir(folder / "empty"),
    "rename": lambda file, folder, new: os.rename(file, new),
    "rename over a name": lambda file, folder, new: os.rename(file, file.with_name("hard link")),
    "renameat2(NOREPLACE)": lambda file, folder, new: _libc(
        "renameat2", AT_FDCWD, bytes(file), AT_FDCWD, bytes(new), RENAME_NOREPLACE
    ),
    "renameat2(EXCHANGE)": lambda file, folder, new: _libc(
        "renameat2", AT_FDCWD, bytes(file), AT_FDCWD, bytes(file.with_name("hard link")), RENAME_EXCHANGE
    ),
    "truncate": lambda file, folder, new: os.truncate(file, 1),
    "chmod": lambda file, folder, new: os.chmod(file, 0o600),
    "chmod of a folder": lambda file, folder, new: os.chmod(folder, 0o700),
    "chown": lambda file, folder, new: os.chown(file, 1, 1),
    "lchown": lambda file, folder, new: os.lchown(file.with_name("symlink"), 1, 1),
    "utimensat": lambda file, folder, new: os.utime(file, ns=(1, 1)),
    "utimensat of a link": lambda file, folder, new: os.utime(
        file.with_name("symlink"), ns=(1, 1), follow_symlinks=False
    ),
    "fchmod": lambda file, folder, new: os.fchmod(os.open(file, os.O_RDONLY), 0o600),
    "fchown": lambda file, folder, new: os.fchown(os.open(file, os.O_RDONLY), 1, 1),
    "futimens": lambda file, folder, new: os.utime(os.open(file, os.O_RDONLY), ns=(1, 1)),
    "setxattr": lambda file, folder, new: os.setxattr(file, "user.x", b"y"),
    "fsetxattr": lambda file, folder, new: os.setxattr(os.open(file, os.O_RDONLY), "user.x", b"y"),
    "removexattr": lambda file, folder, new: os.removexattr(file, "user.x"),
}
# Where files are opened without a message, the server cannot refuse these once the kernel does not; nor need it, as
# long as nothing changes.
OPENED_IN_THE_KERNEL = [name for name in WRITES if re.match(r"open\(O_(WRONLY|RDWR|RDONLY)", name)]
# Where only a descriptor that is open for writing could do harm, and there is none.
REFUSED_OTHERWISE: dict[str, tuple[int, Callable[[int], object]]] = {
    "write": (errno.EBADF, lambda descriptor: os.write(descriptor, b"x")),
    "pwrite": (errno.EBADF, lambda descriptor: os.pwrite(descriptor, b"x", 0)),
    "fallocate": (errno.EBADF, lambda descriptor: os.posix_fallocate(descriptor, 0, 10)),
    "ftruncate": (errno.EINVAL, lambda descriptor: os.ftruncate(descriptor, 0)),
    "sendfile": (errno.EBADF, lambda descriptor: os.sendfile(descriptor, os.open(__file__, os.O_RDONLY), 0, 1)),
    "shared writable map": (
        errno.EACCES,
        lambda descriptor: mmap.mmap(descriptor, 1, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
    ),
}


@in_child
def test_every_write_is_refused_with_erofs(files: Pair) -> None:
    _check_that_writes_are_refused(files, by_the_server=False)
    for number, call in REFUSED_OTHERWISE.values():
        descriptor = os.open(files.path / "random-100", os.O_RDONLY)
        with pytest.raises(OSError, match=rf"Errno {number}\b"):
            call(descriptor)
    for path in (files.path, files.path / "random-100"):
        with pytest.raises(OSError, match=rf"Errno {errno.EROFS}\b"):
            # access(2) tells only yes and no in Python.
            _libc("access", bytes(path), os.W_OK)


def _check_that_writes_are_refused(pair: Pair, *, by_the_server: bool) -> None:
    before = {path.name: os.lstat(path) for path in pair.path.iterdir()}
    for name, write in WRITES.items():
        wanted = [errno.EROFS]
        if by_the_server and name == "open(O_TMPFILE)":
            wanted.append(errno.EOPNOTSUPP)  # the kernel's word for a server that does not know it
        met = 0
        try:
            opened = write(pair.path / "random-100", pair.path / "folder", pair.path / "new")
            if by_the_server and name in OPENED_IN_THE_KERNEL:
                assert isinstance(opened, int)
                wanted = [errno.EROFS if "RDONLY" not in name else errno.EBADF]
                os.write(opened, b"x")
        except OSError as error:
            met = error.errno or 0
        assert met in wanted, f"{name}: {os.strerror(met) if met else 'it succeeded'}"
    assert {path.name: os.lstat(path) for path in pair.path.iterdir()} == before
    assert (pair.path / "random-100").read_bytes() == (pair.source / "random-100").read_bytes()


@needs_root
def test_every_write_is_refused_by_the_server_too(files: Pair) -> None:
    """`mount -o remount,rw` takes the kernel's own refusal away."""
    mounts.call(lambda: mounts.remount(files.path, read_only=False))
    try:

        @in_child
        def check() -> None:
            assert not os.statvfs(files.path).f_flag & os.ST_RDONLY
            _check_that_writes_are_refused(files, by_the_server=True)

        check()
    finally:
        mounts.call(lambda: mounts.remount(files.path, read_only=True))


# --- Who may read --------------------------------------------------------------------------------


@needs_root
def test_another_user_reads_what_the_modes_allow_and_nothing_else(files: Pair) -> None:
    """The source on its own file system is the oracle."""

    def attempts(root: Path) -> dict[str, int]:
        mounts.become_nobody()
        names = sorted(os.listdir(root / "owned"))
        return {name: _errno(root / "owned" / name) for name in names}

    def _errno(path: Path) -> int:
        try:
            if path.name.startswith("folder-"):
                os.listdir(path)
                (path / "inside").read_bytes()
            else:
                path.read_bytes()
        except OSError as error:
            return error.errno or 0
        return 0

    shown = mounts.call(lambda: attempts(files.path))
    assert shown == mounts.call(lambda: attempts(files.source))
    assert set(shown.values()) == {0, errno.EACCES}


@needs_root
def test_access_of_another_user_is_as_the_source_has_it(files: Pair) -> None:
    def answers(root: Path) -> list[bool]:
        mounts.become_nobody()
        return [
            os.access(root / "owned" / name, kind)
            for name in sorted(os.listdir(root / "owned"))
            for kind in (os.R_OK, os.X_OK, os.R_OK | os.X_OK, os.F_OK)
        ]

    assert mounts.call(lambda: answers(files.path)) == mounts.call(lambda: answers(files.source))


@needs_root
def test_another_user_runs_the_usual_programs(files: Pair) -> None:
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    assert run(*as_nobody, "cat", files.path / "text-100") == (files.source / "text-100").read_bytes()
    refused = run_any(*as_nobody, "cat", files.path / "owned" / "0000-0-0")
    assert refused.code == 1
    assert "Permission denied" in refused.stderr
    assert run("cat", files.path / "owned" / "0000-0-0") == b"secret"


# --- Commands ------------------------------------------------------------------------------------

OLD, NEW = b"what version 1 holds", b"what version 2 holds"


@pytest.fixture(scope="module")
def commands() -> Iterator[Node]:
    """The node of the tests that mount for themselves: a slot of two versions, and one in another instance."""
    with mounts.node() as node:
        source = node.folder / "source"
        (source / "folder").mkdir(parents=True)
        (source / "file").write_bytes(OLD)
        node.pack(source, "photos")
        node.pack(source, "team/photos")
        (source / "file").write_bytes(NEW)
        node.pack(source, "photos")
        node.root.mkdir()
        yield node


@pytest.fixture
def node(commands: Node) -> Iterator[Node]:
    yield commands
    commands.settle()


def content(path: Path) -> bytes:
    return mounts.call((path / "file").read_bytes)


def test_mount_says_where_and_is_ready_when_it_returns(node: Node) -> None:
    done = node.cli("mount", "photos")
    path = node.root / "photos"
    assert done.stdout.decode() == f"photos version 2 is mounted at {path}\n"
    assert done.stderr == ""
    assert content(path) == NEW
    assert os.path.ismount(path)


def test_mount_gives_its_starter_the_terminal_and_pipes_back(node: Node) -> None:
    """`$(accelfs mount …)` would wait for ever if the daemon kept a pipe open; and it must outlive its session."""
    process = subprocess.Popen(
        [sys.executable, "-m", "accelfs", "mount", "photos"], env=node.home.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=node.folder,
    )  # fmt: skip
    assert b"is mounted at" in process.communicate(timeout=SECONDS_MAX)[0]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert content(node.root / "photos") == NEW
    for pid in node.home.processes():
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull


def test_version_chooses_and_the_newest_is_the_default(node: Node) -> None:
    path = node.mount("photos", "--version", "1")
    assert content(path) == OLD
    row = node.row("photos")
    assert row is not None
    assert row["version"] == 1
    node.umount("photos")
    assert content(node.mount("photos")) == NEW


def test_status_has_exactly_these_keys(node: Node) -> None:
    path = node.mount("photos", "--workers", "2")
    document = node.cli("status", "--json").json
    assert list(document) == ["mounts"]
    (row,) = document["mounts"]
    assert sorted(row) == sorted(["slot", "mountpoint", "version", "master_pid", "worker_pids", "agent_pid", "ready"])
    assert (row["slot"], row["mountpoint"], row["version"], row["ready"]) == ("photos", str(path), 2, True)
    assert row["agent_pid"] is None
    assert len(row["worker_pids"]) == 2
    assert {row["master_pid"], *row["worker_pids"]} == node.home.processes()
    assert node.cli("status", "photos", "--json").json == document
    text = node.cli("status").stdout.decode()
    assert text.count("\n") == 1
    assert all(word in text for word in ("photos", str(path), "ready", str(row["master_pid"])))


def test_status_of_nothing(node: Node) -> None:
    assert node.cli("status", "--json").json == {"mounts": []}
    assert node.cli("status", "photos", "--json").json == {"mounts": []}
    assert node.cli("status").stdout.startswith(b"nothing is mounted")
    assert "photos" in only_line(node.cli("status", "photos", code=None), 1)


def test_several_slots_stand_side_by_side(node: Node) -> None:
    """The default instance right below the mount root, others below their instance."""
    path, other = node.mount("photos"), node.mount("team/photos")
    assert (path, other) == (node.root / "photos", node.root / "team" / "photos")
    assert (content(path), content(other)) == (NEW, OLD)
    rows = node.cli("status", "--json").json["mounts"]
    assert sorted(row["slot"] for row in rows) == ["photos", "team/photos"]
    node.umount("photos")
    assert content(other) == OLD
    (row,) = node.cli("status", "--json").json["mounts"]
    assert row["slot"] == "team/photos"


def test_umount_leaves_no_folder_that_mount_made(node: Node) -> None:
    """The instance's folder is one of them."""
    node.mount("team/photos")
    node.umount("team/photos")
    assert list(node.root.rglob("*")) == []


def test_umount_leaves_the_folder_that_it_was_given(node: Node) -> None:
    path = node.folder / "given"
    path.mkdir()
    before = os.lstat(path)
    assert node.mount("photos", path) == path
    assert content(path) == NEW
    node.umount("photos")
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert os.listdir(path) == []
    path.rmdir()


@pytest.mark.parametrize("name", ["with space\ttab\\040 backslash\nline é", "-dashes", "+"])
def test_mount_point_of_any_name(node: Node, name: str) -> None:
    path = node.folder / name
    path.mkdir()
    assert node.mount("photos", path) == path
    row = node.row("photos")
    assert row is not None
    assert (row["mountpoint"], row["ready"]) == (str(path), True)
    assert content(path) == NEW
    node.umount("photos")
    path.rmdir()


def test_mount_point_that_is_no_text(node: Node) -> None:
    """Works like any other, or is refused in one line that leaves nothing behind."""
    path = node.folder / "no-text-\udcff"
    path.mkdir()
    done = node.cli("mount", "photos", path, code=None)
    if done.code == 0:
        assert content(path) == NEW
        node.umount("photos")
    else:
        only_line(done, 2)
        node.expect_log(r"ERROR \d+ accelfs\.mount\.daemon: [^\n]*\n\Z", count=None)
    assert node.leftovers() == []
    path.rmdir()


def test_relative_mount_point_is_made_absolute(node: Node) -> None:
    (node.folder / "relative").mkdir()
    document = node.cli("mount", "photos", "./relative", "--json", cwd=node.folder).json
    assert document["mountpoint"] == str(node.folder / "relative")
    assert content(node.folder / "relative") == NEW


def test_mount_point_behind_a_symbolic_link(node: Node) -> None:
    """A link on the way is followed."""
    (node.folder / "real" / "inside").mkdir(parents=True)
    (node.folder / "link").symlink_to("real")
    path = node.mount("photos", node.folder / "link" / "inside")
    assert content(node.folder / "real" / "inside") == NEW
    assert os.path.samefile(path, node.folder / "real" / "inside")


def test_mount_point_that_is_a_symbolic_link(node: Node) -> None:
    """The link itself is followed too, or refused in one line that leaves nothing behind."""
    target, link = node.folder / "link-target", node.folder / "link-itself"
    target.mkdir()
    link.symlink_to(target.name)
    done = node.cli("mount", "photos", link, code=None)
    if done.code == 0:
        assert content(target) == NEW
        assert node.cli("status", "--json").json["mounts"][0]["ready"]
        node.umount("photos")
    else:
        assert str(link) in only_line(done, 2)
        node.expect_log(rf"ERROR \d+ accelfs\.mount\.daemon: {re.escape(done.line)}\n", count=1)
    assert node.leftovers() == []
    assert os.listdir(target) == []


def test_everything_in_the_c_locale(node: Node) -> None:
    source = node.folder / "c-locale"
    source.mkdir()
    (source / "näme-\udcff").write_text("x")
    path = node.folder / "möunt"
    path.mkdir()
    prefix = ("env", "LC_ALL=C", "PYTHONCOERCECLOCALE=0", "PYTHONUTF8=0")
    node.cli("pack", source, "c-locale", prefix=prefix)
    node.cli("mount", "c-locale", path, prefix=prefix)
    assert mounts.call(lambda: os.listdir(os.fsencode(path))) == ["näme-\udcff".encode(errors="surrogateescape")]
    # The other way round too: who asks in another locale gets the same bytes.
    for asked in (prefix, ()):
        shown = node.cli("status", "--json", prefix=asked).json["mounts"][0]["mountpoint"]
        assert os.fsencode(shown) == os.fsencode(path)
    node.cli("umount", "c-locale", prefix=prefix)


def test_engine_chooses_who_serves(node: Node) -> None:
    """The pyfuse3 engine opens files for the kernel, the fast one has none opened."""
    for engine in ENGINES:
        assert content(node.mount("photos", "--engine", engine)) == NEW
        node.umount("photos")
    assert node.cli("mount", "photos", "--engine", "steam", code=None).code == 2


# --- Commands: --foreground ----------------------------------------------------------------------


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_foreground_serves_until_a_signal(node: Node, number: signal.Signals, group: bool) -> None:
    """A terminal signals the whole process group, `kill` the one process."""
    server = node.foreground("photos")
    path = node.root / "photos"
    assert server.line() == f"photos version 2 is mounted at {path}\n"
    assert content(path) == NEW
    row = node.row("photos")
    assert row is not None
    assert row["master_pid"] == server.pid
    started = time.monotonic()
    assert server.end(number, group=group) == 0
    assert time.monotonic() - started < DRAIN_SECONDS, "nobody used it, so there was nothing to wait for"
    assert server.line() == ""
    assert node.leftovers() == []


def test_foreground_with_an_open_file_ends_within_its_five_seconds(node: Node) -> None:
    """Both signals at once, each with a mount of its own.  The path is gone at once, an open file stays readable for
    a while, and then its reads are errors."""
    servers = {signal.SIGINT: node.foreground("photos"), signal.SIGTERM: node.foreground("team/photos")}
    paths = {signal.SIGINT: node.root / "photos", signal.SIGTERM: node.root / "team" / "photos"}
    for server in servers.values():
        assert "is mounted at" in server.line()
    node.expect_log("WARNING .*is in use: detached", count=2)
    with Holder(paths[signal.SIGINT] / "file") as first, Holder(paths[signal.SIGTERM]) as second:
        started = time.monotonic()
        for number, server in servers.items():
            server.signal(number, group=number == signal.SIGINT)
        for path in paths.values():
            wait_until(functools.partial(_is_gone, path), f"{path} to be gone", DRAINED_SECONDS)
        assert time.monotonic() - started < DRAIN_SECONDS, "the path stays until the servers end"
        assert first.read() == 0
        assert second.read() == 0
        for server in servers.values():
            assert server.process.wait(DRAINED_SECONDS) == 0
        assert time.monotonic() - started < DRAINED_SECONDS
        assert first.read() == errno.ENOTCONN
        assert second.read() == errno.ENOTCONN
    assert [text for text in node.leftovers() if "team" not in text] == []


def _is_gone(path: Path) -> bool:
    return str(path) not in Path("/proc/self/mountinfo").read_text()


def test_foreground_that_cannot_mount_says_so_in_one_line(node: Node) -> None:
    server = node.foreground("photos", "--version", "9")
    assert server.line() == ""
    assert server.process.wait(SECONDS_MAX) == 1
    assert server.log.read_text().startswith("accelfs: slot photos has no version 9")
    assert server.log.read_text().count("\n") == 1
    server.log.unlink()


# --- Commands: refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slot", ["a//b", "/photos", "..", "../photos", "a/../b", "p" * 300, "", "a/b/c", "a b", "ph\nos", "photos@1", ".x"]
)
def test_what_is_no_slot_is_refused_by_every_command(node: Node, slot: str) -> None:
    verb = ("mount", "umount", "status")[len(slot) % 3]
    assert only_line(node.cli(verb, "--", slot, code=None), 2)
    assert node.leftovers() == []


def test_mount_of_what_does_not_exist(node: Node) -> None:
    line = only_line(node.cli("mount", "unknown", code=None), 1)
    assert line == "slot unknown has no version; make one: accelfs pack SOURCE unknown"
    line = only_line(node.cli("mount", "photos", "--version", "9", code=None), 1)
    assert line == "slot photos has no version 9; it has 1 to 2"
    assert node.leftovers() == []


def test_umount_of_what_is_not_mounted(node: Node) -> None:
    for slot in ("photos", "unknown"):
        assert only_line(node.cli("umount", slot, code=None), 1) == f"{slot} is not mounted"


def test_mount_of_what_is_mounted(node: Node) -> None:
    path = node.mount("photos")
    before = node.row("photos")
    for arguments in ([], ["--version", "1"], [str(node.folder)], ["--foreground"]):
        line = only_line(node.cli("mount", "photos", *arguments, code=None), 1)
        assert f"photos is mounted already: version 2 at {path}" in line
    assert node.row("photos") == before
    assert content(path) == NEW


def test_umount_of_a_mount_in_use_is_refused_and_leaves_it_alone(node: Node) -> None:
    path = node.mount("photos")
    for used in (path / "file", path / "folder"):
        with Holder(used) as holder:
            line = only_line(node.cli("umount", "photos", code=None), 75)
            assert str(path) in line
            assert "--force" in line
            assert holder.read() == 0
            assert content(path) == NEW
            row = node.row("photos")
            assert row is not None
            assert row["ready"] is True
    node.umount("photos")


def test_umount_by_force_takes_the_path_at_once_and_ends_its_users(node: Node) -> None:
    path = node.mount("photos")
    node.allow_log(r"WARNING [^\n]*: cannot be unmounted: Invalid argument\n\Z")
    with Holder(path / "file") as file, Holder(path / "folder") as folder:
        started = time.monotonic()
        node.umount("photos", "--force")
        assert time.monotonic() - started < DRAINED_SECONDS
        assert node.leftovers() == []
        assert file.read() == errno.ENOTCONN
        assert folder.read() == errno.ENOTCONN


def test_umount_by_force_of_a_mount_that_nobody_uses(node: Node) -> None:
    node.mount("photos")
    started = time.monotonic()
    node.umount("photos", "--force")
    assert time.monotonic() - started < DRAIN_SECONDS
    # Whether the master still has a mount when it hears of it is a matter of luck.
    node.allow_log(r"WARNING [^\n]*: cannot be unmounted: Invalid argument\n\Z")


def test_umount_by_others_ends_the_daemon(node: Node) -> None:
    """The system's own umount, as root types it."""
    path = node.mount("photos")
    pids = node.home.processes()
    run("umount", path)
    wait_until(lambda: not pids & node.home.processes(), "the daemon to end")
    assert node.leftovers() == []
    assert node.cli("status", "--json").json == {"mounts": []}


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("missing", 2, "mkdir -p"),
        ("not empty", 2, "not empty"),
        ("a file", 2, "not a folder"),
        ("below a file", 1, "Not a directory"),
        ("dangling link", 2, ""),
        ("too long", 1, "too long"),
        ("default, not empty", 2, "not empty"),
        ("default, a file", 2, "not a folder"),
    ],
)
def test_place_where_nothing_can_be_mounted(node: Node, kind: str, code: int, words: str) -> None:
    folder = node.folder / "places"
    folder.mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "name").touch()
    (folder / "link").symlink_to("nowhere")
    places = {
        "missing": folder / "missing", "not empty": folder / "full", "a file": folder / "full" / "name",
        "below a file": folder / "full" / "name" / "below", "dangling link": folder / "link",
        "too long": folder / ("l" * 256),
    }  # fmt: skip
    if kind == "default, not empty":
        (node.root / "photos").mkdir()
        (node.root / "photos" / "name").touch()
    elif kind == "default, a file":
        (node.root / "photos").touch()
    before = _names(folder), _names(node.root)
    line = node.refused(code, "photos", *([places[kind]] if kind in places else []))
    assert words in line
    assert (_names(folder), _names(node.root)) == before
    assert node.home.mountpoints() == []
    shutil.rmtree(folder)
    run("rm", "-rf", node.root / "photos")


def _names(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@needs_root
def test_place_where_something_else_is_mounted(node: Node) -> None:
    path = node.folder / "taken"
    path.mkdir()
    run("mount", "-t", "tmpfs", "none", path)
    try:
        line = node.refused(1, "photos", path)
        assert "tmpfs" in line
        assert "mounted here already" in line
    finally:
        run("umount", path)
    other = node.mount("team/photos", path)
    assert "mounted here already" in node.refused(1, "photos", path)
    # Nothing can be made inside either: it is read-only.
    node.refused(2, "photos", path / "new")
    assert content(other) == OLD
    node.umount("team/photos")
    path.rmdir()


@needs_root
@pytest.mark.parametrize(
    ("change", "words"),
    [("mknod /dev/null c 1 3", "/dev/fuse is missing"), ("mkdir /dev/fuse", "/dev/fuse: Is a directory")],
    ids=["missing", "a folder"],
)
def test_machine_without_the_device(node: Node, change: str, words: str) -> None:
    for options in ([], ["--foreground"]):
        prefix = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none /dev && {change} && exec "$@"', "sh")
        assert words in only_line(node.cli("mount", "photos", *options, prefix=prefix, code=None), 1)
        assert node.leftovers() == []


@needs_root
def test_machine_that_forbids_to_mount(node: Node) -> None:
    """A container has the device and not the right.  libfuse knows why, and says it where nobody looks."""
    prefix = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    line = only_line(node.cli("mount", "photos", prefix=prefix, code=None), 1)
    node.expect_log(r"\Afuse|ERROR \d+ accelfs\.mount\.daemon: " + re.escape(line))
    assert node.leftovers() == []
    assert re.search("Operation not permitted|SYS_ADMIN", line), line


@needs_root
def test_home_that_cannot_be_written(node: Node) -> None:
    prefix = ("unshare", "--mount", "sh", "-c", f'mount --bind -o ro "{node.home.path}" "$0" && exec "$@"')
    line = only_line(node.cli("mount", "photos", prefix=(*prefix, str(node.home.path)), code=None), 1)
    assert "ACCELFS_HOME" in line
    assert node.leftovers() == []


# --- Commands: without root ----------------------------------------------------------------------

UNPRIVILEGED = """
set -eu
# Whatever folder of these is closed to others is covered, and what is needed put back below it.
hold='{hold}'
count=0
for path in {needed}; do
    count=$((count + 1))
    mkdir -p "$hold/$count"
    mount --bind "$path" "$hold/$count"
done
for path in {closed}; do
    mount -t tmpfs -o mode=755 none "$path"
done
count=0
for path in {needed}; do
    count=$((count + 1))
    mkdir -p "$path"
    mount --bind "$hold/$count" "$path"
done
mount -t tmpfs -o mode=755 none /dev
mkdir -m 1777 /dev/shm
mknod -m 666 /dev/null c 1 3
mknod -m {device_mode} /dev/fuse c 10 229
exec setpriv --reuid={nobody} --regid={nobody} --clear-groups "$@"
"""


def _unprivileged(node: Node, device_mode: str) -> tuple[str, ...]:
    """The command that runs another as a user who may do nothing, but can read the interpreter and the code."""
    wanted = sorted({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}, key=str)
    needed = [path for path in wanted if not any(path != other and path.is_relative_to(other) for other in wanted)]
    closed: list[Path] = []
    for path in needed:
        # The topmost one hides what lies below it.
        closed += [folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001][:1]
    script = UNPRIVILEGED.format(
        needed=" ".join(f"'{path}'" for path in needed), closed=" ".join(f"'{path}'" for path in sorted(set(closed))),
        hold=node.folder / "hold", device_mode=device_mode, nobody=NOBODY,
    )  # fmt: skip
    return ("unshare", "--mount", "sh", "-c", script, "sh")


@pytest.fixture
def plain_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node of a user without any rights."""
    with mounts.node() as node:
        source = node.folder / "source"
        source.mkdir()
        (source / "file").write_bytes(NEW)
        for path in (node.home.path, node.root):
            path.mkdir()
            os.chown(path, NOBODY, NOBODY)
        yield node


@needs_root
def test_user_without_root_mounts_with_fusermount(plain_user: Node) -> None:
    """All in one namespace, which nobody else sees: the device is open to all there."""
    accelfs = f"'{sys.executable}' -m accelfs"
    script = f"""
        set -e
        {accelfs} pack '{plain_user.folder / "source"}' photos >&2
        {accelfs} mount photos
        cat '{plain_user.root}/photos/file'
        {accelfs} status --json
        {accelfs} umount photos
        ls '{plain_user.root}'
    """
    finished = run_any(
        *_unprivileged(plain_user, "666"), "sh", "-c", script, env=plain_user.home.environment, cwd=Path("/")
    )
    shown = finished.stdout.decode()
    assert finished.code == 0, finished.stderr
    head = f"photos version 1 is mounted at {plain_user.root}/photos\n{NEW.decode()}"
    assert shown.startswith(head)
    (row,) = json.loads(shown.removeprefix(head))["mounts"]
    assert row["ready"] is True


@needs_root
def test_user_who_may_not_open_the_device_is_told_so_in_one_line(plain_user: Node) -> None:
    plain_user.pack(plain_user.folder / "source", "photos")
    run("chown", "-R", f"{NOBODY}:{NOBODY}", plain_user.home.path)
    done = plain_user.cli("mount", "photos", prefix=_unprivileged(plain_user, "600"), code=None, cwd=Path("/"))
    line = only_line(done, 1)
    assert "/dev/fuse may not be opened" in line


# --- Commands: several at once -------------------------------------------------------------------

RACE = """
import json, os, sys
from accelfs.cli import app
import accelfs.dataset.versions, accelfs.mount.daemon, accelfs.mount.master  # what a start would otherwise load first

def start(arguments, gate):
    out, err = os.memfd_create("out"), os.memfd_create("err")
    pid = os.fork()
    if pid == 0:
        os.read(gate, 1)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.argv = ["accelfs", *arguments]
        code = 99
        try:
            app.main()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)
    return pid, out, err

def together(commands):
    "Fork all, let all go at once, and tell how each ended."
    gate, opener = os.pipe()
    started = [start(arguments, gate) for arguments in commands]
    os.close(gate)
    os.write(opener, b"x" * len(commands))
    os.close(opener)
    ends = []
    for pid, out, err in started:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ends.append([code, *(os.pread(file, 1 << 20, 0).decode() for file in (out, err))])
        os.close(out)
        os.close(err)
    return ends

rounds = []
for commands in json.load(open(sys.argv[1])):
    rounds.append(together(commands))
    together([["umount", "photos"]])
print(json.dumps(rounds))
"""


def _race(node: Node, rounds: list[list[list[str]]]) -> list[list[tuple[int, str, str]]]:
    plan = node.folder / "race.json"
    plan.write_text(json.dumps(rounds))
    finished = run_any(sys.executable, "-c", RACE, plan, env=node.home.environment)
    assert finished.code == 0, finished.stderr
    found = json.loads(finished.stdout)
    assert len(found) == len(rounds)
    return [[(code, out, err) for code, out, err in ends] for ends in found]


def _check_race(node: Node, rounds: int) -> None:
    for name in "abcd":
        (node.folder / name).mkdir(exist_ok=True)
    at_one_place = [["mount", "photos"]] * 4
    at_several = [["mount", "photos", str(node.folder / name)] for name in "abcd"]
    for ends in _race(node, [at_one_place, at_several] * (rounds // 2)):
        winners = [out for code, out, _ in ends if code == 0]
        assert len(winners) == 1, ends
        assert "is mounted at" in winners[0]
        for code, out, err in ends:
            if code != 0:
                assert code in (1, 75), (code, err)
                assert out == ""
                assert re.fullmatch(r"accelfs: photos is (being )?mounted .*\n", err), err
    node.allow_log(r"ERROR [^\n]* photos is (being )?mounted [^\n]*\n\Z")
    assert node.leftovers() == []


def test_of_several_mounts_at_once_exactly_one_wins(node: Node) -> None:
    _check_race(node, rounds=12)


@soak
def test_of_several_mounts_at_once_exactly_one_wins_each_time(node: Node) -> None:
    for _ in range(10):
        _check_race(node, rounds=50)


def test_mount_umount_and_status_at_once_keep_their_word(node: Node) -> None:
    """Whoever comes first: no traceback, no other code than those promised, and nothing is left."""
    commands = [["mount", "photos"], ["umount", "photos"], ["status", "--json"], ["umount", "photos", "--force"]]
    node.allow_log(r" (WARNING|ERROR) [^\n]*\n\Z")
    for ends in _race(node, [commands] * 6):
        for (code, _, err), arguments in zip(ends, commands, strict=True):
            assert code in (0, 1, 75), (arguments, code, err)
            assert "Traceback" not in err
            assert code == 0 or err.count("\n") == 1, err


def test_different_slots_are_mounted_at_once(node: Node) -> None:
    """The instance's folder and the state folder are made by several at the same time."""
    ends = _race(node, [[["mount", "photos"], ["mount", "team/photos"]]])
    assert [code for code, _, _ in ends[0]] == [0, 0], ends
    node.umount("team/photos")


# --- Commands: pack and mounts -------------------------------------------------------------------


@needs_root
def test_pack_refuses_what_lies_inside_a_mount_of_ours(node: Node) -> None:
    path = node.mount("photos")
    bound = node.folder / "bound"
    bound.mkdir()
    run("mount", "--bind", path / "folder", bound)
    try:
        for source in (path, path / "folder", f"file://{path}/folder", bound):
            line = only_line(node.cli("pack", source, "copy", code=None), 2)
            assert "inside a mount of accelfs" in line
    finally:
        run("umount", bound)
        bound.rmdir()
    assert not node.home.slot("copy").exists()
    assert content(path) == NEW


def test_pack_refuses_a_folder_that_contains_a_mount_of_ours(node: Node) -> None:
    source = node.folder / "around"
    (source / "below" / "mount").mkdir(parents=True)
    (source / "file").touch()
    node.mount("photos", source / "below" / "mount")
    line = only_line(node.cli("pack", source, "around", code=None), 1)
    assert "below/mount" in line
    assert not (node.home.slot("around") / "versions").exists()
    node.umount("photos")
    node.pack(source, "around")
    shutil.rmtree(source)


def test_the_store_of_a_mounted_slot_can_be_packed_into(node: Node) -> None:
    """A new version appears beside the mounted one, which stays what it is."""
    path = node.mount("photos", "--version", "1")
    node.pack(node.folder / "source", "photos")
    assert content(path) == OLD
    row = node.row("photos")
    assert row is not None
    assert row["version"] == 1


# --- Commands: again and again -------------------------------------------------------------------


def test_a_second_mount_of_a_version_shows_the_same_numbers(node: Node) -> None:
    """Inode numbers and positions in folders survive a remount."""

    def shown(path: Path) -> list[mounts.Dirent]:
        return mounts.call(lambda: mounts.all_dents(os.open(path, os.O_RDONLY)))

    first = shown(node.mount("photos"))
    node.umount("photos")
    second = shown(node.mount("photos"))
    # `..` of the root lies in another file system.
    assert [dent for dent in first if dent.name != b".."] == [dent for dent in second if dent.name != b".."]


def test_nothing_is_left_after_umount(node: Node) -> None:
    """Processes, mounts, folders, sockets and files of the whole node are those of before."""
    node.mount("photos")
    node.umount("photos")

    def everything() -> tuple[list[str], list[str], list[str], set[int]]:
        files = [name for name in _names(node.folder) if "/log/" not in name]
        sockets, mounted = (
            [line for line in Path(table).read_text().splitlines() if str(node.folder) in line]
            for table in ("/proc/net/unix", "/proc/self/mountinfo")
        )
        return files, sockets, mounted, node.home.processes()

    before = everything()
    for _ in range(3):
        node.mount("photos")
        assert everything() != before
        node.umount("photos")
        assert everything() == before
