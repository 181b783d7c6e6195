"""Stores: one suite that every store must pass, what is special about a directory, and the names of slots and keys."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.synchronize
import os
import random
import re
import shutil
import signal
import string
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import deadly
from hypothesis import assume, example, given
from hypothesis import strategies as st

from accelfs.errors import FullError, NotFoundError, StoreError, UsageError
from accelfs.store import layout
from accelfs.store.layout import SlotName, parse_slot
from accelfs.store.posix import PosixStore

if TYPE_CHECKING:
    from conftest import Cli, Home

    from accelfs.store.protocol import Store

WRITERS = 16


def file_with(folder: Path, data: bytes, name: str = "finished") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


# --- What any store must do ----------------------------------------------------------------------


class StoreContract:
    """The Protocol as tests.  A store's own class gives the fixture `store`, empty, and inherits the rest."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        raise NotImplementedError

    def test_what_was_created_is_read(self, store: Store) -> None:
        for data in (b"", b"text", bytes(range(256)) * 4096):
            assert store.create(f"a/b/{len(data)}", data)
            assert store.read(f"a/b/{len(data)}", 2 << 20) == data

    def test_object_is_never_modified(self, store: Store) -> None:
        assert store.create("a/object", b"first")
        assert not store.create("a/object", b"second")
        assert not store.create("a/object", b"first")
        assert store.read("a/object", 100) == b"first"

    def test_uploaded_file_is_read_and_belongs_to_the_store(self, store: Store, tmp_path: Path) -> None:
        data = random.Random(1).randbytes(3 << 20)
        source = file_with(tmp_path, data)
        store.upload(source, "a/b/object")
        assert store.read("a/b/object", len(data)) == data
        assert not source.exists()

    def test_upload_keeps_what_is_there(self, store: Store, tmp_path: Path) -> None:
        store.upload(file_with(tmp_path, b"content"), "a/object")
        store.upload(file_with(tmp_path, b"another"), "a/object")
        assert store.read("a/object", 100) == b"content"
        assert not (tmp_path / "finished").exists()

    def test_upload_of_a_missing_file_is_an_error(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(StoreError):
            store.upload(tmp_path / "missing", "a/object")
        assert store.list("a") == []

    def test_list_names_the_objects_right_below_a_prefix(self, store: Store) -> None:
        for key in ("a/2", "a/10", "a/b/3", "a/b/c/4", "ab/5", "6"):
            assert store.create(key, b"")
        assert store.list("a") == ["10", "2"]
        assert store.list("a/b") == ["3"]
        assert store.list("a/b/c") == ["4"]
        assert store.list("ab") == ["5"]

    def test_list_of_nothing_is_empty(self, store: Store) -> None:
        assert store.list("a") == []
        assert store.list("a/b/c") == []
        store.create("a/object", b"")
        assert store.list("a/b") == []

    def test_read_of_what_is_missing(self, store: Store) -> None:
        for key in ("object", "a/b/object"):
            with pytest.raises(NotFoundError, match="object"):
                store.read(key, 100)
        store.create("a/object", b"")
        with pytest.raises(NotFoundError):
            store.read("a/object/below", 100)

    def test_read_refuses_what_is_larger_than_was_asked_for(self, store: Store) -> None:
        store.create("a/object", bytes(1001))
        assert len(store.read("a/object", 1001)) == 1001
        with pytest.raises(StoreError, match="1000"):
            store.read("a/object", 1000)
        with pytest.raises(StoreError):
            store.read("a/object", 0)

    def test_deleted_object_is_gone_and_may_be_created_again(self, store: Store) -> None:
        store.create("a/object", b"first")
        store.create("a/other", b"other")
        store.delete("a/object")
        assert store.list("a") == ["other"]
        with pytest.raises(NotFoundError):
            store.read("a/object", 100)
        store.delete("a/object")
        store.delete("never/was")
        assert store.create("a/object", b"second")
        assert store.read("a/object", 100) == b"second"

    def test_key_that_cannot_be_is_an_error_of_the_tree(self, store: Store, tmp_path: Path) -> None:
        too_long = "a/" + "k" * 2000
        with pytest.raises(StoreError):
            store.create(too_long, b"data")
        with pytest.raises(StoreError):
            store.read(too_long, 100)
        with pytest.raises(StoreError):
            store.upload(file_with(tmp_path, b"data"), too_long)
        store.create("a/object", b"data")
        with pytest.raises(StoreError):
            store.create("a/object/below", b"data")
        with pytest.raises(StoreError):
            store.upload(file_with(tmp_path, b"data"), "a/object/below")
        assert store.read("a/object", 100) == b"data"

    def test_of_many_processes_exactly_one_creates(self, store: Store) -> None:
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(WRITERS)
        keys = [f"race/{number:06d}" for number in range(25)]
        winners = context.Array("b", [0] * (WRITERS * len(keys)))

        def write(writer: int) -> None:
            for index, key in enumerate(keys):
                barrier.wait(60)
                winners[writer * len(keys) + index] = store.create(key, content_of(writer))

        processes = [context.Process(target=write, args=(writer,)) for writer in range(WRITERS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * WRITERS
        for index, key in enumerate(keys):
            won = [writer for writer in range(WRITERS) if winners[writer * len(keys) + index]]
            assert len(won) == 1
            assert store.read(key, 1 << 20) == content_of(won[0])
        assert store.list("race") == [key.removeprefix("race/") for key in keys]

    def test_of_many_threads_exactly_one_creates(self, store: Store) -> None:
        barrier = threading.Barrier(WRITERS, timeout=60)
        keys = [f"race/{number:06d}" for number in range(25)]
        winners: list[tuple[str, int]] = []
        failures: list[Exception] = []

        def write(writer: int) -> None:
            try:
                for key in keys:
                    barrier.wait()
                    if store.create(key, content_of(writer)):
                        winners.append((key, writer))
            except Exception as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [error for error in failures if not isinstance(error, threading.BrokenBarrierError)] == []
        assert sorted(key for key, _ in winners) == keys
        assert [key for key, writer in winners if store.read(key, 1 << 20) != content_of(writer)] == []

    def test_many_uploads_of_one_object_leave_one(self, store: Store, tmp_path: Path) -> None:
        """Two packs of one content on two nodes: both must succeed."""
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(WRITERS)
        data = random.Random(2).randbytes(300_000)

        def write(writer: int) -> None:
            source = file_with(tmp_path, data, f"finished-{writer}")
            barrier.wait(60)
            store.upload(source, "shards/object")

        processes = [context.Process(target=write, args=(writer,)) for writer in range(WRITERS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * WRITERS
        assert store.list("shards") == ["object"]
        assert store.read("shards/object", 1 << 20) == data


def content_of(writer: int) -> bytes:
    """Of different lengths, so that no mixture of two passes for one."""
    return b"%d " % writer * (1000 + writer)


class TestPosixStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return PosixStore(tmp_path / "store")


class TestPosixStoreAcrossFileSystems(StoreContract):
    """The store lies on another file system than the scratch folders that files are uploaded from."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            assert os.stat(folder).st_dev != os.stat(tmp_path).st_dev, "TMPDIR must not lie in /dev/shm"
            yield PosixStore(Path(folder, "store"))
            assert temporaries(Path(folder)) == []


def temporaries(folder: Path) -> list[str]:
    return [name for _, _, files in os.walk(folder) for name in files if name.startswith(".")]


# --- What is special about a directory -----------------------------------------------------------


def test_directory_appears_with_the_first_object(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "not" / "yet")
    assert store.list("a") == []
    assert not (tmp_path / "not").exists()
    assert store.create("a/object", b"")
    assert store.local_path("a/object").read_bytes() == b""


def test_nothing_but_objects_is_left(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    store.create("a/created", b"data")
    store.create("a/created", b"data")
    store.upload(file_with(tmp_path, b"data"), "a/uploaded")
    assert sorted(os.listdir(tmp_path / "store" / "a")) == ["created", "uploaded"]


def test_names_that_begin_with_a_dot_are_no_objects(tmp_path: Path) -> None:
    """What a killed writer leaves must not be taken for an object."""
    store = PosixStore(tmp_path / "store")
    store.create("a/object", b"data")
    (tmp_path / "store" / "a" / ".tmp-4711-000001.json").write_bytes(b"half of a manifest")
    assert store.list("a") == ["object"]


def test_no_writer_touches_an_object_by_what_a_killed_one_left(tmp_path: Path) -> None:
    """A writer that is killed before its first unlink(2) leaves the object with a second name; and in a container
    the number of its process comes round again at once.  Only a file system without O_TMPFILE knows such names."""
    store = PosixStore(tmp_path / "store")
    really_open = os.open

    def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return really_open(path, flags, *rest, **named)

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed(_: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", refuse)
            patch.setattr(os, "unlink", die)
            patch.setattr(Path, "unlink", die)
            store.create("a/object", b"published")

    assert deadly([0], killed) == [0]
    assert temporaries(tmp_path / "store") != [], "the killed writer left its temporary name"
    (left,) = temporaries(tmp_path / "store")
    assert store.read("a/object", 100) == b"published"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for number in map(int, re.findall(r"\d+", left)):
            patch.setattr(os, "getpid", lambda number=number: number)
            assert not store.create("a/object", b"another")
            assert store.read("a/object", 100) == b"published"


def test_store_that_may_not_be_written_says_so(tmp_path: Path) -> None:
    """A file in the place of a folder refuses root too."""
    (tmp_path / "store").write_bytes(b"")
    store = PosixStore(tmp_path / "store")
    for act in (
        lambda: store.create("a/object", b""),
        lambda: store.upload(file_with(tmp_path, b""), "a/object"),
        lambda: store.list("a"),
        lambda: store.read("a/object", 10),
        lambda: store.delete("a/object"),
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert str(tmp_path / "store") in str(caught.value)


def test_folder_is_no_object(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    store.create("a/b/object", b"")
    with pytest.raises(StoreError):
        store.read("a/b", 100)
    with pytest.raises(StoreError):
        store.delete("a/b")
    assert store.list("a/b") == ["object"]


def test_full_store_is_named_and_left_as_it_was(small_disk: Path, tmp_path: Path) -> None:
    store = PosixStore(small_disk / "store")
    assert store.create("a/small", b"data")
    size = 8 << 20
    with pytest.raises(FullError, match=str(small_disk)):
        store.create("a/large", bytes(size))
    source = file_with(tmp_path, bytes(size))
    with pytest.raises(FullError, match=str(small_disk)):
        store.upload(source, "a/large")
    assert os.listdir(small_disk / "store" / "a") == ["small"]
    # Nothing is lost: with more space the same call works.
    shutil.rmtree(small_disk / "store")
    source.write_bytes(bytes(1 << 20))
    store.upload(source, "a/large")
    assert store.read("a/large", size) == bytes(1 << 20)


# --- Names ---------------------------------------------------------------------------------------

_ALLOWED = string.ascii_letters + string.digits + "._-"

_SPOILERS = [*"/@+: \n\t\\é\0٣ß", "..", "/../", "//"]


def good_names() -> st.SearchStrategy[str]:
    first = st.sampled_from(string.ascii_letters + string.digits)
    rest = st.text(_ALLOWED, max_size=layout.NAME_CHARACTERS_MAX - 1)
    return st.builds(str.__add__, first, rest).filter(lambda name: ".." not in name)


@given(good_names(), good_names())
def test_good_names_are_slots(instance: str, name: str) -> None:
    assert parse_slot(name) == SlotName("default", name)
    assert parse_slot(f"{instance}/{name}") == SlotName(instance, name)
    assert parse_slot(f"default/{name}") == parse_slot(name)
    for text in (name, f"{instance}/{name}"):
        assert parse_slot(str(parse_slot(text))) == parse_slot(text)


@given(
    st.one_of(
        st.text(max_size=12),
        st.text(_ALLOWED + "/@+ \n\0", max_size=12),
        st.builds("{}{}{}".format, good_names(), st.sampled_from(_SPOILERS), good_names()),
    )
)
@example("")
@example("/")
@example("a/")
@example("/a")
@example("a/b/c")
@example("..")
@example("a/..")
@example("../a")
@example("a..b")
@example(".hidden")
@example("-rf")
@example("_a")
@example("a\n")
@example("a b")
@example("a\0")
@example("٣")
@example("n" * 101)
@example("n" * 300)
@example("i" * 300 + "/n")
@example("a@1")
def test_nothing_else_is_a_slot(text: str) -> None:
    part = r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
    assume(re.fullmatch(rf"({part}/)?{part}", text) is None)
    with pytest.raises(UsageError) as caught:
        parse_slot(text)
    assert len(str(caught.value).encode(errors="surrogatepass")) < 400
    assert "\n" not in str(caught.value)


@given(st.lists(st.tuples(good_names(), good_names()), min_size=2, max_size=2, unique=True), st.integers(1, 10**9))
def test_slots_never_share_a_key_a_folder_or_a_file(pair: list[tuple[str, str]], version: int) -> None:
    one, other = (SlotName(*names) for names in pair)
    digest = "0" * 64
    keys = [
        {
            layout.manifest_key(slot, version),
            layout.catalog_key(slot, digest),
            layout.shard_key(slot, digest),
            layout.report_key(slot, digest),
            layout.dictionary_key(slot, digest),
        }
        for slot in (one, other)
    ]
    assert len(keys[0]) == 5
    assert keys[0].isdisjoint(keys[1])
    assert one.file_name != other.file_name
    assert all("/" not in slot.file_name and len(slot.file_name) <= 255 for slot in (one, other))
    assert not any(set(key.split("/")) & {"", ".", ".."} for key in keys[0])


@given(good_names(), st.integers(1, 10**9))
def test_version_is_found_in_its_key_again(name: str, version: int) -> None:
    key = layout.manifest_key(SlotName("default", name), version)
    folder, _, object_name = key.rpartition("/")
    assert folder == layout.versions_prefix(SlotName("default", name))
    assert layout.version_number(object_name) == version


@pytest.mark.parametrize(
    "object_name",
    ["", "1.json", "000001", "000001.json.tmp", ".tmp-1-000001.json", "x000001.json", "000001.jsonl", "000001.json\n"],
)
def test_other_names_are_no_manifests(object_name: str) -> None:
    assert layout.version_number(object_name) is None


@pytest.mark.parametrize("slot", ["", "..", "../a", "a/b/c", "n" * 300, "a\nb"])
def test_commands_refuse_a_bad_slot_in_one_line(cli: Cli, tmp_path: Path, slot: str) -> None:
    assert "slot" in cli("pack", tmp_path, slot, code=2).line
    assert not cli.home.path.exists(), "a name that is refused leaves nothing behind"


@pytest.mark.parametrize("version", ["", "0", "-1", "²", "9" * 5000, "1@2"])
def test_commands_refuse_a_bad_version_in_one_line(cli: Cli, version: str) -> None:
    assert "version" in cli("ls", f"photos@{version}", code=2).line


def test_slots_and_versions_that_do_not_exist_are_one_line(cli: Cli, home: Home, tmp_path: Path) -> None:
    for command in (["ls", "photos"], ["cat", "photos", "a"], ["stat", "photos", "a"], ["extract", "photos", ".", "x"]):
        assert "photos has no version" in cli(*command, code=1, cwd=tmp_path).line
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(b"data")
    cli("pack", tmp_path / "source", "photos")
    assert "no version 7" in cli("ls", "photos@7", code=1).line
    assert cli("ls", "photos@1").stdout == b"file\n"
    assert "team/photos has no version" in cli("ls", "team/photos", code=1).line
