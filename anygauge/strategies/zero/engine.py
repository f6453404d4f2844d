"""The `zero` strategy: DeepSpeed's ZeRO stages 0 to 3 over all ranks.

Stage 3 never holds the model whole. Where frozen layers are flat (`gather`), each rank reads its
own part of them; else rank 0 reads one unit at a time, and DeepSpeed broadcasts and shards it
before the next is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anygauge.interface import (
    HOST_DEVICE,
    BuildContext,
    Counters,
    DeviceBatch,
    LossFunction,
    MemoryEstimate,
    OptimizerFactory,
    Phase,
    Setting,
    TrainedState,
    UpdateResult,
    Workload,
)
from anygauge.interface import estimate as at
from anygauge.strategies.shared.common import (
    WITHOUT_FP8,
    Fp8Contexts,
    compile_regions,
    fp8_contexts,
    logits_of,
    mark_recomputation,
    set_learning_rate,
    summed_losses,
    torch_dtype,
    trained_parameters,
)
from anygauge.strategies.shared.finite import FiniteSteps, propagate_nonfinite
from anygauge.strategies.shared.flat import FLAT, FlatLayers
from anygauge.strategies.shared.footprint import EstimatedStrategy
from anygauge.strategies.shared.materialize import buffers_of, materialize, restore_buffers
from anygauge.strategies.shared.shards import fill, sharded_later
from anygauge.strategies.zero.deepspeed_config import (
    ModelSizes,
    as_config,
    stage_of,
    zero_settings,
)
from anygauge.strategies.zero.deepspeed_runtime import (
    check_fields,
    destroy,
    folder_on_disk,
    gather_by_block,
    gathered_by_peft,
    gradients_finite,
    import_deepspeed,
    leave_as_a_step_does,
    one_partition_group,
    refuse_unserved_type,
    share_buffers,
    synchronize_before_release,
)
from anygauge.strategies.zero.deepspeed_versions import (
    needs_reentrant_checkpointing,
    skips_non_finite,
)
from anygauge.strategies.zero.footprint import zero_memory
from anygauge.strategies.zero.spec import ZeroOptions
from anygauge.strategies.zero.state import ZeroState, whole_shape


class ZeroEngine:
    """A DeepSpeed engine behind anygauge's contract."""

    def __init__(
        self,
        engine: Any,
        stage: int,
        context: BuildContext,
        swapped: TemporaryDirectory[str] | None = None,
        fp8: Fp8Contexts = WITHOUT_FP8,
    ) -> None:
        """Args: swapped: where it keeps what is on a disk."""
        self._engine = engine
        self.model: nn.Module = engine.module
        self._stage = stage
        self._backend = context.workload.backend
        self._world_size = context.workload.world_size
        self._scales_loss = context.workload.precision.scales_loss
        self._trained = trained_parameters(self.model)
        self._state = ZeroState(engine, stage, self._trained, writes=context.workload.rank == 0)
        self.refuses_checkpoints = self._state.refusal
        self._swapped = swapped
        self._fp8 = fp8
        self._steps = (
            None
            if hasattr(engine.optimizer, "clip_grad")
            else FiniteSteps(engine.optimizer, engine.step)
        )
        self._finite = True
        self._undo = contextlib.ExitStack()
        if stage == 3 and context.workload.backend.graph.sync_on_release:
            wait = context.workload.backend.placement.synchronize
            self._undo.enter_context(synchronize_before_release(wait))

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> Sequence[Tensor]:
        """See `Engine.run_step`."""
        self._engine.train()
        sums = []
        # DeepSpeed averages gradients over ranks; the sum is wanted.
        scale = self._world_size / normalizer
        for index, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            with self._fp8.forward():
                outputs = self._engine(**batch)
            self._backend.graph.mark_step(Phase.FORWARD)
            loss = loss_function(outputs)
            with self._fp8.backward():
                self._engine.backward(propagate_nonfinite(loss, scale), scale_wrt_gas=False)
            self._backend.graph.mark_step(Phase.BACKWARD)
            sums.append(loss.detach())
            del outputs, loss  # of which the next forward needs nothing
        return sums

    def update(self, lr: float, max_norm: float) -> UpdateResult:
        """See `Engine.update`."""
        optimizer = self._engine.optimizer
        set_learning_rate(optimizer, lr)
        if self._steps is not None:
            # Stage 0 in float32 hands torch's own optimizer through, which keeps no norm.
            norm = torch.nn.utils.clip_grad_norm_(
                [p for _, p in self._trained], max_norm if max_norm > 0 else math.inf
            )
            self._steps.step(norm)
            self._backend.graph.mark_step(Phase.UPDATE)
            return UpdateResult(norm)
        if not self._finite:
            return UpdateResult(torch.tensor(math.inf))
        optimizer.clip_grad = max_norm
        before = self._engine.skipped_steps
        if self._scales_loss or skips_non_finite() or gradients_finite(optimizer):
            self._engine.step()
        else:
            self._engine.skipped_steps += 1
        self._backend.graph.mark_step(Phase.UPDATE)
        skipped = self._engine.skipped_steps > before
        self._finite = self._scales_loss or not skipped
        found = self._engine.get_global_grad_norm() if self._finite else math.inf
        return UpdateResult(torch.as_tensor(found), skipped and self._scales_loss)

    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """See `Engine.evaluate`."""
        sums = summed_losses(self._engine, self._backend, batches, loss_function)
        if self._stage == 3:
            leave_as_a_step_does(self.model)
        return sums

    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """See `Engine.logits`."""
        return logits_of(self._engine, self._backend, batch).to(HOST_DEVICE, torch.float32)

    def parameter_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `Engine.parameter_shape`."""
        return whole_shape(parameter)

    def export_trained(self) -> Mapping[str, Tensor]:
        """See `Engine.export_trained`; one tensor is whole at a time on other ranks."""
        return {name: whole for name, whole in self._state.masters() if whole is not None}

    def export_state(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """See `Engine.export_state`."""
        return self._state.export()

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        return self._state.counters()

    def import_state(self, state: TrainedState) -> None:
        """See `Engine.import_state`."""
        self._state.load(state)

    def close(self) -> None:
        """Take hooks off and free DeepSpeed's buffers."""
        self._undo.close()
        destroy(self._engine)
        if self._swapped is not None:
            self._swapped.cleanup()


_FLAT = "; frozen layers sharded by anygauge, the rest by DeepSpeed"


class Zero(EstimatedStrategy):
    """DeepSpeed over all ranks."""

    def __init__(self, options: ZeroOptions) -> None:
        self.options = options
        where = "" if options.nvme is None else " to a disk"
        offload = "" if options.offload == "none" else f", {options.offload} offloaded{where}"
        self.description = f"zero, stage {options.stage}{offload}"

    def _stage_of(self, workload: Workload) -> int:
        """Return DeepSpeed's stage for a model; from now on the description says who shards."""
        assert workload.skeleton is not None
        stage = stage_of(self.options, workload, ModelSizes.of(workload.skeleton))
        if stage != self.options.stage and not self.description.endswith(_FLAT):
            self.description += _FLAT
        return stage

    def settings(self, workload: Workload) -> Sequence[Setting]:
        """See `Strategy.settings`."""
        skeleton = workload.skeleton
        sizes = None if skeleton is None else ModelSizes.of(skeleton)
        return zero_settings(self.options, workload, sizes)

    def memory(self, workload: Workload) -> MemoryEstimate:
        """See `StrategyPlanner.memory`."""
        self._stage_of(workload)
        return zero_memory(self.options, workload)

    def build(self, context: BuildContext) -> ZeroEngine:
        """See `Strategy.build`."""
        deepspeed = import_deepspeed(context.workload.backend)
        refuse_unserved_type(context.workload.precision.param_dtype)
        with one_partition_group():
            return self._build(deepspeed, context)

    def _build(self, deepspeed: Any, context: BuildContext) -> ZeroEngine:
        factory = context.factory
        skeleton = factory.adapt(factory.skeleton())
        workload = dataclasses.replace(context.workload, skeleton=skeleton)
        config = as_config(self.settings(workload))
        check_fields(config["zero_optimization"])
        deepspeed.init_distributed()
        swapped = None
        if self.options.nvme is not None:
            found = self.memory(workload)
            # A gradient in the masters' type stands beside each master.
            size = sum(found.bytes_at(moment, at.OPTIMIZER) for moment in (at.LOAD, at.EVALUATION))
            swapped = folder_on_disk(self.options.nvme, size)
            config["zero_optimization"]["offload_optimizer"]["nvme_path"] = swapped.name

        stage = self._stage_of(workload)
        if stage != self.options.stage:
            model, fp8 = self._flat_model(context)
        else:
            model, fp8 = self._by_deepspeed(deepspeed, context, config)
        buffers = buffers_of(model)
        trained = trained_parameters(model)
        shapes = {name: whole_shape(p) for name, p in trained}
        if self.options.offload in ("optimizer", "both"):
            optimizer = on_the_host(context.optimizer, trained, shapes)
        else:
            optimizer = context.optimizer(trained, shapes)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        restore_buffers(buffers)
        return ZeroEngine(engine, stage, context, swapped, fp8)

    def _flat_model(self, context: BuildContext) -> tuple[nn.Module, Fp8Contexts]:
        """A model whose frozen layers are flat, and whose other weights are whole on each rank."""
        factory, device = context.factory, context.workload.backend.placement.device
        model, names = sharded_later(context, reentrant=self.options.reentrant)
        fp8 = fp8_contexts(model, context, reentrant=self.options.reentrant)
        group = dist.group.WORLD
        assert group is not None, "DeepSpeed has made it"
        flat = FlatLayers(model, group, device, otherwise="module")
        setattr(model, FLAT, flat)
        fill(model, names, factory, device, flat=flat)
        for parameter in model.parameters():
            if parameter in flat:
                # By this name DeepSpeed knows what ranks hold in parts, and gives them no copies.
                parameter.ds_optim_param = True  # type: ignore[attr-defined]
        return model, fp8

    def _by_deepspeed(
        self, deepspeed: Any, context: BuildContext, config: Mapping[str, Any]
    ) -> tuple[nn.Module, Fp8Contexts]:
        """A model that is whole on each rank, or that DeepSpeed has sharded."""
        factory, device = context.factory, context.workload.backend.placement.device

        def shard(unit: nn.Module) -> None:
            share_buffers(unit, device)
            deepspeed.zero.Init(module=unit, config_dict_or_path=config)

        sharded = self.options.stage == 3
        model = factory.skeleton()
        materialize(
            model,
            factory,
            device=device,
            dtype=torch_dtype(context.workload.precision.param_dtype),
            read=not sharded or context.workload.rank == 0,
            place=shard if sharded else None,
        )
        with gathered_by_peft(config) if sharded else contextlib.nullcontext():
            model = factory.adapt(model)
        reentrant = self.options.reentrant or needs_reentrant_checkpointing()
        factory.checkpoint_activations(model, reentrant=reentrant)
        mark_recomputation(model, context.workload.backend.graph)
        fp8 = fp8_contexts(model, context, reentrant=reentrant)
        # From here on, modules stay what they are.
        for reader, parameter in factory.external_parameters(model) if sharded else ():
            # DeepSpeed gathers what a module owns; the rest must be registered with it.
            deepspeed.zero.register_external_parameter(reader, parameter)
        if sharded and self.options.gather != "module":
            gather_by_block(model)
        compile_regions(model, context.workload.backend)
        return model, fp8


def on_the_host(
    factory: OptimizerFactory,
    trained: Sequence[tuple[str, nn.Parameter]],
    shapes: Mapping[str, Sequence[int]],
) -> Any:
    """The optimizer that the host would have: DeepSpeed steps it on tensors that it keeps there.

    torch's AdamW is chosen by the device of what it is made with, and a fused one of the host is
    several times as fast as its plain one.
    """
    there = {name: nn.Parameter(torch.empty(0)) for name, _ in trained}
    optimizer: Any = factory(there.items(), shapes)
    own = {id(there[name]): parameter for name, parameter in trained}
    for group in optimizer.param_groups:
        group["params"] = [own[id(parameter)] for parameter in group["params"]]
    return optimizer
