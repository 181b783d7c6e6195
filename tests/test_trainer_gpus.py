"""The choice of GPUs, over a made-up /dev and /proc: no machine of the tests has a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import gpus
from trainer.errors import StartError


def machine(root: Path, nodes: int = 0, known_to_the_driver: int = 0) -> Path:
    (root / "dev").mkdir()
    for name in ["nvidiactl", "nvidia-uvm", "nvidia-modeset", *(f"nvidia{number}" for number in range(nodes))]:
        (root / "dev" / name).touch()
    for number in range(known_to_the_driver):
        (root / "proc/driver/nvidia/gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    return root


def test_device_nodes_are_counted_and_control_nodes_are_not(tmp_path: Path) -> None:
    assert gpus.on_machine(machine(tmp_path, nodes=3, known_to_the_driver=8)) == 3


def test_the_driver_is_asked_where_no_node_was_made_yet(tmp_path: Path) -> None:
    assert gpus.on_machine(machine(tmp_path, known_to_the_driver=2)) == 2


def test_a_machine_without_the_folders_has_none(tmp_path: Path) -> None:
    assert gpus.on_machine(tmp_path) == 0


def test_the_first_ones_are_shown_in_the_order_of_the_bus(tmp_path: Path) -> None:
    chosen = gpus.choose(2, {}, machine(tmp_path, nodes=4))
    assert chosen.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert chosen.note is not None
    assert "without a lease" in chosen.note


def test_more_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--gpus 5: this machine has 4") as caught:
        gpus.choose(5, {}, machine(tmp_path, nodes=4))
    assert caught.value.exit_code == 125


@pytest.mark.parametrize(
    ("inherited", "shown"), [("2,3", "2,3"), (" GPU-aa , GPU-bb,GPU-cc", "GPU-aa,GPU-bb"), ("1,0,-1,2", "1,0")]
)
def test_what_an_outer_scheduler_left_is_the_pool(tmp_path: Path, inherited: str, shown: str) -> None:
    chosen = gpus.choose(2, {"CUDA_VISIBLE_DEVICES": inherited}, machine(tmp_path, nodes=4))
    assert chosen.environment["CUDA_VISIBLE_DEVICES"] == shown


@pytest.mark.parametrize("inherited", ["", "-1", "3"])
def test_a_pool_that_is_too_small_is_refused(tmp_path: Path, inherited: str) -> None:
    with pytest.raises(StartError, match=f"CUDA_VISIBLE_DEVICES={inherited} leaves"):
        gpus.choose(2, {"CUDA_VISIBLE_DEVICES": inherited}, machine(tmp_path, nodes=4))
