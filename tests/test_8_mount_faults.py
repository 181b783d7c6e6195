"""Does a mount survive what kills its parts, and does it say the truth when it cannot?

Processes are killed under readers, stored bytes are damaged before and under a live mount, and what a mount uses is
counted over many reads.  Whatever happens, the path never shows an empty folder and a promised file is never "no such
file": both would be a hole in a training set that nobody notices.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import random
import re
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mounts
import pytest
from conftest import wait_until
from mounts import SOAK_SECONDS, Findings, Holder, Node, Readers, in_child, only_line, soak

from accelfs.dataset import versions
from accelfs.service.node import Node as Machine
from accelfs.store.layout import parse_slot

ENGINES = ["fast", "pyfuse3"]
CHUNK = 1 << 20
DRAINED_SECONDS = 15.0
# `status` gives a mount two seconds to answer.
STATUS_SECONDS = 2.0 + 8.0
STRANDED_SECONDS = 15.0
"""Whose call has no answer by then, waits for one that nobody will give."""
REFUSED_SECONDS = 10.0
"""What is known to be impossible is said at once."""
CAN_RESEND = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) >= (6, 9)
KILLED = r"WARNING \d+ accelfs\.mount\.master: worker \d+ ended with code -9 "

CONTENTS = {
    **{f"random-{size}": random.Random(size).randbytes(size) for size in (1, 100, 5_000, 40_000, 200_000)},
    **{f"text-{size}": (b"some words that repeat\n" * size)[:size] for size in (100, 5_000, 40_000, 200_000)},
    "folder/large": random.Random(1).randbytes(3 * CHUNK + 5),
}


@pytest.fixture(scope="module")
def module_node() -> Iterator[Node]:
    with mounts.node() as node:
        source = node.folder / "source"
        (source / "folder").mkdir(parents=True)
        for name, data in CONTENTS.items():
            (source / name).write_bytes(data)
        (source / "link").symlink_to("folder/large")
        node.pack(source, "photos")
        node.pack(source, "more/photos")
        node.root.mkdir()
        yield node


@pytest.fixture
def node(module_node: Node) -> Iterator[Node]:
    yield module_node
    module_node.settle()


def ready(node: Node) -> bool:
    row = node.row("photos")
    assert row is not None
    return bool(row["ready"])


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def kill(*pids: int) -> None:
    """Kill, and wait until they are dead."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)), f"{pids} to die")


def kill_all_at_once(node: Node) -> None:
    """Nobody has the time to start anybody."""
    pids = node.home.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    kill(*pids)


def check_contents(path: Path) -> None:
    @in_child
    def check() -> None:
        for name, data in CONTENTS.items():
            assert mounts.read_direct(path / name, len(data) + 1) == data, name

    check()


def no_failure(found: Findings) -> None:
    assert found.rounds > 0
    if CAN_RESEND:
        assert found.errors == Counter()
    else:
        assert found.lies == {}


# --- Killed processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_worker_is_replaced_and_no_call_fails(node: Node, engine: str) -> None:
    kills = 4
    path = node.mount("photos", "--engine", engine, "--workers", "2")
    row = node.row("photos")
    assert row is not None
    master = row["master_pid"]
    with Readers(path, CONTENTS) as readers:
        readers.advance(5)
        for number in range(kills):
            before = children(master)
            assert len(before) == 2
            victim = sorted(before)[number % 2]
            kill(victim)
            readers.advance(5)
            wait_until(functools.partial(_has_two_others, master, victim), "a worker to take its place")
        no_failure(readers.stop())
    node.expect_log(KILLED, count=kills)
    wait_until(lambda: set(node.worker_pids("photos")) == children(master), "status to name the new workers")
    row = node.row("photos")
    assert row is not None
    assert (row["master_pid"], row["ready"]) == (master, True)


def _has_two_others(master: int, victim: int) -> bool:
    now = children(master)
    return len(now) == 2 and victim not in now


@pytest.mark.parametrize("engine", ENGINES)
def test_all_workers_killed_at_once_are_replaced_and_no_call_fails(node: Node, engine: str) -> None:
    path = node.mount("photos", "--engine", engine, "--workers", "2")
    with Readers(path, CONTENTS) as readers:
        for _ in range(2):
            readers.advance(5)
            kill(*node.worker_pids("photos"))
            readers.advance(5)
        no_failure(readers.stop())
    node.expect_log(KILLED, count=4)
    check_contents(path)


@soak
@pytest.mark.parametrize("engine", ENGINES)
def test_no_call_fails_under_many_kills(node: Node, engine: str) -> None:
    path = node.mount("photos", "--engine", engine, "--workers", "4")
    row = node.row("photos")
    assert row is not None
    kills = 0
    chooser = random.Random(1)
    with Readers(path, CONTENTS, count=8) as readers:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            readers.advance(2)
            for pid in chooser.sample(now := sorted(children(row["master_pid"])), min(2, len(now))):
                # Who is killed again before the master has noticed counts once.
                if is_alive(pid):
                    kill(pid)
                    kills += 1
        wait_until(lambda: len(children(row["master_pid"])) == 4, "all workers to be back")
        no_failure(readers.stop())
    node.expect_log(KILLED, count=kills)


def test_master_that_was_killed_is_missed_by_nobody_who_reads(node: Node) -> None:
    path = node.mount("photos", "--workers", "2")
    before = node.row("photos")
    assert before is not None
    with Readers(path, CONTENTS) as readers:
        readers.advance(5)
        kill(before["master_pid"])
        readers.advance(20)
        found = readers.stop()
    assert found.errors == Counter()
    assert node.row("photos") == {**before, "master_pid": None}
    assert "master killed" in node.cli("status").stdout.decode()
    # The workers left serve alone, one by one, and then the path is an error.
    first, second = before["worker_pids"]
    kill(first)
    if not CAN_RESEND:
        return
    check_contents(path)
    kill(second)
    check_that_it_is_dead(node, path)


def test_worker_that_dies_after_its_master_takes_no_reader_with_it(node: Node) -> None:
    """Nobody is left to start another worker; what the dead one had read is answered by the others, or fails."""
    path = node.mount("photos", "--workers", "3")
    row = node.row("photos")
    assert row is not None
    with Readers(path, CONTENTS, count=8) as readers:
        readers.advance(5)
        kill(row["master_pid"])
        for pid in row["worker_pids"][:2]:
            readers.advance(5, STRANDED_SECONDS)
            kill(pid)
        readers.advance(5, STRANDED_SECONDS)
        assert readers.stop().lies == {}


@pytest.mark.parametrize("command", [["umount"], ["umount", "--force"]], ids=" ".join)
def test_umount_ends_what_a_killed_master_left(node: Node, command: list[str]) -> None:
    node.mount("photos")
    row = node.row("photos")
    assert row is not None
    kill(row["master_pid"])
    node.cli(*command, "photos")
    assert node.leftovers() == []


def test_umount_of_what_a_killed_master_left_in_use(node: Node) -> None:
    path = node.mount("photos")
    row = node.row("photos")
    assert row is not None
    kill(row["master_pid"])
    with Holder(path / "random-100") as holder:
        only_line(node.cli("umount", "photos", code=None), 75)
        assert holder.read() == 0
        node.umount("photos", "--force")
        assert not node.home.mountpoints()
        wait_until(
            lambda: not node.home.processes(), "the orphaned workers to end, as --force promises", DRAINED_SECONDS
        )
        assert holder.read() == errno.ENOTCONN
    assert node.leftovers() == []


def test_mount_replaces_a_mount_whose_master_was_killed(node: Node) -> None:
    path = node.mount("photos")
    before = node.row("photos")
    assert before is not None
    with Readers(path, CONTENTS) as readers:
        readers.advance(5)
        kill(before["master_pid"])
        node.expect_log("WARNING .* was killed; replacing it", count=1)
        assert node.mount("photos") == path
        readers.advance(5)
        found = readers.stop()
    assert found.lies == {}
    after = node.row("photos")
    assert after is not None
    assert after["ready"] is True
    assert after["master_pid"] not in (None, before["master_pid"])
    check_contents(path)
    wait_until(lambda: not any(map(is_alive, before["worker_pids"])), "the old workers to end", DRAINED_SECONDS)


def check_that_it_is_dead(node: Node, path: Path) -> None:
    """An error for whoever asks what the kernel does not remember, and never an empty folder; and status says so."""
    for look in (
        lambda: os.statvfs(path),
        lambda: os.stat(path / "never asked for"),
        lambda: mounts.read_direct(path / "random-100", 1),
    ):
        assert mounts.errno_of(look) == errno.ENOTCONN
    names = sorted({name.partition("/")[0] for name in CONTENTS} | {"link"})
    assert mounts.call(lambda: _names_or_errno(path)) in (names, errno.ENOTCONN)
    row = node.row("photos")
    assert row is not None
    assert (row["ready"], row["master_pid"]) == (False, None)
    assert "NOT READY" in node.cli("status").stdout.decode()
    assert str(path) in node.home.mountpoints()


def _names_or_errno(path: Path) -> list[str] | int:
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        return error.errno or 0


def kill_everything(node: Node) -> Path:
    path = node.mount("photos")
    with Readers(path, CONTENTS) as readers:
        readers.advance(5)
        kill_all_at_once(node)
        found = readers.stop()
    assert found.lies == {}
    check_that_it_is_dead(node, path)
    return path


def test_mount_repairs_what_was_killed_whole(node: Node) -> None:
    path = kill_everything(node)
    node.expect_log("WARNING .* was killed; replacing it", count=1)
    assert node.mount("photos") == path
    assert node.home.mountpoints() == [str(path)], "the dead mount lies below the new one"
    assert ready(node)
    check_contents(path)


def test_mount_that_repairs_shows_no_empty_folder_meanwhile(node: Node) -> None:
    """Errors before, files after, and nothing else in between."""
    path = node.mount("photos")
    with Readers(path, CONTENTS) as readers:
        readers.advance(5)
        kill_all_at_once(node)
        readers.advance(5)
        node.expect_log("WARNING .* was killed; replacing it", count=1)
        node.mount("photos")
        readers.advance(5)
        found = readers.stop()
    assert found.lies == {}
    assert found.errors.total() > 0


def test_dead_mount_stays_an_error_when_it_cannot_be_repaired(node: Node, published: Published) -> None:
    given = node.folder / "given"
    given.mkdir()
    node.mount("published", given)
    kill_all_at_once(node)
    published.catalog.unlink()
    assert only_line(node.cli("mount", "published", given, code=None), 1)
    assert mounts.errno_of(lambda: os.stat(given / "never asked for")) == errno.ENOTCONN
    assert mounts.call(lambda: _names_or_errno(given)) == errno.ENOTCONN
    node.umount("published")
    given.rmdir()


def test_mount_elsewhere_clears_away_what_was_killed_whole(node: Node) -> None:
    kill_everything(node)
    given = node.folder / "given"
    given.mkdir()
    node.expect_log("WARNING .* was killed; replacing it", count=1)
    assert node.mount("photos", given) == given
    assert node.home.mountpoints() == [str(given)]
    assert list(node.root.iterdir()) == []
    check_contents(given)
    node.umount("photos")
    given.rmdir()


@pytest.mark.parametrize("command", [["umount"], ["umount", "--force"]], ids=" ".join)
def test_umount_clears_away_what_was_killed_whole(node: Node, command: list[str]) -> None:
    kill_everything(node)
    node.cli(*command, "photos")
    assert node.leftovers() == []
    assert only_line(node.cli("umount", "photos", code=None), 1) == "photos is not mounted"


def test_dead_mount_without_a_state_file_is_replaced(node: Node) -> None:
    """A machine whose state folder was wiped while the kernel kept the mount."""
    path = kill_everything(node)
    shutil.rmtree(node.home.path / "run")
    assert node.mount("photos") == path
    assert node.home.mountpoints() == [str(path)]
    check_contents(path)
    node.umount("photos")
    path.rmdir()  # not made by the mount that was taken down last


def test_hangup_of_a_terminal_ends_nobody(node: Node) -> None:
    path = node.mount("photos")
    pids = node.home.processes()
    for pid in pids:
        os.kill(pid, signal.SIGHUP)
    check_contents(path)
    assert node.home.processes() == pids


# --- Processes that hang -------------------------------------------------------------------------


def test_status_waits_two_seconds_for_a_mount_that_does_not_answer(node: Node) -> None:
    node.mount("photos")
    pids = node.worker_pids("photos")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    assert not ready(node)
    assert time.monotonic() - started < STATUS_SECONDS
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert ready(node)


def test_mounts_that_do_not_answer_can_be_ended(node: Node) -> None:
    """One by `umount --force`, one that runs in the foreground by a signal."""
    path = node.mount("photos")
    server = node.foreground("more/photos")
    assert "is mounted at" in server.line()
    for pid in (*node.worker_pids("photos"), *node.worker_pids("more/photos")):
        os.kill(pid, signal.SIGSTOP)
    waiting = mounts.Child(functools.partial(_read_at_any_rate, path / "random-100"))
    try:
        started = time.monotonic()
        node.allow_log("WARNING .*")
        server.signal(signal.SIGTERM, group=False)
        node.umount("photos", "--force")
        assert server.process.wait(DRAINED_SECONDS) == 0
        assert time.monotonic() - started < DRAINED_SECONDS
        assert node.leftovers() == []
        assert waiting.result() in (0, errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT)
    finally:
        waiting.close()


def _read_at_any_rate(path: Path) -> int:
    try:
        mounts.read_direct(path, 100)
    except OSError as error:
        return error.errno or 0
    return 0


# --- Damaged shards ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Where some bytes of a file lie."""

    shard: Path
    offset: int
    length: int


class Spoilt:
    """A slot whose objects may be spoilt: `restore` makes it what it was."""

    def __init__(self, node: Node, slot: str, source: Path, *options: str) -> None:
        self.node = node
        self.slot = slot
        self.folder = node.home.slot(slot)
        self.packed = node.pack(source, slot, *options)
        self._kept = node.folder / "pristine" / slot
        shutil.copytree(self.folder, self._kept)

    @property
    def path(self) -> Path:
        return self.node.root / self.slot

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self._kept, self.folder)


class Damaged(Spoilt):
    """A slot of two shards."""

    def __init__(self, node: Node) -> None:
        self.contents = {f"random-{number}": random.Random(number).randbytes(100_000 + number) for number in range(40)}
        self.contents |= {f"text-{number}": b"a line of text %d\n" % number * 4000 for number in range(20)}
        self.contents["large"] = random.Random(99).randbytes(3 * CHUNK + 1000)
        self.contents["empty"] = b""
        source = node.folder / "to-be-damaged"
        source.mkdir()
        for name, data in self.contents.items():
            (source / name).write_bytes(data)
        # Which process takes which batch is its own affair; that one takes all is rare.
        for number in range(10):
            super().__init__(node, f"damaged-{number}", source, "--jobs", "2")
            if self.packed["totals"]["shards"] > 1:
                break
        self.places = self._places()
        assert len(self.shards) > 1

    @property
    def shards(self) -> list[Path]:
        return sorted({place.shard for places in self.places.values() for place in places})

    def mount(self, engine: str = "fast") -> None:
        """With one worker, so that what it says once is said once."""
        self.node.mount(self.slot, "--engine", engine, "--workers", "1")

    def names_in(self, shard: Path) -> set[str]:
        return {name for name, places in self.places.items() if shard in {place.shard for place in places}}

    def expect(self, broken: set[str], *, times: int = 1) -> None:
        """Each of these files is EIO, every other file is whole; time and again."""

        @in_child
        def check() -> None:
            for _ in range(times):
                for name, data in self.contents.items():
                    number = 0
                    try:
                        assert mounts.read_direct(self.path / name, len(data) + 1) == data, name
                    except OSError as error:
                        number = error.errno or 0
                    assert number == (errno.EIO if name in broken else 0), (name, os.strerror(number))
            assert sorted(os.listdir(self.path)) == sorted(self.contents)
            os.statvfs(self.path)

        check()

    def _places(self) -> dict[str, list[Stored]]:
        machine = Machine.from_environment(self.node.home.environment)
        found: dict[str, list[Stored]] = {}
        with versions.find(machine.store, parse_slot(self.slot), None, machine.trusted).open_tree() as tree:
            for name in self.contents:
                found[name] = [
                    Stored(
                        self.node.home.slot(self.slot) / "shards" / f"{location.shard}.lmdb", location.place.offset,
                        location.place.length,
                    )
                    for location in tree.locations(tree.walk(name.encode()).node)
                ]  # fmt: skip
        return found


@pytest.fixture(scope="module")
def damaged_slot(module_node: Node) -> Damaged:
    return Damaged(module_node)


@pytest.fixture
def damaged(node: Node, damaged_slot: Damaged) -> Damaged:
    damaged_slot.restore()
    return damaged_slot


def flip(stored: Stored, at: int | None = None) -> None:
    position = stored.offset + (stored.length // 2 if at is None else at)
    with stored.shard.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes((byte ^ 0x10,)))


def says(shard: Path, words: str = "") -> str:
    """The one line about a shard."""
    return rf"\A[^\n]* ERROR [^\n]*{re.escape(shard.name)}[^\n]*{words}[^\n]*\n\Z"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("live", [False, True], ids=["before the mount", "under the mount"])
def test_flipped_byte_is_eio_for_its_file_and_one_line(damaged: Damaged, engine: str, live: bool) -> None:
    if live:
        damaged.mount(engine)
    flip(damaged.places["random-7"][0])
    flip(damaged.places["text-7"][0])
    if not live:
        damaged.mount(engine)
    damaged.expect({"random-7", "text-7"}, times=3)
    for name in ("random-7", "text-7"):
        place = damaged.places[name][0]
        damaged.node.expect_log(says(place.shard, rf"\b{place.offset}\b"), count=1)


@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_first_and_last_byte_of_a_file_are_checked_too(damaged: Damaged, at: int) -> None:
    place = damaged.places["random-3"][0]
    flip(place, at % place.length)
    damaged.mount()
    damaged.expect({"random-3"})
    damaged.node.expect_log(says(place.shard), count=1)


def test_flipped_byte_in_a_large_file_spoils_one_part_of_it(damaged: Damaged) -> None:
    flip(damaged.places["large"][1])
    damaged.mount()
    damaged.node.expect_log(says(damaged.places["large"][1].shard), count=1)
    data = damaged.contents["large"]

    @in_child
    def check() -> None:
        for start in (0, 2 * CHUNK, 3 * CHUNK):
            assert mounts.read_direct(damaged.path / "large", CHUNK, start) == data[start : start + CHUNK]
        for start in (CHUNK, 2 * CHUNK - 1, CHUNK + 4096):
            with pytest.raises(OSError, match=rf"Errno {errno.EIO}\b"):
                mounts.read_direct(damaged.path / "large", 1, start)

    check()
    damaged.expect({"large"})


def test_damage_is_eio_through_the_page_cache_and_a_map_too(damaged: Damaged) -> None:
    place = damaged.places["random-5"][0]
    flip(place)
    damaged.mount()
    damaged.node.expect_log(says(place.shard), count=1)
    assert mounts.errno_of((damaged.path / "random-5").read_bytes) == errno.EIO
    done = mounts.run_any("cp", damaged.path / "random-5", damaged.node.folder / "copy")
    assert done.code == 1
    assert "Input/output error" in done.stderr
    good = mounts.call((damaged.path / "random-6").read_bytes)
    assert good == damaged.contents["random-6"]
    line = only_line(damaged.node.cli("cat", damaged.slot, "random-5", code=None), 1)
    assert place.shard.name in line


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _raise_version(path: Path) -> None:
    """The LMDB version stands behind the magic number of each of the two meta pages."""
    data = path.read_bytes()[:8192]
    magic = struct.pack("=I", 0xBEEFC0DE)
    assert data.count(magic) == 2
    with path.open("r+b") as file:
        for page in (0, 4096):
            file.seek(data.index(magic, page) + 4)
            file.write(struct.pack("=I", 77))


SPOILERS: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "truncated": _truncate,
    "longer": _append,
    "empty": _empty,
    "a folder": _replace_by_folder,
    "a loop": _replace_by_loop,
    "another version": _raise_version,
}


@pytest.mark.parametrize("how", SPOILERS)
def test_shard_that_is_spoilt_before_the_mount(damaged: Damaged, how: str) -> None:
    """Its files are EIO, and the files of the other shard, and those without bytes, are whole."""
    shard = damaged.shards[0]
    SPOILERS[how](shard)
    damaged.mount()
    damaged.expect(damaged.names_in(shard), times=2)
    damaged.node.expect_log(says(shard), count=1)


@pytest.mark.parametrize("how", ["removed", "truncated", "empty"])
def test_shard_that_is_spoilt_under_the_mount(damaged: Damaged, how: str) -> None:
    """Before any of it was read."""
    damaged.mount()
    shard = damaged.shards[0]
    kept = damaged.node.folder / "kept"
    shutil.copy2(shard, kept)
    SPOILERS[how](shard)
    broken = damaged.names_in(shard)
    damaged.expect(broken, times=2)
    damaged.node.expect_log(says(shard), count=1)
    # What was put back is read again: an error is not remembered, neither by us nor by the kernel.
    kept.replace(shard)
    damaged.expect(set())


def test_shard_that_is_truncated_while_it_is_read(damaged: Damaged) -> None:
    """A worker has it open: what is left of it is read, the rest is EIO, and nobody dies of it."""
    damaged.mount()
    damaged.expect(set())
    before = damaged.node.worker_pids(damaged.slot)
    shard = damaged.shards[0]
    end = shard.stat().st_size // 2
    os.truncate(shard, end)
    broken = {
        name
        for name, places in damaged.places.items()
        if any(place.shard == shard and place.offset + place.length > end for place in places)
    }
    assert broken
    damaged.expect(broken, times=2)
    damaged.node.expect_log(says(shard), count=None)
    assert damaged.node.worker_pids(damaged.slot) == before


def test_shard_that_is_removed_while_it_is_read(damaged: Damaged) -> None:
    """A worker that has it open goes on, as every program does with an open file."""
    damaged.mount()
    damaged.expect(set())
    damaged.shards[0].unlink()
    damaged.expect(set())


def test_dictionary_that_is_missing_is_eio_for_what_needs_it(node: Node) -> None:
    """Many similar small texts share a zstd dictionary."""
    source = node.folder / "similar"
    source.mkdir()
    for number in range(3000):
        record = {"identifier": number, "kind": "annotation", "label": "cat" if number % 3 else "dog", "score": 0.5}
        (source / f"{number}.json").write_text(json.dumps(record) * 3)
    (source / "empty").touch()
    node.pack(source, "similar", "--profile", "text")
    dictionaries = list((node.home.slot("similar") / "dictionaries").glob("*"))
    assert dictionaries
    dictionaries[0].unlink()
    path = node.mount("similar", "--workers", "1")
    assert mounts.errno_of((path / "1.json").read_bytes) == errno.EIO
    assert mounts.errno_of((path / "2.json").read_bytes) == errno.EIO
    assert mounts.call((path / "empty").read_bytes) == b""
    node.expect_log(rf" ERROR [^\n]*{dictionaries[0].name}[^\n]*\n\Z", count=1)


# --- Damaged catalogs and manifests --------------------------------------------------------------


class Published(Spoilt):
    """A slot whose catalog and manifest may be spoilt."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, "published", node.folder / "source")
        self.manifest = self.folder / "versions" / "000001.json"
        self.trusted = node.home.path / "trusted"

    @property
    def catalog(self) -> Path:
        (path,) = (self.folder / "catalogs").iterdir()
        return path

    def change(self, **fields: Any) -> None:
        self.manifest.write_text(json.dumps({**json.loads(self.manifest.read_bytes()), **fields}))

    def trust(self) -> None:
        """Say that this node has verified the catalog as it is now."""
        status = self.catalog.stat()
        marker = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        (self.trusted / self.catalog.stem).write_text(json.dumps(marker))

    def republish(self) -> None:
        """Make the catalog as it is now the one that was published."""
        digest = hashlib.sha256(self.catalog.read_bytes()).hexdigest()
        self.catalog.rename(self.catalog.with_name(f"{digest}.lmdb"))
        self.change(catalog={"hash": digest, "bytes": self.catalog.stat().st_size})


@pytest.fixture(scope="module")
def published_slot(module_node: Node) -> Published:
    return Published(module_node)


@pytest.fixture
def published(node: Node, published_slot: Published) -> Published:
    published_slot.restore()
    return published_slot


def _flip_middle(path: Path) -> None:
    flip(Stored(path, 0, path.stat().st_size))


CATALOG_SPOILERS: dict[str, list[Callable[[Published], object]]] = {
    "catalog flipped": [lambda slot: _flip_middle(slot.catalog)],
    "catalog truncated": [lambda slot: _truncate(slot.catalog)],
    "catalog empty": [lambda slot: _empty(slot.catalog)],
    "catalog longer": [lambda slot: _append(slot.catalog)],
    "catalog missing": [lambda slot: slot.catalog.unlink()],
    "catalog a folder": [lambda slot: _replace_by_folder(slot.catalog)],
    # What a node that does not verify would meet.
    "catalog of another LMDB": [lambda slot: _raise_version(slot.catalog), Published.republish],
    "catalog of another format": [lambda slot: _raise_catalog_format(slot.catalog), Published.republish],
    "catalog no catalog": [lambda slot: slot.catalog.write_bytes(os.urandom(65536)), Published.republish],
    "catalog truncated and trusted": [lambda slot: _truncate(slot.catalog), Published.trust],
    "catalog empty and trusted": [lambda slot: _empty(slot.catalog), Published.trust],
    "manifest empty": [lambda slot: _empty(slot.manifest)],
    "manifest truncated": [lambda slot: _truncate(slot.manifest)],
    "manifest no JSON": [lambda slot: slot.manifest.write_bytes(b"\xff\x00{}")],
    "manifest a list": [lambda slot: slot.manifest.write_text("[1, 2, 3]")],
    "manifest deep": [lambda slot: slot.manifest.write_text("[" * 100_000)],
    "manifest too large": [lambda slot: slot.change(slot="x" * (2 << 20))],
    "manifest of another format": [lambda slot: slot.change(format=2)],
    "manifest of another engine": [lambda slot: slot.change(engine="lmdb-1.0")],
    "manifest with another field": [lambda slot: slot.change(something="new")],
    "manifest with a path": [lambda slot: slot.change(catalog={"hash": "../" * 21 + "x", "bytes": 1})],
    "manifest with a negative size": [lambda slot: slot.change(catalog={"hash": slot.catalog.stem, "bytes": -1})],
    "manifest a folder": [lambda slot: _replace_by_folder(slot.manifest)],
}


def _raise_catalog_format(path: Path) -> None:
    data = path.read_bytes()
    place = data.rindex(b"accelCAT") + 8
    with path.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<I", 99))


@pytest.mark.parametrize("how", CATALOG_SPOILERS)
def test_version_that_cannot_be_trusted_is_not_mounted(node: Node, published: Published, how: str) -> None:
    for step in CATALOG_SPOILERS[how]:
        step(published)
    started = time.monotonic()
    line = only_line(node.cli("mount", "published", code=None), 1)
    assert time.monotonic() - started < REFUSED_SECONDS
    assert "published" in line, "it says which file, or which slot"
    assert node.leftovers() == []
    # A worker that could not open it has said why.
    node.allow_log(r" ERROR [^\n]*\n\Z")


def test_catalog_that_vanishes_under_a_live_mount_is_needed_only_by_new_workers(
    node: Node, published: Published
) -> None:
    path = node.mount("published", "--workers", "1")
    catalog = published.catalog
    kept = catalog.rename(node.folder / "kept-catalog")
    check_contents(path)
    kill(*node.worker_pids("published"))
    reader = mounts.Child(functools.partial(mounts.read_direct, path / "random-100", 101))
    try:
        row = node.row("published")
        assert row is not None
        assert row["ready"] is False
        kept.rename(catalog)
        if CAN_RESEND:
            # Who asked meanwhile gets an answer from the worker that starts at last.
            assert reader.result() == CONTENTS["random-100"]
    finally:
        reader.close()
    wait_until(lambda: bool((row := node.row("published")) and row["ready"]), "the mount to answer again")
    check_contents(path)
    node.expect_log(KILLED, count=1)
    node.expect_log(rf"ERROR [^\n]*{catalog.name}[^\n]*\n\Z")
    node.expect_log(r"WARNING [^\n]*worker \d+ ended with code 3 ")


def test_catalog_that_is_truncated_under_a_live_mount_can_be_unmounted(node: Node, published: Published) -> None:
    """Whatever the workers make of it, no name is lost and the mount can be ended."""
    path = node.mount("published", "--workers", "2")
    os.truncate(published.catalog, 4096)
    looking = mounts.Child(functools.partial(_read_at_any_rate, path / "random-100"))
    try:
        assert node.cli("status", "--json").json["mounts"][0]["slot"] == "published"
        node.allow_log(".*")
        node.umount("published", "--force")
        assert node.leftovers() == []
        assert looking.result() != errno.ENOENT
    finally:
        looking.close()


# --- Nothing grows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What the processes of a mount use, by process."""

    descriptors: dict[int, int]
    private_kb: dict[int, int]


def usage(pids: list[int]) -> Usage:
    descriptors = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}
    private = {}
    for pid in pids:
        rows = dict(re.findall(r"(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text()))
        tables = re.search(r"VmPTE:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert tables is not None
        private[pid] = int(rows["Private_Clean"]) + int(rows["Private_Dirty"]) + int(tables[1])
    return Usage(descriptors, private)


WARM_READS = 6_000
GROWTH_KB_MAX = 1024


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_grows_over_50_000_reads(node: Node, engine: str) -> None:
    _check_that_nothing_grows(node, engine, 50_000)


@soak
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_grows_over_a_million_reads(node: Node, engine: str) -> None:
    _check_that_nothing_grows(node, engine, 1_000_000)


def _check_that_nothing_grows(node: Node, engine: str, reads: int) -> None:
    path = node.mount("photos", "--engine", engine, "--workers", "2")
    row = node.row("photos")
    assert row is not None
    pids = [row["master_pid"], *row["worker_pids"]]
    _read_in_children(path, WARM_READS)
    before = usage(pids)
    _read_in_children(path, reads)
    after = usage(pids)
    assert after.descriptors == before.descriptors
    growth = {pid: after.private_kb[pid] - before.private_kb[pid] for pid in pids}
    assert max(growth.values()) <= GROWTH_KB_MAX, (growth, before)
    assert node.home.processes() == set(pids)


def _read_in_children(path: Path, reads: int) -> None:
    readers = 2
    children = [mounts.Child(functools.partial(_read_many, path, reads // readers, seed)) for seed in range(readers)]
    try:
        for child in children:
            child.result(seconds=SOAK_SECONDS)
    finally:
        for child in children:
            child.close()


def _read_many(path: Path, count: int, seed: int) -> None:
    """Reads past the page cache, and now and then every other call that reaches a server."""
    chooser = random.Random(seed)
    descriptors = {name: os.open(path / name, os.O_RDONLY | os.O_DIRECT) for name in CONTENTS}
    names = sorted(CONTENTS)
    for number in range(count):
        name = names[number % len(names)]
        data = CONTENTS[name]
        offset = chooser.randrange(len(data))
        size = min(len(data) - offset, 4096)
        if os.pread(descriptors[name], size, offset) != data[offset : offset + size]:
            raise AssertionError(f"{name}: wrong bytes at {offset}")
        if number % 20 == 0:
            os.listdir(path)
            os.statvfs(path)
            os.readlink(path / "link")
            os.lseek(descriptors["folder/large"], chooser.randrange(CHUNK), os.SEEK_HOLE)
            if os.path.lexists(path / f"missing-{seed}-{number}"):
                raise AssertionError("a name that is none")


@soak
def test_nothing_grows_over_many_mounts(node: Node) -> None:
    """Files and folders of the node after a hundred rounds are those after the first."""

    def everything() -> list[str]:
        return sorted(str(path) for path in node.folder.rglob("*"))

    node.mount("photos")
    node.umount("photos")
    before = everything()
    for _ in range(100):
        node.mount("photos")
        node.umount("photos")
    assert everything() == before
