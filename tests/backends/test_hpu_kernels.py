"""Gaudi's kernels: what the library is given, by position."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.interface import RunFileError, UnsupportedError
from anygauge.kernels.rope import apply_rotation
from anygauge.registry import Registry
from anygauge.registry.specs import load_factory
from anygauge_hpu.gaudi_kernels import fused_attention, fused_rms_norm, fused_rope
from tests.helpers.gaudi import STANDIN
from tests.helpers.plans_from_options import backend_with
from tests.standins.signatures import Tree

KERNELS = "habana_frameworks.torch.hpex.kernels"
NORMS = "habana_frameworks.torch.hpex.normalization"


def offer(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Let a module of Gaudi's library be importable, with these names alone."""
    parts = module.split(".")
    for at in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:at]), ModuleType(".".join(parts[:at])))
    for name, value in names.items():
        setattr(sys.modules[module], name, value)


def recorder(module: str, kind: str, calls: list[dict[str, Any]], result: Any) -> Any:
    """A function of the library's: takes arguments by position, and notes each under its name, as
    in the stand-in, which is held against the published source."""
    forward = Tree(STANDIN).function(module, f"{kind}.forward")
    assert forward is not None
    names = [argument.arg for argument in forward.args.args][1:]

    def apply(*args: Any) -> Any:
        calls.append(dict(zip(names, args, strict=False)))
        return result(*args)

    return SimpleNamespace(apply=apply)


@pytest.fixture
def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    fake = recorder(KERNELS, "FusedSDPA", calls, lambda q, *_: q)
    offer(monkeypatch, KERNELS, FusedSDPA=fake)
    return calls


MODULE = SimpleNamespace(training=True)
QUERY, KEY = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 2, 6, 8)
MASK = torch.zeros(2, 1, 6, 6)


@pytest.mark.parametrize(("fast", "softmax"), [(False, "None"), (True, "fast")])
@pytest.mark.parametrize("recompute", [False, True])
def test_attention_without_a_mask_is_causal_in_the_library(
    fast: bool, softmax: str, recompute: bool, attention_calls: list[dict[str, Any]]
) -> None:
    kernel = fused_attention(fast=fast, recompute=recompute)
    output, weights = kernel.forward(MODULE, QUERY, KEY, KEY, None, 0.125, dropout=0.1)
    assert output.shape == (2, 6, 4, 8) and weights is None
    (call,) = attention_calls
    assert call.pop("q") is QUERY and call.pop("k") is KEY and call.pop("v") is KEY
    assert call == {
        "attn_mask": None,
        "dropout_p": 0.1,
        "is_causal": True,
        "scale": 0.125,
        "softmax_mode": softmax,
        "recompute_mode": recompute,
    }
    assert kernel.causal


def test_attention_with_a_mask_is_not_causal_and_one_query_sees_all_keys(
    attention_calls: list[dict[str, Any]],
) -> None:
    kernel = fused_attention()
    kernel.forward(MODULE, QUERY, KEY, KEY, MASK, 0.125)
    kernel.forward(SimpleNamespace(training=False), QUERY[:, :, :1], KEY, KEY, None, dropout=0.1)
    masked, single = attention_calls
    assert (masked["attn_mask"] is MASK, masked["is_causal"]) == (True, False)
    assert (single["is_causal"], single["dropout_p"]) == (False, 0.0)


def test_what_the_library_asserts_is_refused_with_a_way_out(
    attention_calls: list[dict[str, Any]],
) -> None:
    both = fused_attention(fast=True, recompute=True)
    with pytest.raises(UnsupportedError, match=r"remove backend_options\.fast_softmax or"):
        both.forward(MODULE, QUERY, KEY, KEY, MASK, 0.125)
    both.forward(MODULE, QUERY.detach(), KEY, KEY, MASK, 0.125)  # without backward it serves
    fused_attention(fast=True).forward(MODULE, QUERY, KEY, KEY, MASK, 0.125)
    assert len(attention_calls) == 2
    with pytest.raises(UnsupportedError, match="caps its attention scores"):
        both.forward(MODULE, QUERY, KEY, KEY, None, 0.125, softcap=30.0)


@pytest.mark.parametrize(
    ("options", "name", "described"),
    [
        ({}, "gaudi_fused", "fused; its softmax"),
        ({"fast_softmax": True}, "gaudi_fused_fast", "fused, fast softmax; its"),
        ({"attention_recompute": True}, "gaudi_fused_recompute", "scores recomputed in backward;"),
        (
            {"fast_softmax": True, "attention_recompute": True},
            "gaudi_fused_fast_recompute",
            "fused, fast softmax, scores recomputed in backward;",
        ),
    ],
)
def test_options_choose_the_form_of_fused_attention(
    options: dict[str, Any], name: str, described: str, attention_calls: list[dict[str, Any]]
) -> None:
    assert backend_with("hpu", options).kernels["attention"] == name
    (provided,) = (
        p for p in Registry.load().kernels if (p.spec.operation, p.spec.name) == ("attention", name)
    )
    kernel = load_factory(provided)()
    assert kernel.name == name and described in kernel.describe


@pytest.mark.parametrize("name", ["fast_softmax", "attention_recompute"])
@pytest.mark.parametrize("other", [{"attention": "softmax"}, {"optimum_habana": True}])
def test_forms_of_fused_attention_need_fused_attention(name: str, other: dict[str, Any]) -> None:
    with pytest.raises(RunFileError, match=rf"{name}: it is a property of fused attention"):
        backend_with("hpu", {name: True, **other})
    backend_with("hpu", {name: False, **other})


def test_both_forms_at_once_are_refused_with_packed_rows() -> None:
    both = backend_with("hpu", {"fast_softmax": True, "attention_recompute": True})
    with pytest.raises(UnsupportedError, match=r"packed rows have a mask"):
        both.adapt_models(packing=True)
    both.adapt_models(packing=False)
    backend_with("hpu", {"fast_softmax": True}).adapt_models(packing=True)


@pytest.mark.parametrize(
    ("x", "weight", "inside"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_the_fused_norm_gets_one_type_and_gives_that_of_its_input(
    x: torch.dtype, weight: torch.dtype, inside: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    fake = recorder(NORMS, "FusedRMSNorm", calls, lambda a, b, eps: a * b)
    offer(monkeypatch, NORMS, FusedRMSNorm=fake)
    found = fused_rms_norm()(torch.ones(3, 4, dtype=x), torch.ones(4, dtype=weight), 1e-5)
    (call,) = calls
    assert (call["data_in"].dtype, call["gamma"].dtype, call["eps"]) == (inside, inside, 1e-5)
    assert found.dtype == x


@pytest.mark.parametrize("rows", [2, 1], ids=["rows of their own", "one for all"])
def test_the_fused_rotation_reads_its_rows_from_a_table(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def published(p: Any, cos: Any, sin: Any, position_ids: Any) -> Any:
        """As the bridge's own test has it (apply_rotary_pos_emb_v2_ref)."""
        turns = [table.squeeze(1).squeeze(0)[position_ids] for table in (cos, sin)]
        return apply_rotation(p, *turns)

    calls: list[dict[str, Any]] = []
    fake = recorder(KERNELS, "RotaryPosEmbeddingHelperV2", calls, published)
    offer(monkeypatch, KERNELS, RotaryPosEmbeddingHelperV2=fake)
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    angles = torch.randn(rows, 6, 8)
    found = fused_rope()(query, key, angles.cos(), angles.sin())
    for x, one in zip((query, key), found, strict=True):
        assert torch.equal(one, apply_rotation(x, angles.cos(), angles.sin()))
    assert [call["p"] is x for call, x in zip(calls, (query, key), strict=True)] == [True, True]
    for call in calls:
        assert call["cos"].shape == call["sin"].shape == (1, 1, rows * 6, 8)
        assert (call["position_ids"].shape, call["position_ids"].dtype) == ((2, 6), torch.int64)
        assert call["position_ids"].is_contiguous()
