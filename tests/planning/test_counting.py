"""What operations are counted as."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from anygauge.planning.counting import Counter, Seen
from anygauge.planning.work import Work

ROWS, HEADS, LENGTH, WIDTH = 2, 3, 8, 16
PRODUCT = 2 * ROWS * HEADS * LENGTH * LENGTH * WIDTH
"""Of queries with keys, and of weights with values."""


def attended(causal: bool, mask: Tensor | None = None) -> tuple[Work, Work]:
    """Forward, and backward."""
    counter = Counter("cpu")
    query, key, value = (torch.ones(ROWS, HEADS, LENGTH, WIDTH) for _ in range(3))
    query.requires_grad_()
    with Seen(counter):
        found = attention(query, key, value, is_causal=causal, attn_mask=mask)
        forward = counter.taken()
        found.sum().backward()
    return forward, counter.taken()


@pytest.mark.parametrize("causal", [False, True])
def test_a_hosts_attention_counts_as_other_products(causal: bool) -> None:
    forward, backward = attended(causal)
    seen = 0.5 if causal else 1
    assert forward.flops == {"float32": seen * 2 * PRODUCT}
    assert backward.flops == {"float32": seen * 5 * PRODUCT}


def test_a_mask_hides_no_work() -> None:
    whole = torch.ones(LENGTH, LENGTH).tril().bool()
    assert attended(False, whole)[0].flops == {"float32": 2 * PRODUCT}
