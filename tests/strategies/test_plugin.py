"""A strategy of another distribution trains without a change in anygauge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import RunFileError, UnsupportedError
from anygauge.launch.request import read_request
from anygauge.registry import Registry
from tests.architecture.repository import ROOT
from tests.helpers.runs import Run, run_file, trained_here

PLUGIN = ROOT / "examples/plugins/anygauge-plain"
SAVED = {"every": 2, "keep_last": 5}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Put it on the path, with the metadata that an installation writes."""
    site = tmp_path_factory.mktemp("site")
    info = site / "anygauge_plain-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anygauge-plain\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[anygauge]\nplain = anygauge_plain\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        patch.syspath_prepend(str(site))
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
        ({**PLAIN, "stage": 2}, "", "it is a field of strategy 'zero'; valid here: name, sums"),
        ({**PLAIN, "sums": "float16"}, "", "one of float32, float64"),
        ({"name": "single", "sums": "float64"}, "", "it is a field of strategy 'plain'"),
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
