"""One rank that loads a model under a strategy, and says what it read and held.

``python -m tests.strategies.loading_rank OUTPUT MODEL STRATEGY BACKEND OPTIONS``, the last in JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.models.files import LazyTensor
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from tests.helpers.build import build_context, model_factory, open_rank

READ = [0]


def counted(self: LazyTensor, part: tuple[Any, ...]) -> torch.Tensor:
    value = self.source[part]
    READ[0] += value.numel() * value.element_size()
    return value  # type: ignore[no-any-return]


def main(output: Path, model: str, name: str, backend_name: str, options: str) -> None:
    LazyTensor.read = counted  # type: ignore[method-assign]
    registry = Registry.load()
    backend = registry.create_backend(backend_name)
    rank, world = open_rank(backend)
    provided = registry.find_strategy(name)
    kind = load_options(provided, "strategy")
    strategy = registry.strategy(name)(kind(**json.loads(options)))
    context = build_context(
        factory=model_factory(ModelSection(name=model), AdapterSection(r=4), attention="sdpa"),
        backend=backend,
        rank=rank,
        world_size=world,
        micro_batch=1,
    )
    before = backend.placement.memory().in_use
    backend.placement.reset_peak()
    engine = strategy.build(context)
    stats = backend.placement.memory()
    found = {"read": READ[0], "held": stats.in_use - before, "peak": stats.peak - before}
    output.with_suffix(f".{rank}.json").write_text(json.dumps(found))
    engine.close()
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
