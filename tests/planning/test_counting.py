"""What operations come to, as they are counted."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from anygauge.planning.counting import Counter, Seen

ROWS, HEADS, LENGTH, WIDTH = 2, 3, 32, 16
PRODUCT = 2 * ROWS * HEADS * LENGTH * LENGTH * WIDTH
"""Floating point operations of the scores alone, hidden ones among them."""


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_the_host_multiplies_twice_and_five_times_more_for_gradients(
    causal: bool,
) -> None:
    query, key, value = (
        torch.randn(ROWS, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3)
    )
    counter = Counter("cpu")
    with Seen(counter):
        result = scaled_dot_product_attention(query, key, value, is_causal=causal)
        forward = counter.taken()
        result.sum().backward()
        backward = counter.taken()
    seen = PRODUCT // 2 if causal else PRODUCT
    assert forward.flops == {"float32": 2 * seen}
    assert backward.flops == {"float32": 5 * seen}
    assert forward.matrix_bytes > 4 * 4 * query.numel()
