"""`accelfs pack`: a source becomes the next version of a slot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelfs.cli.arguments import Json, Slot, counted, human_bytes, print_json
from accelfs.errors import AccelfsError
from accelfs.service.node import Node
from accelfs.store.layout import parse_slot

if TYPE_CHECKING:
    from accelfs.pack.build import Packed, Progress

_REFRESH_SECONDS = 0.1


class Profile(str, Enum):
    """What kind of files the source holds."""

    auto = "auto"
    image = "image"
    text = "text"
    video = "video"
    raw = "raw"


class _InterruptedError(AccelfsError):
    exit_code = 130


def pack(
    source: Annotated[str, typer.Argument(help="Folder to pack: a path or a file:// URL.", show_default=False)],
    slot: Slot,
    profile: Annotated[
        Profile, typer.Option(help="Order and compression; auto looks at the names and a sample of the bytes.")
    ] = Profile.auto,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=64, help="Packing processes.  [default: one a core]", show_default=False)
    ] = None,
    skip_unreadable: Annotated[
        bool,
        typer.Option("--skip-unreadable", help="Leave out what cannot be read, and report it, instead of failing."),
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the profile was chosen.")] = False,
    as_json: Json = False,
) -> None:
    """Pack a folder as the next version of a slot.

    The version appears whole or not at all.  FIFOs, sockets and devices are left out and reported.
    """
    from accelfs.dataset import trust
    from accelfs.pack import build

    name = parse_slot(slot)
    node = Node.from_environment()
    with _progress(sys.stderr.isatty() and not as_json) as observe:
        try:
            packed = build.pack(
                source, name, node.store, node.scratch(name), profile=profile.value,
                jobs=jobs or len(os.sched_getaffinity(0)), skip_unreadable=skip_unreadable, observe=observe,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise _InterruptedError("interrupted; nothing was published") from None
    # This process has just hashed the catalog it wrote.
    trust.remember(node.store.local_path(packed.catalog_key), packed.manifest.catalog.hash, node.trusted)
    if as_json:
        print_json(_document(packed))
    else:
        _print(packed, explain)


def _document(packed: Packed) -> dict[str, Any]:
    import msgspec

    plan = packed.plan
    return {
        **msgspec.to_builtins(packed.manifest),
        "seconds": round(packed.seconds, 3),
        "plan": {
            "profile": plan.profile, "order": plan.order, "compression": plan.compression,
            "dictionary_bytes": len(plan.dictionary), "reason": plan.reason,
        },
        "reported": packed.report_counts,
    }  # fmt: skip


def _print(packed: Packed, explain: bool) -> None:
    manifest, totals, counts = packed.manifest, packed.manifest.totals, packed.manifest.counts
    rate = counts.files / max(packed.seconds, 1e-3)
    print(
        f"{manifest.slot} version {manifest.version}: {counted(counts.files, 'file')} in "
        f"{counted(counts.directories, 'folder')}, {human_bytes(totals.data_bytes)} -> "
        f"{human_bytes(totals.shard_bytes)} in {counted(totals.shards, 'shard')}, "
        f"{packed.seconds:.1f} s ({rate:,.0f} files/s)"
    )
    if explain:
        plan = packed.plan
        print(f"profile {plan.profile}: {plan.order} order, compression {plan.compression} ({plan.reason})")
    for kind, count in packed.report_counts.items():
        print(f"not packed: {count:,} x {kind}")
    print(f"next: accelfs mount {manifest.slot}")


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar on the terminal with files, bytes, rate and time left.

    It refreshes from our own calls: a refreshing thread must not exist when the workers are forked.
    """
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[files]}"), DownloadColumn(True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("walk", total=None, files="")
        refreshed = 0.0

        def observe(progress: Progress) -> None:
            nonlocal refreshed
            now = time.monotonic()
            if now - refreshed < _REFRESH_SECONDS:
                return
            refreshed = now
            if progress.phase == "walk":
                bar.update(task, files=f"{progress.files:,} names")
            else:
                bar.update(
                    task, description=progress.phase, total=progress.source_bytes_total or None,
                    completed=progress.source_bytes, files=f"{progress.files:,}/{progress.files_total:,} files",
                )  # fmt: skip
            bar.refresh()

        yield observe
