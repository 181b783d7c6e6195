"""Is a mount served on, without an error and without an unmount, when its processes or its version are replaced?

Readers go past the kernel's caches all the time, so each call needs a living worker.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mounts
import pytest
from conftest import wait_until
from mounts import Holder, Node, Readers, only_line
from test_8_mount_faults import CAN_RESEND, CONTENTS, KILLED, check_contents, is_alive, kill

SEED = int(os.environ.get("ACCELFS_TEST_SEED", "20261130"))
TAKEN_OVER = r"WARNING \d+ accelfs\.mount\.master: the master of .* was killed; replacing it"
pytestmark = pytest.mark.skipif(not CAN_RESEND and "CI" not in os.environ, reason="needs Linux 6.9")


@pytest.fixture(scope="module")
def module_node() -> Iterator[Node]:
    with mounts.node() as node:
        for version in (1, 2):
            source = node.folder / f"source{version}"
            (source / "folder").mkdir(parents=True)
            for name, data in CONTENTS.items():
                (source / name).write_bytes(data)
            (source / "version").write_text(f"{version}")
            (source / f"only-{version}").write_text(f"{version}")
            node.pack(source, "photos")
        node.root.mkdir()
        yield node


@pytest.fixture
def node(module_node: Node) -> Iterator[Node]:
    yield module_node
    module_node.settle()


def master_pid(node: Node) -> int:
    row = node.row("photos")
    assert row is not None
    return int(row["master_pid"])


@pytest.mark.parametrize("engine", ["fast", "pyfuse3"])
def test_replace_swaps_all_processes_under_readers(node: Node, engine: str) -> None:
    path = node.mount("photos", "--engine", engine, "--workers", "2")
    before = {master_pid(node), *node.worker_pids("photos")}
    with Readers(path, CONTENTS, count=8) as readers, Holder(path / "random-5000") as holder:
        for _ in range(3):
            readers.advance(3)
            node.cli("mount", "photos", "--replace")
            readers.advance(3)
        found = readers.stop()
        assert holder.read() == 0
    assert found.errors == Counter()
    after = {master_pid(node), *node.worker_pids("photos")}
    assert not before & after
    assert not any(map(is_alive, before))
    node.umount("photos")


def test_what_is_replaced_keeps_its_version_and_place(node: Node) -> None:
    path = node.mount("photos", "--version", "1")
    node.cli("mount", "photos", "--replace")
    row = node.row("photos")
    assert row is not None
    assert (row["version"], row["mountpoint"]) == (1, str(path))
    line = only_line(node.cli("mount", "photos", "--replace", "--version", "2", code=None), 1)
    assert "keeps its version" in line
    check_contents(path)
    node.expect_log("keeps its version")
    node.umount("photos")


def test_replace_of_what_is_not_mounted_mounts_it(node: Node) -> None:
    node.cli("mount", "photos", "--replace")
    check_contents(node.root / "photos")
    node.umount("photos")


def _storm(node: Node, kills: int) -> None:
    """Kill the master, workers or all but one of them, again and again; a new master takes over each time."""
    source = random.Random(SEED)
    print("seed", SEED)
    path = node.mount("photos", "--workers", "3")
    with Readers(path, CONTENTS, count=8) as readers:
        for _ in range(kills):
            master, workers = master_pid(node), node.worker_pids("photos")
            some = source.sample(workers, min(2, len(workers) - 1))
            victims = source.choice(([master], some, [*some, master]))
            source.shuffle(victims)
            kill(*victims)
            if master in victims:
                node.cli("mount", "photos")
            readers.advance(1)
        found = readers.stop()
    assert found.errors == Counter()
    node.umount("photos")
    node.allow_log(TAKEN_OVER)
    node.allow_log(KILLED)


def test_no_call_fails_whoever_is_killed(node: Node) -> None:
    _storm(node, 12)


@pytest.mark.soak
def test_no_call_fails_in_200_kills(node: Node) -> None:
    _storm(node, 200)


def test_switch_shows_the_other_version_and_mixes_nothing(node: Node) -> None:
    path = node.mount("photos", "--version", "1")
    old = {master_pid(node), *node.worker_pids("photos")}
    with Readers(path, CONTENTS, count=4) as readers:
        with Holder(path / "only-1") as file, Holder(path / "folder") as folder:
            assert _seen(path) == ("1", ["only-1"])
            node.cli("switch", "photos")
            assert _seen(path) == ("2", ["only-2"])
            readers.advance(5)
            # Who was in version 1 still is.
            assert (file.read(), folder.read()) == (0, 0)
            assert all(map(is_alive, old))
        wait_until(lambda: not any(map(is_alive, old)), "the old version's processes to end with its last user", 2.0)
        found = readers.stop()
    assert found.errors == Counter()
    node.umount("photos")


def test_many_switches_under_readers(node: Node) -> None:
    path = node.mount("photos", "--version", "1")
    with Readers(path, CONTENTS, count=4) as readers:
        for number in range(10):
            version = 2 - number % 2
            node.cli("switch", "photos", "--version", str(version))
            assert _seen(path) == (str(version), [f"only-{version}"])
            readers.advance(1)
        found = readers.stop()
    assert found.errors == Counter()
    node.umount("photos")


def test_switch_that_cannot_be_is_one_line(node: Node) -> None:
    assert "not mounted" in only_line(node.cli("switch", "photos", code=None), 1)
    path = node.mount("photos")
    assert "already" in only_line(node.cli("switch", "photos", code=None), 1)
    assert "no version 7" in only_line(node.cli("switch", "photos", "--version", "7", code=None), 1)
    check_contents(path)
    node.expect_log("shows version 2 already")
    node.umount("photos")


def test_master_that_retired_ends_on_a_signal_without_touching_the_path(node: Node) -> None:
    path = node.mount("photos", "--version", "1")
    retired = master_pid(node)
    with Holder(path / "only-1"):
        node.cli("switch", "photos")
        os.kill(retired, signal.SIGTERM)
        wait_until(lambda: not is_alive(retired), "the retired master to end", 10.0)
        check_contents(path)
    node.umount("photos")


def _seen(path: Path) -> tuple[str, list[str]]:
    def look() -> tuple[str, list[str]]:
        return (path / "version").read_text(), [name for name in sorted(os.listdir(path)) if name.startswith("only-")]

    return mounts.call(look)
