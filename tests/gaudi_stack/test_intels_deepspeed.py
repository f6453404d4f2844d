"""Runs over Intel's own build of DeepSpeed, whose Python is public, on the stand-in for its device.

`ANYGAUGE_GAUDI_DEEPSPEED` names a checkout of HabanaAI/DeepSpeed of release 1.20 or 1.21.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from tests.helpers.child_processes import printed
from tests.helpers.gaudi import STANDIN, calls, intels_deepspeed, standin_environment, standin_site
from tests.helpers.runs import FIXTURES, TINY, Run, merged, run_file, train

CHECKOUT = os.environ.get("ANYGAUGE_GAUDI_DEEPSPEED")
RECIPE = Path(__file__).parents[2] / "examples/llama2-70b-lora-gaudi2.yaml"
RANKS = 2
STEPS = 3

pytestmark = [
    pytest.mark.skipif(
        not CHECKOUT, reason="ANYGAUGE_GAUDI_DEEPSPEED names no checkout of HabanaAI/DeepSpeed"
    ),
    pytest.mark.skipif(
        Version(metadata.version("deepspeed")) >= Version("0.17"),
        reason="Intel's DeepSpeed goes with the second set of versions (make test-gaudi-stack)",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("anygauge_sim") is None,
        reason="the stand-in's tensors live on simulated cards (make plugins)",
    ),
]

LACKING = {
    "reset_max_memory_allocated": "no release has it; docs/gaudi-measured.md names it as a trap",
    "setDeterministic": "asked for by a variable that anygauge does not set; deprecated",
    "HPUGraph": "captured graphs are for inference",
    "graph": "captured graphs are for inference",
    "wrap_in_hpu_graph": "captured graphs are for inference",
}
"""Of what Intel's accelerator can ask of the device, what the stand-in does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWithFork:
    """A run that ended well, what each rank called, and what rank 0 wrote to its log."""

    run: Run
    calls: list[list[list[Any]]]
    log: str

    def count(self, name: str) -> list[int]:
        """How often each rank called it."""
        return [sum(call[0] == name for call in each) for each in self.calls]


@pytest.fixture(scope="module")
def checkout() -> Path:
    assert CHECKOUT is not None
    return Path(CHECKOUT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gaudi")


def environment(folder: Path, release: str, record: Path, *, intels: Path | None) -> dict[str, str]:
    """Of a process that finds the stand-in, and in front of it Intel's DeepSpeed."""
    found = standin_environment(standin_site(folder, release), record)
    if intels is None:
        return found
    copy = folder / f"intels-deepspeed-{release}"
    if not copy.exists():
        intels_deepspeed(folder, intels, release)
    return {**found, "PYTHONPATH": f"{copy}{os.pathsep}{found['PYTHONPATH']}"}


def trained(
    folder: Path, release: str, options: Mapping[str, Any], *, intels: Path | None
) -> TrainedWithFork:
    """The recipe with a tiny model, on two cards."""
    name = f"{release}-{'index' if intels is None else 'intels'}"
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    del recipe["train"]["epochs"], recipe["model"], recipe["output"]
    changes = {
        "name": name,
        "model": {"config": TINY, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": {"path": str(FIXTURES / "alpaca.json")}, "eval_fraction": 0.25},
        "train": {"steps": STEPS, "global_batch_size": 2 * RANKS, "micro_batch_size": 1},
        "launch": {"devices": RANKS},
    }
    fields = {**merged(recipe, changes), "backend_options": options}
    fields["data"]["max_length"] = 96
    path = run_file(folder, **fields)
    record = folder / f"{name}-record"
    run = train(path, environment=environment(folder, release, record, intels=intels))
    assert run.status == 0, run.out + run.err
    return TrainedWithFork(
        run=run,
        calls=[calls(record, rank) for rank in range(RANKS)],
        log=(run.folder / "logs/rank0.log").read_text(encoding="utf-8"),
    )


def assert_same(one: TrainedWithFork, other: TrainedWithFork, release: str) -> None:
    """Both have the same numbers, as printed; one of them ran over Intel's build."""
    build = rf"DeepSpeed info: version=[\d.]+\+hpu\.synapse\.v{re.escape(release)}"
    assert re.search(build, one.log) and not re.search(build, other.log)
    printed = [
        [f"{loss:.4f}" for loss in [*each.run.steps("loss"), *each.run.evaluations()]]
        for each in (one, other)
    ]
    assert printed[0] == printed[1] and len(printed[0]) > STEPS
    norms = [each.run.steps("grad_norm") for each in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert one.count("refused") == [0] * RANKS, "no mode refuses a call"
    assert one.count("FusedAdamW") == [STEPS] * RANKS, "its ZeRO steps the device's optimizer"


@pytest.mark.slow
def test_the_recipe_trains_in_lazy_mode_as_with_the_other_build(
    folder: Path, checkout: Path
) -> None:
    options = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["backend_options"]
    assert options["mode"] == "lazy" and options["sync_on_release"]
    options["recipe_cache"] = str(folder / "recipes")
    intels = trained(folder, "1.20.0", options, intels=checkout)
    other = trained(folder, "1.20.0", options, intels=None)
    assert_same(intels, other, "1.20.0")
    # Where graphs end does not depend on the build; that gathered weights wait before they are
    # freed is anygauge's doing, and works on its functions.
    assert intels.count("mark_step") == other.count("mark_step")
    assert min(intels.count("mark_step")) > 0
    assert min(intels.count("synchronize")) > 50


@pytest.mark.slow
def test_it_trains_in_compile_mode_as_with_the_other_build(folder: Path, checkout: Path) -> None:
    options = {"attention": "softmax", "mode": "compile"}
    intels = trained(folder, "1.21.0", options, intels=checkout)
    other = trained(folder, "1.21.0", options, intels=None)
    assert_same(intels, other, "1.21.0")
    assert min(intels.count("compile")) > 0 and intels.count("mark_step") == [0] * RANKS


def test_the_doctor_recognizes_the_build(folder: Path, checkout: Path) -> None:
    code = (
        "from anygauge_hpu.diagnostics import checks; "
        "print(*(f'{c.name}: {c.outcome} {c.seen}' for c in checks()), sep='\\n')"
    )
    found = environment(folder, "1.21.0", folder / "doctor", intels=checkout)
    number = (checkout / "version.txt").read_text(encoding="utf-8").strip()
    build = f"{number}+hpu.synapse.v1.21.0, Intel's build of release 1.21.0"
    assert f"deepspeed: pass deepspeed {build}" in printed(code, environment=found)


def test_the_stand_in_answers_what_its_accelerator_asks(checkout: Path) -> None:
    accelerator = (checkout / "accelerator/hpu_accelerator.py").read_text(encoding="utf-8")
    asked = set(re.findall(r"\bhpu\.(?:random\.)?([A-Za-z_]+)", accelerator)) - {"random", "hpu"}
    assert {"synchronize", "Event", "default_generators", "memory_stats"} <= asked
    package = STANDIN / "habana_frameworks/torch/hpu"
    names = set()
    for file in ("__init__.py", "random.py"):
        for node in ast.parse((package / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    assert asked - names == set(LACKING)
