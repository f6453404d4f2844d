"""What a model is given: masks that isolate packed documents, positions, the tokens of a proof."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import EvaluationBatches, Layout, TokenizedRows, prepare
from anygauge.interface import UnsupportedError
from anygauge.models.inputs import MaskPlan, model_inputs, plan_masks, visible
from anygauge.models.source import check_positions
from anygauge.models.verify import VerificationError, probe_tokens, verify
from tests.helpers.dispatched_operations import TRIANGLES, Operations
from tests.helpers.runs import tiny_model
from tests.helpers.tiny_tokenizer import FIXTURES, make_tokenizer
from tests.models.families import config_of

LENGTH = 96


def losses_by_document(model: Any, tokenizer: Any, packing: bool) -> list[list[float]]:
    """Every document's losses of its loss tokens, in nats; documents in an order of their own."""
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
    found = []
    for batch in EvaluationBatches(rows, layout):
        with torch.no_grad():
            logits = model(**model_inputs(batch.tensors(), torch.float32)).logits
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), batch.shift_labels, reduction="none"
        )
        segments = batch.segment_ids if packing else batch.attention_mask
        assert segments is not None
        for row in range(len(segments)):
            for segment in range(1, int(segments[row].max()) + 1):
                document = segments[row] == segment
                here = document & (batch.shift_labels[row] != -100)
                if here.any():
                    found.append((batch.input_ids[row][document].tolist(), losses[row][here]))
    return [losses.tolist() for _, losses in sorted(found, key=lambda pair: pair[0])]


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


@pytest.mark.parametrize(
    ("segments", "window", "seen"),
    [
        ([1, 1, 2, 2, 0], None, ["10000", "11000", "00100", "00110", "00001"]),
        # A window counts the token itself.
        ([1, 1, 1, 1, 2], 2, ["10000", "11000", "01100", "00110", "00001"]),
    ],
)
def test_a_token_sees_its_own_past_only(
    segments: list[int], window: int | None, seen: list[str]
) -> None:
    found = visible(torch.tensor([segments]), window)[0].int().tolist()
    assert ["".join(map(str, row)) for row in found] == seen


@pytest.mark.parametrize("form", ["additive", "boolean"])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_are_made_by_comparing_positions(form: str, window: int | None) -> None:
    """Not every device has a kernel for a triangle or a diagonal of truths."""
    segments = torch.tensor([[1, 1, 2, 2, 2, 0]])
    with Operations() as seen:
        MaskPlan(form=form, windows=(("", window),)).masks(segments, torch.float32)
    assert "aten::arange" in seen.names()
    assert not seen.names() & TRIANGLES


@pytest.mark.parametrize("window", [None, 1, 5, 200])
def test_every_form_says_the_same(window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_mask

    cuts = torch.rand(3, 150, generator=torch.Generator().manual_seed(3)) < 0.1
    given = cuts.cumsum(1) + 1
    given[0, -38:] = 0
    seen, kinds = visible(given, window), (("", window),)
    assert torch.equal(MaskPlan("boolean", kinds).masks(given, torch.float32)[:, 0], seen)
    added = MaskPlan("additive", kinds).masks(given, torch.bfloat16)[:, 0]
    assert torch.equal(added == 0, seen) and added.dtype is torch.bfloat16
    assert set(added.unique().tolist()) == {0.0, torch.finfo(torch.bfloat16).min}
    blocks = MaskPlan("blocks", kinds).masks(given, torch.float32)
    assert torch.equal(create_mask(blocks.mask_mod, 3, 1, 150, 150, device="cpu")[:, 0], seen)


def sizes(**fields: Any) -> Any:
    return SimpleNamespace(num_attention_heads=4, **fields)


BOTH = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, {"": None}),
        ({"sliding_window": 64}, {"": 64}),
        ({"sliding_window": 65}, {"": None}),
        ({"sliding_window": 64, "use_sliding_window": False}, {"": None}),
        ({"sliding_window": 64, "layer_types": BOTH}, dict(zip(BOTH, (None, 64), strict=True))),
        ({"sliding_window": 64, "layer_types": BOTH[:1]}, {"": None}),
        ({"sliding_window": 64, "layer_types": BOTH[1:]}, {"": 64}),
    ],
)
def test_masks_follow_what_layers_see(
    fields: dict[str, Any], windows: dict[str, int | None]
) -> None:
    assert dict(plan_masks(sizes(**fields), "sdpa", 65).windows) == windows


def test_masks_have_the_form_of_the_attention() -> None:
    forms = [plan_masks(sizes(), name, 65).form for name in ("eager", "sdpa", "flex_attention")]
    assert forms == ["additive", "boolean", "blocks"]


OWN_POSITIONS = "counts positions from its padding token's number|build their own masks"
NO_POSITIONS = "takes no position ids, so it cannot count from 0 again at each document"


@pytest.mark.parametrize(
    ("config", "attention", "message"),
    [
        (sizes(sliding_window=64, max_window_layers=2), "sdpa", "at most 64"),
        (sizes(), "flash_attention_2", "eager or sdpa"),
        (sizes(layer_types=("full_attention", "linear_attention")), "sdpa", "linear_attention"),
        (sizes(mamba_d_state=16), "sdpa", "layers of kind mamba_d_state"),
        (SimpleNamespace(), "sdpa", "this model has layers with no attention"),
        (config_of("roberta"), "sdpa", rf"data\.packing: .*({OWN_POSITIONS}).*: false"),
        (config_of("bart"), "sdpa", rf"data\.packing: .*{NO_POSITIONS}.*: false"),
        *(
            (AutoConfig.for_model(kind), "eager", "data.packing: this model has layers of kind")
            for kind in ("jamba", "bamba", "falcon_h1", "zamba", "recurrent_gemma")
        ),
    ],
)
def test_packing_is_refused_where_it_would_leak(config: Any, attention: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_masks(config, attention, 65)


@pytest.mark.parametrize("family", ["roberta", "llama", "opt", "bart"])
def test_rows_of_one_document_have_the_architectures_own_positions(family: str) -> None:
    """RoBERTa begins to count after its padding token's number, BART takes no positions at all."""
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4} if family == "bart" else {}
    model: Any = AutoModelForCausalLM.from_config(config_of(family, **decoder)).eval()
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = 2, 0
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        logits = model(**model_inputs(given, torch.float32)).logits
        own = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(logits[mask.bool()], own[mask.bool()])


def test_positions_without_end_allow_rows_of_any_length() -> None:
    config = AutoConfig.for_model("xlnet")
    assert config.max_position_embeddings == -1
    check_positions(config, 4096)


class WiderThanItsVocabulary:
    """Causal only with a mask, and with more logits than tokens, as CPM-Ant has them."""

    def __call__(self, *, input_ids: Any, attention_mask: Any, use_cache: bool) -> Any:
        assert attention_mask.shape == input_ids.shape and not use_cache
        return SimpleNamespace(logits=torch.nn.functional.one_hot(input_ids, 600).float())


def test_a_result_is_proved_on_the_tokens_that_were_tried_before() -> None:
    model = WiderThanItsVocabulary()
    tried = probe_tokens(512)
    trained = model(input_ids=tried, attention_mask=tried, use_cache=False).logits
    found = verify(trained, lambda: model, dtype=torch.float32, name="adapter", vocabulary=512)
    assert found.logits == 0
    with pytest.raises(VerificationError):
        verify(trained, lambda: model, dtype=torch.float32, name="adapter")
