"""Both benchmarks in one run, the rows also in `results/latest.jsonl`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

from benchmarks import pack, read
from benchmarks.processes import end_on_sigterm
from benchmarks.report import publish

RESULTS = Path(__file__).parent / "results" / "latest.jsonl"


def main() -> int:
    """Run `read`, then `pack`, with their default options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few files and rounds: proves the harness, not the figures"
    )
    arguments = parser.parse_args()
    end_on_sigterm()
    read_options, pack_options = read.Options(), pack.Options()
    if arguments.quick:
        read_options = dataclasses.replace(read_options, files=read.QUICK_FILES, rounds=read.QUICK_ROUNDS)
        pack_options = dataclasses.replace(pack_options, files=pack.QUICK_FILES, rounds=pack.QUICK_ROUNDS)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", encoding="utf-8") as results:
        return publish(itertools.chain(read.measure(read_options), pack.measure(pack_options)), sys.stdout, results)


if __name__ == "__main__":
    sys.exit(main())
