from __future__ import annotations

import torch
from torch import nn

from anygauge.config.schema import OptimizerSection
from anygauge.training.optimizer import optimizer_factory


def test_vectors_are_not_decayed_also_where_they_are_sharded() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    # A sharded matrix is flat; its own shape stands in ds_shape.
    flat = nn.Parameter(torch.zeros(0))
    flat.ds_shape = torch.Size([5, 6])  # type: ignore[attr-defined]
    section = OptimizerSection(lr=0.5, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6)
    made = optimizer_factory(section)([*layer.named_parameters(), ("flat", flat)])
    decay = {id(p): g["weight_decay"] for g in made.param_groups for p in g["params"]}
    assert decay == {
        id(layer[0].weight): 0.1,
        id(layer[0].bias): 0.0,
        id(layer[1].weight): 0.0,
        id(layer[1].bias): 0.0,
        id(flat): 0.1,
    }
    for group in made.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)
