"""Packed documents never see their neighbours: per-token losses equal those of padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import EvaluationBatches, Layout, TokenizedRows, prepare
from anygauge.interface import UnsupportedError
from anygauge.models.inputs import check_packing, isolating_mask, model_inputs
from anygauge.models.loss import token_losses
from tests.helpers.runs import TINY
from tests.helpers.tokenizer import FIXTURES, make_tokenizer

LENGTH = 96


def losses_by_document(model: Any, tokenizer: Any, packing: bool) -> list[list[float]]:
    """Every document's supervised token losses; documents in an order of their own."""
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
            losses = token_losses(model(**model_inputs(batch, torch.float32)).logits, batch.labels)
        segments = batch.segment_ids if packing else batch.attention_mask
        assert segments is not None
        for row in range(len(segments)):
            for segment in range(1, int(segments[row].max()) + 1):
                here = (segments[row] == segment) & (batch.labels[row] != -100)
                if here.any():
                    ids = batch.input_ids[row][segments[row] == segment].tolist()
                    found.append((ids, losses[row][here].tolist()))
    return [losses for _, losses in sorted(found)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_and_padded_rows_have_equal_token_losses(attention: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer(tmp_path)
    torch.manual_seed(0)
    fields = {k: v for k, v in TINY.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **fields), attn_implementation=attention
    ).eval()
    for parameter in model.parameters():  # sharper attention, so that a leak would show
        parameter.data.mul_(5)
    padded = losses_by_document(model, tokenizer, packing=False)
    packed = losses_by_document(model, tokenizer, packing=True)
    assert len(padded) == 40
    for one, other in zip(padded, packed, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_the_mask_lets_a_token_see_its_own_past_only() -> None:
    mask = isolating_mask(torch.tensor([[1, 1, 2, 2, 0]]), torch.float32)[0, 0] == 0
    assert mask.tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [False, False, True, False, False],
        [False, False, True, True, False],
        [False, False, False, False, True],
    ]


def test_packing_is_refused_where_it_would_leak() -> None:
    class Sliding:
        num_attention_heads = 4
        sliding_window = 64

    class Hybrid:
        num_attention_heads = 4
        layer_types = ("full_attention", "linear_attention")

    class Plain:
        num_attention_heads = 4

    check_packing(Sliding(), "sdpa", max_length=64)
    with pytest.raises(UnsupportedError, match="at most 64"):
        check_packing(Sliding(), "sdpa", max_length=65)
    with pytest.raises(UnsupportedError, match="eager or sdpa"):
        check_packing(Plain(), "flash_attention_2", max_length=65)
    with pytest.raises(UnsupportedError, match="linear_attention"):
        check_packing(Hybrid(), "sdpa", max_length=65)
    with pytest.raises(UnsupportedError, match="no attention"):
        check_packing(object(), "sdpa", max_length=65)
