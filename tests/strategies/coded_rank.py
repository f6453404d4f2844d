"""One rank that trains beside frozen weights of eight bits, under each of some strategies.

``python -m tests.strategies.coded_rank OUTPUT STRATEGIES``, a JSON list of [name, options].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import OptimizerSection
from anygauge.interface import Backend, Precision
from anygauge.interface.strategy import PartFunction
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory, parts_of
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import batch_of, build_context, open_rank
from tests.strategies.parity_rank import CONFIG

SCALE = 1 / 512
STEPS, ROWS = 3, 4


class Coded(nn.Module):
    """A linear layer whose weight is bytes."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.codes.to(x.dtype) - 128) * SCALE)


class CodedFactory(CausalModelFactory):
    """Each layer's last matrix is coded."""

    def skeleton(self) -> nn.Module:
        model: Any = super().skeleton()
        for layer in model.model.layers:
            layer.mlp.down_proj = Coded(layer.mlp.down_proj.weight.shape)
        return model  # type: ignore[no-any-return]

    def values(
        self, model: nn.Module, unit: str, part: PartFunction | None = None
    ) -> Mapping[str, Tensor]:
        found = dict(super().values(super().skeleton(), unit))
        for name in [name for name in found if "down_proj" in name]:
            codes = (found.pop(name) / SCALE).round().clamp(-128, 127) + 128
            found[name.replace("weight", "codes")] = codes.to(torch.uint8)
        return found if part is None else parts_of(found, f"{unit}.", part)


def trained(name: str, options: Any, backend: Backend, rank: int, world: int) -> dict[str, Any]:
    registry = Registry.load()
    provided = registry.find_strategy(name)
    kind = load_options(provided, "strategy")
    chosen = kind(**options)
    share = provided.spec.share(chosen, rank, world)
    engine = registry.strategy(name)(chosen).build(
        build_context(
            factory=CodedFactory(
                ModelSection(config=CONFIG, tokenizer="none"),
                AdapterSection(r=4, targets=["q_proj", "v_proj", "gate_proj"]),
                attention="sdpa",
                dtype=torch.bfloat16,
                seed=0,
                gradient_checkpointing=False,
            ),
            optimizer=optimizer_factory(OptimizerSection(name="sgd", lr=0.5)),
            precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
            backend=backend,
            rank=rank,
            world_size=world,
            micro_batch=1,
            share=share,
            accumulation=ROWS // share.count,
        )
    )
    losses = []
    for step in range(STEPS):
        ids = torch.randint(1, 255, (ROWS, 16), generator=torch.Generator().manual_seed(step))
        batches = [batch_of(ids[n : n + 1]) for n in range(share.index, ROWS, share.count)]
        sums = engine.run_step(batches, model_loss, ROWS * 15).loss_sums
        engine.update(0.5, 1.0)
        mine = [float(sum(map(float, sums)))]
        losses.append((backend.collectives.sum_on_host(mine) if world > 1 else mine)[0])
    found = {"losses": losses, "codes": codes_of(engine.model)}
    engine.close()
    return found


def codes_of(model: nn.Module) -> dict[str, list[int]]:
    """Of what this rank has: the bytes of each coded weight."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("codes"):
            part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = getattr(parameter, "ds_tensor", part)
            if not part.is_meta:
                assert part.dtype is torch.uint8, (name, part.dtype)
                found[name.rpartition("model.")[2]] = part.flatten().tolist()
    return found


def main(output: Path, strategies: list[tuple[str, Any]]) -> None:
    backend = Registry.load().create_backend("cpu")
    rank, world = open_rank(backend, alone=False)
    found = [trained(name, options, backend, rank, world) for name, options in strategies]
    output.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
