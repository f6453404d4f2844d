"""Loops written by hand on engines of torch, DeepSpeed and Accelerate, as a careful user would.

Each micro-batch's loss is its own mean, as usual; torch's engines send gradients with the last
micro-batch. DeepSpeed's settings are those that anygauge would give it, so that a difference in
speed is one of loops and data (see `zero3_by_hand`); Accelerate has the documented ZeRO-3 file. Two
bounds are trained by the same loop. Nobody could use them for one model: processes end with
different weights.

``python -m benchmarks.contenders.loops PLAN CONTENDER``, of which a function here has the name
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from benchmarks.contender_plan import ContenderPlan
from benchmarks.contenders.peer_parts import (
    IGNORED,
    Recorder,
    adapted_model,
    documented_zero3,
    skip_inference_kernel,
    start,
    tokenized_rows,
)

PREFETCH = 500_000_000
DEFAULT_LIVE = 1_000_000_000
"""Of reuse distance and live parameters; two layers of a model measured here are far smaller."""
DEFAULT_PERSISTENCE = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerEngine:
    """What a loop drives.

    Attributes:
        called: the model; a call returns what has a loss.
        backward: of a micro-batch's mean loss.
        around: whether a micro-batch is the step's last -> what is around its forward and backward.
        update: after a step's last micro-batch.
        batches: in order; without them, padded micro-batches of this rank.
        close: after the last step.
    """

    called: Any
    backward: Callable[[Tensor], Any]
    around: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()
    update: Callable[[], Any] = lambda: None
    batches: Iterable[dict[str, Tensor]] | None = None
    close: Callable[[], Any] = lambda: None


Build = Callable[[ContenderPlan, torch.device, Recorder], PeerEngine]


def main(plan: ContenderPlan, recorder: Recorder, build: Build) -> None:
    """Train one rank."""
    device = torch.device("cpu")
    if plan.device != "cpu":
        device = torch.device(plan.device, int(os.environ["LOCAL_RANK"]))
        torch.get_device_module(plan.device).set_device(device)
    torch.manual_seed(plan.seed)
    engine = build(plan, device, recorder)
    rows = iter(engine.batches or loader_of(plan, int(os.environ["RANK"]), plan.ranks))
    engine.called.train()
    for _ in range(plan.steps):
        loss_sum, loss_tokens = 0.0, 0
        for turn in range(plan.accumulation):
            batch = {n: each.to(device, non_blocking=True) for n, each in next(rows).items()}
            with engine.around(turn == plan.accumulation - 1):
                loss = engine.called(**batch).loss
                engine.backward(loss)
            # The model shifts labels by one.
            count = int((batch["labels"][:, 1:] != IGNORED).sum())
            loss_sum += float(loss.detach()) * count
            loss_tokens += count
        engine.update()
        recorder.step(loss_sum, loss_tokens)
    engine.close()


def loader_of(plan: ContenderPlan, rank: int = 0, ranks: int = 1) -> Any:
    """Padded micro-batches, in random order, of this rank among so many."""
    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    rows: Any = tokenized_rows(plan, tokenizer)
    return DataLoader(
        rows,
        batch_size=plan.micro_batch,
        sampler=DistributedSampler(rows, ranks, rank, shuffle=True, seed=plan.seed),
        collate_fn=DataCollatorForSeq2Seq(tokenizer),
    )


def watched_model(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> Any:
    """The adapted model, with its tokens counted."""
    adapted = adapted_model(plan, device)
    recorder.watch(adapted)
    return adapted


def by_torch(plan: ContenderPlan, adapted: nn.Module, called: Any, **more: Any) -> PeerEngine:
    """An engine that leaves backward and the update to torch; `more` of its fields."""
    optimizer = optimizer_of(plan, adapted)

    def backward(loss: Tensor) -> None:
        (loss / plan.accumulation).backward()

    def update() -> None:
        nn.utils.clip_grad_norm_(trained(adapted), plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return PeerEngine(called=called, backward=backward, update=update, **more)


def ddp(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> PeerEngine:
    """The model in DDP."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    dist.init_process_group(dist.get_default_backend_for_device(device))
    model = watched_model(plan, device, recorder)
    wrapper = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    # What DDP does by itself, where it is counted: its own sum never passes through Python.
    wrapper.register_comm_hook(None, default_hooks.allreduce_hook)

    def around(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else wrapper.no_sync()

    return by_torch(plan, model, wrapper, around=around, close=dist.destroy_process_group)


def fsdp(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> PeerEngine:
    """FSDP2 as its tutorial has it: each layer, then the root."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(dist.get_default_backend_for_device(device))
    model = watched_model(plan, device, recorder)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    sharded = fully_shard(model)

    def around(last: bool) -> AbstractContextManager[None]:
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    return by_torch(plan, model, sharded, around=around, close=dist.destroy_process_group)


def unsharded(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> PeerEngine:
    """The bound: each process trains the whole model alone, with no communication."""
    model = watched_model(plan, device, recorder)
    return by_torch(plan, model, model)


def sharded_bound(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> PeerEngine:
    """The bound of what is sharded: the same, while its layers' weights are gathered."""
    dist.init_process_group(dist.get_default_backend_for_device(device))
    model = watched_model(plan, device, recorder)
    gathers = Gathers(plan, list(model.get_base_model().model.layers))
    return by_torch(plan, model, model, close=gathers.close)


def deepspeed(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> PeerEngine:
    """DeepSpeed's ZeRO-3, with the settings that anygauge would give it."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    skip_inference_kernel()
    deepspeed.init_distributed()
    config = zero3_by_hand(plan)
    sharded_loading = HfDeepSpeedConfig(config)  # must live while the model is loaded
    model = adapted_model(plan)
    del sharded_loading
    optimizer = optimizer_of(plan, model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    recorder.watch(engine.module)

    def backward(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return PeerEngine(called=engine, backward=backward, close=engine.destroy)


def zero3_by_hand(plan: ContenderPlan) -> dict[str, Any]:
    """What ``anygauge train --dry-run`` shows for the same model; a test compares the two.

    Differences in speed to this contender are then of loops and data, not of settings. Only
    accumulation is DeepSpeed's setting here, and done by anygauge itself there.
    """
    sizes = json.loads((Path(plan.model) / "config.json").read_text(encoding="utf-8"))
    largest_factor = plan.lora_rank * max(sizes["hidden_size"], sizes["intermediate_size"])
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": plan.max_norm,
        "steps_per_print": 2**31 - 1,
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if plan.dtype == "bfloat16" else {}),
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": PREFETCH,
            "memory_efficient_linear": not plan.checkpointing,
            "stage3_param_persistence_threshold": max(DEFAULT_PERSISTENCE, largest_factor),
            "stage3_max_reuse_distance": DEFAULT_LIVE,
            "stage3_max_live_parameters": DEFAULT_LIVE,
        },
    }


def accelerate(plan: ContenderPlan, device: torch.device, recorder: Recorder) -> PeerEngine:
    """Accelerate with its DeepSpeed plugin and the documented ZeRO-3 file."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs

    skip_inference_kernel()
    # Accelerate fills what depends on the model; these are the loop's own.
    config = documented_zero3() | {
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": plan.max_norm,
    }
    # Left to choose, Accelerate takes no process group where there is no other device than the
    # host, and every rank trains alone.
    group = [InitProcessGroupKwargs(backend="gloo")] if plan.device == "cpu" else []
    accelerator = Accelerator(
        mixed_precision="bf16" if plan.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=plan.accumulation,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=True),
        kwargs_handlers=group,
    )
    model: Any = adapted_model(plan)
    optimizer: Any = optimizer_of(plan, model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(plan))
    recorder.watch(model.module)

    def backward(loss: Tensor) -> None:
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return PeerEngine(
        called=model,
        backward=backward,
        around=lambda last: accelerator.accumulate(model),
        batches=loader,
        close=accelerator.end_training,
    )


def optimizer_of(plan: ContenderPlan, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the adapter."""
    return torch.optim.AdamW(trained(model), lr=plan.lr, weight_decay=0.0)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The adapter's parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Gathers:
    """Gathers of all layers' weights, each layer once for forward and once for backward.

    In place, into two buffers that stay, the next layer's while one computes. What is gathered is
    not read.

    Args:
        layers: in order; where they are recomputed, their forward is called in backward as well.
    """

    def __init__(self, plan: ContenderPlan, layers: list[nn.Module]) -> None:
        ranks = dist.get_world_size()
        sizes = [sum(p.numel() for p in m.parameters() if not p.requires_grad) for m in layers]
        like = next(layers[0].parameters())
        self._pieces = [like.new_zeros(-(-size // ranks)) for size in sizes]
        longest = max(map(len, self._pieces)) * ranks
        self._buffers = [like.new_empty(longest) for _ in range(2)]
        self._order = [*range(len(layers)), *reversed(range(len(layers)))]
        self._ranks, self._next = ranks, 0
        self._handle: Any = None
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.enter())
            if not plan.checkpointing:
                layer.register_forward_hook(self._at_backward)

    def enter(self) -> None:
        """The next layer in order begins: its weights have to be there, the next one's leave."""
        if self._handle is None:
            self._begin()
        self._handle.wait()
        self._next = (self._next + 1) % len(self._order)
        self._begin()

    def _begin(self) -> None:
        piece = self._pieces[self._order[self._next]]
        whole = self._buffers[self._next % 2][: len(piece) * self._ranks]
        self._handle = dist.all_gather_into_tensor(whole, piece, async_op=True)

    def close(self) -> None:
        """Wait for what is under way, and leave the process group."""
        if self._handle is not None:
            self._handle.wait()
        dist.destroy_process_group()

    def _at_backward(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.enter())


if __name__ == "__main__":
    main(*start(), globals()[sys.argv[2].replace("-", "_")])
