"""What a rank holds and sends as part of a pipeline, counted from the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

from anygauge.interface.strategy import (
    BACKWARD,
    BEGIN,
    BUFFERS,
    END,
    EVALUATION,
    FORWARD,
    GRADIENTS,
    LOAD,
    LOSS,
    OPTIMIZER,
    SAVE,
    SAVED,
    UPDATE,
    WEIGHTS,
    Footprint,
    HeldLayers,
    MemoryEstimate,
    Traffic,
    Workload,
)
from anygauge.strategies.degrees import WIDTH, Degrees, stages_per_rank
from anygauge.strategies.footprint import (
    item_bytes,
    numbers,
    scale_bytes,
    update_made,
    weight_bytes,
)
from anygauge.strategies.pipeline_cut import rank_of_stage, stage_parts, stages_at
from anygauge.strategies.pipeline_order import actions, fullest
from anygauge.strategies.pipeline_stage import PipelineModel
from anygauge.strategies.tensor_division import causal_of
from anygauge.strategies.whole_footprint import on_host, step_bytes


def pipeline_footprint(options: Degrees, workload: Workload) -> Footprint:
    """See `Strategy.footprint`; of the workload's rank."""
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "a footprint is counted from the model"
    stages = stage_parts(model, options)
    rows = workload.world_size // options.pp
    place = workload.rank // rows
    pipeline = PipelineModel(model)
    mine = stages_at(stages, options, place)
    held = [p for part in mine for p in pipeline.part(part).parameters()]
    trained = numbers(p for p in held if p.requires_grad)
    own_masters = precision.master_dtype != precision.param_dtype
    # Each boundary to another rank: hidden states one way, their gradients the other.
    boundaries = [
        rank_of_stage(other, options) != place
        for part in mine
        for other in (part.index - 1, part.index + 1)
        if 0 <= other < part.count
    ]
    unit = _unit(workload)
    sent = {"send": sum(boundaries) * workload.accumulation * unit}
    sums = trained if rows > 1 else 0
    ends = {rank_of_stage(0, options), rank_of_stage(len(stages) - 1, options)}
    if len(ends) > 1 and place in ends:
        first, last = (
            {id(p): p for p in pipeline.part(s).parameters()} for s in (stages[0], stages[-1])
        )
        sums += numbers(p for key, p in first.items() if key in last and p.requires_grad)
    if sums:
        sent["all_reduce"] = sums * item_bytes(precision.reduce_dtype)
    return Footprint(
        weights=weight_bytes(held, precision.param_dtype),
        gradients=trained * item_bytes(precision.reduce_dtype),
        masters=trained * item_bytes(precision.master_dtype) if own_masters else 0,
        optimizer=round(trained * workload.state_bytes),
        sent=sent,
    )


def _unit(workload: Workload) -> int:
    """Bytes of the hidden states of a micro-batch."""
    width = causal_of(workload.skeleton).config.get_text_config().hidden_size
    length = min(math.ceil(workload.length / WIDTH) * WIDTH, workload.length)
    return int(workload.micro_batch * length * width * item_bytes(workload.precision.param_dtype))


def pipeline_memory(options: Degrees, workload: Workload) -> MemoryEstimate:
    """What the workload's rank holds and sends.

    torch's stages have a buffer for each micro-batch that they receive, one for its hidden states
    and one for their gradient, from the first step on (`PipelineStage._prepare_forward_infra` and
    `_create_grad_recv_info`). `Schedule1F1B` lets go of a gradient that it sent when the next one
    is there; schedules of several stages keep all that they send until a step ends.
    """
    model, precision = workload.skeleton, workload.precision
    assert model is not None, "an estimate is made from the model"
    held = pipeline_footprint(options, workload)
    rows, count = workload.world_size // options.pp, workload.accumulation
    place, schedule = workload.rank // rows, options.schedule or "1f1b"
    stages = stage_parts(model, options)
    mine = stages_at(stages, options, place)
    sizes = [part.end - part.first for part in mine]
    full = fullest(actions(schedule, place, options.pp, count), sizes)
    # `PipelineStage.backward_one_chunk`: the first stage alone has all of backward at once.
    apart = schedule == "zero_bubble"
    unit, pipeline = _unit(workload), PipelineModel(model)
    received = sum((not part.begins) + (not part.ends) for part in mine)
    weights = held.weights + sum(scale_bytes(pipeline.part(part)) for part in mine)
    trained = {
        id(p): p for part in mine for p in pipeline.part(part).parameters() if p.requires_grad
    }
    # `StageGradients` adds each gradient to its sum as soon as it is there.
    added = {GRADIENTS: held.gradients}
    before = added if any(full.done) else {}
    on_way = unit if any(full.done) and place > 0 else 0
    if len(mine) > 1:
        on_way = unit * sum(
            done * ((not part.begins) + (not part.ends))
            for part, done in zip(mine, full.done, strict=True)
        )
    fixed = {
        WEIGHTS: weights,
        OPTIMIZER: held.masters + held.optimizer,
        BUFFERS: received * count * unit,
    }
    step = {**fixed, BUFFERS: fixed[BUFFERS] + on_way, **before}
    # `stage_backward_input` leaves gradients with its buffers until the next step begins.
    left = unit * count * sum(apart and not part.begins for part in mine)
    after = {**fixed, BUFFERS: fixed[BUFFERS] + left}
    # `sum_at` puts gradients into one message: all, or those of a weight that both ends have.
    made = update_made(workload, (p.numel() for p in trained.values()))
    message = held.gradients if rows > 1 else held.sent.get("all_reduce", 0)
    whole = max((p.numel() for p in model.parameters() if p.requires_grad), default=0)
    return MemoryEstimate(
        device={
            LOAD: {WEIGHTS: weights, OPTIMIZER: held.masters},
            BEGIN: step,
            FORWARD: step,
            LOSS: step,
            BACKWARD: step,
            END: {**step, **added},
            UPDATE: {
                **after,
                **added,
                GRADIENTS: held.gradients + max(0, message - made),
                OPTIMIZER: fixed[OPTIMIZER] + made,
            },
            EVALUATION: after,
            # The first rank of a pipeline is handed the tensors of all.
            SAVE: {
                **after,
                SAVED: whole * item_bytes(precision.master_dtype) if place == 0 else 0,
            },
        },
        host=on_host(workload),
        traffic=_traffic(options, workload, held.sent, place, rows),
        stages=tuple(
            HeldLayers(part.first, part.end, max(1, at_once), apart and not part.begins)
            for part, at_once in zip(mine, full.in_flight, strict=True)
        ),
        other_bytes=step_bytes(workload, numbers(trained.values()), held.optimizer),
    )


def _traffic(
    options: Degrees, workload: Workload, sent: Mapping[str, int], place: int, rows: int
) -> tuple[Traffic, ...]:
    """Of a rank's footprint, by group: a rank of the pipeline beside it, and its replicas."""
    found = []
    if sent.get("send"):
        other = (place + 1) % options.pp
        pair = tuple(sorted(at * rows + workload.rank % rows for at in (place, other)))
        times = sent["send"] / _unit(workload)
        found.append(
            Traffic(operation="send", group=pair, waited=True, times=times, bytes=sent["send"])
        )
    if sent.get("all_reduce"):
        group = tuple(range(place * rows, (place + 1) * rows))
        if rows == 1:
            last = rank_of_stage(options.pp * stages_per_rank(options) - 1, options)
            group = (workload.rank % rows, last * rows + workload.rank % rows)
        found.append(
            Traffic(
                operation="all_reduce",
                group=group,
                waited=True,
                times=1,
                bytes=sent["all_reduce"],
            )
        )
    return tuple(found)
