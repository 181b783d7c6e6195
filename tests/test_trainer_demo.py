"""The demo, whole: a real image set, a real mount, a real training, and nothing left behind however it ends."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

# The demo itself promises three minutes, on a machine that does nothing else.
SECONDS_MAX = 240
DEMO = (sys.executable, "-m", "trainer.demo")


@dataclass(frozen=True)
class Place:
    """Where one demo works and mounts."""

    work: Path
    mountpoint: Path
    environment: dict[str, str]

    def is_clean(self) -> bool:
        mounts = Path("/proc/self/mountinfo").read_text()
        return not list(self.work.iterdir()) and str(self.mountpoint) not in mounts


@pytest.fixture
def place(tmp_path: Path) -> Place:
    work, root = tmp_path / "work", tmp_path / "mnt"
    work.mkdir()
    environment = dict(os.environ, TMPDIR=str(work), ACCELFS_MOUNT_ROOT=str(root))
    return Place(work, root / "digits", environment)


def test_demo_trains_a_good_model_and_cleans_up(place: Place) -> None:
    result = subprocess.run(DEMO, env=place.environment, capture_output=True, timeout=SECONDS_MAX, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    typed = [line for line in lines if line.startswith("$ ")]
    assert typed == [
        "$ accelfs pack digits digits",
        "$ accelfs mount digits",
        f"$ find {place.mountpoint} -type f | wc -l",
        "$ accel-train run --slot digits -- python train.py",
        "$ accelfs umount digits",
    ]
    assert "1797" in lines
    (accuracy,) = re.findall(r"test accuracy (0\.\d+) on images", result.stdout)
    assert float(accuracy) >= 0.95
    (steps,) = (line for line in lines if line.startswith("1,797 files   "))
    assert re.findall(r"(\w+) \d+\.\d s", steps) == ["write", "pack", "mount", "train", "unmount", "together"]
    assert "Warning" not in result.stdout + result.stderr
    assert place.is_clean()


def test_demo_does_not_start_where_something_is(place: Place) -> None:
    place.mountpoint.mkdir(parents=True)
    (place.mountpoint / "mine").touch()
    result = subprocess.run(DEMO, env=place.environment, capture_output=True, timeout=SECONDS_MAX, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"demo: {place.mountpoint} is in use")
    assert result.stderr.count("\n") == 1
    assert place.is_clean()


def test_demo_whose_training_fails_unmounts(place: Place) -> None:
    environment = dict(place.environment, KERAS_BACKEND="no-such-backend")
    result = subprocess.run(DEMO, env=environment, capture_output=True, timeout=SECONDS_MAX, text=True)
    assert result.returncode == 1
    assert "\ndemo: `accel-train run --slot digits -- python train.py` ended with exit code 1\n" in result.stderr
    assert "$ accelfs umount digits" in result.stdout
    assert place.is_clean()


@pytest.mark.parametrize("how", ["Ctrl-C", "TERM"])
def test_demo_that_is_interrupted_unmounts(place: Place, how: str) -> None:
    with subprocess.Popen(
        DEMO, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        wait_for(demo.stdout.fileno(), b"Epoch 1/")
        if how == "Ctrl-C":
            # As a terminal does it: to the demo and to the command that it waits for.
            os.killpg(demo.pid, signal.SIGINT)
        else:
            demo.terminate()
        output, _ = demo.communicate(timeout=SECONDS_MAX)
    assert demo.returncode == 128 + (signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
    assert b"$ accelfs umount digits" in output
    assert place.is_clean()


def wait_for(descriptor: int, words: bytes) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    seen = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while words not in seen:
            assert selector.select(max(0.0, deadline - time.monotonic())), seen
            piece = os.read(descriptor, 4096)
            assert piece, seen
            seen += piece
