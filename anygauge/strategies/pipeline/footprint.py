"""What a rank holds and sends as part of a pipeline, counted from the model."""

from __future__ import annotations

import math

from anygauge.interface import HeldLayers, MemoryEstimate, Workload
from anygauge.interface import estimate as at
from anygauge.strategies.pipeline.stage import (
    PipelineModel,
    rank_of_stage,
    stage_parts,
    stages_at,
)
from anygauge.strategies.shared.degrees import Degrees
from anygauge.strategies.shared.footprint import (
    Sizes,
    by_moment,
    numel,
    scale_bytes,
    transfer,
    unique,
    update_made,
    weight_bytes,
)


def pipeline_memory(options: Degrees, workload: Workload) -> MemoryEstimate:
    """What the workload's rank holds and sends.

    torch's stages have a buffer for each micro-batch that they receive, one for its hidden states
    and one for their gradient, from the first step on (`PipelineStage._prepare_forward_infra` and
    `_create_grad_recv_info`). `Schedule1F1B` lets go of a gradient that it sent when the next one
    is there; schedules of several stages keep all that they send until a step ends.
    """
    size, count = Sizes.of(workload), workload.accumulation
    rows, schedule = workload.world_size // options.pp, options.schedule or "1f1b"
    place, row = divmod(workload.rank, rows)
    stages, pipeline = stage_parts(size.model, options), PipelineModel(size.model)
    mine = stages_at(stages, options, place)
    parts = [pipeline.part(part) for part in mine]
    held = unique(p for part in parts for p in part.parameters())
    trained = [p for p in held if p.requires_grad]
    weights = weight_bytes(held, workload.precision.param_dtype)
    weights += sum(scale_bytes(part) for part in parts)
    state = round(numel(trained) * workload.state_bytes)
    own_masters = size.master != size.compute
    masters = numel(trained) * size.master if own_masters else 0
    gradients = numel(trained) * size.reduce
    width = pipeline.causal.config.get_text_config().hidden_size
    length = math.ceil(workload.length / options.tp)
    if not options.sequence_parallel:
        length *= options.tp
    unit = int(workload.micro_batch * length * width * size.compute)
    # Of each stage, edges at which it receives: hidden states one way, their gradients the other.
    edges = [(not part.is_first) + (not part.is_last) for part in mine]
    sends = sum(
        rank_of_stage(other, options) != place
        for part in mine
        for other in (part.index - 1, part.index + 1)
        if 0 <= other < part.count
    )
    at_once = in_flight(schedule, place, options.pp, count)
    done = [count - n for n in at_once]
    on_way = unit if any(done) and place > 0 else 0
    if len(mine) > 1:
        on_way = unit * sum(n * edge for n, edge in zip(done, edges, strict=True))
    # `PipelineStage.backward_one_chunk`: the first stage alone has all of backward at once.
    # `stage_backward_input` leaves gradients with its buffers until the next step begins.
    apart = [schedule == "zero_bubble" and not part.is_first for part in mine]
    received = sum(edges) * count * unit
    after = {at.BUFFERS: received + unit * count * sum(apart)}
    # `StageGradients` adds each gradient to its sum as soon as it is there.
    step = {at.BUFFERS: received + on_way, at.GRADIENTS: gradients if any(done) else 0}
    # `sum_at` puts gradients into one message: all, or those of a weight that both ends have.
    last = rank_of_stage(len(stages) - 1, options)
    ends = [{id(p): p for p in pipeline.part(stages[end]).parameters()} for end in (0, -1)]
    shared = 0
    if last != 0 and place in (0, last):
        shared = numel(p for key, p in ends[0].items() if key in ends[1] and p.requires_grad)
    replicas = range(place * rows, (place + 1) * rows)
    message = (gradients if rows > 1 else 0) or shared * size.reduce
    made = update_made(workload, (p.numel() for p in trained))
    pair = sorted((neighbour * rows + row) for neighbour in (place, (place + 1) % options.pp))
    return MemoryEstimate(
        device=by_moment(
            {at.WEIGHTS: weights, at.OPTIMIZER: masters + state},
            masters,
            step,
            {
                at.END: {**step, at.GRADIENTS: gradients},
                at.UPDATE: {
                    **after,
                    at.GRADIENTS: gradients + max(0, message - made),
                    at.OPTIMIZER: made,
                },
                at.EVALUATION: after,
                # The first rank of a pipeline is handed the tensors of all.
                at.SAVE: {**after, at.SAVED: size.largest * size.master if place == 0 else 0},
            },
        ),
        host={at.SAVE: size.to_save},
        traffic=(
            *transfer("send", pair, sends * count, sends * count * unit, waited=True),
            *transfer("all_reduce", replicas, 1, gradients, waited=True),
            *transfer("all_reduce", (row, last * rows + row), 1, shared * size.reduce, waited=True),
        ),
        stages=tuple(
            HeldLayers(part.first, part.end, max(1, n), one)
            for part, n, one in zip(mine, at_once, apart, strict=True)
        ),
        other_bytes=size.update_traffic(numel(trained), state),
    )


def in_flight(schedule: str, place: int, ranks: int, count: int) -> tuple[int, ...]:
    """Count the micro-batches that each stage of the rank at a place of `ranks` has at once.

    At the last moment of a step of `count` at which they are most, by the order of torch's schedule
    of that name: from then on, each forward follows a backward. Backward of a micro-batch is that
    of its weights, where a schedule has two.
    """
    if schedule == "gpipe":
        return (count,)
    if schedule == "1f1b":
        return (min(count, ranks - place),)
    if schedule == "zero_bubble":
        return min(count, 2 * ranks - place - 1), min(count, place + 1)
    in_round = count // max(1, count // ranks)
    forwards = min(2 * count, in_round + 2 * (ranks - 1 - place) + 1)
    second = sum(turn // in_round % 2 for turn in range(forwards))
    return forwards - second, second
