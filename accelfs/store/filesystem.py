"""On which kernel file system does a path lie, and is that one local?

Shards are mapped and read in place only from a local file system: a network file system may serve stale
pages or block a mapped read for ever.  The mounts of accelfs itself are recognised by their type.

Concurrency: sync, stateless.  Nothing here touches the path's own file system except `stat` in `device_of`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ACCELFS_TYPE = "fuse.accelfs"

# Types whose data another machine can change or withhold.
_REMOTE_TYPES = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "coda", "cpfs", "fhgfs", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs",
     "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2",
     "smb3", "smbfs", "virtiofs", "wekafs")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MountedFileSystem:
    """One row of /proc/self/mountinfo (proc(5)): where, which device (`major:minor`), type and source."""

    mount_id: int
    device: str
    mountpoint: Path
    type: str
    source: str


def mount_table() -> list[MountedFileSystem]:
    """Every mount of this mount namespace, in the order in which they were made."""
    rows = []
    with open("/proc/self/mountinfo", encoding=None, errors="surrogateescape") as file:
        for line in file:
            fields, _, tail = line.rstrip("\n").partition(" - ")
            mount_id, _, device, _, mountpoint = fields.split(" ")[:5]
            type_, source = tail.split(" ")[:2]
            rows.append(MountedFileSystem(int(mount_id), device, Path(_plain(mountpoint)), type_, _plain(source)))
    return rows


def mounted_at(path: Path) -> MountedFileSystem | None:
    """The topmost file system mounted exactly at this absolute path, found without touching it."""
    found = None
    for row in mount_table():
        if row.mountpoint == path:
            found = row
    return found


def file_system_of(path: Path) -> MountedFileSystem | None:
    """The file system that holds an existing path, by its device number."""
    device = device_of(path)
    found = None
    for row in mount_table():
        if row.device == device:
            found = row
    return found


def device_of(path: Path) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def is_remote(type_: str) -> bool:
    return type_ in _REMOTE_TYPES


def _plain(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
