"""A model that makes its loss in its output layer gives the loss and gradients of its logits."""

from __future__ import annotations

import copy
import functools
from importlib import metadata
from typing import Any

import pytest
import torch
from packaging.version import Version

from anygauge.kernels.logits_rule import LogitsRule, logits_rule
from anygauge.kernels.loss import model_loss, return_loss, state_loss_rows, summed_cross_entropy
from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from tests.helpers.build import shift_labels
from tests.models.families import config_of

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "phi3": {},
    "olmo2": {},
    "stablelm": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "mixtral": {"num_local_experts": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
}


def build(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SMALL, **MODELS[model_type], **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 96, (3, 17), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    labels[1] = -100
    return {"input_ids": ids, "shift_labels": shift_labels(labels)}


def fused(model: Any) -> Any:
    rule, served = logits_rule(model)
    assert served, served
    return_loss(model, rule.bind(linear_cross_entropy))
    return model


def loss_and_gradients(model: Any, *, labelled: bool) -> tuple[float, dict[str, torch.Tensor]]:
    given = batch()
    labels = given["shift_labels"]
    outputs = model(**(given if labelled else {"input_ids": given["input_ids"]}), use_cache=False)
    assert (outputs.logits is None) == labelled
    loss = model_loss(outputs) if labelled else summed_cross_entropy(outputs.logits, labels)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def exactly(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients from logits in float64.

    Two ways to compute in float32 may differ by as much as both err, which is another amount on
    each processor; what either errs by is small beside the largest gradient on all of them.
    """
    if model.config.model_type in IN_FLOAT32_ALONE:
        return loss_and_gradients(model, labelled=False)
    exact = copy.deepcopy(model).double()
    # torch's product of groups, which experts are computed with, has no float64.
    exact.config._experts_implementation = "eager"
    return loss_and_gradients(exact, labelled=False)


# These mix types that they make themselves with those of the model, in transformers before 5.
OLD = Version(metadata.version("transformers")) < Version("5")
IN_FLOAT32_ALONE = ("gptj", "mpt") if OLD else ()


def compare(model: Any, wanted: float, exact: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Check loss and gradients of a model that makes its loss itself; returns the gradients."""
    loss, gradients = loss_and_gradients(model, labelled=True)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert gradients.keys() == exact.keys() and gradients
    for name, gradient in gradients.items():
        largest = float(exact[name].abs().max())
        error = float((gradient - exact[name]).abs().max())
        assert error <= 1e-5 * largest + 1e-7, name
    return gradients


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_the_host_knows_are_not_asked_for(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama", tie_word_embeddings=tied)
    rule, _ = logits_rule(model)
    return_loss(model, functools.partial(rule.bind(linear_cross_entropy), skip_ignored=True))

    def computed(*, stated: bool) -> list[torch.Tensor]:
        model.zero_grad()
        given = batch()
        labels = given["shift_labels"]
        if stated:
            counts = (labels != -100).sum(dim=1).tolist()
            state_loss_rows(labels, (labels.flatten() != -100).nonzero().squeeze(1), counts)
            monkeypatch.setattr(torch.Tensor, "nonzero", None)
        loss = model_loss(model(**given, use_cache=False))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    wanted = computed(stated=False)
    for one, other in zip(computed(stated=True), wanted, strict=True):
        assert torch.equal(one, other)


TIED = [
    (name, {"tie_word_embeddings": tied})
    for name in ("llama", "gemma2", "gpt2")
    for tied in (False, True)
]


@pytest.mark.parametrize(("model_type", "changes"), [*((name, {}) for name in MODELS), *TIED])
def test_the_loss_is_that_of_the_logits(model_type: str, changes: dict[str, Any]) -> None:
    model = build(model_type, **changes)
    wanted, exact = exactly(model)
    compare(fused(model), wanted, exact)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_of_the_configuration_are_found_by_running_the_forward(device: str) -> None:
    with torch.device(device):
        models = [build(name) for name in ("gemma2", "cohere", "granite")]
        models.append(build("llama", final_logit_softcapping=3.0))
    rules, served = zip(*map(logits_rule, models), strict=True)
    assert all(served)
    scaled = LogitsRule(scale=0.25)
    assert rules == (LogitsRule(softcap=3.0), scaled, scaled, LogitsRule())


def test_a_number_that_the_architecture_reads_otherwise_is_refused() -> None:
    model = build("llama")
    cls = type(model)

    class Shifted(cls):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits + 1
            return outputs

    model.__class__ = Shifted
    _, served = logits_rule(model)
    assert not served and "changes its logits in a way that is not known" in str(served)
    # Nothing of the trial is left behind.
    assert "forward" not in vars(model.lm_head) and "forward" not in vars(model.model)


def test_what_cannot_be_followed_is_left_with_its_logits() -> None:
    model = build("llama")
    model.forward = lambda **_: None
    assert "was replaced by something else" in str(logits_rule(model)[1])
    model = build("llama")
    model.model.forward = lambda **_: None
    assert "decoder of LlamaForCausalLM was not found" in str(logits_rule(model)[1])


def test_without_labels_it_is_what_it_was() -> None:
    model = build("gemma2")
    given = batch()
    wanted = model(input_ids=given["input_ids"]).logits
    fused(model)
    assert torch.equal(model(input_ids=given["input_ids"]).logits, wanted)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert copied(**given).loss.item() != pytest.approx(model(**given).loss.item(), rel=1e-3)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("targets", [["attn"], ["attn", "head"], ["head"]])
def test_lora(model_type: str, targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    names = {"attn": "c_attn" if model_type == "gpt2" else "q_proj", "head": "lm_head"}
    model = build(model_type, tie_word_embeddings=False)
    config = LoraConfig(r=4, lora_alpha=16, use_rslora=True, init_lora_weights=False,
                        target_modules=[names[t] for t in targets])  # fmt: skip
    model = get_peft_model(model, config).train()
    wanted, exact = exactly(model)
    assert all("lora" in name for name in compare(fused(model), wanted, exact))
    given = batch()
    with model.disable_adapter(), torch.no_grad():
        logits = model(input_ids=given["input_ids"], use_cache=False).logits
        base = summed_cross_entropy(logits, given["shift_labels"]).item()
        assert model(**given, use_cache=False).loss.item() == pytest.approx(base, rel=1e-6)
        assert base != pytest.approx(wanted, rel=1e-5)
    model.merge_adapter()
    with torch.no_grad():
        assert model(**given, use_cache=False).loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("replaced", [False, True])
def test_without_a_kernel_the_loss_is_made_of_the_logits(replaced: bool) -> None:
    model = build("gemma2")
    if replaced:
        model.forward = model.forward
    given = batch()
    logits = model(input_ids=given["input_ids"]).logits
    wanted, gradients = loss_and_gradients(model, labelled=False)
    return_loss(model)
    assert torch.equal(model(input_ids=given["input_ids"]).logits, logits)
    found = loss_and_gradients(model, labelled=True)
    assert found[0] == wanted
    assert found[1].keys() == gradients.keys()
    assert all(torch.equal(found[1][name], gradients[name]) for name in gradients)


def test_an_output_layer_called_decoder_is_not_taken_for_one() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of("modernbert-decoder"))
    if getattr(model, "get_decoder", int)() is not model.get_output_embeddings():
        pytest.skip("this version's is not")
    _, served = logits_rule(model)
    assert not served and "could not be followed" in served.reason
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert model(input_ids=ids).logits.shape[:2] == (1, 4), "as it was"


def test_a_decoder_under_its_usual_name_is_found() -> None:
    """Llama 4's prefix is that of the model with images."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama4_text"))
    assert model.base_model_prefix == "language_model" and not hasattr(model, "language_model")
    assert logits_rule(model)[1]
