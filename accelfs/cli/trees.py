"""`accelfs ls`, `cat`, `extract` and `stat`: a version's tree without a mount."""

from __future__ import annotations

import errno
import os
import stat as stat_module
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelfs.cli.arguments import Json, SlotVersion, counted, human_bytes, print_json, slot_and_version
from accelfs.errors import TreeError
from accelfs.service.node import Node

if TYPE_CHECKING:
    from accelfs.dataset.tree import Attributes, Tree
    from accelfs.dataset.versions import Version

_PIECE_BYTES = 1 << 20
_LOCATIONS_SHOWN = 20

TreePath = Annotated[str, typer.Argument(metavar="PATH", help="Path inside the slot.", show_default=False)]


def ls(
    slot: SlotVersion,
    path: Annotated[str, typer.Argument(metavar="[PATH]", help="Path inside the slot.")] = ".",
    long: Annotated[bool, typer.Option("-l", help="Mode, links, owner, size and time too.")] = False,
    recursive: Annotated[bool, typer.Option("-R", help="All names below, as paths relative to PATH.")] = False,
) -> None:
    """List names, one a line."""
    with _find(slot).open_tree() as tree:
        root = tree.walk(os.fsencode(path))
        out = sys.stdout.buffer
        if not stat_module.S_ISDIR(root.mode):
            out.write(_line(tree, root, os.fsencode(path), long))
            return
        pending = [(root.node, b"")]
        while pending:
            node, prefix = pending.pop()
            folders = []
            for child in tree.list(node):
                name = prefix + child.name
                out.write(_line(tree, child.attributes, name, long))
                if recursive and stat_module.S_ISDIR(child.attributes.mode):
                    folders.append((child.attributes.node, name + b"/"))
            pending.extend(reversed(folders))
        out.flush()


def cat(
    slot: SlotVersion,
    paths: Annotated[list[str], typer.Argument(metavar="PATH…", help="Files inside the slot.", show_default=False)],
) -> None:
    """Write the bytes of files to stdout."""
    with _find(slot).open_tree() as tree:
        out = sys.stdout.buffer
        for path in paths:
            found = tree.walk(os.fsencode(path))
            if not stat_module.S_ISREG(found.mode):
                number = errno.EISDIR if stat_module.S_ISDIR(found.mode) else errno.EINVAL
                raise TreeError(f"{path}: {os.strerror(number)}; only files have bytes", number)
            offset = 0
            while piece := tree.read(found.node, offset, _PIECE_BYTES):
                out.write(piece)
                offset += len(piece)
        out.flush()


def extract(
    slot: SlotVersion,
    path: TreePath,
    destination: Annotated[
        Path, typer.Argument(metavar="DEST", help="A path that does not exist yet.", show_default=False)
    ],
) -> None:
    """Write a file or folder of the slot as ordinary files: the way out, without a mount."""
    from accelfs.dataset import extract as extraction

    with _find(slot).open_tree() as tree:
        done = extraction.extract(tree, os.fsencode(path), destination)
    print(f"{destination}: {counted(done.names, 'name')}, {human_bytes(done.data_bytes)}")


def stat(slot: SlotVersion, path: TreePath, as_json: Json = False) -> None:
    """Show a name's attributes, and where and how its bytes are stored."""
    from accelfs.format.codec import CODEC_NAMES

    version = _find(slot)
    with version.open_tree() as tree:
        found = tree.walk(os.fsencode(path))
        document: dict[str, Any] = {
            "slot": str(version.slot),
            "version": version.number,
            "path": path,
            "type": _type(found.mode),
            "mode": f"{stat_module.S_IMODE(found.mode):04o}",
            "uid": found.uid,
            "gid": found.gid,
            "size": found.size,
            "blocks": found.blocks,
            "nlink": found.nlink,
            "mtime_ns": found.mtime_ns,
            "node": found.node,
        }
        if stat_module.S_ISLNK(found.mode):
            document["target"] = os.fsdecode(tree.readlink(found.node))
        if stat_module.S_ISREG(found.mode):
            document["xxh3_128"] = tree.content_hash(found.node).hex()
            document["stored"] = [
                {
                    "chunk": location.chunk, "shard": location.shard, "offset": location.place.offset,
                    "length": location.place.length, "codec": CODEC_NAMES.get(location.place.codec, "unknown"),
                    "crc32c": f"{location.place.crc32c:08x}",
                }
                for location in tree.locations(found.node)
            ]  # fmt: skip
    if as_json:
        print_json(document)
        return
    stored = document.pop("stored", [])
    for key, value in document.items():
        print(f"{key:>9}  {value}")
    for row in stored[:_LOCATIONS_SHOWN]:
        where = f"{row['length']} bytes {row['codec']} at {row['offset']} of shard {row['shard']}"
        print(f"   stored  chunk {row['chunk']}: {where}, CRC32C {row['crc32c']}")
    if len(stored) > _LOCATIONS_SHOWN:
        print(f"           … {len(stored) - _LOCATIONS_SHOWN} more chunks (--json shows all)")


def _find(slot: str) -> Version:
    from accelfs.dataset import versions

    name, number = slot_and_version(slot)
    node = Node.from_environment()
    return versions.find(node.store, name, number, node.trusted)


def _line(tree: Tree, attributes: Attributes, name: bytes, long: bool) -> bytes:
    if not long:
        return name + b"\n"
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(attributes.mtime_ns // 10**9))
    target = b" -> " + tree.readlink(attributes.node) if stat_module.S_ISLNK(attributes.mode) else b""
    head = (
        f"{stat_module.filemode(attributes.mode)} {attributes.nlink:3} {attributes.uid:5} {attributes.gid:5} "
        f"{attributes.size:12} {moment} "
    )
    return head.encode() + name + target + b"\n"


def _type(mode: int) -> str:
    return "directory" if stat_module.S_ISDIR(mode) else "symlink" if stat_module.S_ISLNK(mode) else "file"
