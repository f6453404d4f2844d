"""The run files of one recipe on several devices say the same but for the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.data import accumulation
from anygauge_hpu.backend import LAZY_ONLY
from tests.gaudi_stack.their_command import OPTIONS, VARIABLES
from tests.helpers.runs import anygauge

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = Path(__file__).parents[1] / "fixtures/alpaca.json"
RECIPE = "llama2-70b-lora-gaudi2.yaml"
EAGER = "llama2-70b-lora-gaudi2-eager.yaml"
H100 = "llama2-70b-lora-h100.yaml"
TWO_NODES = "llama2-70b-lora-gaudi2-two-nodes.yaml"


@pytest.mark.parametrize(
    ("name", "differs"),
    [(H100, {"backend", "backend_options"}), (EAGER, {"backend_options"}), (TWO_NODES, {"launch"})],
)
def test_they_differ_in_what_they_say_alone(name: str, differs: set[str]) -> None:
    recipe, other = (load_run_file(EXAMPLES / file).model_dump() for file in (RECIPE, name))
    assert {field for field in recipe if recipe[field] != other[field]} == differs


def test_the_eager_form_has_no_option_of_lazy_mode() -> None:
    lazy, eager = (load_run_file(EXAMPLES / n).backend_options for n in (RECIPE, EAGER))
    removed = {*LAZY_ONLY, "sync_on_release"}
    assert set(lazy) - set(eager) == removed & set(lazy)
    assert {name for name in eager if eager[name] != lazy[name]} == {"mode"}


def test_every_line_says_what_it_stands_for_in_the_published_command() -> None:
    text = (EXAMPLES / RECIPE).read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("#")]
    without = [line for line in lines if line and not line.endswith(":") and "  # " not in line]
    assert not without
    given = [
        *(f"{name}={value}" for name, value in VARIABLES.items()),
        *(f"--{o}" for o in OPTIONS),
    ]
    assert not [name for name in given if name not in text]
    different = {line.partition(":")[0] for line in lines if "differs:" in line}
    assert {"packing", "micro_batch_size", "reduce_dtype", "throughput_warmup_steps"} < different
    assert {"graph_limit", "r", "lr", "epochs", "max_length", "devices"}.isdisjoint(different)


def test_two_machines_share_the_same_steps() -> None:
    one = load_run_file(EXAMPLES / RECIPE)
    two = load_run_file(EXAMPLES / TWO_NODES)
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
    run = load_run_file(EXAMPLES / RECIPE)
    assert run.adapter is not None
    assert (run.adapter.r, run.adapter.alpha, run.adapter.dropout) == (4, 16, 0.05)
    assert run.adapter.targets == ["q_proj", "v_proj", "k_proj", "o_proj"]
    assert (run.train.epochs, run.train.micro_batch_size, run.data.max_length) == (2, 10, 2048)
    assert run.train.global_batch_size == run.train.micro_batch_size * run.launch.devices
    assert (run.train.optimizer.lr, run.train.schedule.warmup_ratio) == (0.0018, 0.03)
    assert run.train.schedule.name == "cosine"


@pytest.mark.parametrize("name", [RECIPE, EAGER, H100])
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
        for text in ("PT_HPU_LAZY_MODE", "HLS_MODULE_ID"):
            assert text in done.stdout
        assert ("PT_HPU_MAX_COMPOUND_OP_SIZE" in done.stdout) is (name == RECIPE)
        assert "zero_optimization.overlap_comm" in settings
        assert "zero_optimization.contiguous_gradients" in settings
