"""The C programs of this package: built with gcc when their source is newer, and one pass of the reader.

Floors and reader are in C because they are the measure: a slow client would hide the difference between servers, and
a floor must do nothing but answer.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import CommandError, run

if TYPE_CHECKING:
    from benchmarks.data import DataSet

SOURCES = Path(__file__).parent
BUILD = SOURCES / "build"
PASS_SECONDS_MAX = 300.0
PROBE_SECONDS_MAX = 20.0
COMPILE_SECONDS_MAX = 60.0


def build(name: str, *, package: str | None = None) -> Path:
    """The program built from `name`.c, against a pkg-config package if one is named.

    Raises CommandError with the reason when it cannot be built here.
    """
    source, program = SOURCES / f"{name}.c", BUILD / name
    newest = max(path.stat().st_mtime for path in (source, SOURCES / "listing.h"))
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    if not shutil.which("gcc"):
        raise CommandError("gcc is not installed")
    flags: list[str] = []
    if package:
        if not shutil.which("pkg-config"):
            raise CommandError("pkg-config is not installed")
        flags = run(["pkg-config", "--cflags", "--libs", package], COMPILE_SECONDS_MAX).output.split()
    BUILD.mkdir(exist_ok=True)
    unfinished = BUILD / f"{name}.unfinished"
    run(["gcc", "-O2", "-Wall", "-Wextra", "-o", unfinished, source, "-pthread", *flags], COMPILE_SECONDS_MAX)
    unfinished.rename(program)
    return program


def probe(root: Path, dataset: DataSet) -> None:
    """The first things a user does with a mount: stat, a listing of the root, one whole read."""
    run([build("reader"), "--probe", root, dataset.first_file], PROBE_SECONDS_MAX)


def read_pass(reader: str, root: Path, dataset: DataSet, *, threads: int, seed: int, cpu: int | None) -> float:
    """Files a second of one pass: open, read, close every file below `root` in the order of `seed`.

    `reader` is "c" or "python".

    Raises CommandError when a file cannot be read or when the bytes do not add up.
    """
    program: list[str | Path] = [build("reader")]
    if reader == "python":
        # Isolated and without site: the start of the interpreter is not part of the pass, but its imports cost memory.
        program = [sys.executable, "-I", "-S", SOURCES / "python_reader.py"]
    options = ["--threads", str(threads), "--seed", str(seed), *(["--cpu", str(cpu)] if cpu is not None else [])]
    result = json.loads(run([*program, *options, dataset.listing, root], PASS_SECONDS_MAX).output)
    if (result["files"], result["bytes"]) != (dataset.file_count, dataset.byte_count):
        raise CommandError(f"read {result['files']} files and {result['bytes']} bytes, not those of {dataset.name}")
    return dataset.file_count / float(result["seconds"])
