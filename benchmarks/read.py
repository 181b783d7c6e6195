"""How fast is a mounted data set: cold and second pass, listings, mount time, memory.

    python -m benchmarks.read [--rounds N] [--files N] [--servers a,b] [--threads 1,4] [--data text] [--quick]

"Cold" is a fresh mount, so the kernel knows no name and no page of it, while the packed file itself is in the page
cache: what is measured is the server, not the disk. The "second" pass reads all files once more in another order. The
plain file system has no cold pass; its figures are warm ones.

With one reader thread, reader and server are pinned to one processor: on a virtual machine such a pass otherwise
measures mostly how long it takes to wake the other one. With more threads nothing is pinned.

In each round every figure is taken from all servers in turn, close together in time, and the order of the servers
turns from round to round, so that a machine that slows down or speeds up does so for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks import data, native
from benchmarks.processes import CommandError, end_on_sigterm, pin, private_bytes, run
from benchmarks.report import Json, Row, best, publish, ratio, significant
from benchmarks.servers import (
    ACCELFS,
    FLOOR,
    FLOOR_NO_OPEN,
    FLOOR_RAW,
    PLAIN,
    RATARMOUNT,
    SQUASHFS_IMAGES,
    Server,
    all_servers,
    equal_queue,
    mounted,
    scratch_folder,
)

if TYPE_CHECKING:
    from benchmarks.data import DataSet

QUICK_FILES, QUICK_ROUNDS = 2_000, 2
LISTING_SECONDS_MAX = 120.0
WORKER_BUDGET_BYTES = 40e6
LISTINGS = {"ls": ("ls", "-lR"), "find": ("find",)}


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured."""

    files: int = 20_000
    rounds: int = 5
    threads: tuple[int, ...] = (1, 4)
    kind: str = "incompressible"
    reader: str = "c"
    servers: tuple[str, ...] = ()
    """Names; empty for all."""
    workers: int | None = None
    """Workers of the product; None for its own default."""
    work: Path = data.DEFAULT_WORK


@dataclass(slots=True)
class Measurement:
    """The samples of a run, and the servers that are still in it."""

    options: Options
    dataset: DataSet
    folder: Path
    servers: list[Server]
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By row, then by server."""
    memory_by_role: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """By server: the largest process of each role."""

    def add(self, row: str, server: Server, value: float) -> None:
        """Note one value."""
        self.samples[row][server.name].append(value)

    def turned(self, by: int) -> list[Server]:
        """The servers in the order of a round."""
        by %= max(len(self.servers), 1)
        return [*self.servers[by:], *self.servers[:by]]

    @contextlib.contextmanager
    def dropping(self, server: Server) -> Iterator[None]:
        """Leave a server out of the rest of the run when it fails: what it gave until then stays."""
        try:
            yield
        except CommandError as error:
            print(f"{server.name}: {error}", file=sys.stderr)
            self.failed[server.name] = str(error)
            self.servers.remove(server)

    @contextlib.contextmanager
    def fresh_mount(self, server: Server) -> Iterator[Path]:
        """A new mount over warm backing files, with the queue of the floors for every peer."""
        for path in server.backing_files():
            _warm(path)
        mountpoint = self.folder / "mounts" / server.name
        with mounted(server, mountpoint) as root:
            if server.name != ACCELFS:  # the product is measured as its users get it
                equal_queue(mountpoint)
            yield root


def measure(options: Options) -> Iterator[Row]:
    """Run all rounds, then yield the rows."""
    native.build("reader")
    servers = _chosen(options)
    dataset = data.provide(options.kind, options.files, options.work)
    with scratch_folder(options.work, "read-") as folder:
        measurement = Measurement(options, dataset, folder, servers)
        _prepare(measurement)
        for round_index in range(options.rounds):
            print(f"read: round {round_index + 1} of {options.rounds}", file=sys.stderr)
            _measure_round(measurement, round_index)
    yield from _rows(measurement)


def _chosen(options: Options) -> list[Server]:
    servers = all_servers(workers=options.workers)
    unknown = set(options.servers) - {server.name for server in servers}
    if unknown:
        raise SystemExit(f"unknown servers: {', '.join(sorted(unknown))}")
    return [server for server in servers if not options.servers or server.name in options.servers]


def _prepare(measurement: Measurement) -> None:
    for server in list(measurement.servers):
        reason = server.absent()
        if reason is not None:
            measurement.absent[server.name] = reason
            measurement.servers.remove(server)
            continue
        print(f"read: preparing {server.name}", file=sys.stderr)
        folder = measurement.folder / server.name
        folder.mkdir()
        with measurement.dropping(server):
            server.prepare(measurement.dataset, folder)


def _measure_round(measurement: Measurement, round_index: int) -> None:
    for threads in measurement.options.threads:
        for server in measurement.turned(round_index):
            with measurement.dropping(server):
                _measure_passes(measurement, server, threads, round_index)
    for row in LISTINGS:
        for server in measurement.turned(round_index):
            with measurement.dropping(server):
                _measure_listing(measurement, server, row)
    for server in measurement.turned(round_index):
        if server.name != PLAIN:
            with measurement.dropping(server):
                _measure_mount(measurement, server)


def _measure_passes(measurement: Measurement, server: Server, threads: int, round_index: int) -> None:
    options, dataset = measurement.options, measurement.dataset
    cpu = max(os.sched_getaffinity(0)) if threads == 1 else None
    with measurement.fresh_mount(server) as root:
        if cpu is not None:
            pin(_pids(server), cpu)
        for row, seed in (("cold", 2 * round_index), ("second", 2 * round_index + 1)):
            speed = native.read_pass(options.reader, root, dataset, threads=threads, seed=seed, cpu=cpu)
            if row == "second" or server.name != PLAIN:
                measurement.add(f"{row}_{threads}", server, speed)
        if threads == max(options.threads):
            _measure_memory(measurement, server)


def _measure_memory(measurement: Measurement, server: Server) -> None:
    largest = measurement.memory_by_role[server.name]
    total = 0
    for role, pids in server.processes().items():
        sizes = [private_bytes(pid) for pid in pids]
        total += sum(sizes)
        if sizes:
            largest[role] = max(largest.get(role, 0), *sizes)
    if total:
        measurement.add("memory", server, total / 1e6)


def _measure_listing(measurement: Measurement, server: Server, row: str) -> None:
    with measurement.fresh_mount(server) as root:
        measurement.add(row, server, run([*LISTINGS[row], root], LISTING_SECONDS_MAX, discard_output=True).seconds)


def _measure_mount(measurement: Measurement, server: Server) -> None:
    """From the start of the mount command to the end of a first stat, listing and read."""
    for path in server.backing_files():
        _warm(path)
    begin = time.perf_counter()
    with mounted(server, measurement.folder / "mounts" / server.name) as root:
        native.probe(root, measurement.dataset)
        measurement.add("mount", server, time.perf_counter() - begin)


def _pids(server: Server) -> list[int]:
    return [pid for pids in server.processes().values() for pid in pids]


def _warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def _rows(measurement: Measurement) -> Iterator[Row]:
    passes = [f"{row}_{threads}" for threads in measurement.options.threads for row in ("cold", "second")]
    for name in passes:
        yield _row(measurement, name, "files_per_second", "higher")
    for name in (*LISTINGS, "mount"):
        yield _row(measurement, name, "seconds", "lower")
    yield _memory_row(measurement)


def _row(measurement: Measurement, name: str, unit: str, better: Literal["higher", "lower"]) -> Row:
    samples = measurement.samples[name]
    squashfuse = best(samples, (image.name for image in SQUASHFS_IMAGES), better)
    others = {FLOOR: FLOOR, FLOOR_NO_OPEN: FLOOR_NO_OPEN, FLOOR_RAW: FLOOR_RAW, "best_squashfuse": squashfuse}
    others |= {RATARMOUNT: RATARMOUNT, PLAIN: PLAIN}
    ratios = {f"ours_to_{label}": ratio(samples, ACCELFS, other) for label, other in others.items()}
    details = {"best_squashfuse": squashfuse, **_conditions(measurement)}
    return Row(name, unit, better, ratios, samples, details, failed=ACCELFS in measurement.failed)


def _memory_row(measurement: Measurement) -> Row:
    samples = measurement.samples["memory"]
    squashfuse = best(samples, (image.name for image in SQUASHFS_IMAGES), "lower")
    worker = measurement.memory_by_role[ACCELFS].get("worker")
    ratios = {
        "ours_worker_to_budget": None if worker is None else worker / WORKER_BUDGET_BYTES,
        "ours_to_best_squashfuse": ratio(samples, ACCELFS, squashfuse),
        "ours_to_ratarmount": ratio(samples, ACCELFS, RATARMOUNT),
    }
    roles: dict[str, Json] = {
        server: {role: significant(size / 1e6) for role, size in sizes.items()}
        for server, sizes in measurement.memory_by_role.items()
        if sizes
    }
    details = {"largest_process_megabytes": roles, "best_squashfuse": squashfuse, **_conditions(measurement)}
    return Row("memory", "private_megabytes", "lower", ratios, samples, details, failed=ACCELFS in measurement.failed)


def _conditions(measurement: Measurement) -> dict[str, Json]:
    options = measurement.options
    return {
        "files": measurement.dataset.file_count,
        "megabytes": round(measurement.dataset.byte_count / 1e6),
        "data": options.kind,
        "reader": options.reader,
        "rounds": options.rounds,
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "absent": measurement.absent,
        "failed": measurement.failed,
    }


def main() -> int:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read", description=__doc__.partition("\n")[0])
    defaults = Options()
    parser.add_argument("--files", type=int, help=f"number of files (default {defaults.files})")
    parser.add_argument("--rounds", type=int, help=f"default {defaults.rounds}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FILES} files, {QUICK_ROUNDS} rounds")
    parser.add_argument("--threads", default="1,4", help="reader threads, one figure each (default 1,4)")
    parser.add_argument("--data", choices=("incompressible", "text"), default=defaults.kind)
    parser.add_argument("--reader", choices=("c", "python"), default=defaults.reader)
    names = ", ".join(server.name for server in all_servers())
    parser.add_argument("--servers", default="", help=f"only these, separated by commas: {names}")
    parser.add_argument("--workers", type=int, help="workers of an accelfs mount (default: its own choice)")
    parser.add_argument("--work", type=Path, default=defaults.work, help=f"on local disk (default {defaults.work})")
    arguments = parser.parse_args()
    end_on_sigterm()
    options = Options(
        files=arguments.files or (QUICK_FILES if arguments.quick else defaults.files),
        rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else defaults.rounds),
        threads=tuple(int(word) for word in arguments.threads.split(",")),
        kind=arguments.data,
        reader=arguments.reader,
        servers=tuple(word for word in arguments.servers.split(",") if word),
        workers=arguments.workers,
        work=arguments.work.resolve(),
    )
    return publish(measure(options), sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
