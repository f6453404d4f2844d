"""What a model is given: positions where it takes them, a mask, and the tokens of a proof."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.data import MicroBatch
from anygauge.interface import UnsupportedError
from anygauge.models.inputs import model_inputs
from anygauge.models.masks import plan_masks
from anygauge.models.source import check_positions
from anygauge.models.verify import VerificationError, probe_tokens, verify
from tests.models.families import config_of


def batch() -> MicroBatch:
    """Two rows of one document, of which one ends in padding."""
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = 2, 0
    return MicroBatch(
        input_ids=ids,
        shift_labels=torch.full_like(ids, -100),
        attention_mask=mask,
        position_ids=torch.arange(12).expand(2, -1),
        has_padding=True,
        origins=(),
        num_loss_tokens=0,
        tokens=24,
    )


@pytest.mark.parametrize("family", ["roberta", "llama", "opt", "bart"])
def test_rows_of_one_document_have_the_architectures_own_positions(family: str) -> None:
    """RoBERTa begins to count after its padding token's number, BART takes no positions at all."""
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4} if family == "bart" else {}
    model: Any = AutoModelForCausalLM.from_config(config_of(family, **decoder)).eval()
    given = batch()
    with torch.no_grad():
        logits = model(**model_inputs(given.tensors(), torch.float32)).logits
        own = model(input_ids=given.input_ids, attention_mask=given.attention_mask).logits
    real = given.attention_mask.bool()
    assert torch.equal(logits[real], own[real])


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("roberta", "counts positions from its padding token's number|build their own masks"),
        ("bart", "takes no position ids, so it cannot count from 0 again at each document"),
    ],
)
def test_packing_is_refused_where_positions_would_be_others(family: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"data\.packing: .*({said}).*: false"):
        plan_masks(config_of(family), "sdpa", 64)


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
