"""What is refused of `fsdp` before torch is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pydantic import ValidationError

from anygauge.interface import AnygaugeError, Backend, StrategyRun, UnsupportedError
from anygauge.strategies.fsdp_options import FsdpOptions
from anygauge.strategies.fsdp_spec import FSDP, shards
from tests.helpers.ranks import on_ranks


def check(
    world_size: int = 4, *, optimizer: str = "adamw", adapter: str = "", **fields: Any
) -> None:
    FSDP.check(
        StrategyRun(
            options=FsdpOptions(**fields),
            world_size=world_size,
            optimizer=optimizer,
            adapter=adapter,
        )
    )


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [({}, 4), ({"dp_replicate": 2}, 2), ({"dp_replicate": 4}, 1), ({"dp_shard": 4}, 4)],
)
def test_what_is_left_shards(fields: dict[str, int], ranks: int) -> None:
    assert shards(FsdpOptions(**fields), 4) == ranks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp_replicate": 3}, "dp_replicate 3 does not divide 4.*one of 1, 2, 4"),
        ({"dp_replicate": 2, "dp_shard": 4}, "2 x 4 is not 4"),
        ({"dp_shard": 0}, "1 x 0 is not 4"),
        ({"cp": 3}, "4 ranks .* are not a multiple of 3. Set strategy.cp to one of 1, 2, 4"),
        (
            {"cp": 2, "dp_shard": 4},
            "1 x 4 is not 2, the number of ranks .* divided by strategy.cp 2",
        ),
        ({"optimizer": "adafactor"}, "only a part of it.*adamw_8bit"),
        ({"adapter": "dora"}, "norms of whole weights.*zero, ddp or single"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(given: dict[str, Any], said: str) -> None:
    with pytest.raises(AnygaugeError, match=said):
        check(**given)


def test_ranks_that_share_sequences_read_the_same_rows() -> None:
    options = FsdpOptions(cp=2)
    shares = [FSDP.share(options, rank, 4) for rank in range(4)]
    assert [(s.index, s.count, s.leads) for s in shares] == [
        *((0, 2, True), (0, 2, False)),
        *((1, 2, True), (1, 2, False)),
    ]
    assert [s.sequence and (s.sequence.index, s.sequence.count) for s in shares] == [
        *((0, 2), (1, 2)),
        *((0, 2), (1, 2)),
    ]
    assert len({s.random_stream for s in shares}) == 4, "each drops tokens of its own"
    assert shards(options, 4) == 4 and shards(FsdpOptions(cp=2, dp_replicate=2), 4) == 2


def test_heads_are_divided_by_their_number() -> None:
    config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=6))
    FSDP.check_model(FsdpOptions(cp=4), config)
    FSDP.check_model(FsdpOptions(cp=3, cp_method="ulysses"), config)
    with pytest.raises(
        AnygaugeError, match=r"this model has 6 heads. Set strategy.cp to one of 1, 2, 3"
    ):
        FSDP.check_model(FsdpOptions(cp=4, cp_method="ulysses"), config)


def test_a_value_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError):
        FsdpOptions(offload="optimizer")


def test_a_kernel_of_the_device_updates_what_lies_on_it() -> None:
    assert FSDP.takes_update_kernel(FsdpOptions())
    assert "host" in FSDP.takes_update_kernel(FsdpOptions(offload="both")).reason
    assert not FSDP.takes_clip_kernel(FsdpOptions())


def answers_of_means(backend: Backend) -> list[str]:
    """Whichever way the installed torch's gloo answers, a mean that is a sum is refused."""
    import torch.distributed as dist

    from anygauge.strategies.fsdp import check_average

    reduce, group = dist.all_reduce, dist.group.WORLD
    assert group is not None

    def wrong(value: Any, op: Any, group: Any) -> None:
        reduce(value, op=dist.ReduceOp.SUM, group=group)

    def right(value: Any, op: Any, group: Any) -> None:
        reduce(value, op=dist.ReduceOp.SUM, group=group)
        value.div_(dist.get_world_size(group))

    def lacking(value: Any, op: Any, group: Any) -> None:
        raise RuntimeError("no such operation")

    said = []
    for one in (right, wrong, lacking):
        with mock.patch.object(dist, "all_reduce", one):
            try:
                check_average(group, backend.placement.device)
                said.append("accepted")
            except UnsupportedError as error:
                said.append(str(error))
    return said


def test_means_that_are_none_are_refused() -> None:
    """Where torch cannot be told to sum: asked once, with what real collectives have answered."""
    right, wrong, lacking = on_ranks(answers_of_means, world=2)[0]
    assert right == "accepted"
    assert "gloo gives 1.0 as the mean of 0 to 1. Use strategy.name: ddp" in wrong
    assert "gloo says: no such operation" in lacking
