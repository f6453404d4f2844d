"""One rank that trains a few steps and counts the collectives of the last one.

Run as a script: ``count_rank.py WAY OUTPUT`` with WAY ``anygauge`` or ``by_hand``; the latter is
the loop that DeepSpeed's own tutorial shows, on the same model with the same configuration.
Counted are calls of torch.distributed's functions on tensors, in elements, so that the type does
not matter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anygauge.config.schema import AdapterSection
from anygauge.interface.strategy import BuildContext, Engine
from anygauge.kernels.loss import model_loss
from anygauge.registry import Registry
from anygauge.strategies.common import trained_parameters
from anygauge.strategies.zero import Zero
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.strategies.zero_settings import as_config
from tests.helpers.build import batch_of, build_context, model_factory, open_rank

STEPS = 4
LENGTH = 16
CONFIG = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
}
FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
)


class CountedCalls:
    """Calls and elements by function, and the elements of each gather in the order of calls, while
    `on`; a function that calls another counts once."""

    def __init__(self) -> None:
        self.on = False
        self._depth = 0
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.gathers: list[int] = []

    def install(self) -> None:
        for module in (dist, dist.distributed_c10d):
            for name in FUNCTIONS:
                if hasattr(module, name):
                    setattr(module, name, self._counting(name, getattr(module, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.on and self._depth == 0:
                # By their old names: torch renamed two of them.
                known = name.replace("gather_single", "gather_into_tensor").replace(
                    "scatter_single", "scatter_tensor"
                )
                first = args[0] if args else next(iter(kwargs.values()))
                tensors = first if isinstance(first, list) else [first]
                self.calls[known] += 1
                elements = sum(t.numel() for t in tensors)
                self.elements[known] += elements
                if known == "all_gather_into_tensor":
                    self.gathers.append(elements)
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted


def main(way: str, output: Path) -> None:
    counters = CountedCalls()
    counters.install()  # before DeepSpeed binds the functions
    registry = Registry.load()
    backend = registry.create_backend("cpu")
    rank, world = open_rank(backend)
    factory = model_factory(
        CONFIG, AdapterSection(r=16), attention="sdpa", gradient_checkpointing=True
    )
    context = build_context(
        factory=factory,
        backend=backend,
        rank=rank,
        world_size=world,
        micro_batch=1,
        max_norm=1.0,
    )
    strategy = Zero(ZeroOptions(**json.loads(os.environ["ZERO_OPTIONS"])))
    if way == "anygauge":
        engine = strategy.build(context)
        step = anygauge_step(engine, context)
    else:
        step = by_hand_step(strategy, context)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, CONFIG["vocab_size"], (STEPS, 1, LENGTH), generator=generator)
    losses = []
    for index in range(STEPS):
        counters.on = index == STEPS - 1
        losses.append(step(ids[index]))
    found: dict[str, Any] = {"calls": dict(counters.calls), "elements": dict(counters.elements)}
    found["gathers"] = counters.gathers
    if way == "anygauge":
        counters.on = False
        engine.evaluate([batch_of(ids[0])], model_loss)
        counters.on, counters.gathers = True, []
        step(ids[0])
        found["gathers after an evaluation"] = counters.gathers
    skeleton = factory.skeleton()
    result = {
        **found,
        "losses": losses,
        "parameters": sum(p.numel() for p in skeleton.parameters()),
    }
    output.with_suffix(f".{rank}.json").write_text(json.dumps(result))
    backend.close()


def anygauge_step(engine: Engine, context: BuildContext) -> Callable[[torch.Tensor], float]:
    def step(ids: torch.Tensor) -> float:
        batch = batch_of(ids)
        tokens = context.workload.world_size * (LENGTH - 1)
        result = engine.run_step([batch], model_loss, tokens)
        engine.update(1e-4, context.workload.max_norm)
        return float(result.loss_sums[0]) / (LENGTH - 1)

    return step


def by_hand_step(strategy: Zero, context: BuildContext) -> Callable[[torch.Tensor], float]:
    """A plain DeepSpeed loop: its own context, its own engine, the model's own loss."""
    from anygauge.strategies.materialise import materialise
    from anygauge.strategies.zero_runtime import import_deepspeed
    from anygauge.strategies.zero_versions import needs_reentrant_checkpointing

    deepspeed = import_deepspeed(context.backend)
    skeleton = context.factory.adapt(context.factory.skeleton())
    config = as_config(strategy.settings(dataclasses.replace(context.workload, skeleton=skeleton)))
    deepspeed.init_distributed()
    model = context.factory.skeleton()
    materialise(model, context.factory, device=torch.device("cpu"), dtype=torch.float32)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    model = context.factory.adapt(model)
    del model.get_base_model().forward  # the model's own loss
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": needs_reentrant_checkpointing()}
    )
    if needs_reentrant_checkpointing():
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for _, p in trained_parameters(model)], lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()

    def step(ids: torch.Tensor) -> float:
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return step


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
