"""Pipeline parallelism: stages of neighbouring layers on ranks of their own, by torch's schedules.

Every rank of a pipeline reads the same rows and makes their masks; hidden states alone travel.
Shapes are given to torch, which otherwise sends them in a form that runs code where it is read: one
schedule for each width of micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from anygauge.interface import (
    HOST_DEVICE,
    BuildContext,
    Counters,
    DeviceBatch,
    LossFunction,
    Phase,
)
from anygauge.strategies.pipeline.stage import (
    PipelineModel,
    Stage,
    StagePart,
    rank_of_stage,
    stage_parameter_ids,
    stage_parts,
    stages_at,
)
from anygauge.strategies.shared.common import torch_dtype, trained_parameters
from anygauge.strategies.shared.degrees import Degrees, mesh_axes
from anygauge.strategies.shared.exchanges import device_mesh, group_along
from anygauge.strategies.shared.finite import propagate_nonfinite
from anygauge.strategies.shared.gradients import LocalGradients
from anygauge.strategies.shared.layout import GroupLayout, TensorLayout, scale_to
from anygauge.strategies.shared.shards import fill, sharded_later
from anygauge.strategies.shared.torch_engine import TorchEngine
from anygauge.strategies.tensor.tensor_parallel import divide_model

SCHEDULES: dict[str, type[Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}


class PipelineEngine(TorchEngine):
    """See `Engine`.

    Args:
        stages: of a pipeline, in their order; those that this rank has are `mine`.
        group: the ranks of this one's pipeline.
    """

    def __init__(
        self,
        pipeline: PipelineModel,
        context: BuildContext,
        options: Degrees,
        stages: Sequence[StagePart],
        group: dist.ProcessGroup,
        **more: Any,
    ) -> None:
        super().__init__(pipeline.model, context, **more)
        self._pipeline = pipeline
        self._options = options
        self._group = group
        self._place = dist.get_rank(group)
        self._ranks = [rank_of_stage(part.index, options) for part in stages]
        self._stages = stages
        self._mine = [part for part in stages if self._ranks[part.index] == self._place]
        self._device = context.workload.backend.placement.device
        self._hidden = pipeline.causal.config.get_text_config().hidden_size
        self._dtype = torch_dtype(context.workload.precision.param_dtype)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._batches: Sequence[DeviceBatch] = ()
        self._taken: dict[int, DeviceBatch] = {}
        self._loss_function: LossFunction | None = None
        self._sums: dict[int, Tensor] = {}
        self._factor = 1.0

    def run_step(
        self, batches: Sequence[DeviceBatch], loss_function: LossFunction, normalizer: int
    ) -> Sequence[Tensor]:
        """See `Engine.run_step`; losses are zero but on ranks that have the last stage."""
        self.model.train()
        self._set_weights("train")
        self._batches, self._loss_function, self._sums = batches, loss_function, {}
        self._factor = self._scale.factor / normalizer
        turns = torch.arange(len(batches))
        schedule = self._schedule(self._to_device(0, None)["input_ids"].shape, len(batches))
        first, last = self._stages[0] in self._mine, self._stages[-1] in self._mine
        schedule.step(
            *((turns,) if first else ()),
            turn=turns,
            target=turns if last else None,
            return_outputs=False,
        )
        self._gradients.collect()
        self._graph.mark_step(Phase.BACKWARD)
        self._batches, self._taken = (), {}
        nothing = torch.zeros((), device=self._device)
        return [self._sums.get(number, nothing) for number in range(len(batches))]

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[DeviceBatch], loss_function: LossFunction
    ) -> Sequence[Tensor]:
        """See `Engine.evaluate`; one batch after another goes through the stages."""
        self._set_weights("eval")
        sums = []
        for batch in batches:
            outputs = self._forward(batch)
            nothing = torch.zeros((), device=self._device)
            sums.append(nothing if outputs is None else loss_function(outputs))
        return sums

    @torch.no_grad()
    def logits(self, batch: DeviceBatch) -> Tensor | None:
        """See `Engine.logits`."""
        self._set_weights("eval")
        inputs = {name: value for name, value in batch.items() if name != "shift_labels"}
        outputs = self._forward(inputs)
        last = self._ranks[-1]
        logits = None if outputs is None else self._join_logits(outputs.logits.float())
        if last == 0:
            return None if logits is None else logits.to(HOST_DEVICE)
        if logits is not None:
            send(logits, self._group, 0)
        if self._place != 0:
            return None
        vocabulary = self._pipeline.causal.get_output_embeddings().weight.shape[0]
        shape = (*batch["input_ids"].shape, vocabulary)
        found = receive(torch.empty(shape, device=self._device), self._group, last)
        return found.to(HOST_DEVICE)

    def counters(self) -> Counters:
        """See `Engine.counters`; a stage in which nothing is trained makes no updates."""
        mine = super().counters()
        updates = self._backend.collectives.gather_objects(mine.updates)
        return dataclasses.replace(mine, updates=max(updates))

    def _state_keys(self) -> dict[str, list[str]]:
        """Likewise of all stages."""
        found = self._backend.collectives.gather_objects(super()._state_keys())
        return {name: keys for each in found for name, keys in each.items()}

    def _forward(self, batch: DeviceBatch) -> Any:
        """What the model returns of a batch, on the rank of the last stage; None on others."""
        self.model.eval()
        shape = self._hidden_shape(batch["input_ids"].shape)
        given: Any = None
        for part in self._mine:
            before = self._ranks[part.index - 1]
            if not part.is_first and before != self._place:
                given = torch.empty(shape, dtype=self._dtype, device=self._device)
                receive(given, self._group, before)
            given = self._pipeline.call(part, None if part.is_first else given, batch)
            if not part.is_last and (after := self._ranks[part.index + 1]) != self._place:
                send(given, self._group, after)
        self._graph.mark_step(Phase.FORWARD)
        return given if self._mine[-1].is_last else None

    def _hidden_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what stages hand on of a micro-batch (B, T): of this rank's positions."""
        rows, length = shape
        options = self._options
        return rows, length // (options.tp if options.sequence_parallel else 1), self._hidden

    def _to_device(self, number: int, part: StagePart | None) -> DeviceBatch:
        """A micro-batch on the device; kept until this rank's last stage has had it."""
        if number not in self._taken:
            self._taken[number] = self._batches[number]
        batch = self._taken[number]
        if part is self._mine[-1]:
            del self._taken[number]
        return batch

    def _loss(self, number: int, outputs: Any) -> Tensor:
        assert self._loss_function is not None
        loss = self._loss_function(outputs)
        self._sums[number] = loss.detach()
        return propagate_nonfinite(loss, self._factor)

    def _schedule(self, shape: Sequence[int], count: int) -> Any:
        """Make the schedule for micro-batches of a shape, (B, T)."""
        key = (*shape, count)
        if key not in self._schedules:
            hidden = torch.empty(
                self._hidden_shape(shape), dtype=self._dtype, device="meta", requires_grad=True
            )
            turn = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty((), device="meta", requires_grad=True)
            stages = [
                pipelining.PipelineStage(
                    Stage(self._pipeline, part, self._to_device, self._loss),
                    part.index,
                    part.count,
                    self._device,
                    input_args=turn if part.is_first else hidden,
                    output_args=loss if part.is_last else hidden,
                    group=self._group,
                )
                for part in self._mine
            ]
            kind = SCHEDULES[self._options.schedule or "1f1b"]
            several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
            self._schedules[key] = kind(
                stages if several else stages[0],
                count,
                loss_fn=lambda loss, _: loss,
                # Losses are divided by the step's tokens already.
                scale_grads=False,
            )
        return self._schedules[key]


def build_pipeline(context: BuildContext, options: Degrees) -> PipelineEngine:
    """This rank's stages on the opened device; the rest of the model stays on meta."""
    device = context.workload.backend.placement.device
    mesh = device_mesh(mesh_axes(options, context.workload.world_size), device)
    group = mesh.get_group("pipeline")
    model, names = sharded_later(context)
    divided = divide_model(model, options, mesh, device)
    pipeline = PipelineModel(model)
    stages = stage_parts(model, options)
    place = dist.get_rank(group)
    mine = stage_parameter_ids(pipeline, stages_at(stages, options, place))
    foreign = {id(p) for p in model.parameters()} - mine
    fill(model, names, context.factory, device, foreign=foreign, cuts=divided.cuts)
    owners = [
        stage_parameter_ids(pipeline, stages_at(stages, options, at)) for at in range(options.pp)
    ]
    trained = [parameter for _, parameter in trained_parameters(model)]
    shared = [at for at, p in enumerate(trained) if sum(id(p) in ids for ids in owners) > 1]
    sums = divided.partial_sums(model)
    if (replicas := group_along(mesh, "data")) is not None:
        # Ranks with the same stages, which read other rows.
        own = [at for at, p in enumerate(trained) if not p.is_meta]
        sums.append((own, replicas))
    ends = _end_group(mesh, rank_of_stage(len(stages) - 1, options)) if shared else None
    if ends is not None:
        sums.append((shared, ends))
    dtype = torch_dtype(context.workload.precision.reduce_dtype)
    return PipelineEngine(
        pipeline,
        context,
        options,
        stages,
        group,
        gradients=lambda trained: StageGradients(trained, dtype),
        sums=sums,
        layout=StageLayout(divided.layout(TensorLayout(), model), owners, trained, group, device),
        join_logits=divided.whole_logits,
    )


def _end_group(mesh: DeviceMesh, last: int) -> dist.ProcessGroup | None:
    """The ranks of the first and the last stage in this rank's pipeline; None in between."""
    found = None
    for pair in mesh.mesh[[0, last]].reshape(2, -1).T.tolist():
        # Every rank makes every group.
        group = dist.new_group(pair)
        if dist.get_rank() in pair:
            found = group
    return found


# -- trained parameters, and their gradients, of a rank's stages -----------------------------------


class StageLayout(GroupLayout):
    """A rank holds its stages' parameters whole, and nothing of others; see `TensorLayout`.

    A weight that the first and the last stage share counts on the first rank that has it.

    Args:
        inner: of what the ranks that have the same stages hold.
        owners: for each rank of the pipeline, the identities of the parameters that it has.
        trained: in the engine's order.
    """

    def __init__(
        self,
        inner: TensorLayout,
        owners: Sequence[set[int]],
        trained: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(group, device, inner)
        self._place = dist.get_rank(group)
        self._mine = owners[self._place]
        self._owner = {
            id(p): next(at for at, ids in enumerate(owners) if id(p) in ids) for p in trained
        }
        self._counts = [self._owner[id(p)] == self._place for p in trained]

    def local(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `TensorLayout.local`."""
        mine = id(parameter) in self._mine
        return self._inner.local(parameter) if mine else nn.Parameter(torch.empty(0))

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """See `TensorLayout.shape`."""
        return self._inner.shape(parameter)

    def clip(self, parts: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See `TensorLayout.clip`."""
        nothing = nn.Parameter(torch.empty(0))
        counted = [
            part if counts else nothing for part, counts in zip(parts, self._counts, strict=True)
        ]
        return scale_to(parts, self.grad_square(counted).sqrt(), max_norm)

    def gather(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """See `TensorLayout.gather`; the first rank of the pipeline alone gets it."""
        owner = self._owner[id(parameter)]
        if self._place == owner:
            whole = self._inner.gather(parameter, part)
            if owner != 0:
                send(whole.to(self._device), self._group, 0)
            return whole
        if self._place != 0:
            return part
        found = torch.empty(self.shape(parameter), dtype=part.dtype, device=self._device)
        return receive(found, self._group, owner)

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """See `TensorLayout.part`."""
        return self._inner.part(parameter, whole)


class StageGradients(LocalGradients):
    """Sums the gradients of a rank's stages after the schedule; see `Gradients`.

    Backward of several micro-batches runs within one call of torch's, so each gradient is taken as
    soon as it is there, to be summed in its own type. A schedule that computes gradients of weights
    one by one adds those up itself, in the type of the weights.
    """

    def __init__(self, trained: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(trained, dtype)
        for at, parameter in enumerate(trained):
            if not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(lambda _, at=at: self._add(at))


def send(tensor: Tensor, group: dist.ProcessGroup, place: int) -> None:
    """Hand a tensor to the rank at a place in a group."""
    dist.send(tensor.contiguous(), dst=dist.get_global_rank(group, place), group=group)


def receive(into: Tensor, group: dist.ProcessGroup, place: int) -> Tensor:
    """Fill a tensor with what the rank at a place in a group sends; returns it."""
    dist.recv(into, src=dist.get_global_rank(group, place), group=group)
    return into
