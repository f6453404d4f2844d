"""Plans of ranks that divide layers, sequences or stages: what one of them holds and sends."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anygauge.interface import UnsupportedError
from anygauge.planning.forecast import RunMemory
from anygauge.strategies.context.context_parallel import NAME
from anygauge.strategies.pipeline.engine import SCHEDULES
from anygauge.strategies.pipeline.footprint import in_flight
from anygauge.strategies.shared.exchanges import (
    EXCHANGE,
    GATHER,
    OWN,
    SCATTER,
    SUM,
    CountedGroup,
    over_ranks,
)
from tests.helpers.runs import TINY
from tests.planning import standins
from tests.planning.standins import run
from tests.strategies.test_architectures import COMPUTES_BY_ITSELF

LENGTH, BATCH = 64, 2
CONFIG = {**TINY, "num_hidden_layers": 4, "vocab_size": 512}
UNIT = BATCH * LENGTH * CONFIG["hidden_size"] * 2
TP, CP = {"name": "ddp", "tp": 2}, {"name": "ddp", "cp": 2}


def planned(strategy: dict[str, Any], ranks: int = 2, times: int = 1, **model: Any) -> RunMemory:
    train = {"micro_batch_size": BATCH, "global_batch_size": BATCH * times}
    of = run(
        strategy=strategy,
        launch={"devices": ranks},
        precision={"param_dtype": "bfloat16"},
        model={"config": CONFIG, **model},
        data={"max_length": LENGTH},
        train=train,
    )
    return standins.planned(of, "cpu")


def test_exchanges_of_a_counted_group_have_shapes_and_gradients() -> None:
    group = CountedGroup(4, 1)
    x = torch.zeros(8, 12, device="meta", requires_grad=True)
    asked: Any = {(32, 12): (GATHER, 0), (8, 3): (SCATTER, 1), (8, 12): (SUM,), (2, 12): (OWN, 0)}
    asked[2, 48] = (EXCHANGE, 0, 1)
    made = {shape: over_ranks(x, name, group, *dims) for shape, (name, *dims) in asked.items()}
    for shape, found in made.items():
        assert tuple(found.shape) == shape
        x.grad = None
        found.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("strategy", [TP, {**TP, "sequence_parallel": False}, CP], ids=str)
def test_a_part_of_a_model_is_traced_without_a_group(strategy: dict[str, Any]) -> None:
    whole, part = planned({"name": "single"}, 1), planned(strategy)
    assert not dist.is_initialized()
    share = 1 if strategy.get("sequence_parallel") is False else 2
    assert part.per_layer == whole.per_layer // share
    # Attention with an explicit mask passes by nothing; the output layer is whole.
    assert 0.5 <= part.work.flops["bfloat16"] / whole.work.flops["bfloat16"] < 0.8


def test_the_attention_of_a_run_is_left_alone_and_eager_ones_exchange_heads() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    AttentionInterface.register(NAME, runs_own := lambda *_: None)
    sent = planned({**CP, "cp_method": "ulysses"}, attention="eager").work.traffic
    assert ALL_ATTENTION_FUNCTIONS[NAME] is runs_own
    # Four each time of four layers: forward, again, and backward.
    assert [t.times for t in sent if t.operation == "all_to_all"] == [4 * 3 * 4]


def test_attention_that_takes_no_other_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"GPTNeo.*strategy\.cp: 1, or .* strategy\.tp"):
        planned(CP, config=COMPUTES_BY_ITSELF)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 3), (4, 2), (4, 8), (4, 12)])
@pytest.mark.parametrize("name", ["interleaved", "zero_bubble"])
def test_most_micro_batches_are_in_flight_as_torch_orders_them(
    name: str, ranks: int, count: int
) -> None:
    rounds = max(1, count // ranks)
    given = SimpleNamespace(pp_group_size=ranks, n_local_stages=2, num_stages=2 * ranks)
    given._n_microbatches, given.number_of_rounds = count, rounds
    given.microbatches_per_round = count // rounds
    for place in range(ranks):
        theirs = SCHEDULES[name]._calculate_single_rank_operations(given, place)
        found = [re.fullmatch(r"(\d+)([FBW])\d+", str(one)) for one in theirs]
        most, at_once = (0, 0), [0, 0]
        for one in filter(None, found):
            at_once[int(one[1]) >= ranks] += 1 if one[2] == "F" else -1
            most = (at_once[0], at_once[1]) if sum(at_once) >= sum(most) else most
        assert in_flight(name, place, ranks, count) == most


def test_a_stage_holds_its_buffers_and_micro_batches_in_flight() -> None:
    assert in_flight("1f1b", 0, 4, 8) == (4,)
    assert in_flight("gpipe", 3, 4, 8) == (8,)
    stages = {"name": "ddp", "pp": 2}
    found, gpipe = (planned({**stages, "schedule": s}, times=4) for s in ("1f1b", "gpipe"))
    assert found.device["update"].kinds["buffers"] == 4 * UNIT
    more = (
        gpipe.device["forward"].kinds["activations"] - found.device["forward"].kinds["activations"]
    )
    assert more >= 2 * 3 * UNIT  # of two more, what is given to two layers and to the next stage
    assert found.work.traffic[0].wire_bytes == 8 / 2 * UNIT
