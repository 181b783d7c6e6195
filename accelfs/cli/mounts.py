"""`accelfs mount`, `umount` and `status`: the mounts of this node."""

from __future__ import annotations

import os
import signal
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from accelfs.mount.master import Mode
    from accelfs.mount.state import MountState

from accelfs.cli.arguments import Json, Slot, print_json
from accelfs.errors import BusyError, MountError, NotFoundError
from accelfs.service.node import Node
from accelfs.store.layout import SlotName, parse_slot

_STATUS_SECONDS = 2.0
_UMOUNT_SECONDS = 10.0
_DEFAULT_WORKERS_MAX = 4


class Engine(str, Enum):
    """Who speaks FUSE in a worker."""

    fast = "fast"
    pyfuse3 = "pyfuse3"


def mount(
    slot: Slot,
    mountpoint: Annotated[
        Path | None,
        typer.Argument(help="Empty folder.  [default: ACCELFS_MOUNT_ROOT/SLOT, made if missing]", show_default=False),
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in this process; log to stderr.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Serving processes.  [default: one a core, at most 4]", show_default=False),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="fast answers hot requests itself; pyfuse3 leaves all to the library.")
    ] = Engine.fast,
    version: Annotated[
        int | None, typer.Option(min=1, help="Version to mount.  [default: the newest]", show_default=False)
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take a mounted slot over with new processes; its readers notice nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Mount a slot read-only.

    Returns when a call through the mount has succeeded.  Without --foreground the mount is served in the background
    and logs to ACCELFS_HOME/log.
    """
    from accelfs.mount.mountpoint import resolved
    from accelfs.mount.state import SlotState, is_mounted

    name = parse_slot(slot)
    node = Node.from_environment()
    files = SlotState(node.run, name)
    if not replace:
        os.close(files.hold())  # refuse a second mount before the catalog is verified for it
    state = files.read()
    create = mountpoint is None
    if state is not None and is_mounted(state):
        # A mount keeps its version, its place and its engine for life, whoever serves it.
        version, mountpoint, engine = (
            version or state.version,
            mountpoint or Path(state.mountpoint),
            Engine(state.engine),
        )
        workers = workers or state.workers
    mode: Mode = "replace" if replace else "mount"
    path = resolved(mountpoint or node.mountpoint(name))
    _serve(node, name, mode, version, path, create, engine, workers, foreground, as_json)


def switch(
    slot: Slot,
    version: Annotated[
        int | None, typer.Option(min=1, help="Version to show.  [default: the newest]", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show another version at a slot's mount, at once and without an unmount.

    Open files, working directories and running scans stay in the version that they began in; its processes end with
    its last user.  Needs root and Linux 6.5.
    """
    from accelfs.mount.state import SlotState, is_mounted

    name = parse_slot(slot)
    node = Node.from_environment()
    state = SlotState(node.run, name).read()
    if state is None or not is_mounted(state):
        raise NotFoundError(f"{name} is not mounted; accelfs mount {name}")
    path, engine = Path(state.mountpoint), Engine(state.engine)
    _serve(node, name, "switch", version, path, False, engine, state.workers, False, as_json)


def _serve(
    node: Node, name: SlotName, mode: Mode, version: int | None, path: Path, create: bool, engine: Engine,
    workers: int | None, foreground: bool, as_json: bool,
) -> None:  # fmt: skip
    """Start a master, here or in the background, and say when it is ready."""
    from accelfs.dataset import versions
    from accelfs.mount import daemon, device, master

    device.check_available()
    found = versions.find(node.store, name, version, node.trusted)
    found.open_tree().close()  # what a worker would stumble over is said here, before anything is mounted
    request = master.Request(
        slot=name, version=found.number, mountpoint=path, mode=mode, create_mountpoint=create,
        workers=workers or min(_DEFAULT_WORKERS_MAX, len(os.sched_getaffinity(0))),
        engine=engine.value, run=node.run, open_tree=found.open_tree,
    )  # fmt: skip
    if foreground:
        daemon.log_to(2)

        def on_ready(state: MountState) -> None:
            print(_ready(str(name), state.version, state.mountpoint), flush=True)
            daemon.notify_ready()

        master.serve(request, on_ready)
        return
    state = daemon.start(request, node.log / f"{name.file_name}.log")
    if as_json:
        print_json(_row(node, name))
    else:
        print(_ready(str(name), state.version, state.mountpoint))


def umount(
    slot: Slot,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Detach a mount in use: the path is gone at once, and its programs get errors within 5 s."
        ),
    ] = False,
) -> None:
    """Unmount a slot; its processes have ended when this returns."""
    from accelfs.mount import device, mountpoint
    from accelfs.mount.master import DRAIN_SECONDS
    from accelfs.mount.state import SlotState, is_mounted

    name = parse_slot(slot)
    node = Node.from_environment()
    files = SlotState(node.run, name)
    state = files.read()
    if state is None:
        if files.held():
            raise BusyError(f"{name} is being mounted; wait for it")
        raise NotFoundError(f"{name} is not mounted")
    path = Path(state.mountpoint)
    if is_mounted(state):
        mountpoint.unmount(path, lazy=force)
    if files.held():
        if force:
            os.kill(state.master_pid, signal.SIGTERM)
        if not files.wait_ended(state.master_pid, _UMOUNT_SECONDS):
            raise MountError(f"{path} is unmounted, but its process {state.master_pid} does not end; see the log")
        return
    # The master was killed: what it would have done.  Without --force nobody used the mount, and its workers end by
    # themselves; with it their readers get the same seconds as from a living master.
    deadline = time.monotonic() + (DRAIN_SECONDS if force else _UMOUNT_SECONDS)
    for process in [*state.worker_pids, *device.holders(state.device)]:
        if device.descriptors(process) and not device.wait(process, max(0.0, deadline - time.monotonic())):
            device.end(process, _UMOUNT_SECONDS)
    mountpoint.remove_folders(path, state.made_folders)
    files.remove()


def status(
    slot: Annotated[str | None, typer.Argument(metavar="SLOT", help="Only this slot.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Show the mounts of this node.

    A mount is ready when a call through it succeeds now.
    """
    from accelfs.mount import state

    node = Node.from_environment()
    names = state.slots(node.run) if slot is None else [parse_slot(slot)]
    rows = [row for name in names if (row := _row(node, name)) is not None]
    if as_json:
        print_json({"mounts": rows})
        return
    if not rows:
        if slot is not None:
            raise NotFoundError(f"{slot} is not mounted")
        print("nothing is mounted; accelfs mount SLOT")
        return
    for row in rows:
        health = "ready" if row["ready"] else "NOT READY"
        master = (
            f"master {row['master_pid']}" if row["master_pid"] is not None else "master killed (mount again to replace)"
        )
        workers = ", ".join(map(str, row["worker_pids"]))
        print(f"{row['slot']}  version {row['version']}  {row['mountpoint']}  {health}  {master}, workers {workers}")


def _ready(slot: str, version: int, path: str) -> str:
    return f"{slot} version {version} is mounted at {path}"


def _row(node: Node, name: SlotName) -> dict[str, Any] | None:
    """What status says of one slot; None if nothing of it is mounted."""
    from accelfs.mount import device
    from accelfs.mount.state import SlotState, is_mounted

    files = SlotState(node.run, name)
    state = files.read()
    if state is None or not is_mounted(state):
        return None
    return {
        "slot": state.slot,
        "mountpoint": state.mountpoint,
        "version": state.version,
        "master_pid": state.master_pid if files.held() else None,
        "worker_pids": state.worker_pids,
        "agent_pid": state.agent_pid,
        "ready": device.answers(Path(state.mountpoint), _STATUS_SECONDS),
    }
