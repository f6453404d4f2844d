from __future__ import annotations

import torch
from torch import nn

from anygauge.kernels.loss import summed_cross_entropy
from anygauge.models.flops import step_flops


def test_the_loss_is_a_sum_over_supervised_tokens_in_float32() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 7, (2, 5))
    targets[0, :3] = -100
    total = summed_cross_entropy(logits, targets)
    expected = 0.0
    for row in range(2):
        for place in range(5):
            if targets[row, place] != -100:
                scores = logits[row, place].double().log_softmax(-1)
                expected -= scores[targets[row, place]].item()
    assert total.dtype is torch.float32
    assert abs(total.item() - expected) < 1e-5 * expected


def test_nothing_supervised_gives_zero_with_a_gradient() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    total = summed_cross_entropy(logits, torch.full((1, 3), -100))
    total.backward()
    assert total.item() == 0.0
    assert logits.grad is not None and logits.grad.eq(0).all()


def test_frozen_weights_cost_four_operations_and_trained_ones_six() -> None:
    class Config:
        num_hidden_layers = 2
        num_attention_heads = 3
        hidden_size = 12

    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Linear(20, 5), nn.Embedding(99, 10))
    model[0].weight.requires_grad_(False)
    flops = step_flops(model, Config(), lambda parameter: parameter.shape)
    assert flops.per_token == 4 * 200 + 6 * 100
    # 2 layers x 3 heads x 4 numbers a head, 6 operations for each position seen.
    assert flops.of(7, 11.0) == 7 * (1400 + 6 * 2 * 3 * 4 * 11.0)
