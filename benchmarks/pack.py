"""How fast is a pack, how large its result, and how much memory does it take?

    python -m benchmarks.pack [--rounds N] [--files N] [--quick]
    python -m benchmarks.pack --million [--files N]

The whole command is timed, from its start to its end, against mksquashfs on the same tree: uncompressed for data that
does not compress, zstd at the same level for text. The source is in the page cache, and what the command before left
dirty is on disk before the next one starts. `--million` packs one tree of tiny files once, to see that memory does not
grow with their number.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import data
from benchmarks.processes import CommandError, PeakMemory, end_on_sigterm, kill_group, wait_for
from benchmarks.report import Json, Row, publish, ratio, summary
from benchmarks.servers import (
    ACCELFS,
    REPOSITORY,
    SLOT,
    UNCOMPRESSED,
    ZSTD,
    Accelfs,
    accelfs_command,
    accelfs_environment,
    mksquashfs_command,
    scratch_folder,
)

if TYPE_CHECKING:
    from benchmarks.data import DataSet

QUICK_FILES, QUICK_ROUNDS = 2_000, 2
MKSQUASHFS = "mksquashfs"
PEER_OPTIONS = {"incompressible": UNCOMPRESSED, "text": ZSTD}
PACK_SECONDS_MAX = 600.0
MILLION_FILES = 1_000_000
MILLION_WRITE_SECONDS_MAX = 900.0
MILLION_PACK_SECONDS_MAX = 1800.0
PEAK_BUDGET_MEGABYTES = 400.0

Command = Callable[[Path], list[str | Path]]
"""The command of a packer that writes everything it makes into an empty folder."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured."""

    files: int = 20_000
    rounds: int = 5
    work: Path = data.DEFAULT_WORK


@dataclass(frozen=True, slots=True)
class Packed:
    """One run of a packer."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    image_bytes: int


@dataclass(slots=True)
class Measurement:
    """The runs of every packer on one data set."""

    dataset: DataSet
    runs: dict[str, list[Packed]] = field(default_factory=lambda: defaultdict(list))
    absent: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def figures(self, value: Callable[[Packed], float]) -> dict[str, list[float]]:
        """One figure of every run, by packer."""
        return {name: [value(packed) for packed in runs] for name, runs in self.runs.items()}


def measure(options: Options) -> Iterator[Row]:
    """Yield one row for each kind of data."""
    for kind, peer_options in PEER_OPTIONS.items():
        dataset = data.provide(kind, options.files, options.work)
        _warm(dataset.tree)
        measurement = Measurement(dataset)
        commands: dict[str, Command] = {ACCELFS: _accelfs(dataset), MKSQUASHFS: _mksquashfs(dataset, peer_options)}
        _measure_rounds(measurement, commands, options)
        yield _row(measurement, f"pack_{kind}")


def measure_million(files: int, work: Path) -> Iterator[Row]:
    """Pack a tree of tiny files once and yield its row; the tree is removed afterwards."""
    dataset = data.provide("tiny", files, work, seconds_max=MILLION_WRITE_SECONDS_MAX)
    try:
        measurement = Measurement(dataset)
        commands: dict[str, Command] = {ACCELFS: _accelfs(dataset)}
        _measure_rounds(measurement, commands, Options(files, 1, work), seconds_max=MILLION_PACK_SECONDS_MAX)
        yield _million_row(measurement)
    finally:
        data.remove(dataset)


def pack(command: list[str | Path], folder: Path, seconds_max: float) -> Packed:
    """Run a packer that writes into `folder`, and watch its processes.

    Raises CommandError when it fails or does not end in time; it is ended then.
    """
    os.sync()
    before = _cpu_seconds()
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=accelfs_environment(folder),
            cwd=REPOSITORY,
            start_new_session=True,
        )
        try:
            with PeakMemory(process.pid) as memory:
                ended = wait_for(process, seconds_max)
                seconds = time.perf_counter() - begin
        finally:
            if process.poll() is None:
                kill_group(process)
        if not ended:
            raise CommandError(f"did not end within {seconds_max:g} s")
        if process.returncode:
            output.seek(0)
            last_lines = output.read().decode(errors="replace").strip().splitlines()[-3:]
            raise CommandError(f"ended with {process.returncode}: {' | '.join(last_lines)}")
    sizes = (path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return Packed(seconds, _cpu_seconds() - before, memory.peak_bytes, sum(sizes))


def _accelfs(dataset: DataSet) -> Command:
    return lambda folder: [*accelfs_command(), "pack", dataset.tree, SLOT, "--json"]


def _mksquashfs(dataset: DataSet, options: tuple[str, ...]) -> Command:
    return lambda folder: mksquashfs_command(dataset.tree, folder / "image.squashfs", options)


def _measure_rounds(
    measurement: Measurement,
    commands: Mapping[str, Command],
    options: Options,
    *,
    seconds_max: float = PACK_SECONDS_MAX,
) -> None:
    reasons = {ACCELFS: Accelfs().absent(), MKSQUASHFS: None if shutil.which(MKSQUASHFS) else "not installed"}
    measurement.absent |= {name: reason for name in commands if (reason := reasons[name])}
    for round_index in range(options.rounds):
        print(f"pack {measurement.dataset.name}: round {round_index + 1} of {options.rounds}", file=sys.stderr)
        # Every other round the other way round: neither always follows the other.
        for name in sorted(commands, reverse=bool(round_index % 2)):
            if name in measurement.absent or name in measurement.failed:
                continue
            with scratch_folder(options.work, "pack-") as folder:
                try:
                    measurement.runs[name].append(pack(commands[name](folder), folder, seconds_max))
                except CommandError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    measurement.failed[name] = str(error)


def _row(measurement: Measurement, name: str) -> Row:
    dataset = measurement.dataset
    speeds = measurement.figures(lambda packed: dataset.byte_count / 1e6 / packed.seconds)
    images = measurement.figures(lambda packed: packed.image_bytes)
    peaks = measurement.figures(lambda packed: packed.peak_bytes / 1e6)
    ratios = {
        "ours_to_mksquashfs": ratio(speeds, ACCELFS, MKSQUASHFS),
        "size_to_mksquashfs": ratio(images, ACCELFS, MKSQUASHFS),
        "peak_to_mksquashfs": ratio(peaks, ACCELFS, MKSQUASHFS),
    }
    return Row(name, "megabytes_per_second", "higher", ratios, speeds, _details(measurement), _is_failure(measurement))


def _million_row(measurement: Measurement) -> Row:
    peaks = measurement.figures(lambda packed: packed.peak_bytes / 1e6)
    ours = peaks.get(ACCELFS)
    ratios = {"peak_to_budget": max(ours) / PEAK_BUDGET_MEGABYTES if ours else None}
    return Row(
        "pack_million", "peak_megabytes", "lower", ratios, peaks, _details(measurement), _is_failure(measurement)
    )


def _details(measurement: Measurement) -> dict[str, Json]:
    figures: dict[str, Callable[[Packed], float]] = {
        "seconds": lambda packed: packed.seconds,
        "cpu_seconds": lambda packed: packed.cpu_seconds,
        "peak_resident_megabytes": lambda packed: packed.peak_bytes / 1e6,
        "image_megabytes": lambda packed: packed.image_bytes / 1e6,
    }
    return {
        **{
            name: {packer: summary(values) for packer, values in measurement.figures(value).items() if values}
            for name, value in figures.items()
        },
        "files": measurement.dataset.file_count,
        "source_megabytes": round(measurement.dataset.byte_count / 1e6),
        "rounds": max((len(runs) for runs in measurement.runs.values()), default=0),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "absent": measurement.absent,
        "failed": measurement.failed,
    }


def _is_failure(measurement: Measurement) -> bool:
    return ACCELFS in measurement.failed


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _warm(tree: Path) -> None:
    for folder, _, names in os.walk(tree):
        for name in names:
            Path(folder, name).read_bytes()


def main() -> int:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pack", description=__doc__.partition("\n")[0])
    defaults = Options()
    parser.add_argument("--files", type=int, help=f"default {defaults.files}; {MILLION_FILES} with --million")
    parser.add_argument("--rounds", type=int, help=f"default {defaults.rounds}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FILES} files, {QUICK_ROUNDS} rounds")
    parser.add_argument("--million", action="store_true", help="memory of one pack of tiny files, nothing else")
    parser.add_argument("--work", type=Path, default=defaults.work, help=f"on local disk (default {defaults.work})")
    arguments = parser.parse_args()
    end_on_sigterm()
    work = arguments.work.resolve()
    if arguments.million:
        return publish(measure_million(arguments.files or MILLION_FILES, work), sys.stdout)
    options = Options(
        files=arguments.files or (QUICK_FILES if arguments.quick else defaults.files),
        rounds=arguments.rounds or (QUICK_ROUNDS if arguments.quick else defaults.rounds),
        work=work,
    )
    return publish(measure(options), sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
