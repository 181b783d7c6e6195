"""Is the repository laid out as it says?

The import contracts are in pyproject.toml.  Here they are checked twice: that the code keeps them,
and that each of them would be broken by what it forbids, since a contract that names a module wrongly
holds for ever.  The other rules are those that a linter has no words for.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("accelfs", "trainer")
CODE = (*PRODUCT, "tests", "benchmarks")
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "README.md",
    "accelfs",
    "benchmarks",
    "dev",
    "pyproject.toml",
    "systemd",
    "tests",
    "trainer",
}
# A module with such a name gathers what nobody found a place for.
ATTICS = {"common", "helper", "helpers", "misc", "util", "utils"}
# The one place that polls, with a deadline; everybody else waits for something by way of it.
MAY_SLEEP = {"tests/waiting.py"}

# One file for each thing that the contracts forbid, by the id of the contract that it breaks.
VIOLATIONS = {
    "layers": ("accelfs/unplaced.py", ""),
    "pack-dataset": ("accelfs/pack/violation.py", "import accelfs.dataset"),
    "format-only": ("accelfs/store/violation.py", "import lmdb"),
    "store-only": ("accelfs/pack/violation2.py", "import fsspec"),
    "mount-only": ("accelfs/dataset/violation.py", "import trio"),
    "trainer-door": ("trainer/violation.py", "import accelfs.store"),
    "launcher": ("trainer/violation2.py", "import tensorflow"),
    "accelfs-alone": ("accelfs/cli/violation.py", "import trainer"),
    "demo-apart": ("trainer/violation3.py", "import trainer.demo"),
}


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=directory,
        # Wide, so that a contract and its result stand on one line.
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def modules(*folders: str) -> list[Path]:
    return [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_import_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_import_contract_can_be_broken(tmp_path: Path) -> None:
    for folder in PRODUCT:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for place, text in VIOLATIONS.values():
        (tmp_path / place).write_text(text + "\n")
    contracts = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]

    result = lint_imports(tmp_path)

    assert {contract["id"] for contract in contracts} == set(VIOLATIONS)
    kept = [contract["name"] for contract in contracts if f"{contract['name']} BROKEN" not in result.stdout]
    assert not kept, result.stdout + result.stderr


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path) for path in modules(*PRODUCT) if not ast.get_docstring(ast.parse((ROOT / path).read_bytes()))]
    assert not silent


def test_no_module_is_an_attic() -> None:
    assert not [str(path) for path in modules(*CODE) if ATTICS & {path.stem, path.parent.name}]


def test_no_test_sleeps() -> None:
    """A sleep is too short on a busy machine and too long on any other."""
    sleeps = [
        f"{path}:{node.lineno}"
        for path in modules("tests")
        if str(path) not in MAY_SLEEP
        for node in ast.walk(ast.parse((ROOT / path).read_bytes()))
        if isinstance(node, ast.Call) and _called(node) == "sleep"
    ]
    assert not sleeps


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def test_the_top_level_is_what_the_readme_says() -> None:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    found = {
        name
        for name in os.listdir(ROOT)
        if name != ".git" and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    }
    assert found == TOP_LEVEL


def test_dev_without_a_known_word_shows_its_words() -> None:
    for words in ([], ["tets"]):
        result = subprocess.run([ROOT / "dev", *words], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stdout == ""
        assert "usage: ./dev WORD" in result.stderr
