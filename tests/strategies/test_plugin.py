"""Strategies of other distributions train without a change in anygauge."""

from __future__ import annotations

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from anygauge.interface import RunFileError, UnsupportedError
from anygauge.launch.request import read_request
from anygauge.registry import Registry
from anygauge.strategies.ddp.engine import Ddp
from anygauge.strategies.shared.degrees import Degrees
from anygauge.strategies.shared.torch_engine import TorchEngine
from tests.architecture.repository import ROOT
from tests.docs.pages import blocks
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, run_file, trained_here

PLUGIN = ROOT / "examples/plugins/anygauge-plain"
SAVED = {"every": 2, "keep_last": 5}


@contextlib.contextmanager
def on_path(distribution: str, module: str, *places: Path) -> Iterator[None]:
    """A plugin is in one of the places, beside the metadata that an installation writes."""
    with tempfile.TemporaryDirectory() as site, mock.patch.object(sys, "path", [*sys.path]):
        info = Path(site) / f"{distribution.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[anygauge]\nits = {module}\n")
        sys.path[:0] = [site, *map(str, places)]
        importlib.invalidate_caches()
        yield


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    with on_path("anygauge-plain", "anygauge_plain", PLUGIN):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def asked(folder: Path, name: str, strategy: dict[str, Any], **changes: Any) -> Path:
    return run_file(folder, name=name, strategy=strategy, checkpoint=SAVED, **changes)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Run:
    return trained_here(asked(folder, "plain", {"name": "plain", "sums": "float64"}))


@pytest.fixture(scope="module")
def single(folder: Path) -> Run:
    return trained_here(asked(folder, "single", {"name": "single"}))


def test_it_is_found_like_any_plugin() -> None:
    provided = Registry.load().find_strategy("plain")
    assert provided.origin == "anygauge-plain 0.1.0"


def test_it_trains_as_single_does(plain: Run, single: Run) -> None:
    assert plain.steps("loss") == pytest.approx(single.steps("loss"), rel=1e-6)
    assert plain.steps("grad_norm") == pytest.approx(single.steps("grad_norm"), rel=1e-5)


def test_its_options_are_in_the_record_and_on_the_card(plain: Run) -> None:
    assert "sums: float64" in (plain.folder / "run.yaml").read_text()
    card = (plain.folder / "adapter/README.md").read_text()
    assert "| strategy | plain, sums in float64 |" in card
    assert "deepspeed" not in (plain.folder / "versions.json").read_text()


def test_its_checkpoint_is_resumed_under_another_strategy(plain: Run, folder: Path) -> None:
    middle = plain.folder / "checkpoints/step-00000002"
    path = run_file(
        folder, name="rest", strategy={"name": "single"}, checkpoint={"resume": str(middle)}
    )
    assert trained_here(path).steps("loss") == pytest.approx(plain.steps("loss")[2:], rel=1e-5)


PLAIN = {"name": "plain"}


@pytest.mark.parametrize(
    ("strategy", "override", "told"),
    [
        ({"name": "plian"}, "", "did you mean 'plain'"),
        ({**PLAIN, "stage": 2}, "", "it is one of zero; valid here: name, sums"),
        ({**PLAIN, "sums": "float16"}, "", "one of float32, float64"),
        ({"name": "single", "sums": "float64"}, "", "it is one of plain"),
        (PLAIN, "launch.devices=2", "in one process, but the run has 2 ranks"),
        (PLAIN, "precision.param_dtype=bfloat16", "plain computes in"),
    ],
)
def test_what_it_cannot_do_is_refused_when_the_run_is_read(
    tmp_path: Path, strategy: dict[str, Any], override: str, told: str
) -> None:
    path = run_file(tmp_path, strategy=strategy)
    with pytest.raises((RunFileError, UnsupportedError), match=told):
        read_request(path, [override] if override else [], {}, need_device=False)


# -- a strategy that derives from `ddp`: that of docs/other-plugins.md -----------------------------

SENDS_LESS = "anygauge_mine_strategy"
TOP_K = {"name": "topk", "share": 0.05}


def checked_tokens(self: Any, batches: Sequence[Any], loss_function: Any, normalizer: int) -> Any:
    """A step of an engine that finds its own loss tokens in its batches."""
    own = sum((batch["shift_labels"] != -100).sum() for batch in batches)
    total = own.clone()
    dist.all_reduce(total)
    assert total == normalizer > own > 0
    return usual_step(self, batches, loss_function, normalizer)


usual_step = TorchEngine.run_step


@contextlib.contextmanager
def sends_less() -> Iterator[None]:
    """Ranks that have the page's plugin."""
    (text,) = [block.text for block in blocks() if block.option("file") == f"{SENDS_LESS}.py"]
    with (
        tempfile.TemporaryDirectory() as folder,
        on_path("anygauge-mine", SENDS_LESS, Path(folder)),
        mock.patch.object(TorchEngine, "run_step", checked_tokens),
    ):
        (Path(folder) / f"{SENDS_LESS}.py").write_text(text)
        yield


def test_what_each_rank_keeps_is_in_the_checkpoint_and_resumed_to_the_last_digit(
    folder: Path,
) -> None:
    """Of several micro-batches in a step; another strategy resumes from the rest."""
    several = {"launch": {"devices": 2}, "train": {"micro_batch_size": 1, "steps": 5}}

    def part(name: str, strategy: dict[str, Any], **checkpoint: Any) -> RunPart:
        changes = {"strategy": strategy, "checkpoint": {**SAVED, **checkpoint}, **several}
        return RunPart(file=str(run_file(folder, name=name, **changes)))

    middle = str(folder / "out/topk/checkpoints/step-00000002")
    whole, rest, other, ddp = finished(
        [
            part("topk", TOP_K),
            part("rest", TOP_K, resume=middle),
            part("other", {"name": "ddp"}, resume=middle),
            part("ddp", {"name": "ddp"}),
        ],
        within=sends_less,
    )
    assert whole.steps("loss")[0] == ddp.steps("loss")[0]
    assert whole.steps("loss")[1:] != ddp.steps("loss")[1:]
    assert whole.steps("loss") == pytest.approx(ddp.steps("loss"), rel=0.02)
    for field in ("loss", "grad_norm"):
        assert rest.steps(field) == whole.steps(field)[2:]
    assert "left out: what each rank had of its own" in other.out
    assert len(other.steps("loss")) == len(rest.steps("loss"))


def test_stages_do_not_pass_by_what_a_derived_strategy_sums() -> None:
    class Own(Ddp):
        def gradients(self, *given: Any) -> Any:
            return super().gradients(*given)

    nothing: Any = None
    with pytest.raises(UnsupportedError, match=r"strategy\.pp: 2: stages sum gradients .* 'ddp, 2"):
        Own(Degrees(pp=2)).build(nothing)
