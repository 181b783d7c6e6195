"""accel-train run: exit codes, command line, slots and GPUs, each through the command itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from accelfs.clients import slots
from accelfs.errors import MountError, NotFoundError, UsageError

# Far above what any command here takes on a busy machine, far below the test's own limit.
SECONDS_MAX = 60
NO_GPU = not list(Path("/dev").glob("nvidia[0-9]*")) and not Path("/proc/driver/nvidia/gpus").exists()


def accel_train(
    *arguments: str | bytes, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments], env=env, cwd=cwd, capture_output=True, timeout=SECONDS_MAX
    )


def only_line(result: subprocess.CompletedProcess[bytes]) -> str:
    """What the launcher said, checked to be one line of its own."""
    text = result.stderr.decode()
    assert text.startswith("accel-train: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text.removeprefix("accel-train: ").rstrip("\n")


# --- Exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 2, 7, 75, 125, 127, 255])
def test_exit_code_of_the_job_is_passed_through(code: int) -> None:
    result = accel_train("run", "--", "sh", "-c", f"exit {code}")
    assert (result.returncode, result.stderr) == (code, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV])
def test_job_that_died_of_a_signal_gives_128_and_its_number(number: signal.Signals) -> None:
    result = accel_train("run", "--", "sh", "-c", f"ulimit -c 0; kill -{int(number)} $$")
    assert result.returncode == 128 + number
    assert number.name in only_line(result)


def test_command_that_is_not_found_gives_127() -> None:
    result = accel_train("run", "--", "no-such-command-anywhere")
    assert result.returncode == 127
    assert only_line(result) == "no-such-command-anywhere: command not found"


def test_script_whose_interpreter_is_missing_gives_127(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    result = accel_train("run", "--", str(script))
    assert result.returncode == 127
    assert "interpreter" in only_line(result)


@pytest.mark.parametrize("kind", ["folder", "not executable", "no first line"])
def test_command_that_cannot_be_executed_gives_126(tmp_path: Path, kind: str) -> None:
    command = tmp_path / "command"
    if kind == "folder":
        command.mkdir()
    else:
        command.write_text("echo hello\n")
        command.chmod(0o644 if kind == "not executable" else 0o755)
    result = accel_train("run", "--", str(command))
    assert result.returncode == 126
    assert str(command) in only_line(result)


def test_argument_list_that_is_too_long_gives_126() -> None:
    # Linux takes 32 pages in one argument and no more, so the launcher cannot get it from its own command line.
    code = "from trainer.cli import main; main(['run', '--', 'true', 'x' * 2**20])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=SECONDS_MAX)
    assert result.returncode == 126
    assert only_line(result).startswith("true: ")


# --- Command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "--no-such-option", "--", "true"],
        ["run", "--gpus", "many", "--", "true"],
        ["run", "--gpus", "-1", "--", "true"],
        ["run", "--json", "--", "true"],
        ["run", "--slot"],
        ["run", "--slot", "", "--", "true"],
        ["run", "--slot", "=/data", "--", "true"],
        ["run", "--slot", "photos=", "--", "true"],
        ["run", "--slot", "photos@3", "--", "true"],
        ["run", "--slot", "../photos", "--", "true"],
        ["run", "--slot", "a/b/c", "--", "true"],
        ["run", "--slot", "p" * 300, "--", "true"],
        ["run", "--slot", "--dry-run", "--", "true"],
    ],
    ids=" ".join,
)
def test_wrong_command_line_is_one_line_and_no_code_of_the_jobs(arguments: list[str]) -> None:
    result = accel_train(*arguments)
    assert result.returncode == 125
    assert only_line(result)


@pytest.mark.parametrize("arguments", [[], ["no-such-verb"]], ids=repr)
def test_without_a_job_a_wrong_command_line_gives_2(arguments: list[str]) -> None:
    result = accel_train(*arguments)
    assert result.returncode == 2
    assert only_line(result)


@pytest.mark.parametrize(
    ("one", "other", "variable"),
    [
        ("a.b", "a-b", "ACCEL_SLOT_A_B"),
        ("photos", "Photos", "ACCEL_SLOT_PHOTOS"),
        ("team/a", "team.a", "ACCEL_SLOT_TEAM_A"),
    ],
)
def test_two_slots_with_one_variable_are_refused(one: str, other: str, variable: str) -> None:
    result = accel_train("run", "--slot", one, "--slot", other, "--", "true")
    assert result.returncode == 125
    line = only_line(result)
    assert all(word in line for word in (one, other, variable))


@pytest.mark.parametrize("again", ["photos", "default/photos", "photos=/elsewhere"])
def test_one_slot_twice_is_refused(again: str) -> None:
    result = accel_train("run", "--slot", "photos", "--slot", again, "--", "true")
    assert result.returncode == 125
    assert "twice" in only_line(result)


def test_arguments_reach_the_job_byte_for_byte() -> None:
    odd = [
        b"",
        b" ",
        b"--",
        b"--help",
        b"--slot",
        b"-x",
        b"a=b",
        b"new\nline",
        b"\xff\xfe",
        "ü€😀".encode(),
        b"'\"$`\\",
    ]
    arguments = odd + [b"%d" % number for number in range(5000)]
    write = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    result = accel_train("run", "--", sys.executable, "-c", write, *arguments)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.split(b"\0") == arguments


def test_job_may_follow_without_the_two_dashes() -> None:
    result = accel_train("run", "echo", "-n", "--", "--gpus", "1")
    assert result.stdout == b"-- --gpus 1"


def test_job_has_stdin_and_working_directory_of_the_launcher(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trainer", "run", "--", "sh", "-c", "cat; pwd"],
        input=b"from stdin\n",
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(Path(slots.__file__).parents[2])),
        capture_output=True,
        timeout=SECONDS_MAX,
    )
    assert result.stdout == b"from stdin\n" + os.fsencode(tmp_path) + b"\n"


def test_launcher_loads_no_library_of_the_job() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainer", "run", "--gpus", "1", "--", "true"],
        capture_output=True,
        timeout=SECONDS_MAX,
    )
    loaded = {line.rpartition(b"|")[2].strip().decode() for line in result.stderr.splitlines()}
    assert "trainer.launch" in loaded
    assert loaded.isdisjoint({"tensorflow", "keras", "numpy", "sklearn", "pyfuse3", "trio", "rich"})


# --- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_without_a_gpu_the_job_runs_on_the_cpu_and_the_launcher_says_so() -> None:
    result = accel_train("run", "--gpus", "2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert (result.returncode, result.stdout) == (0, b"-1\n")
    assert only_line(result) == "this machine has no GPU: the job runs on the CPU (CUDA_VISIBLE_DEVICES=-1)"


def test_a_job_that_asks_for_none_sees_none_and_nothing_is_said() -> None:
    result = accel_train("run", "--gpus", "0", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"-1\n", b"")


def test_without_the_option_the_gpus_are_left_alone() -> None:
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="3,5")
    result = accel_train("run", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", env=env)
    assert (result.stdout, result.stderr) == (b"3,5\n", b"")


# --- Slots ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node of its own: home, mount root and two packed slots, `tiny` and `other.one`."""

    root: Path
    environment: dict[str, str]

    def accelfs(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "accelfs", *arguments],
            env=self.environment,
            capture_output=True,
            timeout=SECONDS_MAX,
        )

    def mounts(self) -> list[dict[str, object]]:
        result = self.accelfs("status", "--json")
        assert result.returncode == 0, result.stderr
        mounts = json.loads(result.stdout)["mounts"]
        assert isinstance(mounts, list)
        return mounts

    def unmount_all(self) -> None:
        if self.is_in_the_mount_table():
            for mount in self.mounts():
                self.accelfs("umount", str(mount["slot"]))
        assert not self.is_in_the_mount_table()

    def is_in_the_mount_table(self) -> bool:
        return f" {self.root}/" in Path("/proc/self/mountinfo").read_text()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return accel_train("run", *arguments, env=self.environment)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Node:
    root = tmp_path_factory.mktemp("node")
    environment = dict(os.environ, ACCELFS_HOME=str(root / "home"), ACCELFS_MOUNT_ROOT=str(root / "mnt"))
    node = Node(root, environment)
    for slot in ("tiny", "other.one"):
        source = root / f"source-{slot}"
        (source / "a").mkdir(parents=True)
        (source / "a" / "hello.txt").write_text(f"hello from {slot}\n")
        result = node.accelfs("pack", str(source), slot)
        assert result.returncode == 0, result.stderr
    return node


@pytest.fixture
def node(packed: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """The packed node with nothing mounted, before and after."""
    for name in ("ACCELFS_HOME", "ACCELFS_MOUNT_ROOT"):
        monkeypatch.setenv(name, packed.environment[name])
    try:
        yield packed
    finally:
        packed.unmount_all()


def test_slot_is_mounted_found_by_the_job_and_stays_mounted(node: Node) -> None:
    where = node.root / "mnt" / "tiny"
    result = node.run("--slot", "tiny", "--", "sh", "-c", 'echo "$ACCEL_SLOT_TINY"; cat "$ACCEL_SLOT_TINY"/a/hello.txt')
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == f"{where}\nhello from tiny\n"
    assert only_line(result) == f"mounted tiny at {where} (version 1); it stays mounted"
    assert [(mount["slot"], mount["ready"]) for mount in node.mounts()] == [("tiny", True)]

    again = node.run("--slot", "tiny", "--", "true")
    assert (again.returncode, again.stderr) == (0, b"")


def test_several_slots_each_have_a_variable(node: Node) -> None:
    read = 'cat "$ACCEL_SLOT_TINY"/a/hello.txt "$ACCEL_SLOT_OTHER_ONE"/a/hello.txt'
    result = node.run("--slot", "tiny", "--slot", "other.one", "--", "sh", "-c", read)
    assert result.stdout == b"hello from tiny\nhello from other.one\n"


def test_slot_is_mounted_at_the_path_that_the_job_wants(node: Node) -> None:
    where = node.root / "wanted"
    where.mkdir()
    result = node.run(
        "--slot", f"tiny={where}", "--", "sh", "-c", 'echo "$ACCEL_SLOT_TINY"; cat "$1"', "", f"{where}/a/hello.txt"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode() == f"{where}\nhello from tiny\n"

    # Without a path any mount will do, and the job is told where it is.
    anywhere = node.run("--slot", "tiny", "--", "sh", "-c", 'echo "$ACCEL_SLOT_TINY"')
    assert anywhere.stdout.decode() == f"{where}\n"


def test_slot_that_is_mounted_elsewhere_is_not_moved(node: Node) -> None:
    assert node.accelfs("mount", "tiny").returncode == 0
    result = node.run("--slot", f"tiny={node.root / 'elsewhere'}", "--", "true")
    assert result.returncode == 125
    line = only_line(result)
    assert str(node.root / "mnt" / "tiny") in line
    assert "accelfs umount tiny" in line


def test_slot_that_does_not_exist_is_one_line(node: Node) -> None:
    result = node.run("--slot", "nowhere", "--", "touch", str(node.root / "ran"))
    assert result.returncode == 125
    assert "nowhere" in only_line(result)
    assert not (node.root / "ran").exists()


def test_job_that_cannot_start_leaves_no_mount(node: Node) -> None:
    result = node.run("--slot", "tiny", "--slot", "nowhere", "--", "true")
    assert result.returncode == 125
    assert not node.is_in_the_mount_table()


def signal_mount(node: Node, number: signal.Signals) -> None:
    """Send a signal to every process of the one mount."""
    (mount,) = node.mounts()
    workers = mount["worker_pids"]
    assert isinstance(workers, list)
    for pid in (mount["master_pid"], *workers):
        assert isinstance(pid, int)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_mount_whose_daemon_was_killed_is_replaced(node: Node) -> None:
    assert node.accelfs("mount", "tiny").returncode == 0
    signal_mount(node, signal.SIGKILL)
    result = node.run("--slot", "tiny", "--", "sh", "-c", 'cat "$ACCEL_SLOT_TINY"/a/hello.txt')
    assert (result.returncode, result.stdout) == (0, b"hello from tiny\n"), result.stderr


def test_mount_that_does_not_answer_stops_the_job_before_its_start(node: Node) -> None:
    assert node.accelfs("mount", "tiny").returncode == 0
    signal_mount(node, signal.SIGSTOP)
    try:
        result = node.run("--slot", "tiny", "--", "touch", str(node.root / "ran"))
    finally:
        signal_mount(node, signal.SIGCONT)
    assert result.returncode == 125
    assert "does not answer" in only_line(result)
    assert not (node.root / "ran").exists()


def test_jobs_that_start_at_once_share_one_mount(node: Node) -> None:
    command = [
        sys.executable,
        "-m",
        "trainer",
        "run",
        "--slot",
        "tiny",
        "--",
        "sh",
        "-c",
        "cat $ACCEL_SLOT_TINY/a/hello.txt",
    ]
    jobs = [
        subprocess.Popen(command, env=node.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    outputs = [job.communicate(timeout=SECONDS_MAX) for job in jobs]
    assert [(job.returncode, stdout) for job, (stdout, _) in zip(jobs, outputs, strict=True)] == [
        (0, b"hello from tiny\n")
    ] * 4, outputs
    assert len(node.mounts()) == 1


def test_dry_run_tells_what_a_run_does_and_mounts_nothing(node: Node) -> None:
    arguments = ["--slot", "tiny", "--gpus", "0"]
    planned = node.run(*arguments, "--dry-run", "--json", "--", "sh", "-c", "env")
    assert planned.returncode == 0, planned.stderr
    document = json.loads(planned.stdout)
    assert not node.is_in_the_mount_table()
    assert document["command"] == ["sh", "-c", "env"]
    assert document["slots"] == [
        {
            "slot": "tiny",
            "variable": "ACCEL_SLOT_TINY",
            "path": str(node.root / "mnt" / "tiny"),
            "mounted": False,
            "version": None,
        }
    ]
    done = node.run(*arguments, "--", "sh", "-c", "env")
    for name, value in document["environment"].items():
        assert f"{name}={value}" in done.stdout.decode().splitlines()


def test_dry_run_without_json_is_a_script_that_does_the_same(node: Node) -> None:
    script = node.run("--slot", "tiny", "--dry-run", "--", "sh", "-c", 'cat "$ACCEL_SLOT_TINY/a/hello.txt"')
    assert script.returncode == 0, script.stderr
    bin_folder = node.root / "bin"
    bin_folder.mkdir(exist_ok=True)
    command = bin_folder / "accelfs"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m accelfs "$@"\n')
    command.chmod(0o755)
    env = dict(node.environment, PATH=f"{bin_folder}:{os.environ['PATH']}")
    result = subprocess.run(["sh", "-e"], input=script.stdout, env=env, capture_output=True, timeout=SECONDS_MAX)
    assert result.stdout.endswith(b"hello from tiny\n"), (script.stdout, result.stderr)


# --- The client module -----------------------------------------------------------------------------


def test_client_finds_and_mounts(node: Node) -> None:
    assert slots.find("tiny") is None
    assert slots.mounted() == ()
    mount = slots.ensure("tiny")
    assert (mount.slot, mount.mountpoint, mount.version, mount.ready) == ("tiny", node.root / "mnt" / "tiny", 1, True)
    assert slots.default_mountpoint("tiny") == mount.mountpoint
    assert slots.mounted() == (mount,)
    assert slots.ensure("default/tiny", mount.mountpoint) == mount


def test_client_gives_errors_of_the_tree(node: Node) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        slots.find("nowhere")
    with pytest.raises(NotFoundError, match="nowhere"):
        slots.ensure("nowhere")
    with pytest.raises(UsageError, match=r"\.\./up"):
        slots.find("../up")
    slots.ensure("tiny")
    with pytest.raises(MountError, match="is mounted at"):
        slots.ensure("tiny", node.root / "elsewhere")


def test_client_does_not_run_what_lies_in_the_working_directory(node: Node, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong random')\n")
    result = accel_train(
        *("run", "--slot", "tiny", "--", "true"),
        env=dict(node.environment, PYTHONSAFEPATH="1", PYTHONPATH=str(Path(slots.__file__).parents[2])),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
