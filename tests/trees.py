"""Source trees for tests: generated ones, a hostile one, and a walk that looks at any tree by itself.

    trees()              hypothesis: a tree as a value; `make` writes it to disk
    hostile_tree(path)   one tree with everything that a file system allows and a program may stumble on
    walk(path)           what any tree on disk shows, name by name: a source, a mount, an extracted copy
    packed(walk)         what a slot packed from that source must show
    slot_walk(…)         what a slot shows, read through accelfs without a mount
    differences(a, b)    in words, a name a line

`walk` shares no code with accelfs: it opens everything relative to its folder's descriptor, so that no
path is too long for it, and hashes holes without reading them where the file system tells them.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from hypothesis import strategies as st

from accelfs.dataset import versions
from accelfs.format.catalog import ROOT
from accelfs.service.node import Node as Machine
from accelfs.store.layout import parse_slot

if TYPE_CHECKING:
    from accelfs.dataset.tree import Tree

IS_ROOT = os.geteuid() == 0
CHUNK = 1 << 20
BLOCK = 512
GIGA = 10**9
_ZEROS = bytes(CHUNK)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
NEVER_PACKED = ("fifo", "socket", "device")


# --- What a tree shows ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What one name shows.  `mode` are the permission bits."""

    type: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    """0 of a folder: that is its file system's own affair."""
    content: str
    """XXH3-128 of a file's bytes, empty for all else."""
    target: bytes
    first_name: bytes
    """The first name, in the order of bytes, of the hard-linked group that this one belongs to."""
    nlink: int
    blocks: int
    """Of a file; 0 of all else."""
    is_sparse: bool


Walk = dict[bytes, Seen]


def walk(root: Path | str | bytes) -> Walk:
    """Look at every name below `root`; the root itself is b"."."""
    found: Walk = {}
    groups: dict[tuple[int, int], list[bytes]] = {}
    descriptor = os.open(root, _FOLDER)
    try:
        _look(descriptor, b".", os.fstat(descriptor), found, groups, -1)
    finally:
        os.close(descriptor)
    for names in groups.values():
        for name in names:
            found[name] = replace(found[name], first_name=min(names))
    return found


def packed(source: Walk) -> Walk:
    """What a slot packed from this source must show: DESIGN 6, as rules."""
    kept = {path: seen for path, seen in source.items() if seen.type not in NEVER_PACKED}
    names = Counter(seen.first_name for seen in kept.values())
    subfolders = Counter(_folder_of(path) for path, seen in kept.items() if seen.type == "folder" and path != b".")
    shown: Walk = {}
    for path, seen in kept.items():
        if seen.type == "folder":
            seen = replace(seen, nlink=2 + subfolders[path], blocks=0, is_sparse=False)
        else:
            # Names outside the source do not count.
            seen = replace(seen, nlink=names[seen.first_name])
        if seen.type == "file":
            blocks = max(seen.blocks, 1) if seen.is_sparse else -(-seen.size // BLOCK)
            seen = replace(seen, blocks=blocks, is_sparse=blocks * BLOCK < seen.size)
        shown[path] = seen
    return shown


def slot_walk(environment: Mapping[str, str], slot: str, version: int | None = None) -> Walk:
    """Look at every name of a slot's version, by default the newest, in this process."""
    machine = Machine.from_environment(environment)
    with versions.find(machine.store, parse_slot(slot), version, machine.trusted).open_tree() as tree:
        return tree_walk(tree)


def tree_walk(tree: Tree) -> Walk:
    """The same of a tree that is open."""
    found: Walk = {}
    groups: dict[int, list[bytes]] = {}
    pending = [(b".", ROOT)]
    while pending:
        path, number = pending.pop()
        shown = tree.attributes(number)
        type_ = _TYPES[stat.S_IFMT(shown.mode)]
        size, content, target, blocks = shown.size, "", b"", 0
        if type_ == "folder":
            size = 0
            children = [(child.name, child.attributes) for child in tree.list(number)]
            assert [name for name, _ in children] == sorted(name for name, _ in children)
            prefix = b"" if path == b"." else path + b"/"
            pending += [(prefix + name, attributes.node) for name, attributes in children]
            assert all(attributes == tree.attributes(attributes.node) for _, attributes in children)
        elif type_ == "symlink":
            target = tree.readlink(number)
        else:
            blocks = shown.blocks
            digest = xxhash.xxh3_128()
            for offset in range(0, size, CHUNK):
                digest.update(tree.read(number, offset, CHUNK))
            content = digest.hexdigest()
        groups.setdefault(number, []).append(path)
        found[path] = Seen(
            type_, stat.S_IMODE(shown.mode), shown.uid, shown.gid, shown.mtime_ns, size, content, target, path,
            shown.nlink, blocks, type_ == "file" and blocks * BLOCK < size,
        )  # fmt: skip
    for names in groups.values():
        for name in names:
            found[name] = replace(found[name], first_name=min(names))
    return found


def without_blocks(seen: Walk) -> Walk:
    """For a copy on another file system, which counts blocks in its own way and need not keep holes."""
    return {path: replace(one, blocks=0, is_sparse=False) for path, one in seen.items()}


def differences(expected: Walk, found: Walk) -> list[str]:
    """What is not equal, a line a name; empty if all is."""
    lines = [f"missing: {path!r} {expected[path]}" for path in sorted(expected.keys() - found.keys())]
    lines += [f"not expected: {path!r} {found[path]}" for path in sorted(found.keys() - expected.keys())]
    for path in sorted(expected.keys() & found.keys()):
        if expected[path] != found[path]:
            fields = [name for name in Seen.__slots__ if getattr(expected[path], name) != getattr(found[path], name)]
            parts = [f"{name} {getattr(found[path], name)!r} for {getattr(expected[path], name)!r}" for name in fields]
            lines.append(f"{path!r}: " + ", ".join(parts))
    return lines


def _look(
    descriptor: int, path: bytes, status: os.stat_result, found: Walk, groups: dict[tuple[int, int], list[bytes]],
    parent: int,
) -> None:  # fmt: skip
    """Note the name `path`; `descriptor` is open for folders and -1 for all else, which `parent` holds."""
    type_ = _TYPES[stat.S_IFMT(status.st_mode)]
    content, target, size, blocks, is_sparse = "", b"", 0, 0, False
    name = path.rpartition(b"/")[2]
    if type_ == "file":
        file = os.open(name, _FILE, dir_fd=parent)
        try:
            content, has_hole = _content(file, status.st_size)
        finally:
            os.close(file)
        size, blocks = status.st_size, status.st_blocks
        is_sparse = has_hole and blocks * BLOCK < size
    elif type_ == "symlink":
        target = os.readlink(name, dir_fd=parent)
        size = len(target)
    found[path] = Seen(
        type_, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, size, content, target,
        path, status.st_nlink, blocks, is_sparse,
    )  # fmt: skip
    if type_ != "folder":
        if status.st_nlink > 1:
            groups.setdefault((status.st_dev, status.st_ino), []).append(path)
        return
    for child in sorted(map(os.fsencode, os.listdir(descriptor))):
        below = child if path == b"." else path + b"/" + child
        child_status = os.stat(child, dir_fd=descriptor, follow_symlinks=False)
        if not stat.S_ISDIR(child_status.st_mode):
            _look(-1, below, child_status, found, groups, descriptor)
            continue
        folder = os.open(child, _FOLDER, dir_fd=descriptor)
        try:
            _look(folder, below, child_status, found, groups, descriptor)
        finally:
            os.close(folder)


def _content(file: int, size: int) -> tuple[str, bool]:
    """XXH3-128 of a file's bytes, and whether it has holes."""
    digest = xxhash.xxh3_128()
    position = 0
    has_hole = False
    for start, end in _data(file, size):
        has_hole |= start > position
        _hash_zeros(digest, start - position)
        position = start
        while position < end:
            piece = os.pread(file, min(CHUNK, end - position), position)
            assert piece, f"the file ends at {position}, and fstat promised {size} bytes"
            digest.update(piece)
            position += len(piece)
    has_hole |= position < size
    _hash_zeros(digest, size - position)
    assert os.pread(file, 1, size) == b"", "the file goes on behind its size"
    return digest.hexdigest(), has_hole


def _data(file: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < size:
        try:
            start = os.lseek(file, position, os.SEEK_DATA)
            end = os.lseek(file, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            start, end = position, size  # a file system that does not tell holes
        yield start, min(end, size)
        position = end


def _hash_zeros(digest: xxhash.xxh3_128, count: int) -> None:
    for _ in range(count // CHUNK):
        digest.update(_ZEROS)
    digest.update(_ZEROS[: count % CHUNK])


def _folder_of(path: bytes) -> bytes:
    return path.rpartition(b"/")[0] or b"."


# --- Generated trees -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of a file: `kind` says how they are made from the seed."""

    kind: str
    size: int
    seed: int

    def data(self) -> bytes:
        if self.kind == "random":
            return random.Random(self.seed).randbytes(self.size)
        if self.kind == "text":
            words = (b"shard ", b"slot ", b"node\n", b"catalog ")
            return b"".join(random.Random(self.seed).choices(words, k=self.size // 4 + 1))[: self.size]
        return bytes(self.size)


@dataclass(frozen=True, slots=True)
class File:
    content: Content
    mode: int
    mtime_ns: int
    owner: tuple[int, int]
    holes: tuple[int, ...] = ()
    """Chunk numbers that are left out when the file is written."""


@dataclass(frozen=True, slots=True)
class Symlink:
    target: bytes
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Further:
    """A further hard link to the file or symbolic link of this number, modulo how many there are."""

    which: int


@dataclass(frozen=True, slots=True)
class Folder:
    children: dict[bytes, Node]
    mode: int
    mtime_ns: int
    owner: tuple[int, int]


Node = File | Symlink | Further | Folder


def names(bytes_max: int = 255) -> st.SearchStrategy[bytes]:
    """Whatever the kernel takes for a name."""
    long = st.integers(min(200, bytes_max), bytes_max).map(lambda count: b"n" * count)
    return st.one_of(
        st.sampled_from([b"a", b"b", b"B", b".a", b"..a", b"a b", b"a\nb", b"\xff\xfe", b"-l", b"\\", "é".encode()]),
        st.binary(min_size=1, max_size=20),
        long,
    ).filter(lambda name: name not in (b".", b"..") and not {0, 0x2F} & set(name))


def _modes(folder: bool) -> st.SearchStrategy[int]:
    """An ordinary user must be able to read, and to write while the tree is made, what is made."""
    needed = 0 if IS_ROOT else 0o500 if folder else 0o400
    usual = [0o755, 0o700, 0o1777, 0o2755] if folder else [0o644, 0o600, 0o444, 0o755, 0o4755, 0o2711]
    return st.one_of(st.sampled_from(usual), st.integers(0, 0o7777)).map(lambda mode: mode | needed)


_ODD_TIMES = [0, 1, -1, GIGA - 1, -GIGA, -GIGA - 1, -950_000_000 * GIGA + 7, 4_500_000_000 * GIGA + 999_999_999]
_TIMES = st.one_of(st.integers(1_500_000_000 * GIGA, 1_800_000_000 * GIGA), st.sampled_from(_ODD_TIMES))
_OWNERS = st.sampled_from([(0, 0), (1000, 100), (65534, 65534), (2**32 - 2, 7)] if IS_ROOT else [(-1, -1)])
_SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 20_000),
    st.sampled_from([0, 1, 63, 64, 511, 512, 513, 4095, 4096, 4097, 16384, 16385]),
    st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]),
)
_CONTENTS = st.builds(Content, st.sampled_from(["random", "text", "zeros"]), _SIZES, st.integers(0, 3))
_FILES = st.one_of(
    st.builds(File, _CONTENTS, _modes(False), _TIMES, _OWNERS),
    st.builds(
        File,
        st.builds(Content, st.sampled_from(["random", "text"]), st.integers(1, 4 * CHUNK), st.integers(0, 3)),
        _modes(False),
        _TIMES,
        _OWNERS,
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda chunks: tuple(sorted(set(chunks)))),
    ),
)  # fmt: skip
_TARGETS = st.one_of(
    st.sampled_from([b".", b"..", b"a", b"/", b"/no/such/place", b"../../..", b"t" * 4095]),
    st.binary(min_size=1, max_size=60).filter(lambda target: 0 not in target),
)
_LEAVES = st.one_of(
    _FILES, _FILES, st.builds(Symlink, _TARGETS, _TIMES), st.builds(Further, st.integers(0, 30))
)  # fmt: skip


def _folders(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.builds(Folder, st.dictionaries(names(60), children, max_size=6), _modes(True), _TIMES, _OWNERS)


def trees() -> st.SearchStrategy[Folder]:
    """A folder with at least one name in it, which is no link to another that is not there."""
    nodes: st.SearchStrategy[Node] = st.recursive(_LEAVES, _folders, max_leaves=12)
    children = st.dictionaries(names(), nodes, min_size=1, max_size=8)
    found = children.filter(lambda some: any(not isinstance(node, Further) for node in some.values()))
    return st.builds(Folder, found, _modes(True), _TIMES, _OWNERS)


def make(tree: Folder, path: Path) -> None:
    """Write a generated tree; `path` must not exist."""
    os.mkdir(path, 0o700)
    made: list[bytes] = []
    further: list[tuple[bytes, Further]] = []
    _make_children(tree, os.fsencode(path), made, further)
    for where, link in further:
        if made:
            os.link(made[link.which % len(made)], where, follow_symlinks=False)
    # Times of folders last, the deepest first: what is made in them changes them.
    _finish_folders(tree, os.fsencode(path))


def _make_children(folder: Folder, path: bytes, made: list[bytes], further: list[tuple[bytes, Further]]) -> None:
    for name, node in folder.children.items():
        where = path + b"/" + name
        if isinstance(node, Folder):
            os.mkdir(where, 0o700)
            _make_children(node, where, made, further)
        elif isinstance(node, Further):
            further.append((where, node))
        elif isinstance(node, Symlink):
            os.symlink(node.target, where)
            os.utime(where, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)
            made.append(where)
        else:
            _make_file(node, where)
            made.append(where)


def _make_file(file: File, where: bytes) -> None:
    descriptor = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        data = file.content.data()
        for chunk, offset in enumerate(range(0, len(data), CHUNK)):
            if chunk not in file.holes:
                os.pwrite(descriptor, data[offset : offset + CHUNK], offset)
        os.truncate(descriptor, len(data))
        # A new owner takes the setuid bit away, so the mode comes after it.
        os.fchown(descriptor, *file.owner)
        os.fchmod(descriptor, file.mode)
        os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
    finally:
        os.close(descriptor)


def _finish_folders(folder: Folder, path: bytes) -> None:
    for name, node in folder.children.items():
        if isinstance(node, Folder):
            _finish_folders(node, path + b"/" + name)
    os.chown(path, *folder.owner)
    os.chmod(path, folder.mode)
    os.utime(path, ns=(folder.mtime_ns, folder.mtime_ns))


# --- The hostile tree ----------------------------------------------------------------------------

DEEP_LEVELS = 60
DEEP_NAME = b"level-" + b"x" * 94
"""60 of these are longer than any path that one system call takes (PATH_MAX, 4096 bytes)."""


def hostile_tree(path: Path, *, largest_bytes: int = 5 << 30) -> None:
    """Make it at `path`, which must not exist.  The sparse files take no space."""
    os.mkdir(path, 0o755)
    root = os.open(path, _FOLDER)
    try:
        _hostile_names(root)
        _hostile_depth(root)
        _hostile_sizes(root, largest_bytes)
        _hostile_links(root)
        _hostile_modes(root)
        _hostile_times(root)
        _hostile_kinds(root)
        os.utime(root, ns=(0, 1_234_567_890_123_456_789))
    finally:
        os.close(root)


def _write(folder: int, name: bytes, data: bytes = b"", mode: int = 0o644) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        os.write(file, data)
        os.fchmod(file, mode)
    finally:
        os.close(file)


def _subfolder(folder: int, name: bytes) -> int:
    os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _hostile_names(root: int) -> None:
    folder = _subfolder(root, b"names")
    odd = [bytes((byte,)) for byte in range(1, 256) if byte not in (0x2E, 0x2F)]
    odd += [b"n" * 255, b"\xff" * 255, ("é" * 127).encode(), b"new\nline", b"...", b"..a", b"-rf", b"\xed\xa0\x80"]
    odd += [b"a" + bytes((byte,)) + b"b" for byte in (1, 9, 10, 13, 32, 34, 39, 42, 92, 127, 128, 255)]
    for name in sorted(set(odd)):
        _write(folder, name, b"content of " + name)
    # Order of bytes is not the order of any language.
    for name in (b"Z", b"a.", b"a.a", b"a/", b"ab", b"B", "ä".encode(), "a\u0308".encode(), b".accelfs"):
        if name.endswith(b"/"):
            os.close(_subfolder(folder, b"a-folder"))
        elif name not in odd:
            _write(folder, name, name)
    os.close(folder)


def _hostile_depth(root: int) -> None:
    folder = _subfolder(root, b"deep")
    for _ in range(DEEP_LEVELS):
        below = _subfolder(folder, DEEP_NAME)
        _write(folder, b"beside", b"beside the next level")
        os.close(folder)
        folder = below
    _write(folder, b"bottom", b"the bottom")
    os.symlink(b"bottom", b"link to the bottom", dir_fd=folder)
    os.close(folder)


def _hostile_sizes(root: int, largest_bytes: int) -> None:
    folder = _subfolder(root, b"sizes")
    sizes = [0, 1, 63, 64, 511, 512, 513, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 1]
    for size in sizes:
        _write(folder, b"random %d" % size, random.Random(size).randbytes(size))
        _write(folder, b"zeros %d" % size, bytes(size))
    _write(folder, b"text", b"the same line again\n" * 100_000)
    sparse: dict[bytes, tuple[int, dict[int, bytes]]] = {
        b"only a hole": (1 << 20, {}),
        b"only a small hole": (5000, {}),
        b"hole in front": (300_000, {200_000: b"data"}),
        b"hole behind": (3 * CHUNK + 17, {0: b"data"}),
        b"holes between": (40 * CHUNK, {0: b"a", 7 * CHUNK - 2: b"spans", 30 * CHUNK: b"b" * 5000}),
        b"largest": (largest_bytes, {0: b"first", largest_bytes // 2 - 3: b"middle", largest_bytes - 4: b"last"}),
    }
    for name, (size, pieces) in sparse.items():
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
        os.truncate(file, size)
        for offset, data in pieces.items():
            os.pwrite(file, data, offset)
        os.close(file)
    os.close(folder)


def _hostile_links(root: int) -> None:
    folder = _subfolder(root, b"links")
    inner = _subfolder(folder, b"a folder")
    _write(folder, b"file", b"three names")
    os.link(b"file", b"file again", src_dir_fd=folder, dst_dir_fd=folder)
    # The first name in the walk's order is not the name that was made first.
    os.link(b"file", b"0 file", src_dir_fd=folder, dst_dir_fd=inner)
    _write(folder, b"empty", b"")
    os.link(b"empty", b"empty too", src_dir_fd=folder, dst_dir_fd=folder)
    targets = {
        b"relative": b"file",
        b"absolute": b"/etc/hostname",
        b"dangling": b"no such file",
        b"dangling absolute": b"/no/such/file",
        b"to a folder": b"a folder",
        b"to itself": b"to itself",
        b"loop 1": b"loop 2",
        b"loop 2": b"loop 1",
        b"up": b"..",
        b"out": b"../../../../../../etc",
        b"with slash": b"a folder/",
        b"not UTF-8": b"\xff\xfe\n",
        b"longest": b"l" * 4095,
        b"longest path": (b"../links/" * 500)[:4095],
    }
    for name, target in targets.items():
        os.symlink(target, name, dir_fd=folder)
    os.link(b"dangling", b"dangling again", src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    os.close(inner)
    os.close(folder)


def _hostile_modes(root: int) -> None:
    folder = _subfolder(root, b"modes")
    needed = 0 if IS_ROOT else 0o500
    for mode in (0, 0o001, 0o400, 0o644, 0o777, 0o1644, 0o2755, 0o4755, 0o6711, 0o7777):
        _write(folder, b"file %04o" % mode, b"mode", mode | needed)
        name = b"folder %04o" % mode
        inner = _subfolder(folder, name)
        _write(inner, b"inside", b"inside")
        os.fchmod(inner, mode | needed)
        os.close(inner)
    if IS_ROOT:
        for number, owner in enumerate([(1, 2), (1000, 1000), (65534, 65534), (2**32 - 2, 2**32 - 2)]):
            _write(folder, b"owner %d" % number, b"owner")
            os.chown(b"owner %d" % number, *owner, dir_fd=folder)
    os.close(folder)


def _hostile_times(root: int) -> None:
    folder = _subfolder(root, b"times")
    os.symlink(b"target", b"symlink", dir_fd=folder)
    os.utime(b"symlink", ns=(1, -1), dir_fd=folder, follow_symlinks=False)
    seconds = [0, 1, -1, -86_400 * 365 * 40, 2**31 - 1, 2**31, 4_102_444_800, 7_000_000_000]
    for number, second in enumerate(seconds):
        for nanosecond in (0, 1, 999_999_999):
            name = b"%d+%d" % (number, nanosecond)
            _write(folder, name, b"time")
            moment = second * GIGA + nanosecond
            os.utime(name, ns=(moment, moment), dir_fd=folder)
    inner = _subfolder(folder, b"old folder")
    os.utime(inner, ns=(0, -1_000_000_001))
    os.close(inner)
    os.close(folder)


def _hostile_kinds(root: int) -> None:
    folder = _subfolder(root, b"kinds")
    os.close(_subfolder(folder, b"empty folder"))
    os.mkfifo(b"fifo", dir_fd=folder)
    os.mknod(b"socket", stat.S_IFSOCK | 0o600, dir_fd=folder)
    if IS_ROOT:
        os.mknod(b"character device", stat.S_IFCHR | 0o600, os.makedev(1, 3), dir_fd=folder)
        os.mknod(b"block device", stat.S_IFBLK | 0o600, os.makedev(7, 0), dir_fd=folder)
    only = _subfolder(folder, b"only a fifo")
    os.mkfifo(b"fifo", dir_fd=only)
    os.close(only)
    os.close(folder)
