"""The demo: each command as a user would type it, then what it said.

    python -m trainer.demo

Everything lives in a temporary folder with an ACCELFS_HOME of its own, so that no slot of the user's is touched;
only the mount point is the real one, <ACCELFS_MOUNT_ROOT>/digits, and if somebody uses that the demo does not
start.  Whatever happens after the mount, a failed step or Ctrl-C, the slot is unmounted and the folder removed.

Concurrency: one process at a time, waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import trainer

SLOT = "digits"
ACCURACY_MIN = 0.95
# The commands that a user types, and the modules that are behind them: this way the demo shows the code that it
# belongs to, installed or not.
MODULES = {"accelfs": "accelfs", "accel-train": "trainer"}
# A child that was interrupted gets this long to end by itself, then again after SIGTERM.
GRACE_SECONDS = 10.0
FIND_SECONDS_MAX = 60.0
OCTAL = re.compile(rb"\\([0-7]{3})")


class DemoError(Exception):
    """A step failed; the message is one line."""


class Demo:
    """The steps, in order; each returns when its command has ended."""

    def __init__(self, work: Path, mountpoint: Path) -> None:
        self.work = work
        self.mountpoint = mountpoint
        self.seconds: dict[str, float] = {}
        self.environment = _environment(work)

    def run(self) -> None:
        files = self.write()
        self.step("pack", f"accelfs pack {SLOT} {SLOT}")
        self.step("mount", f"accelfs mount {SLOT}")
        self.count(files)
        self.step("train", f"accel-train run --slot {SLOT} -- python train.py")
        accuracy = self.accuracy()
        self.unmount()
        self.summary(files, accuracy)
        if accuracy < ACCURACY_MIN:
            raise DemoError(f"a test accuracy of {accuracy:.3f} is below {ACCURACY_MIN}: something is wrong")

    def write(self) -> int:
        print(bold("# a folder of small files: scikit-learn's handwritten digits, one PNG each"), flush=True)
        with self.timed("write"):
            # Late, because it loads scikit-learn: nothing has been shown until here.
            from trainer.demo import digits

            files = digits.write(self.work / SLOT)
            shutil.copy(Path(__file__).with_name("train.py"), self.work)
        images = (self.work / SLOT).glob("*/*.png")
        size = sum(path.stat().st_size for path in images)
        print(f"{files:,} images, {size:,} bytes, in ten folders: {SLOT}/0/0000.png … {SLOT}/9/1794.png")
        self.took("write")
        return files

    def step(self, name: str, command: str) -> None:
        print(bold(f"$ {command}"), flush=True)
        with self.timed(name):
            code = self.execute(shlex.split(command))
        if code != 0:
            raise DemoError(f"`{command}` ended with exit code {code}")
        self.took(name)

    def execute(self, words: list[str]) -> int:
        command = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
        process = subprocess.Popen(command, cwd=self.work, env=self.environment)
        try:
            return process.wait()
        except BaseException:
            _end(process)
            raise

    def count(self, files: int) -> None:
        command = f"find {shlex.quote(str(self.mountpoint))} -type f | wc -l"
        print(bold(f"$ {command}"), flush=True)
        found = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, timeout=FIND_SECONDS_MAX).stdout
        print(found)
        if found.split() != [str(files)]:
            raise DemoError(f"{files} files were packed, and the mount does not show as many")

    def accuracy(self) -> float:
        return float(json.loads((self.work / "metrics.json").read_text())["test_accuracy"])

    def unmount(self) -> None:
        self.step("unmount", f"accelfs umount {SLOT}")

    def summary(self, files: int, accuracy: float) -> None:
        steps = "   ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        total = sum(self.seconds.values())
        print(bold(f"test accuracy {accuracy:.3f} on images read from {self.mountpoint}"))
        print(f"{files:,} files   {steps}   together {total:.1f} s")
        print(f"The training script is {Path(__file__).with_name('train.py')}: copy it and make it yours.", flush=True)

    def clean_up(self) -> None:
        """Unmount if something is mounted, then remove the folder; never leave a mount without its store."""
        if _is_mounted(self.mountpoint):
            self.unmount()
        shutil.rmtree(self.work)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begin

    def took(self, name: str) -> None:
        print(dim(f"  {self.seconds[name]:.1f} s") + "\n", flush=True)


def main() -> int:
    argparse.ArgumentParser(prog="python -m trainer.demo", description="Pack, mount and train, in one go.").parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    root = Path(os.path.abspath(os.path.expanduser(os.environ.get("ACCELFS_MOUNT_ROOT") or "/mnt/accel")))
    mountpoint = root / SLOT
    if _is_mounted(mountpoint) or _holds_something(mountpoint):
        return fail(f"{mountpoint} is in use: unmount it, or set ACCELFS_MOUNT_ROOT to another folder")
    demo = Demo(Path(tempfile.mkdtemp(prefix="accelfs-demo-")), mountpoint)
    code = 0
    try:
        demo.run()
    except (DemoError, subprocess.TimeoutExpired) as error:
        code = fail(str(error))
    except KeyboardInterrupt:
        code = fail("interrupted", 128 + signal.SIGINT)
    finally:
        # A second Ctrl-C must not leave the mount behind; the commands of the clean-up inherit this.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            demo.clean_up()
        except DemoError as error:
            home = demo.environment["ACCELFS_HOME"]
            code = fail(f"{error}; still mounted: ACCELFS_HOME={home} accelfs umount {SLOT} --force")
    return code


def fail(line: str, code: int = 1) -> int:
    sys.stdout.flush()
    print(f"demo: {line}", file=sys.stderr, flush=True)
    return code


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text


def _environment(work: Path) -> dict[str, str]:
    environment = dict(os.environ, ACCELFS_HOME=str(work / "home"), PYTHONUNBUFFERED="1")
    # `python` must be the one that has TensorFlow, in an activated environment or not.
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    # The commands run in the work folder, and this checkout may be found through the working directory only.
    home = str(Path(trainer.__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child that may have been interrupted together with us, else end it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_mounted(path: Path) -> bool:
    """Ask the mount table: a call on the path itself could hang or fail if its daemon is gone."""
    wanted = os.fsencode(os.path.join(os.path.realpath(path.parent), path.name))
    with open("/proc/self/mountinfo", "rb") as table:
        return any(OCTAL.sub(_character, line.split(b" ")[4]) == wanted for line in table)


def _character(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


def _holds_something(path: Path) -> bool:
    try:
        return path.is_symlink() or any(path.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
