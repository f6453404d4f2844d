"""Every kind of adapter: loaded again by peft alone, and folded into its base."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli import run as command
from anygauge.config.schema import AdapterSection
from anygauge.interface import UnsupportedError
from anygauge.models.export import save_adapter
from anygauge.models.factory import dtype_name
from anygauge.models.model_files import WeightFiles
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import run_file, save_tiny, trained_here
from tests.helpers.tiny_tokenizer import make_tokenizer
from tests.models.families import FAMILIES, saved
from tests.training.test_results import plain_loss

IDS = torch.arange(3, 19)[None]
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "gpt2": {**GPT2, "bos_token_id": 0, "eos_token_id": 1},
}
UP = r"model\.layers\.1\..*_proj"
GROUPS = {
    "targets": ["q_proj", "v_proj"],
    "groups": [{"targets": UP, "r": 2, "alpha": 8}, {"targets": ["lm_head"], "alpha": 5.5}],
}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
WHOLE = (["embed_tokens"], ["lm_head"], ["model.norm"])
INITS = ("pissa", "olora", "pissa_niter_4")
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rslora": ("llama", {"rslora": True, "dropout": 0.1}, 14),
    "dora": ("llama", {"dora": True}, 14),
    "groups": ("llama", GROUPS, 10),
    "embeddings": ("llama", {"targets": ["embed_tokens", "lm_head"], "alpha": 128}, 2),
    "dora on everything": ("llama", {"dora": True, "rslora": True, "targets": ".*"}, 16),
    "tied embeddings": ("tied", {"targets": ["embed_tokens", "lm_head"], "alpha": 128}, 2),
    "embedding of a tied model": ("tied", {"targets": ["all-linear", "embed_tokens"]}, 15),
    "conv1d": ("gpt2", {}, 8),
    "dora on conv1d": ("gpt2", {"dora": True, "dropout": 0.1, "targets": ["c_fc", "wte"]}, 3),
    **{f"{whole} of {b}": (b, {"modules_to_save": whole}, 14)
       for whole in WHOLE for b in ("llama", "tied")},
    # Factors out of the base are saved for the base as it was.
    **{f"{init}, rslora": ("llama", {"init": init, "rslora": True}, 14) for init in INITS},
    **{f"{init}, groups": ("llama", {"init": init, **GROUPS}, 10) for init in INITS},
    **{f"experts of {family}": (family, EXPERTS, 0) for family in FAMILIES
       if family != "gemma3_text"},
}  # fmt: skip
UNTIED = {"tied embeddings", "embedding of a tied model", "dora on conv1d"}
"""Kinds that change one use of a tensor which their base has in two places."""
APART = {"['embed_tokens'] of tied", "['lm_head'] of tied"}
"""Kinds that train one use of such a tensor as one of its own."""
PARTS = {
    "dora": "lora_magnitude_vector",
    "modules_to_save": "modules_to_save",
    "target_parameters": ".experts.",
}
"""Fields -> what is then trained."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a model of an architecture, and a tokenizer."""

    @functools.cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("base")
        if name in BASES:
            return save_tiny(folder, BASES[name])
        pytest.importorskip("transformers.core_model_loading", reason="experts are layers before")
        make_tokenizer(folder)
        return saved(name, folder)

    return of


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def moved(model: Any) -> dict[str, torch.Tensor]:
    """Trained tensors, as if training had moved them."""
    generator = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return {name: p.detach() for name, p in trained.items()}


@pytest.mark.parametrize("name", KINDS)
def test_plain_peft_loads_it_and_it_merges(
    name: str, base: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    kind, fields, layers = KINDS[name]
    folder, float32 = base(kind), {dtype_name(): torch.float32}
    made = model_factory(folder, AdapterSection(r=4, **fields))
    plain = logits(on_host(made))
    model: Any = made.adapt(on_host(made))
    if "init" in fields:
        torch.testing.assert_close(logits(model), plain, rtol=1e-4, atol=1e-5)
    trained = moved(model)
    for field, part in PARTS.items():
        assert field not in fields or any(part in each for each in trained), field
    wanted = logits(model)
    assert (wanted - plain).abs().max() > 1e-3, "it does something"
    shapes = {each: tuple(tensor.shape) for each, tensor in trained.items()}
    adapter = tmp_path / "adapter"
    save_adapter(
        model, trained, adapter, shapes=shapes, base=made.section, first=made.first_factors
    )
    config = json.loads((adapter / "adapter_config.json").read_text())
    # Others read lora_alpha and the rank alone: llama.cpp, and what is built on it.
    assert (config["use_rslora"], config["alpha_pattern"]) == (False, {})

    again = AutoPeftModelForCausalLM.from_pretrained(adapter, **float32)
    assert kind in FAMILIES or sum(isinstance(m, LoraLayer) for m in again.modules()) == layers
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-5)

    output = tmp_path / "merged"
    assert command(["merge", str(folder), "--adapter", str(adapter), "--output", str(output)]) == 0
    assert ("one tensor in the base" in capsys.readouterr().out) == (name in UNTIED)
    merged = AutoModelForCausalLM.from_pretrained(output, **float32)
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-4)
    names, before = (WeightFiles(each).names() for each in (output, folder))
    assert (names == before) == (name not in UNTIED | APART) and names >= before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "merged"]


@pytest.mark.parametrize(
    "fields",
    [{"dora": True}, {"modules_to_save": ["lm_head"]}, {"targets": ["q_proj", "embed_tokens"]}],
)
def test_factors_out_of_the_base_are_refused_beside_what_could_not_be_saved(
    fields: dict[str, Any], base: Callable[[str], Path]
) -> None:
    made = model_factory(base("llama"), AdapterSection(r=4, init="olora", **fields))
    with pytest.raises(UnsupportedError, match=r"^adapter\.init: olora takes .* Leave out what"):
        made.adapt(made.skeleton())


@pytest.mark.parametrize("name", ["groups", "dora on everything", "tied embeddings", "conv1d"])
def test_a_run_saves_what_it_trained_and_proves_it(
    name: str, base: Callable[[str], Path], tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    kind, fields, _ = KINDS[name]
    run = trained_here(
        run_file(
            tmp_path,
            model={"name": str(base(kind))},
            adapter={"r": 4, **fields},
            data={"eval_fraction": 0.2},
            train={"steps": 1, "eval_at_start": True, "optimizer": {"lr": 2.0e-2}},
            strategy={"name": "single"},
        )
    )
    report = json.loads((run.folder / "report.json").read_text())["verified"]
    assert report["reloaded"] is True and report["logits"] < 1e-5
    assert report["effect"] > 1e-3, "and these are not the base's"
    folder = run.folder / "adapter"
    before, after = run.evaluations()
    assert after != pytest.approx(before, rel=2e-5)
    model = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    assert plain_loss(model, run) == pytest.approx(after, rel=1e-5)
