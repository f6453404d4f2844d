"""Packed documents never see their neighbours: per-token losses equal those of padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import EvaluationBatches, Layout, TokenizedRows, prepare
from anygauge.interface import UnsupportedError
from anygauge.models.inputs import model_inputs
from anygauge.models.masks import MaskPlan, plan_masks, visible
from tests.helpers.operations import TRIANGLES, Operations
from tests.helpers.runs import tiny_model
from tests.helpers.tokenizer import FIXTURES, make_tokenizer

LENGTH = 96


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each position's loss in nats: (B, T) float32, zero where there is no loss."""
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2).float(), labels, ignore_index=-100, reduction="none"
    )
    return losses


def losses_by_document(model: Any, tokenizer: Any, packing: bool) -> list[list[float]]:
    """Every document's loss token losses; documents in an order of their own."""
    data = DataSection(
        train=SourceSection(path=str(FIXTURES / "rows.jsonl")),
        max_length=LENGTH,
        packing=packing,
        cache="off",
    )
    rows = prepare(data, tokenizer, 0).train
    assert isinstance(rows, TokenizedRows)
    layout = Layout(
        micro_batch=2, max_length=LENGTH, pad_id=tokenizer.pad_token_id, packing=packing
    )
    batches = EvaluationBatches(rows, layout)
    found = []
    for batch in batches:
        with torch.no_grad():
            losses = token_losses(
                model(**model_inputs(batch.tensors(), torch.float32)).logits, batch.shift_labels
            )
        segments = batch.segment_ids if packing else batch.attention_mask
        assert segments is not None
        for row in range(len(segments)):
            for segment in range(1, int(segments[row].max()) + 1):
                here = (segments[row] == segment) & (batch.shift_labels[row] != -100)
                if here.any():
                    ids = batch.input_ids[row][segments[row] == segment].tolist()
                    found.append((ids, losses[row][here].tolist()))
    return [losses for _, losses in sorted(found)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_and_padded_rows_have_equal_token_losses(attention: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    model = tiny_model(attention).eval()
    for parameter in model.parameters():  # sharper attention, so that a leak would show
        parameter.data.mul_(5)
    padded = losses_by_document(model, tokenizer, packing=False)
    packed = losses_by_document(model, tokenizer, packing=True)
    assert len(padded) == 40
    for one, other in zip(padded, packed, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_the_mask_lets_a_token_see_its_own_past_only() -> None:
    seen = visible(torch.tensor([[1, 1, 2, 2, 0]]))[0]
    assert seen.tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [False, False, True, False, False],
        [False, False, True, True, False],
        [False, False, False, False, True],
    ]


@pytest.mark.parametrize("form", ["additive", "boolean"])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_are_made_by_comparing_positions(form: str, window: int | None) -> None:
    """Not every device has a kernel for a triangle or a diagonal of truths."""
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    with Operations() as seen:
        MaskPlan(form=form, windows=(("", window),)).masks(segments, torch.float32)
    assert "aten::arange" in seen.names()
    assert not seen.names() & TRIANGLES


def test_a_window_counts_the_token_itself() -> None:
    seen = visible(torch.tensor([[1, 1, 1, 1, 2]]), window=2)[0]
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def segments(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    cuts = torch.rand(rows, length, generator=generator) < 0.1
    found = cuts.cumsum(1) + 1
    found[0, -length // 4 :] = 0
    return found


@pytest.mark.parametrize("window", [None, 1, 5, 200])
def test_every_form_says_the_same(window: int | None) -> None:
    given = segments(3, 150)
    seen = visible(given, window)
    kinds = (("", window),)
    assert torch.equal(MaskPlan("boolean", kinds).masks(given, torch.float32)[:, 0], seen)
    added = MaskPlan("additive", kinds).masks(given, torch.bfloat16)[:, 0]
    assert torch.equal(added == 0, seen) and added.dtype is torch.bfloat16
    assert set(added.unique().tolist()) == {0.0, torch.finfo(torch.bfloat16).min}
    from torch.nn.attention.flex_attention import create_mask

    blocks = MaskPlan("blocks", kinds).masks(given, torch.float32)
    assert torch.equal(create_mask(blocks.mask_mod, 3, 1, 150, 150, device="cpu")[:, 0], seen)


class Config:
    num_attention_heads = 4

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def test_masks_follow_what_layers_see() -> None:
    both = ["full_attention", "sliding_attention"]

    def windows(**fields: Any) -> Any:
        return plan_masks(Config(**fields), "sdpa", 65).windows

    assert windows() == (("", None),)
    assert windows(sliding_window=64) == (("", 64),)
    assert windows(sliding_window=65) == (("", None),)
    assert windows(sliding_window=64, use_sliding_window=False) == (("", None),)
    assert windows(sliding_window=64, layer_types=both) == (
        ("full_attention", None),
        ("sliding_attention", 64),
    )
    assert windows(sliding_window=64, layer_types=both[:1]) == (("", None),)
    assert windows(sliding_window=64, layer_types=both[1:]) == (("", 64),)
    forms = [plan_masks(Config(), name, 65).form for name in ("eager", "sdpa", "flex_attention")]
    assert forms == ["additive", "boolean", "blocks"]


def test_packing_is_refused_where_it_would_leak() -> None:
    with pytest.raises(UnsupportedError, match="at most 64"):
        plan_masks(Config(sliding_window=64, max_window_layers=2), "sdpa", 65)
    with pytest.raises(UnsupportedError, match="eager or sdpa"):
        plan_masks(Config(), "flash_attention_2", 65)
    with pytest.raises(UnsupportedError, match="linear_attention"):
        plan_masks(Config(layer_types=("full_attention", "linear_attention")), "sdpa", 65)
    with pytest.raises(UnsupportedError, match="this model has layers with no attention"):
        plan_masks(object(), "sdpa", 65)
