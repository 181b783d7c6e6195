"""One small interface for everything that can serve a data set: absent, prepare, mount, processes, unmount.

Each peer runs at the best settings found for it: cloned devices where it has them, small uncompressed blocks for
random reads, a ready-made index, caches of the kernel that never expire. The background queue of FUSE, 12 requests
unless a server asks for more, is made equally long for all peers, so that servers are compared and not their queues.

A server that cannot run here says why (`absent`). Whatever goes wrong with a mount, `mounted` ends it: it asks first,
then aborts the FUSE connection, which frees every process that hangs in it, and detaches the mount. Only processes
started here are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import native
from benchmarks.processes import CommandError, kill_group, run, wait_for

if TYPE_CHECKING:
    from benchmarks.data import DataSet

REPOSITORY = Path(__file__).parents[1]
SLOT = "bench"
ACCELFS = "accelfs"
FLOOR, FLOOR_NO_OPEN, FLOOR_RAW = "floor", "floor_no_open", "floor_raw"
RATARMOUNT, PLAIN = "ratarmount", "plain"

PREPARE_SECONDS_MAX = 600.0
MOUNT_SECONDS_MAX = 30.0
UNMOUNT_SECONDS_MAX = 20.0
POLL_SECONDS = 0.0005
"""How often the mount table is read while a server starts: the resolution of the mount time."""
BACKGROUND_REQUESTS_MAX = 4096


class Server(ABC):
    """A way to read a data set below a folder."""

    name: str

    @abstractmethod
    def absent(self) -> str | None:
        """Why it cannot run on this machine; None when it can."""

    @abstractmethod
    def prepare(self, dataset: DataSet, folder: Path) -> None:
        """Make the image of the data set in an empty folder, which is the server's own from then on."""

    @abstractmethod
    def mount(self, mountpoint: Path) -> Path:
        """Mount the image, wait until the mount is in the kernel's table, and return the root of the tree."""

    @abstractmethod
    def processes(self) -> dict[str, list[int]]:
        """The processes behind the mount, by role."""

    @abstractmethod
    def unmount(self, mountpoint: Path) -> None:
        """Unmount and wait for the end of the processes."""

    @abstractmethod
    def backing_files(self) -> list[Path]:
        """The files that a cold read must find in the page cache."""


class Plain(Server):
    """The tree itself on the local file system: what a second pass can reach at best."""

    name = PLAIN

    def __init__(self) -> None:
        self._tree = Path()

    def absent(self) -> str | None:
        return None

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        self._tree = dataset.tree

    def mount(self, mountpoint: Path) -> Path:
        return self._tree

    def processes(self) -> dict[str, list[int]]:
        return {}

    def unmount(self, mountpoint: Path) -> None:
        pass

    def backing_files(self) -> list[Path]:
        return []


class Daemon(Server):
    """A server that is one foreground command, started here, so its pid is known and nothing else is ever ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()

    @abstractmethod
    def command(self, mountpoint: Path) -> list[str | Path]:
        """The command that serves in the foreground."""

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        self._log = folder / "log"

    def mount(self, mountpoint: Path) -> Path:
        with self._log.open("wb") as log:
            process = self._process = subprocess.Popen(
                self.command(mountpoint), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + MOUNT_SECONDS_MAX
        while mount_device(mountpoint) is None:
            if process.poll() is not None:
                raise CommandError(f"{self.name} ended at start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise CommandError(f"{self.name} did not mount within {MOUNT_SECONDS_MAX:g} s")
            time.sleep(POLL_SECONDS)
        return mountpoint

    def processes(self) -> dict[str, list[int]]:
        return {"daemon": [self._process.pid]} if self._process else {}

    def unmount(self, mountpoint: Path) -> None:
        process, self._process = self._process, None
        try:
            if mount_device(mountpoint) is not None:
                run(_umount_command(mountpoint), UNMOUNT_SECONDS_MAX)
            if process and not wait_for(process, UNMOUNT_SECONDS_MAX):
                raise CommandError(f"{self.name} did not end after umount")
        except CommandError:
            detach(mountpoint)
            if process:
                kill_group(process)
            raise

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-3:])


class Floor(Daemon):
    """The do-nothing C libfuse daemon, with OPEN or with zero-message open."""

    def __init__(self, *, no_open: bool) -> None:
        super().__init__()
        self.name = FLOOR_NO_OPEN if no_open else FLOOR
        self._options = ["--no-open"] if no_open else []
        self._listing = Path()

    def absent(self) -> str | None:
        return _build_failure("floor", "fuse3")

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        super().prepare(dataset, folder)
        self._listing = dataset.listing

    def command(self, mountpoint: Path) -> list[str | Path]:
        return [native.build("floor", package="fuse3"), *self._options, self._listing, mountpoint]

    def backing_files(self) -> list[Path]:
        return []


class RawFloor(Daemon):
    """The protocol answered by bare system calls, one process a processor."""

    name = FLOOR_RAW

    def __init__(self) -> None:
        super().__init__()
        self._listing = Path()

    def absent(self) -> str | None:
        return "mount(2) needs root" if os.geteuid() else _build_failure("floor_raw")

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        super().prepare(dataset, folder)
        self._listing = dataset.listing

    def command(self, mountpoint: Path) -> list[str | Path]:
        count = str(len(os.sched_getaffinity(0)))
        return [native.build("floor_raw"), "--processes", count, self._listing, mountpoint]

    def processes(self) -> dict[str, list[int]]:
        if not self._process:
            return {}
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return {"master": [pid], "worker": [int(child) for child in children]}

    def backing_files(self) -> list[Path]:
        return []


@dataclass(frozen=True, slots=True)
class SquashfsImage:
    """How mksquashfs is asked to write."""

    name: str
    options: tuple[str, ...]


UNCOMPRESSED = ("-noI", "-noD", "-noF", "-noX")
ZSTD = ("-comp", "zstd", "-Xcompression-level", "3")
SQUASHFS_IMAGES = (
    SquashfsImage("squashfuse_16k", ("-b", "16384", *UNCOMPRESSED)),
    SquashfsImage("squashfuse_32k", ("-b", "32768", *UNCOMPRESSED)),
    SquashfsImage("squashfuse_zstd", ("-b", "131072", *ZSTD)),
)


def mksquashfs_command(tree: Path, image: Path, options: tuple[str, ...]) -> list[str | Path]:
    """The command that packs a tree; all processors, as is its default."""
    return ["mksquashfs", tree, image, "-noappend", "-no-xattrs", "-no-progress", "-quiet", *options]


class Squashfuse(Daemon):
    """squashfuse_ll over one image."""

    def __init__(self, image: SquashfsImage) -> None:
        super().__init__()
        self.name = image.name
        self._options = image.options
        self._image = Path()

    def absent(self) -> str | None:
        return _missing_program("mksquashfs") or _missing_program("squashfuse_ll")

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        super().prepare(dataset, folder)
        self._image = folder / "image.squashfs"
        run(mksquashfs_command(dataset.tree, self._image, self._options), PREPARE_SECONDS_MAX)

    def command(self, mountpoint: Path) -> list[str | Path]:
        return ["squashfuse_ll", "-f", "-o", "clone_fd", self._image, mountpoint]

    def backing_files(self) -> list[Path]:
        return [self._image]


class Ratarmount(Daemon):
    """ratarmount over a plain tar whose index is made beforehand."""

    name = RATARMOUNT

    def __init__(self) -> None:
        super().__init__()
        self._program = "ratarmount"
        self._tar = Path()
        self._index = Path()

    def absent(self) -> str | None:
        # The one beside this interpreter first: the development extra installs it there.
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        program = shutil.which("ratarmount", path=places)
        self._program = program or "ratarmount"
        return None if program else "ratarmount is not installed"

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        super().prepare(dataset, folder)
        self._tar, self._index = folder / "tree.tar", folder / "index.sqlite"
        run(["tar", "-C", dataset.tree, "-cf", self._tar, "."], PREPARE_SECONDS_MAX)
        run([self._program, "--no-mount", "--index-file", self._index, self._tar], PREPARE_SECONDS_MAX)

    def command(self, mountpoint: Path) -> list[str | Path]:
        timeouts = "ro,kernel_cache,entry_timeout=86400,attr_timeout=86400,negative_timeout=86400"
        return [self._program, "-f", "--index-file", self._index, "-o", timeouts, self._tar, mountpoint]

    def backing_files(self) -> list[Path]:
        return [self._tar, self._index]


class Accelfs(Server):
    """The product through its command line, in a home of its own."""

    name = ACCELFS

    def __init__(self, *, workers: int | None = None) -> None:
        self._home = Path()
        self._mount_options = ["--workers", str(workers)] if workers else []

    def absent(self) -> str | None:
        try:
            run([*accelfs_command(), "--help"], MOUNT_SECONDS_MAX, folder=REPOSITORY)
        except CommandError as error:
            return str(error)
        return None

    def prepare(self, dataset: DataSet, folder: Path) -> None:
        self._home = folder
        self._call("pack", str(dataset.tree), SLOT, seconds_max=PREPARE_SECONDS_MAX)

    def mount(self, mountpoint: Path) -> Path:
        self._call("mount", SLOT, str(mountpoint), *self._mount_options, seconds_max=MOUNT_SECONDS_MAX)
        return mountpoint

    def processes(self) -> dict[str, list[int]]:
        status = json.loads(self._call("status", "--json", seconds_max=MOUNT_SECONDS_MAX))
        roles: dict[str, list[int]] = {"master": [], "worker": [], "agent": []}
        for mount in status["mounts"]:
            pids = {"master": [mount["master_pid"]], "worker": mount["worker_pids"], "agent": [mount["agent_pid"]]}
            for role, numbers in pids.items():
                roles[role].extend(pid for pid in numbers if pid is not None)
        return roles

    def unmount(self, mountpoint: Path) -> None:
        try:
            if mount_device(mountpoint) is not None:
                self._call("umount", SLOT, seconds_max=UNMOUNT_SECONDS_MAX)
        finally:
            if mount_device(mountpoint) is not None:
                detach(mountpoint)

    def backing_files(self) -> list[Path]:
        return sorted(self._home.rglob("*.lmdb"))

    def _call(self, *words: str, seconds_max: float) -> str:
        command = [*accelfs_command(), *words]
        return run(command, seconds_max, environment=accelfs_environment(self._home), folder=REPOSITORY).output


def accelfs_command() -> list[str]:
    """The product as this interpreter has it."""
    return [sys.executable, "-m", "accelfs"]


def accelfs_environment(home: Path) -> dict[str, str]:
    """An environment in which the product touches nothing outside `home`."""
    return {**os.environ, "ACCELFS_HOME": str(home / "home"), "ACCELFS_MOUNT_ROOT": str(home / "mounts")}


def all_servers(*, workers: int | None = None) -> list[Server]:
    """Every server that is known, the product first; `workers` is passed to the product."""
    return [
        Accelfs(workers=workers),
        Floor(no_open=False),
        Floor(no_open=True),
        RawFloor(),
        *(Squashfuse(image) for image in SQUASHFS_IMAGES),
        Ratarmount(),
        Plain(),
    ]


@contextlib.contextmanager
def mounted(server: Server, mountpoint: Path) -> Iterator[Path]:
    """A fresh mount of a prepared server; the root of its tree. Whatever happens inside, no mount is left."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    try:
        yield server.mount(mountpoint)
    except BaseException:
        # Abort before anything else: the failure may be a reader that hangs in this mount.
        detach(mountpoint)
        with contextlib.suppress(CommandError):
            server.unmount(mountpoint)
        raise
    server.unmount(mountpoint)


@contextlib.contextmanager
def scratch_folder(work: Path, prefix: str) -> Iterator[Path]:
    """A folder for images and mount points. Removed at the end, unless something in it could not be unmounted."""
    work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=work)).resolve()  # the mount table knows no symlinks
    try:
        yield folder
    finally:
        for mountpoint in _mounts_below(folder):
            detach(mountpoint)
        if not _mounts_below(folder):
            shutil.rmtree(folder, ignore_errors=True)


def mount_device(mountpoint: Path) -> tuple[str, str] | None:
    """The device number ("0:57") and type of the mount at a path, from the mount table: the mount is not touched."""
    found = [(device, kind) for device, path, kind in _mount_table() if path == mountpoint]
    return found[-1] if found else None  # the last one lies on top


def equal_queue(mountpoint: Path) -> None:
    """Give a peer's connection the background queue of the floors, where fusectl is mounted and writable (root)."""
    connection = _connection(mountpoint)
    if connection:
        for name in ("max_background", "congestion_threshold"):
            with contextlib.suppress(OSError):
                (connection / name).write_text(str(BACKGROUND_REQUESTS_MAX), encoding="ascii")


def detach(mountpoint: Path) -> None:
    """Take a mount away even if its server hangs."""
    connection = _connection(mountpoint)
    if connection:
        with contextlib.suppress(OSError):
            (connection / "abort").write_text("1", encoding="ascii")
    if mount_device(mountpoint) is not None:
        with contextlib.suppress(CommandError):
            run(_umount_command(mountpoint, lazy=True), UNMOUNT_SECONDS_MAX)


def _mount_table() -> Iterator[tuple[str, Path, str]]:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        yield words[2], Path(words[4].replace("\\040", " ")), rest.split()[0]


def _mounts_below(folder: Path) -> list[Path]:
    return [path for _, path, _ in _mount_table() if folder in path.parents]


def _connection(mountpoint: Path) -> Path | None:
    device = mount_device(mountpoint)
    if device is None or not device[1].startswith("fuse"):
        return None
    path = Path("/sys/fs/fuse/connections") / device[0].partition(":")[2]
    return path if path.is_dir() else None


def _umount_command(mountpoint: Path, *, lazy: bool = False) -> list[str | Path]:
    if os.geteuid() == 0:
        return ["umount", *(["-l"] if lazy else []), mountpoint]
    return ["fusermount3", "-u", *(["-z"] if lazy else []), mountpoint]


def _missing_program(name: str) -> str | None:
    return None if shutil.which(name) else f"{name} is not installed"


def _build_failure(name: str, package: str | None = None) -> str | None:
    try:
        native.build(name, package=package)
    except CommandError as error:
        return str(error)
    return None
