"""One rank that trains a tiny model under strategy after strategy, in one process group."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import CheckpointingSection
from anygauge.interface import Backend, DeviceBatch, Engine, Precision, Share
from anygauge.interface import estimate as at
from anygauge.kernels.install_kernels import ModelKernels
from anygauge.kernels.logits_rule import logits_rule
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.models.inputs import MaskPlan, model_inputs
from anygauge.models.quantized import QuantizedLinear
from anygauge.strategies.shared.activations import offload_activations
from anygauge.strategies.shared.flat import FLAT
from anygauge.strategies.shared.footprint import memory_of
from anygauge.testing.bisect import CollectiveBytes
from anygauge.training.optimizer import optimizer_factory
from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from anygauge_kernels.lora import addmm
from tests.helpers.build import (
    build_context,
    model_factory,
    optimizer_section,
    rank_of_world,
    shift_labels,
    strategy_of,
)

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
RATES = {"lion": 1e-3, "adafactor": 0.1, "adamw_8bit": 5e-3}
"""Of optimizers, where it is not 1e-2."""


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One training run.

    Attributes:
        options: of the section ``strategy``.
        lora: an adapter is trained; otherwise all weights.
        every, selective: which layers recompute, and what, if any do.
        offloaded: what layers keep for backward is on the host.
        packed: each row is several documents.
        model: fields of the model's configuration in place of those of `CONFIG`; or its folder, as
            ``name``.
        adapter: other fields of an adapter's section.
        rule: other fields of the optimizer's section.
        routers: weight of the loss of a mixture's routers.
        fused: the loss is made in the output layer, in chunks, and LoRA's products are fused.
        quantize: of the section ``model``.
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
    adapter: dict[str, Any] = field(default_factory=dict)
    rule: dict[str, Any] = field(default_factory=dict)
    routers: float = 0.0
    fused: bool = False
    quantize: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.strategy, *(f"{k}={v}" for k, v in self.options.items())]
        words += ["LoRA" if self.lora else "all weights"]
        words += ["recomputed"] * self.recomputed + [f"every {self.every}"] * (self.every > 1)
        words += ["selective"] * self.selective + ["activations offloaded"] * self.offloaded
        words += ["packed"] * self.packed + ["fused"] * self.fused
        words += [self.optimizer] * (self.optimizer != "adamw")
        words += [self.dtype] * (self.dtype != "float32")
        words += [self.model.get("model_type", "files")] if self.model else []
        words += ["routers' loss"] * bool(self.routers)
        words += [f"{k}={v}" for k, v in {**self.adapter, **self.rule, **self.quantize}.items()]
        return " ".join(words)

    @property
    def rate(self) -> float:
        return RATES.get(self.optimizer, 1e-2)

    @property
    def section(self) -> AdapterSection | None:
        return AdapterSection(**{"r": 4, **self.adapter}) if self.lora else None

    def alone(self) -> ParityCase:
        """The same run under the reference, on the host, where activations stay as they are."""
        plain = {"every": 1, "selective": False, "offloaded": False, "fused": False}
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
    batch = {
        "input_ids": ids.to(device),
        "attention_mask": torch.ones_like(ids).to(device),
        "position_ids": places.to(device),
    }
    if segments is not None:
        batch["segment_ids"] = segments.to(device)
    inputs = model_inputs(batch, torch.float32, MaskPlan("boolean"), share.sequence)
    if case.routers:
        inputs["tokens"] = batch["attention_mask"]
    mine = share.positions(ids.shape[1])
    return {**inputs, "shift_labels": shift_labels(labels).to(device)[:, mine]}


def micro_batches(
    case: ParityCase, step: int, share: Share, device: torch.device
) -> Iterator[DeviceBatch]:
    """Those of a step that a share reads, as the data's layout deals them."""
    ids, labels = rows(step)
    for turn in range(GLOBAL // (MICRO * share.count)):
        at = slice(first := (turn * share.count + share.index) * MICRO, first + MICRO)
        yield placed(case, ids[at], labels[at], share, device)


def fused_kernels(bare: CausalModelFactory) -> ModelKernels:
    """Of a model that makes its loss without holding its logits."""
    looked_at = bare.with_kernels("eager", None)
    rule, served = logits_rule(looked_at.adapt(looked_at.skeleton()))
    assert served, served
    of_five_rows = functools.partial(linear_cross_entropy, chunk_bytes=4 * 256 * 5)
    return ModelKernels(loss=rule.bind(of_five_rows), lora=addmm())


def built(case: ParityCase, backend: Backend, rank: int, world: int) -> tuple[Engine, Any, Share]:
    """(engine, footprint, share) of a case on this rank."""
    strategy, share = strategy_of(case.strategy, case.options, rank, world)
    described = {"config": case.model or CONFIG, "tokenizer": "none"}
    quantized = {"quantize": case.quantize} if case.quantize else {}
    bare = model_factory(
        ModelSection(**(case.model if "name" in case.model else described), **quantized),
        case.section,
        attention=case.attention,
        dtype=getattr(torch, case.dtype),
        gradient_checkpointing=case.checkpointing,
        router_aux_loss_coef=case.routers,
    )
    kernels = fused_kernels(bare) if case.fused else ModelKernels()
    context = build_context(
        factory=bare.with_kernels(case.attention, kernels),
        optimizer=optimizer_factory(
            optimizer_section(
                name=case.optimizer,
                lr=case.rate,
                eps=1e-6 if case.optimizer == "adamw" else None,
                **case.rule,
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
    workload = dataclasses.replace(context.workload, skeleton=skeleton)
    estimate = memory_of(strategy, workload)
    engine = strategy.build(context)
    if case.offloaded:
        offload_activations(engine.model, backend.placement)
    scales = sum(b.numel() * b.element_size() for b in skeleton.buffers() if b.is_meta)
    weights = estimate.bytes_at(at.EVALUATION, at.WEIGHTS)
    return engine, {"weights": weights, "scales": scales, "sent": estimate.bytes_sent}, share


def trained(case: ParityCase, backend: Backend, rank: int, world: int) -> dict[str, Any]:
    """Train; losses are summed over all ranks, as the loop does."""
    with CollectiveBytes() as called:
        found = _trained(case, backend, rank, world)
    return {**found, "operators": sorted(called.operators)}


def _trained(case: ParityCase, backend: Backend, rank: int, world: int) -> dict[str, Any]:
    engine, footprint, share = built(case, backend, rank, world)
    device = backend.placement.device
    losses, norms = [], []
    if case.adapter.get("dropout"):
        engine.model.register_forward_pre_hook(draw_by_rows, with_kwargs=True)
    kept: set[str] = set()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        values = [value for state in optimizer.state.values() for value in state.values()]
        kept.update(str(value.dtype) for value in values if isinstance(value, torch.Tensor))

    hook = register_optimizer_step_post_hook(note)
    counter = CollectiveBytes()
    for step in range(case.steps):
        tokens = num_loss_tokens(case, step)
        counter = CollectiveBytes()
        with counter:
            batches = list(micro_batches(case, step, share, device))
            result = engine.run_step(batches, model_loss, tokens)
            update = engine.update(case.rate, 1.0)
        mine = [float(sum(map(float, result)))]
        losses.append((backend.collectives.sum_on_host(mine) if world > 1 else mine)[0] / tokens)
        norms.append(float(update.grad_norm))
    hook.remove()
    flat = getattr(engine.model, FLAT, None)  # its parameters are views of what is gathered
    held = sum(_local_bytes(p) for p in engine.model.parameters() if not (flat and p in flat))
    held += flat.num_bytes if flat else 0
    codes = codes_of(engine.model)  # an evaluation gathers them
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
        "kept": sorted(kept),
        "codes": codes,
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


def codes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """The codes of each quantized weight that this rank has, or of its part of it."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight: Any = module.weight
            part = weight.to_local() if hasattr(weight, "to_local") else weight
            part = getattr(weight, "ds_tensor", part)
            if not part.is_meta:
                assert not part.is_floating_point(), (name, part.dtype)
                found[name.rpartition("model.")[2]] = part.flatten().tolist()
    return found


def draw_by_rows(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Dropout draws alike for the same rows, whichever rank has them."""
    torch.manual_seed(int(kwargs["input_ids"].sum()))


def num_loss_tokens(case: ParityCase, step: int) -> int:
    """Tokens to learn in a step."""
    whole = placed(case, *rows(step), Share(0, 1), torch.device("cpu"))
    return int((whole["shift_labels"] != -100).sum())


def _local_bytes(parameter: torch.Tensor) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return 0 if local.is_meta else local.numel() * local.element_size()


def results(backend: Backend, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of all cases, in one process group."""
    rank, world = rank_of_world()
    return [trained(ParityCase(**fields), backend, rank, world) for fields in cases]
