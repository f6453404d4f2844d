"""An optimizer of another distribution, that of docs/other-plugins.md, trains and is resumed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.config.describe import all_places
from anygauge.interface import AnygaugeError
from anygauge.launch.request import read_request
from tests.docs.pages import blocks
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, run_file
from tests.strategies.test_plugin import on_path

PLUGIN = "anygauge_mine_optimizer"
AVERAGED = {"optimizer": {"name": "averaged", "lr": 0.01, "newest": 0.5}}
LAYOUTS: dict[str, Any] = {
    "single": {"strategy": {"name": "single"}},
    "fsdp": {"strategy": {"name": "fsdp"}, "launch": {"devices": 2}},
    "pp": {"strategy": {"name": "ddp", "pp": 2}, "launch": {"devices": 2}},
}


@contextlib.contextmanager
def plugin() -> Iterator[None]:
    (text,) = [block.text for block in blocks() if block.option("file") == f"{PLUGIN}.py"]
    with tempfile.TemporaryDirectory() as folder, on_path("anygauge-mine", PLUGIN, Path(folder)):
        (Path(folder) / f"{PLUGIN}.py").write_text(text)
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_weights_are_evaluated_and_saved_than_trained(layout: str, tmp_path: Path) -> None:
    """Evaluations do not disturb what is trained, and a checkpoint has both."""

    def part(name: str, steps: int = 4, **more: Any) -> RunPart:
        train = {**AVERAGED, "steps": steps, "schedule": {"name": "constant"}}
        train["eval_every"] = more.pop("eval_every", 1)
        sections = {**LAYOUTS[layout], "data": {"eval_fraction": 0.2}, "train": train, **more}
        return RunPart(file=str(run_file(tmp_path, name=name, **sections)))

    middle = str(tmp_path / "out/whole/checkpoints/step-00000002")
    whole, alone, rest = finished(
        [
            part("whole", checkpoint={"every": 2}),
            part("alone", eval_every=0),
            part("rest", checkpoint={"resume": middle}),
        ],
        within=plugin,
    )
    assert whole.steps("loss") == alone.steps("loss")
    assert rest.steps("loss") == whole.steps("loss")[2:]
    assert rest.evaluations() == whole.evaluations()[2:]
    saved, mean, trained = tensors(whole)
    assert saved.keys() == mean.keys() and all(torch.equal(saved[n], mean[n]) for n in saved)
    assert not all(torch.equal(trained[n], mean[n]) for n in mean), "they are two"


def tensors(run: Run) -> list[dict[str, torch.Tensor]]:
    """Of the last step: the adapter's, and in the checkpoint the means and what is trained."""
    adapter = load_file(run.folder / "adapter/adapter_model.safetensors")
    state: dict[str, torch.Tensor] = {}
    for file in (run.folder / "checkpoints/step-00000004").glob("state-*.safetensors"):
        state |= load_file(file)
    found = [{name.replace(".weight", ""): value for name, value in adapter.items()}]
    for key in ("mean/", "parameter/"):
        own = {n.removeprefix(key): v for n, v in state.items() if n.startswith(key)}
        found.append({n.replace(".default", "").replace(".weight", ""): v for n, v in own.items()})
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"name": "zero"}}, r"averaged evaluates other weights.*fsdp, ddp or single"),
        (
            {
                "checkpoint": {"result": "best"},
                "data": {"eval_fraction": 0.2},
                "train": {"eval_every": 1},
            },
            r"checkpoint\.result: best: .*averaged has",
        ),
        ({"train": {"optimizer": {"newest": 0}}}, r"train\.optimizer\.newest: got 0"),
        ({"train": {"optimizer": {"newst": 1}}}, r"not a setting of averaged; did you mean 'newe"),
        ({"train": {"optimizer": {"name": "avraged"}}}, r"optimizer named 'avraged'; did you mean"),
    ],
)
def test_what_it_cannot_do_is_refused_when_the_run_is_read(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"strategy": {"name": "single"}, **changes}
    own = sections.get("train", {})
    optimizer = {**AVERAGED["optimizer"], **own.get("optimizer", {})}
    if optimizer["name"] != "averaged":
        del optimizer["newest"]
    sections["train"] = {**own, "optimizer": optimizer}
    with plugin(), pytest.raises(AnygaugeError, match=said):
        read_request(run_file(tmp_path, **sections), [], {}, need_device=False)


def test_its_settings_are_listed_like_any() -> None:
    with plugin():
        (place,) = [one for one in all_places()[0] if one.owner == "optimizer averaged"]
    assert place.path == ("train", "optimizer")
    assert {"name", "lr", "weight_decay", "newest"} <= place.section.model_fields.keys()
