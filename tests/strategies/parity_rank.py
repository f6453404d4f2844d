"""One rank that trains a tiny model under strategy after strategy, in one process group.

``python -m tests.strategies.parity_rank OUTPUT CASES``: CASES is a JSON list of the fields of
`ParityCase`; rank 0 writes what each case came to, in their order, to OUTPUT.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import CheckpointingSection, OptimizerSection
from anygauge.data import MicroBatch
from anygauge.interface import Backend, Precision, Share
from anygauge.interface.strategy import DeviceBatch, Engine
from anygauge.kernels.install import ModelKernels
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.models.inputs import model_inputs, positions, shift_labels
from anygauge.models.masks import MaskPlan
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.strategies.activations import offload_activations
from anygauge.strategies.flat import FLAT
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import build_context, open_rank
from tests.helpers.collective_bytes import CalledOperators, CollectiveBytes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GLOBAL, MICRO, LENGTH = 8, 2, 32
RATE = {"adamw": 1e-2, "sgd": 1e-2}


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One training run.

    Attributes:
        options: of the section ``strategy``.
        lora: an adapter is trained; otherwise all weights.
        every, selective: which layers recompute, and what, if any do.
        offloaded: what layers keep for backward is on the host.
        packed: each row is several documents.
        model: fields of the model's configuration in place of those of `CONFIG`.
        tensors: an adapter's `target_parameters`.
        routers: weight of the loss of a mixture's routers.
        whole: an adapter's `modules_to_save`.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = True
    recomputed: bool = False
    every: int = 1
    selective: bool = False
    offloaded: bool = False
    packed: bool = False
    optimizer: str = "adamw"
    dtype: str = "float32"
    steps: int = 4
    model: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    tensors: list[str] = field(default_factory=list)
    routers: float = 0.0
    whole: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        words = [self.strategy, *(f"{k}={v}" for k, v in self.options.items())]
        words += ["LoRA" if self.lora else "all weights"]
        words += ["recomputed"] * self.recomputed + [f"every {self.every}"] * (self.every > 1)
        words += ["selective"] * self.selective + ["activations offloaded"] * self.offloaded
        words += ["packed"] * self.packed
        words += [self.optimizer] * (self.optimizer != "adamw")
        words += [self.dtype] * (self.dtype != "float32")
        words += [self.model["model_type"]] if self.model else []
        words += ["experts"] * bool(self.tensors) + ["routers' loss"] * bool(self.routers)
        words += ["whole modules"] * bool(self.whole)
        return " ".join(words)

    def alone(self) -> ParityCase:
        """The same run under the reference, on the host, where activations stay as they are."""
        plain = {"every": 1, "selective": False, "offloaded": False}
        if self.every > 1 or self.selective or self.offloaded:
            plain["recomputed"] = False
        return dataclasses.replace(self, strategy="single", options={}, **plain)

    @property
    def checkpointing(self) -> bool | CheckpointingSection:
        """``train.gradient_checkpointing``."""
        if not self.recomputed:
            return False
        return CheckpointingSection(every=self.every, selective=self.selective)


@functools.cache
def real_texts() -> list[bytes]:
    """Bytes of the answers in the file that PARITY_ROWS names, of those that are long enough."""
    file = os.environ.get("PARITY_ROWS")
    if not file:
        return []
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    answers = (json.loads(line)["answer"].encode() for line in lines)
    return [answer for answer in answers if len(answer) >= LENGTH]


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) of a step's rows, (GLOBAL, LENGTH) each.

    The first row of each micro-batch of two has one token to learn, the second up to 31: who counts
    a row twice, or takes the mean of means, is found out.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    texts = real_texts()
    if texts:
        at = range(step * GLOBAL, (step + 1) * GLOBAL)
        ids = torch.tensor([list(texts[n % len(texts)][:LENGTH]) for n in at])
    else:
        ids = torch.randint(1, 255, (GLOBAL, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0::2, :-1] = -100
    lengths = torch.randint(8, LENGTH + 1, (GLOBAL // 2,), generator=generator)
    for row, length in zip(range(1, GLOBAL, 2), lengths.tolist(), strict=True):
        labels[row, length:] = -100
    return ids, labels


DOCUMENTS = (5, 13, 14)
"""Lengths of the documents in a packed row."""


def placed(
    case: ParityCase, ids: torch.Tensor, labels: torch.Tensor, share: Share, device: torch.device
) -> DeviceBatch:
    """A micro-batch as a run's placer makes it: masks, positions, this rank's part."""
    segments = None
    places = torch.arange(ids.shape[1]).expand_as(ids)
    if case.packed:
        lengths = torch.tensor(DOCUMENTS)
        segments = torch.repeat_interleave(torch.arange(1, 4), lengths).expand_as(ids)
        places = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand_as(ids)
        labels = labels.masked_fill(places == 0, -100)
    batch = MicroBatch(
        input_ids=ids.to(device),
        labels=shift_labels(labels).to(device),
        attention_mask=torch.ones_like(ids).to(device),
        position_ids=places.to(device),
        segment_ids=None if segments is None else segments.to(device),
        origins=(),
        num_loss_tokens=0,
        tokens=0,
    )
    inputs = model_inputs(batch, torch.float32, MaskPlan("boolean"), share.sequence)
    if case.routers:
        inputs["tokens"] = batch.attention_mask
    mine = positions(share.sequence, ids.shape[1])
    return DeviceBatch({**inputs, "shift_labels": batch.labels[:, mine]})


def micro_batches(
    case: ParityCase, step: int, share: Share, device: torch.device
) -> Iterator[DeviceBatch]:
    """Those of a step that a share reads, as the data's layout deals them."""
    ids, labels = rows(step)
    for turn in range(GLOBAL // (MICRO * share.count)):
        at = slice(first := (turn * share.count + share.index) * MICRO, first + MICRO)
        yield placed(case, ids[at], labels[at], share, device)


def built(case: ParityCase, backend: Backend, rank: int, world: int) -> tuple[Engine, Any, Share]:
    """(engine, footprint, share) of a case on this rank."""
    registry = Registry.load()
    provided = registry.find_strategy(case.strategy)
    kind = load_options(provided, "strategy")
    options = kind(**case.options)
    strategy = registry.strategy(case.strategy)(options)
    share = provided.spec.share(options, rank, world)
    context = build_context(
        factory=CausalModelFactory(
            ModelSection(config=case.model or CONFIG, tokenizer="none"),
            AdapterSection(r=4, target_parameters=case.tensors, modules_to_save=case.whole)
            if case.lora
            else None,
            attention=case.attention,
            kernels=ModelKernels(),
            dtype=getattr(torch, case.dtype),
            seed=0,
            gradient_checkpointing=case.checkpointing,
            router_aux_loss_coef=case.routers,
        ),
        optimizer=optimizer_factory(
            OptimizerSection(
                name=case.optimizer,
                lr=RATE[case.optimizer],
                eps=1e-6 if case.optimizer == "adamw" else None,
            )
        ),
        precision=Precision(param_dtype=case.dtype, reduce_dtype="float32"),
        backend=backend,
        rank=rank,
        world_size=world,
        micro_batch=MICRO,
        share=share,
        accumulation=GLOBAL // (MICRO * share.count),
        length=LENGTH,
        offload=case.offloaded,
    )
    skeleton = context.factory.adapt(context.factory.skeleton())
    footprint = strategy.footprint(dataclasses.replace(context.workload, skeleton=skeleton))
    engine = strategy.build(context)
    if case.offloaded:
        offload_activations(engine.model, backend.placement)
    return engine, dataclasses.asdict(footprint), share


def trained(case: ParityCase, backend: Backend, rank: int, world: int) -> dict[str, Any]:
    """Train; losses are summed over all ranks, as the loop does."""
    with CalledOperators() as called:
        found = _trained(case, backend, rank, world)
    return {**found, "operators": sorted(called.names)}


def _trained(case: ParityCase, backend: Backend, rank: int, world: int) -> dict[str, Any]:
    engine, footprint, share = built(case, backend, rank, world)
    device = backend.placement.device
    losses, norms = [], []
    counter = CollectiveBytes()
    for step in range(case.steps):
        tokens = num_loss_tokens(case, step)
        counter = CollectiveBytes()
        with counter:
            batches = list(micro_batches(case, step, share, device))
            result = engine.run_step(batches, model_loss, tokens)
            update = engine.update(RATE[case.optimizer], 1.0)
        mine = [float(sum(map(float, result.loss_sums)))]
        losses.append((backend.collectives.sum_on_host(mine) if world > 1 else mine)[0] / tokens)
        norms.append(float(update.grad_norm))
    flat = getattr(engine.model, FLAT, None)  # its parameters are views of what is gathered
    held = sum(_local_bytes(p) for p in engine.model.parameters() if not (flat and p in flat))
    held += flat.held if flat else 0
    evaluated = engine.evaluate(micro_batches(case, 77, share, device), model_loss)
    mine = [float(sum(map(float, evaluated)))]
    found = {
        "losses": losses,
        "norms": norms,
        "evaluation": (backend.collectives.sum_on_host(mine) if world > 1 else mine)[0],
        "calls": counter.calls,
        "bytes": counter.bytes,
        "footprint": footprint,
        "held": held,
    }
    values = engine.export_trained()
    ids, labels = rows(5)
    logits = engine.logits(placed(case, ids[:1], labels[:1], share, device))
    if rank == 0:
        assert logits is not None
        values = {} if os.environ.get("PARITY_WEIGHTS") == "no" else values
        found["trained"] = {name: value.flatten().tolist() for name, value in values.items()}
        found["logits"] = logits.flatten().tolist()[:512]
    engine.close()
    return found


def num_loss_tokens(case: ParityCase, step: int) -> int:
    """Tokens to learn in a step."""
    whole = placed(case, *rows(step), Share(0, 1), torch.device("cpu"))
    return int((whole.inputs["shift_labels"] != -100).sum())


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return 0 if local.is_meta else local.numel() * local.element_size()


def main(output: Path, cases: list[ParityCase]) -> None:
    """All cases, in one process group."""
    backend = Registry.load().create_backend(os.environ.get("PARITY_BACKEND", "cpu"))
    rank, world = open_rank(backend, alone=False)
    found = [trained(case, backend, rank, world) for case in cases]
    if rank == 0:
        output.write_text(json.dumps(found))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [ParityCase(**fields) for fields in json.loads(sys.argv[2])])
