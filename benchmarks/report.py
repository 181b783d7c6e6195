"""What a row of figures looks like: one JSON line for programs, one line of a table for people.

A ratio `ours_to_X` is the median of accelfs divided by the median of X, in the unit of the row: more than 1 is good
where the row says "higher", less than 1 where it says "lower". A ratio is null when one of the two was not measured.
Ratios of medians, and not medians of ratios, so that they can be checked against the figures in the same row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TextIO

from benchmarks.processes import CommandError

Json = str | int | float | bool | None | Mapping[str, "Json"] | Sequence["Json"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, measured for several servers."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    ratios: Mapping[str, float | None]
    samples: Mapping[str, Sequence[float]]
    """By server, one value a round."""
    details: Mapping[str, Json] = field(default_factory=dict)
    failed: bool = False
    """Whether the product itself could not be measured."""

    def document(self) -> dict[str, Json]:
        """The row as it is printed: ratios first."""
        return {
            "row": self.name,
            **{name: None if ratio is None else significant(ratio) for name, ratio in self.ratios.items()},
            "better": self.better,
            self.unit: {server: summary(values) for server, values in self.samples.items() if values},
            **self.details,
        }


def significant(value: float, digits: int = 4) -> float:
    """Rounded to the digits that may mean something."""
    return float(f"{value:.{digits}g}")


def summary(values: Sequence[float]) -> dict[str, Json]:
    """Median, minimum and maximum of the rounds."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: significant(value) for name, value in figures.items()}


def ratio(samples: Mapping[str, Sequence[float]], ours: str, theirs: str | None) -> float | None:
    """Median of ours to median of theirs; None when either is missing."""
    if theirs is None or not samples.get(ours) or not samples.get(theirs):
        return None
    divisor = statistics.median(samples[theirs])
    return statistics.median(samples[ours]) / divisor if divisor else None


def best(
    samples: Mapping[str, Sequence[float]], names: Iterable[str], better: Literal["higher", "lower"]
) -> str | None:
    """The name with the best median."""
    present = [name for name in names if samples.get(name)]
    choose = max if better == "higher" else min
    return choose(present, key=lambda name: statistics.median(samples[name])) if present else None


def publish(rows: Iterable[Row], *outputs: TextIO) -> int:
    """Print each row as soon as it is there, a table on stderr at the end; the exit code.

    A run that cannot go on at all (no compiler, no time to write the data) ends with one line, after the rows it has.
    """
    shown: list[Row] = []
    status = 0
    try:
        for row in rows:
            line = json.dumps(row.document())
            for output in outputs:
                print(line, file=output, flush=True)
            shown.append(row)
    except (CommandError, TimeoutError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        status = 1
    for row in shown:
        print(_table(row), file=sys.stderr)
    return 1 if any(row.failed for row in shown) else status


def _table(row: Row) -> str:
    ratios = "  ".join(f"{name} {value:.2f}" for name, value in row.ratios.items() if value is not None)
    lines = [f"\n{row.name} ({row.unit}, {row.better} is better)  {ratios}"]
    for server, values in row.samples.items():
        if values:
            median, low, high = statistics.median(values), min(values), max(values)
            lines.append(f"    {server:<18}{_number(median):>12}   {_number(low):>12} .. {_number(high)}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
