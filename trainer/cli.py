"""What can a person type after `accel-train`?

Hides typer.  Thin: parse, call, print.  Messages of the launcher go to stderr and start with
`accel-train:`; stdout belongs to the job, or to the answer of a dry run.

Concurrency: one thread, the main one, because jobs are started from it.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from accelfs.clients.slots import AccelfsError
from trainer import job, launch, sandbox
from trainer.errors import NOT_STARTED, StartError

USAGE = 2

# Plain help: the pretty one imports a library that costs more than the launcher itself.
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback()
def accel_train() -> None:
    """Start training jobs with their slots and GPUs attached."""


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The job and its arguments, best after --.")],
    slot: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PATH]",
            help="A slot that the job reads; may be repeated. The job finds its path in ACCEL_SLOT_<NAME> "
            "(upper case, _ for every character outside A-Z and 0-9). "
            "A slot that is not mounted is mounted first, at PATH if one is given, and stays mounted at the end.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Show the job the first N GPUs and no others; on a machine without one it runs on the CPU. "
            "There are no leases: another job may use the same. "
            "Without this option the job sees what the launcher sees.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON document.")] = False,
) -> int:
    """Run COMMAND with slots and GPUs attached.

    Signals are passed to the job. The exit code is the job's own, 128+N if signal N ended it; 125 if something
    failed before the job started, 126 if COMMAND cannot be executed, 127 if it is not found.
    """
    if as_json and not dry_run:
        raise StartError("--json needs --dry-run: without it, stdout belongs to the job")
    requests = sandbox.parse(slot or ())
    if dry_run:
        _answer(job.foresee(tuple(command), requests, gpus), as_json=as_json)
        return 0
    ready = job.prepare(tuple(command), requests, gpus, _say)
    ended = launch.run(ready.command, ready.environment)
    if ended.killed_by is not None and not ended.expected:
        _say(f"the job was ended by {_describe(ended.killed_by)}")
    return ended.exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(list(arguments)))


def _run(arguments: list[str]) -> int:
    failed = NOT_STARTED if arguments[:1] == ["run"] else USAGE
    try:
        # Not standalone: typer would end every mistake with 2, which here is a code of the job's own.
        code = app(arguments, prog_name="accel-train", standalone_mode=False)
    except StartError as error:
        _say(str(error))
        return error.exit_code
    except AccelfsError as error:
        _say(str(error))
        return failed
    except Exception as error:
        # The class of typer's own errors moves between its releases; what they have in common is this method.
        explain = getattr(error, "format_message", None)
        if explain is None:
            # A mistake of ours, which must not look like an exit code of the job's.
            traceback.print_exc()
        else:
            _say(f"{explain().rstrip('.')}: see `accel-train {'run ' if failed == NOT_STARTED else ''}--help`")
        return failed
    return int(code or 0)


def _answer(planned: job.Job, *, as_json: bool) -> None:
    text = json.dumps(planned.document(), indent=2) if as_json else planned.script()
    # Arguments and paths are bytes; those that are no text leave as they came.
    sys.stdout.buffer.write(text.encode(errors="surrogateescape") + b"\n")
    sys.stdout.buffer.flush()


def _say(line: str) -> None:
    print(f"accel-train: {line}", file=sys.stderr, flush=True)


def _describe(killed_by: signal.Signals | int) -> str:
    if killed_by == signal.SIGKILL:
        return "SIGKILL: somebody's kill -9, or the kernel when memory ran out (see `dmesg`)"
    return killed_by.name if isinstance(killed_by, signal.Signals) else f"signal {killed_by}"
