"""What a rank holds and sends as part of a pipeline, counted from the model."""

from __future__ import annotations

import math

from anygauge.interface.strategy import Footprint, Workload
from anygauge.strategies.degrees import WIDTH, Degrees
from anygauge.strategies.footprint import item_bytes, numbers, weight_bytes
from anygauge.strategies.pipeline_cut import rank_of_stage, stage_parts, stages_at
from anygauge.strategies.pipeline_stage import PipelineModel
from anygauge.strategies.tensor_division import causal_of


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
    width = causal_of(model).config.get_text_config().hidden_size
    length = min(math.ceil(workload.length / WIDTH) * WIDTH, workload.length)
    unit = workload.micro_batch * length * width * item_bytes(precision.param_dtype)
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
