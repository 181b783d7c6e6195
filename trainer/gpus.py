"""Which GPUs does a job see?

Hides how a GPU is found: the driver's device nodes, or its folder under /proc where the nodes are
made on first use.  No driver library is loaded, so this also works, and finds none, on a machine
without one.

There are no leases: two jobs that ask for one GPU each get the same one, and the job's user is told.

Concurrency: plain functions that read the file system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import StartError

DEVICE_NODE = re.compile(r"nvidia[0-9]+")


@dataclass(frozen=True, slots=True)
class Gpus:
    """What a job sees, as environment variables and in words."""

    asked: int | None
    on_machine: int
    environment: dict[str, str]
    note: str | None


def on_machine(root: Path = Path("/")) -> int:
    """Count the GPUs that processes of this machine (or of this container) can open."""
    nodes = [path for path in _entries(root / "dev") if DEVICE_NODE.fullmatch(path.name)]
    return len(nodes) or len(_entries(root / "proc/driver/nvidia/gpus"))


def choose(asked: int | None, environment: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """Choose the GPUs of a job that asked for so many; None leaves what it inherits as it is.

    An inherited CUDA_VISIBLE_DEVICES is the whole pool: an outer scheduler has set it.
    Raises StartError when the machine has GPUs, and fewer than asked for.
    """
    present = on_machine(root)
    if asked is None:
        return Gpus(None, present, {}, None)
    if asked == 0:
        return Gpus(0, present, {"CUDA_VISIBLE_DEVICES": "-1"}, None)
    if present == 0:
        note = "this machine has no GPU: the job runs on the CPU (CUDA_VISIBLE_DEVICES=-1)"
        return Gpus(asked, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, note)
    pool, whose = _pool(environment, present)
    if asked > len(pool):
        raise StartError(f"--gpus {asked}: {whose} {len(pool)}")
    # CUDA's default order puts the fastest card first, everybody else counts along the bus.
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(pool[:asked])}
    named = f"GPU {pool[0]}" if asked == 1 else f"GPUs {', '.join(pool[:asked])}"
    return Gpus(asked, present, chosen, f"the job sees {named}, without a lease: another job may use the same")


def _pool(environment: Mapping[str, str], present: int) -> tuple[list[str], str]:
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        return [str(index) for index in range(present)], "this machine has"
    pool = []
    for name in (part.strip() for part in inherited.split(",")):
        # CUDA reads the list up to the first name that is no device: `0,-1,1` shows one.
        if not name or name.startswith("-"):
            break
        pool.append(name)
    return pool, f"CUDA_VISIBLE_DEVICES={inherited} leaves"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
