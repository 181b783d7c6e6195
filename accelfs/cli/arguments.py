"""Arguments and forms of output that several commands share, so that their help text exists once."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from accelfs.errors import UsageError
from accelfs.store.layout import SlotName, parse_slot

Slot = Annotated[
    str, typer.Argument(metavar="SLOT", help="NAME (default instance) or INSTANCE/NAME.", show_default=False)
]
SlotVersion = Annotated[
    str,
    typer.Argument(
        metavar="SLOT[@N]", help="NAME or INSTANCE/NAME; @N reads version N, else the newest.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def slot_and_version(text: str) -> tuple[SlotName, int | None]:
    """Split `slot[@N]`.  Raises UsageError."""
    name, at, number = text.partition("@")
    if at and not (number.isascii() and number.isdigit() and len(number) < 10 and int(number) > 0):
        raise UsageError(f"{text!r}: a version is a number, as in {name}@3")
    return parse_slot(name), int(number) if at else None


def print_json(document: object) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def counted(count: int, noun: str) -> str:
    """`1 file`, `1,797 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def human_bytes(count: float) -> str:
    """As `ls -h` writes it: powers of 1024, three digits."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
