"""Modules that are trained whole beside factors: saved as peft saves them, merged, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli import run as command
from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.export import save_adapter
from anygauge.models.merge import merge
from anygauge.models.result_files import ResultFiles
from tests.helpers.build import model_factory
from tests.helpers.runs import TINY, run_file
from tests.helpers.tokenizer import make_tokenizer
from tests.models.families import adapted

IDS = torch.arange(3, 19)[None]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {**TINY, "tie_word_embeddings": request.param}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"], ["model.norm"]])
def test_plain_peft_loads_them_and_they_merge(base: Path, whole: list[str], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = adapted(base, modules_to_save=whole)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert any("modules_to_save" in name for name in trained)
    with torch.no_grad():
        plain = model(input_ids=IDS).logits
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        logits = model(input_ids=IDS).logits
        assert (logits - plain).abs().max() > 1e-2
        shapes = {name: tuple(p.shape) for name, p in trained.items()}
        folder = tmp_path / "adapter"
        section = ModelSection(name=str(base))
        save_adapter(model, trained, folder, shapes=shapes, base=section)

        fresh = AutoModelForCausalLM.from_pretrained(base)
        again = PeftModel.from_pretrained(fresh, folder).eval()(input_ids=IDS).logits
        torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-5)

        given = section.model_copy(update={"tokenizer": str(tmp_path)})
        files = ResultFiles(given, make_tokenizer(tmp_path))
        merge(section, folder, tmp_path / "merged", files)
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(
            merged.eval()(input_ids=IDS).logits, logits, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"modules_to_save": ["lm_haed"]}, "ends with 'lm_haed'; did you mean 'lm_head'"),
        (
            {"modules_to_save": ["up_proj"]},
            "'up_proj' would be trained whole, but .* also has factors",
        ),
    ],
)
def test_names_that_mean_nothing_are_refused(fields: dict[str, Any], said: str) -> None:
    made = model_factory(TINY, AdapterSection(r=4, **fields))
    with pytest.raises(ModelError, match=said):
        made.adapt(made.skeleton())


def test_divided_models_do_not_take_them(tmp_path: Path) -> None:
    path = run_file(
        tmp_path, adapter={"modules_to_save": ["lm_head"]}, strategy={"name": "ddp", "tp": 2}
    )
    with pytest.raises(UnsupportedError, match=r"modules_to_save: .*strategy\.tp: 1"):
        command(["train", str(path), "--devices", "2"])
