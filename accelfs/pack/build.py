"""How does a source become a version of a slot?

    walk -> plan -> workers read, compress, write shards -> catalog -> publish: shards, catalog, report, manifest

Everything is written in the slot's scratch folder first and is durable before the manifest is created, so a
version is visible whole or not at all, whatever ends the pack.  One pack of a slot runs at a time on a node
(flock); what a killed pack left behind, in scratch or unnamed in the store, the next one removes.

Concurrency: the packing process is single-threaded until its workers have ended, so that they can be forked safely;
then one thread makes the shards durable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import shutil
import signal
import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accelfs import __version__
from accelfs.errors import AccelfsError, BusyError, FullError, SourceError, StoreError, UsageError
from accelfs.format import lmdbfile
from accelfs.format import manifest as manifest_format
from accelfs.format.catalog import EXTENTS, LINK, CatalogWriter, Entry, Header, ShardInfo
from accelfs.format.catalog import Place as CatalogPlace
from accelfs.format.codec import CHUNK_BYTES, file_hash
from accelfs.format.manifest import Counts, Manifest, Source, StoredObject, Totals
from accelfs.pack import profile as profiles
from accelfs.pack import source as sources
from accelfs.pack import worker as workers
from accelfs.pack.listing import Listing, ListingWriter
from accelfs.pack.report import Report
from accelfs.store import layout

if TYPE_CHECKING:
    from accelfs.pack.profile import Plan, ProfileName
    from accelfs.pack.report import Kind
    from accelfs.store.layout import SlotName
    from accelfs.store.protocol import Store

VERSIONS_TRIES_MAX = 100
"""How often a version's number may be taken by another node before this pack gives up."""
_BATCH_BYTES = 8 << 20
_BATCH_FILES = 2048
_ONE_PROCESS_BYTES = 2 << 20
_UNREADABLE_NAMED = 5
_UPLOADS = "uploads.json"
_INTERRUPT_SECONDS = 0.2
"""How soon a Ctrl-C is noticed while the workers say nothing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pack is.  While it walks, totals are not known yet and `files` counts names."""

    phase: Literal["walk", "pack", "publish"]
    files: int = 0
    files_total: int = 0
    source_bytes: int = 0
    source_bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """What a finished pack has made."""

    manifest: Manifest
    plan: Plan
    seconds: float
    report_counts: dict[str, int]
    catalog_key: str


def pack(
    source: str,
    slot: SlotName,
    store: Store,
    scratch: Path,
    *,
    profile: ProfileName,
    jobs: int,
    skip_unreadable: bool,
    observe: Callable[[Progress], None],
) -> Packed:
    """Pack `source` as the next version of `slot`, with `jobs` worker processes.

    Raises UsageError, SourceError, BusyError, StoreError or FullError; nothing is published then.
    """
    started = time.monotonic()
    root = sources.local_root(source)
    if scratch.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{source}: holds accelfs' own folder {scratch.parent.parent}; pack a folder beside it")
    with _scratch_folder(scratch), _full_disk_named(scratch):
        _forget_uploads(store, slot, scratch)
        work = scratch / "work"
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            build = _Build(root, source, slot, store, scratch, profile, jobs, skip_unreadable, observe)
            manifest, plan, counts = build.run()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # a second Ctrl-C must not stop the cleaning
            shutil.rmtree(work, ignore_errors=True)
            # What is published can no longer be interrupted, and what failed needs no interrupt.
            signal.sigtimedwait((signal.SIGINT,), 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        catalog = layout.catalog_key(slot, manifest.catalog.hash)
        return Packed(manifest, plan, time.monotonic() - started, counts, catalog)


class _Build:
    """One pack from walk to manifest; its state is what the phases hand on."""

    def __init__(
        self, root: Path, source: str, slot: SlotName, store: Store, scratch: Path, profile: ProfileName, jobs: int,
        skip_unreadable: bool, observe: Callable[[Progress], None],
    ) -> None:  # fmt: skip
        self._root = root
        self._source = source
        self._slot = slot
        self._store = store
        self._scratch = scratch
        self._work = scratch / "work"
        self._profile = profile
        self._jobs = jobs
        self._skip_unreadable = skip_unreadable
        self._observe = observe
        self._shards: dict[int, workers.ShardDone] = {}
        self._unreadable: list[workers.Unreadable] = []

    def run(self) -> tuple[Manifest, Plan, dict[str, int]]:
        report = Report(self._work / "report")
        try:
            written = ListingWriter(self._work)
            try:
                walked = sources.walk(
                    self._root, written, report, skip_unreadable=self._skip_unreadable,
                    on_names=lambda names: self._observe(Progress("walk", names)),
                )  # fmt: skip
            finally:
                written.close()
            if written.count == 1:
                raise SourceError(f"{self._source}: holds nothing that can be packed")
            plan = self._plan(written)
            kept_out = walked.kept_out + self._run_workers(written, plan)
            self._observe(Progress("publish", len(written.files), len(written.files)))
            if written.count == 1 + len(self._unreadable):
                raise SourceError(f"{self._source}: holds nothing that can be read; nothing was published")
            for name in self._unreadable:
                report.name("unreadable", name.path, name.reason)
            report.total("xattrs", kept_out["xattrs"])
            report.total("acls", kept_out["acls"])
            report.total("capabilities", kept_out["capabilities"])
            version = _Version(self._work, written, self._shards, self._unreadable, plan, report)
            # The disk writes the shards while the processor writes the catalog.
            with ThreadPoolExecutor(1) as disk:
                durable = disk.submit(_make_durable, [done.path for done in version.shards])
                header, counts = version.write()
                durable.result()
            manifest = self._publish(version, header, counts, report, plan, walked.fingerprint)
            return manifest, plan, {kind: count for kind, count in report.counts.items() if count}
        finally:
            report.close()

    def _plan(self, written: ListingWriter) -> Plan:
        listing = Listing(self._work)
        root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return profiles.plan(self._profile, listing, written, root)
        finally:
            os.close(root)
            listing.close()

    def _run_workers(self, written: ListingWriter, plan: Plan) -> Counter[Kind]:
        order = profiles.order(plan, len(written.files))
        total = sum(written.sizes)
        batches = _batches(written.sizes, order, max(1, min(_BATCH_BYTES, total // (4 * self._jobs))))
        task = workers.Task(self._root, self._work, plan, written.files, order, batches, os.getpid())
        jobs = (
            1 if total < _ONE_PROCESS_BYTES and len(written.files) < 1000 else min(self._jobs, max(1, len(batches) - 1))
        )
        done = Progress("pack", 0, len(written.files), 0, total)
        kept_out: Counter[Kind] = Counter()
        for message in _messages(jobs, task):
            if isinstance(message, workers.BatchDone):
                files, source_bytes = done.files + message.files, done.source_bytes + message.source_bytes
                done = Progress("pack", files, done.files_total, source_bytes, total)
                self._observe(done)
            elif isinstance(message, workers.ShardDone):
                self._shards[message.number] = message
            elif isinstance(message, workers.Unreadable):
                self._unreadable.append(message)
                if not self._skip_unreadable and len(self._unreadable) >= _UNREADABLE_NAMED:
                    break
            elif isinstance(message, workers.Finished):
                kept_out += message.kept_out
        if self._unreadable and not self._skip_unreadable:
            names = "; ".join(f"{os.fsdecode(name.path)!r}: {name.reason}" for name in self._unreadable)
            raise SourceError(
                f"{self._source}: files that cannot be read: {names}; nothing was published "
                "(--skip-unreadable leaves such files out and reports them)"
            )
        return kept_out

    def _publish(
        self, version: _Version, header: Header, counts: Counts, report: Report, plan: Plan, fingerprint: str
    ) -> Manifest:
        catalog = StoredObject(file_hash(version.catalog), version.catalog.stat().st_size)
        stored_report = report.finish()
        shards = version.shards
        objects = [(done.path, layout.shard_key(self._slot, done.hash)) for done in shards]
        if plan.dictionary:
            objects.append((version.dictionary, layout.dictionary_key(self._slot, file_hash(version.dictionary))))
        objects.append((version.catalog, layout.catalog_key(self._slot, catalog.hash)))
        objects.append((report.path, layout.report_key(self._slot, stored_report.hash)))
        number = _next_version(self._store, self._slot)
        _remember_uploads(self._store, self._scratch, layout.catalog_key(self._slot, catalog.hash), objects)
        for path, key in objects:
            self._store.upload(path, key)
        # From here on an interrupt comes too late, and must not make us deny what is published.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        for _ in range(VERSIONS_TRIES_MAX):
            manifest = Manifest(
                format=manifest_format.FORMAT_VERSION, engine=lmdbfile.ENGINE, page_bytes=lmdbfile.PAGE_BYTES,
                slot=str(self._slot), version=number, created=int(time.time()), release=__version__,
                source=Source(self._source if "://" in self._source else self._root.as_uri(), fingerprint),
                profile=plan.profile, counts=counts,
                totals=Totals(
                    header.data_bytes, header.stored_bytes, len(shards), sum(done.file_bytes for done in shards)
                ),
                tree_digest=header.tree_digest, catalog=catalog, report=stored_report,
            )  # fmt: skip
            if self._store.create(layout.manifest_key(self._slot, number), manifest_format.encode(manifest)):
                (self._scratch / _UPLOADS).unlink(missing_ok=True)
                return manifest
            number += 1
        raise StoreError(f"{self._slot}: {VERSIONS_TRIES_MAX} version numbers were taken by others; run pack again")


class _Version:
    """Turn the listing and the closed shards into a catalog."""

    def __init__(
        self, work: Path, written: ListingWriter, shards: dict[int, workers.ShardDone],
        unreadable: list[workers.Unreadable], plan: Plan, report: Report,
    ) -> None:  # fmt: skip
        self.catalog = work / "catalog"
        self.dictionary = work / "dictionary"
        self._work = work
        self._written = written
        self._plan = plan
        self._report = report
        # In the order in which the workers closed them, so that equal inputs give equal tables with one worker.
        self._order = sorted(shards)
        self.shards = [shards[number] for number in self._order]
        self._index = {number: index for index, number in enumerate(self._order)}
        self._live_bytes = [0] * len(self._order)
        self._dropped = array("Q", sorted(name.number for name in unreadable))
        self._extents: dict[int, int] = {}
        self._counts: Counter[str] = Counter()
        self._links: list[tuple[int, int, Entry, bytes]] = []

    def write(self) -> tuple[Header, Counts]:
        written = self._written
        listing = Listing(self._work)
        # A chunk more for each file: those above CHUNK_BYTES and those with holes.
        extents = sum(size // CHUNK_BYTES + 1 for size in written.sizes if size > CHUNK_BYTES) + len(written.files)
        try:
            if self._dropped and written.further_links:
                self._drop_links(listing)
            with CatalogWriter(
                self.catalog, entries=written.count, name_bytes=written.name_bytes, extents=extents
            ) as catalog:
                self._write_entries(catalog, listing)
                for number, done in enumerate(self.shards):
                    catalog.add_shard(number, ShardInfo(done.hash, done.file_bytes, self._live_bytes[number]))
                if self._plan.dictionary:
                    self._write_dictionary(catalog)
                header = catalog.finish()
        finally:
            for descriptor in self._extents.values():
                os.close(descriptor)
            listing.close()
        counts = self._counts
        return header, Counts(
            counts["files"], counts["directories"], counts["symlinks"], counts["links"], self._report.skipped
        )

    def _write_entries(self, catalog: CatalogWriter, listing: Listing) -> None:
        directories = iter(self._written.directories)
        further_links = self._written.further_links
        dropped = set(self._dropped)
        counts = self._counts
        names: list[bytes] = []
        directory = 1
        for number, record, name, target in listing.scan():
            if number in dropped:
                continue
            entry = record.entry
            parent = self._renumbered(record.parent)
            if number > 1:
                if parent != directory:
                    if names:
                        catalog.add_names(directory, names)
                    directory, names = parent, []
                names.append(name)
            new = self._renumbered(number)
            if entry.flags & LINK:
                node = entry.position
                entry = self._further_link(listing.record(node).entry, node, len(name))
                counts["links"] += 1
                counts["files" if entry.is_file else "symlinks"] += 1
            elif entry.is_file:
                counts["files"] += 1
                entry = self._file(catalog, new, entry, 1 + further_links.get(number, 0))
            elif entry.is_directory:
                counts["directories"] += 1
                _, first, count, subdirectories = (next(directories) for _ in range(4))
                kept = count - (bisect_left(self._dropped, first + count) - bisect_left(self._dropped, first))
                entry = _placed(entry, 2 + subdirectories, self._renumbered(first), kept, parent)
            else:
                counts["symlinks"] += 1
                entry = _placed(entry, 1 + further_links.get(number, 0), 0, 0, 0)
            catalog.add(new, entry, name, target)
        if names:
            catalog.add_names(directory, names)

    def _further_link(self, node: Entry, number: int, name_bytes: int) -> Entry:
        """The entry of a further hard link: its node's attributes, and the node's number instead of a place."""
        extents = node.flags & EXTENTS
        return node._replace(
            nlink=1 + self._written.further_links[number], codec=0, dictionary=0, flags=LINK | extents,
            name_bytes=name_bytes, position=self._renumbered(number), extra=node.extra if extents else 0,
            parent_or_crc=0,
        )  # fmt: skip

    def _file(self, catalog: CatalogWriter, number: int, entry: Entry, nlink: int) -> Entry:
        """Replace a worker's provisional position by a place in the shard file."""
        position, extra, crc = entry.position, entry.extra, entry.parent_or_crc
        if entry.flags & EXTENTS:
            self._write_extents(catalog, number, crc >> 32, position, crc & 0xFFFFFFFF)
            return _placed(entry, nlink, 0, extra, 0)
        length = extra >> 32
        if length == 0:
            return _placed(entry, nlink, 0, 0, 0)
        index, offset = self._place(extra & 0xFFFFFFFF, position, length)
        return _placed(entry, nlink, offset, index | length << 32, crc)

    def _write_extents(self, catalog: CatalogWriter, number: int, worker: int, start: int, count: int) -> None:
        """Copy one file's rows from a worker's extents file."""
        if count == 0:
            return
        if worker not in self._extents:
            self._extents[worker] = os.open(self._work / f"extents-{worker}", os.O_RDONLY | os.O_CLOEXEC)
        rows = os.pread(self._extents[worker], count * workers.EXTENT.size, start)
        for chunk, position, shard, length, crc, codec, dictionary in workers.EXTENT.iter_unpack(rows):
            index, offset = self._place(shard, position, length)
            catalog.add_extent(number, chunk, CatalogPlace(offset, index, length, crc, codec, dictionary))

    def _place(self, shard: int, position: int, length: int) -> tuple[int, int]:
        index = self._index[shard]
        self._live_bytes[index] += length
        return index, self.shards[index].payload_offsets[position >> 32] + (position & 0xFFFFFFFF)

    def _renumbered(self, number: int) -> int:
        return number - bisect_left(self._dropped, number) if self._dropped else number

    def _drop_links(self, listing: Listing) -> None:
        """The further names of an unreadable file are as unreadable as its first."""
        gone = set(self._dropped)
        links = [
            (number, listing.path(record))
            for number, record, _, _ in listing.scan()
            if record.entry.flags & LINK and record.entry.position in gone
        ]
        for _, path in links:
            self._report.name("unreadable", path, "a further name of a file that cannot be read")
        self._dropped = array("Q", sorted([*self._dropped, *(number for number, _ in links)]))

    def _write_dictionary(self, catalog: CatalogWriter) -> None:
        with self.dictionary.open("wb") as file:
            file.write(self._plan.dictionary)
            file.flush()
            os.fsync(file.fileno())
        catalog.add_dictionary(1, file_hash(self.dictionary), len(self._plan.dictionary))


def _make_durable(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _placed(entry: Entry, nlink: int, position: int, extra: int, parent_or_crc: int) -> Entry:
    """The entry with what the whole listing tells of it; once a name, so without the detour of `_replace`."""
    return Entry._make((*entry[:6], nlink, *entry[7:11], position, extra, parent_or_crc, entry[14]))


def _batches(sizes: array[int], order: array[int] | range, bytes_max: int) -> array[int]:
    """Where each batch begins in the order, and the end: batch k is order[batches[k]:batches[k + 1]]."""
    batches = array("Q", (0,))
    pending = 0
    for position, index in enumerate(order):
        if pending and (pending + sizes[index] > bytes_max or position - batches[-1] >= _BATCH_FILES):
            batches.append(position)
            pending = 0
        pending += sizes[index] + 512
    if len(order):
        batches.append(len(order))
    return batches


def _messages(jobs: int, task: workers.Task) -> Iterator[workers.Message]:
    """Run the workers and yield what they say until all have finished.

    A worker that fails raises its error here; one that dies (out of memory, a signal) raises StoreError.  In
    every case no worker is left when this generator is closed.

    SIGINT is blocked and looked for between messages: as an exception it could come where Python drops exceptions, or
    between the fork of a worker and our knowing it.
    """
    context = multiprocessing.get_context("fork")
    counter = context.Value("Q", 0)
    processes: dict[multiprocessing.connection.Connection, multiprocessing.context.ForkProcess] = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        for worker in range(jobs):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=workers.run, args=(worker, task, counter, theirs), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        running = dict(processes)
        while running:
            if signal.SIGINT in signal.sigpending():
                raise KeyboardInterrupt
            for ready in multiprocessing.connection.wait(list(running), _INTERRUPT_SECONDS):
                assert isinstance(ready, multiprocessing.connection.Connection)
                try:
                    message: workers.Message = ready.recv()
                except EOFError:
                    running[ready].join()
                    raise StoreError(
                        f"a packing process ended with code {running[ready].exitcode}; nothing was published: "
                        "is there enough memory?"
                    ) from None
                if isinstance(message, workers.Failed):
                    raise message.error
                if isinstance(message, workers.Finished):
                    running.pop(ready).join()
                yield message
    finally:
        for connection, process in processes.items():
            if process.is_alive():
                process.kill()
            process.join()
            connection.close()
        if signal.sigtimedwait((signal.SIGINT,), 0) is None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _scratch_folder(scratch: Path) -> Iterator[None]:
    """Hold the slot's scratch folder; BusyError if another pack of the slot does."""
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{scratch}: {error.strerror}; set ACCELFS_HOME to a folder you may write") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another pack of this slot runs ({scratch}); wait for it to end") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _full_disk_named(scratch: Path) -> Iterator[None]:
    """Whatever writes to scratch may meet a full disk: say where."""
    try:
        yield
    except FullError as error:
        raise FullError(f"{error}; nothing was published: free some space below {scratch.parent.parent}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(f"no space left below {scratch.parent.parent}; nothing was published") from error
        raise AccelfsError(f"{error.filename or scratch}: {error.strerror}") from error


def _next_version(store: Store, slot: SlotName) -> int:
    numbers = [layout.version_number(name) for name in store.list(layout.versions_prefix(slot))]
    return 1 + max((number for number in numbers if number is not None), default=0)


def _remember_uploads(store: Store, scratch: Path, catalog: str, objects: list[tuple[Path, str]]) -> None:
    """Note which objects are about to be new in the store, so that the next pack can take them back."""
    present: dict[str, set[str]] = {}
    new = []
    for _, key in objects:
        prefix, _, name = key.rpartition("/")
        if prefix not in present:
            present[prefix] = set(store.list(prefix))
        if name not in present[prefix]:
            new.append(key)
    with (scratch / _UPLOADS).open("w", encoding="ascii") as file:
        json.dump({"catalog": catalog, "new": new}, file)
        file.flush()
        os.fsync(file.fileno())


def _forget_uploads(store: Store, slot: SlotName, scratch: Path) -> None:
    """Remove what a pack uploaded before it was killed, unless a manifest names its catalog."""
    path = scratch / _UPLOADS
    try:
        note: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        note = {"catalog": "", "new": []}  # killed while it wrote the note: nothing was uploaded yet
    if note["catalog"] not in _named_catalogs(store, slot):
        for key in note["new"]:
            store.delete(key)
    path.unlink()


def _named_catalogs(store: Store, slot: SlotName) -> set[str]:
    """Catalog keys that the slot's manifests name."""
    keys = set()
    for name in store.list(layout.versions_prefix(slot)):
        if layout.version_number(name) is not None:
            document = store.read(f"{layout.versions_prefix(slot)}/{name}", manifest_format.MANIFEST_BYTES_MAX)
            keys.add(layout.catalog_key(slot, manifest_format.decode(document, name).catalog.hash))
    return keys
