"""The run files of one recipe on several devices say the same but for the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.data import accumulation
from tests.helpers.runs import anygauge

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = Path(__file__).parents[1] / "fixtures/alpaca.json"
RECIPE = ("llama2-70b-lora-gaudi2.yaml", "llama2-70b-lora-h100.yaml")
TWO_NODES = "llama2-70b-lora-gaudi2-two-nodes.yaml"


def test_they_differ_in_the_device_alone() -> None:
    gaudi, h100 = (load_run_file(EXAMPLES / name).run.model_dump() for name in RECIPE)
    assert {field for field in gaudi if gaudi[field] != h100[field]} == {
        "backend",
        "backend_options",
    }


def test_two_machines_differ_in_the_launch_alone() -> None:
    one = load_run_file(EXAMPLES / RECIPE[0]).run
    two = load_run_file(EXAMPLES / TWO_NODES).run
    given, other = one.model_dump(), two.model_dump()
    assert {field for field in given if given[field] != other[field]} == {"launch"}
    assert (two.launch.nodes, two.launch.devices) == (2, 8)
    # The same 80 sequences a step, on twice the cards.
    assert one.train.sequences_at_once(8) == 10
    assert two.train.sequences_at_once(16) == 5
    assert accumulation(two.train.global_batch_size, two.train.sequences_at_once(16), 16) == 1


def test_two_machines_have_their_environment_shown() -> None:
    done = anygauge(["env", EXAMPLES / TWO_NODES, "--explain"], environment={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "HCCL_SOCKET_IFNAME" in done.stdout


def test_it_is_the_recipe_of_the_article() -> None:
    run = load_run_file(EXAMPLES / RECIPE[0]).run
    assert run.adapter is not None
    assert (run.adapter.r, run.adapter.alpha, run.adapter.dropout) == (4, 16, 0.05)
    assert run.adapter.targets == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (run.train.epochs, run.train.micro_batch_size, run.data.max_length) == (2, 10, 2048)
    assert run.train.global_batch_size == run.train.micro_batch_size * run.launch.devices
    assert (run.train.optimizer.lr, run.train.schedule.warmup_ratio) == (0.0018, 0.03)
    assert run.train.schedule.name == "cosine"


@pytest.mark.parametrize("name", RECIPE)
def test_a_dry_run_needs_no_device(name: str, tmp_path: Path) -> None:
    """Nor the gated model: what depends on its sizes is left out, with the reason. The rows are of
    the repository, because those of the hub cannot be reached by a test."""
    done = anygauge(
        [
            *("train", EXAMPLES / name, "--dry-run", "--set", f"data.train.path={ROWS}"),
            *("--set", f"data.cache={tmp_path}"),
        ],
        environment={"HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*-zero.json")
    settings = json.loads(file.read_text())
    assert str(file) in done.stdout and "zero_optimization.stage" in settings
    if "gaudi" in name:
        for text in (
            "PT_HPU_LAZY_MODE",
            "PT_HPU_MAX_COMPOUND_OP_SIZE",
            "HLS_MODULE_ID",
        ):
            assert text in done.stdout
        assert "zero_optimization.overlap_comm" in settings
        assert "zero_optimization.contiguous_gradients" in settings
