"""The `accelfs` command: which commands there are, and how an error ends one.

Results go to stdout, one JSON document with --json; progress and messages go to stderr.  An error of the error tree
is one line and its exit code; anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

import typer

from accelfs.cli import mounts, packing, trees
from accelfs.errors import AccelfsError

app = typer.Typer(
    name="accelfs",
    help="Pack a dataset of small files once, mount it read-only at the speed of the kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("pack")(packing.pack)
app.command("mount")(mounts.mount)
app.command("umount")(mounts.umount)
app.command("switch")(mounts.switch)
app.command("status")(mounts.status)
app.command("ls")(trees.ls)
app.command("cat")(trees.cat)
app.command("extract")(trees.extract)
app.command("stat")(trees.stat)


def one_line(message: str) -> str:
    """Names hold any byte; what is printed is one line of printable characters."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in message)


def main() -> None:
    """Run the command of sys.argv and end the process."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(errors="surrogateescape")  # names are bytes, whatever the locale
    try:
        app()
    except AccelfsError as error:
        print(f"accelfs: {one_line(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of stdout has enough (`accelfs ls … | head`): end quietly, also at interpreter exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
