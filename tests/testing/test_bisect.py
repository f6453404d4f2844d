"""The search for a cause: bounds that hold for what is sound, and the first thing that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.testing import bisect, noise
from anygauge.testing.compare import (
    Digests,
    Recorded,
    distance,
    first_difference,
    without_padding,
)
from anygauge.testing.exchanged import ExchangeRecord, first_wrong, recorded
from anygauge.testing.loop import EVALUATION, LOSS, NORM, Trained, differences, first_beyond
from anygauge.testing.place import place_in
from anygauge.testing.process import Subject
from anygauge.testing.replay import Replay


class MixedBlock(nn.Module):
    """Something of everything: products, a norm, softmax, look-ups, recomputation."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 32)
        self.inner = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Hardtanh()
        self.to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embedding(rows)
        self.drop(x.detach())  # makes no node: the look-up's must not be taken for its own
        x = x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        scores = (x @ x.transpose(1, 2) / 32).softmax(-1)
        return self.norm(scores @ x).float().pow(2).sum(-1).log().mean()


class WrongOperation(TorchDispatchMode):
    """One operation of the "device", which here is the host, gives something else."""

    def __init__(self, name: str, change: Any, calls: int = 1) -> None:
        super().__init__()
        self._name, self._change, self._calls = name, change, calls
        self._replayed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self._name or args[0].dtype is torch.float64:
            return result
        self._replayed += 1
        # The host repeats each of them once in the same type, which stays right.
        return self._change(result) if self._replayed % 2 else result


def trained(dtype: torch.dtype, wrong: TorchDispatchMode | None = None) -> tuple[Replay, str]:
    """A step of the block, repeated: (what was found, where)."""
    model = MixedBlock(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.arange(2 * 7).view(2, 7) % 11
    if wrong is not None:
        wrong.__enter__()
    try:
        with place_in(model) as place, Replay("cpu", place) as replay:
            model(rows).backward()
            optimizer.step()
    finally:
        if wrong is not None:
            wrong.__exit__(None, None, None)
    return replay, "" if replay.found is None else "".join(map(str, replay.found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sound_operations_are_within_their_bounds(dtype: torch.dtype) -> None:
    replay, found = trained(dtype)
    assert found == ""
    assert replay.compared > 100
    assert not replay.unknown


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        ("_softmax", "aten::_softmax (float32, 2 x 7 x 7)"),
        ("_softmax_backward_data", "aten::_softmax_backward_data (float32, 2 x 7 x 7), backward"),
        ("silu", "aten::silu (float32, 2 x 7 x 48) in inner.1"),
        ("silu_backward", "aten::silu_backward (float32, 2 x 7 x 48) in inner.1, backward"),
        ("embedding_dense_backward", "aten::embedding_dense_backward (float32, 2 x 7 x 32) in emb"),
        ("addmm", "aten::addmm (float32, "),
    ],
)
def test_the_first_wrong_operation_is_named_with_its_module(operation: str, found: str) -> None:
    _, said = trained(torch.float32, WrongOperation(operation, lambda result: result * (1 + 1e-4)))
    assert said.startswith(found)


def test_a_place_follows_recomputed_forwards_that_end_early() -> None:
    model = MixedBlock(torch.float32)
    with place_in(model) as place:
        model(torch.zeros(1, 3, dtype=torch.long)).backward()
        assert str(place) == ""


# -- what else differs ----------------------------------------------------------------------------


def record(**changes: Tensor) -> Recorded:
    usual = {"output": torch.ones(3), "gradient": torch.ones(3), "moved": torch.ones(3)} | changes
    return Recorded(
        outputs=[("layer", usual["output"])],
        gradients={"layer.weight": usual["gradient"]},
        moved={"layer.weight": usual["moved"]},
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"output": torch.tensor([1, 1, 1 + 1e-6])}, ""),
        ({"output": torch.tensor([1, 1, 1.1])}, "in the output of layer, step 1"),
        ({"output": torch.ones(2)}, "output of layer, step 1: its shape is (2,), on the host (3,)"),
        ({"gradient": torch.tensor([1, 1, torch.nan])}, "in the gradient of layer.weight, step 1"),
        ({"moved": torch.tensor([1, 1, 0.5])}, "in the update of layer.weight, step 1"),
    ],
)
def test_the_first_difference_of_two_steps(changes: dict[str, Tensor], said: str) -> None:
    found = first_difference(record(**changes), record(), "float32")
    assert said in found
    assert bool(said) == bool(found)


def test_calls_that_one_side_alone_makes_are_not_compared() -> None:
    """A kernel may take the place of modules, which the other side still calls."""
    here, there = record(), record()
    there.outputs = [("norm", torch.zeros(7)), *there.outputs, ("layer", torch.zeros(3))]
    assert first_difference(here, there, "float32") == ""
    here.outputs += [("layer", torch.ones(3))]
    assert "in the output of layer, step 1" in first_difference(here, there, "float32")
    there.gradients.clear()
    here.outputs.pop()
    assert first_difference(here, there, "float32") == (
        "on the host layer.weight has no gradient, step 1"
    )


def test_what_is_computed_of_padding_is_not_compared() -> None:
    output = torch.arange(1.0, 13).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    kept = without_padding(output, mask)
    assert kept[0].equal(output[0]) and kept[1, 0].equal(output[1, 0])
    assert not kept[1, 1:].any()
    assert without_padding(output[:, :, 0], mask)[1].tolist() == [7.0, 0.0, 0.0]
    for other in (output[:1], output.flatten(), torch.ones(())):
        assert without_padding(other, mask).equal(other), "not of rows"
    assert without_padding(output, None).equal(output)


def test_distances_are_relative_to_the_largest_value() -> None:
    assert distance(torch.tensor([0.0, 9.0]), torch.tensor([0.0, 10.0])) == pytest.approx(0.1)
    assert distance(torch.empty(0), torch.empty(0)) == 0.0


def test_digests_tell_the_operation_that_drew_other_numbers() -> None:
    def drawn(seed: int) -> list[tuple[str, str, bytes]]:
        model = nn.Dropout(0.5)
        torch.manual_seed(seed)
        with place_in(model) as place, Digests("cpu", place) as digests:
            model(torch.ones(64) * 2)
        return digests.found

    assert drawn(0) == drawn(0)
    pairs = zip(drawn(0), drawn(1), strict=True)
    first = next(before[0] for before, after in pairs if before != after)
    assert first in ("aten::native_dropout", "aten::bernoulli_")


def exchange(name: str, how: str, before: list[float], after: list[float]) -> ExchangeRecord:
    return ExchangeRecord(name, (0, 1), how, torch.tensor(before), torch.tensor(after))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [
                [exchange("all_reduce", "SUM", [1.0, 2.0], [4.0, 6.0])],
                [exchange("all_reduce", "SUM", [3.0, 4.0], [4.0, 6.0])],
            ],
            "",
        ),
        (
            [
                [exchange("all_reduce", "AVG", [1.0, 2.0], [2.0, 3.0])],
                [exchange("all_reduce", "AVG", [3.0, 4.0], [4.0, 6.0])],
            ],
            "all_reduce (avg) of ranks 0, 1 (float32, 2): rank 1 got 4 where float64 gives 2",
        ),
        (
            [
                [exchange("reduce_scatter_tensor", "SUM", [1.0, 2.0], [4.0])],
                [exchange("reduce_scatter_tensor", "SUM", [3.0, 4.0], [4.0])],
            ],
            "reduce_scatter_tensor (sum) of ranks 0, 1 (float32, 1): rank 1 got 4 where float64",
        ),
        (
            [
                [exchange("all_gather_into_tensor", "", [1.0], [1.0, 2.0])],
                [exchange("all_gather_into_tensor", "", [2.0], [2.0, 1.0])],
            ],
            "all_gather_into_tensor of ranks 0, 1 (float32, 2): rank 1 got",
        ),
        (
            [
                [exchange("broadcast", "1", [1.0], [1.0])],
                [exchange("broadcast", "1", [2.0], [2.0])],
            ],
            "broadcast of ranks 0, 1 (float32, 1): rank 0 got 1 where float64 gives 2",
        ),
        (
            [
                [exchange("broadcast", "1", [1.0], [1.0])],
                [exchange("broadcast", "0", [2.0], [2.0])],
            ],
            "ranks 0, 1 are not in the same collective",
        ),
    ],
)
def test_the_first_wrong_collective(ranks: list[list[ExchangeRecord]], said: str) -> None:
    number, found = first_wrong(ranks)
    assert found.startswith(said)
    assert (number, bool(found)) == ((0, True) if said else (1, False))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def without_signature(usual: Any) -> Any:
    """A function in another's place that shows none of its arguments."""
    return lambda *args, **kwargs: usual(*args, **kwargs)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shown", [True, False])
def test_collectives_are_recorded_whatever_a_vendor_puts_in_their_place(
    monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    if not shown:
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"):
            monkeypatch.setattr(dist, name, without_signature(getattr(dist, name)))
    value, two = torch.tensor([1.0, 2.0]), torch.empty(2)
    with recorded() as found:
        dist.all_reduce(value)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        dist.broadcast(value, src=0)
        dist.all_gather_into_tensor(two, value + 1)
        dist.reduce_scatter_tensor(two, input=value + 2, op=dist.ReduceOp.SUM)
    assert [(e.name, e.ranks, e.how, e.before.tolist(), e.after.tolist()) for e in found] == [
        ("all_reduce", (0,), "SUM", [1.0, 2.0], [1.0, 2.0]),
        ("all_reduce", (0,), "MAX", [1.0, 2.0], [1.0, 2.0]),
        ("broadcast", (0,), "0", [1.0, 2.0], [1.0, 2.0]),
        ("all_gather_into_tensor", (0,), "", [2.0, 3.0], [2.0, 3.0]),
        ("reduce_scatter_tensor", (0,), "SUM", [3.0, 4.0], [3.0, 4.0]),
    ]
    assert first_wrong([found]) == (5, "")


def test_a_rank_that_cannot_search_says_why(tmp_path: Path) -> None:
    nowhere = tmp_path / "run"
    said = bisect.cause_of_ranks(Subject(name="cpu"), tmp_path, nowhere, 2, 1, None)
    assert said.startswith(f"{bisect.NOT_FOUND}: looking for it raised ")
    assert str(nowhere) in said and said.endswith("(rank 0)")


def test_ranks_do_not_wait_long_for_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(command: list[str], **given: Any) -> Any:
        wait = "import sys, time, json; asked = json.loads(sys.stdin.read()); "
        if given["env"]["RANK"] == "1":
            wait += "open(asked['answer'], 'w').write(json.dumps({'cause': 'X'})); "
        return run_process([command[0], "-c", wait + "time.sleep(0.1)" + late], **given)

    late, run_process = "; time.sleep(600 * (asked['answer'][-6] == '0'))", bisect.subprocess.Popen
    monkeypatch.setattr(bisect, "NOT_FOUND", "X")
    monkeypatch.setattr(bisect, "ALONE_S", 0.5)
    monkeypatch.setattr(bisect, "environments", lambda *_: ([{"RANK": "0"}, {"RANK": "1"}], ""))
    monkeypatch.setattr(bisect.subprocess, "Popen", started)
    said = bisect.cause_of_ranks(Subject(name="cpu"), tmp_path, tmp_path / "run", 2, 1, None)
    assert said == "X (rank 1)"


def test_a_search_that_fails_says_so(tmp_path: Path) -> None:
    nowhere = tmp_path / "run"
    said = bisect.cause_of(Subject(name="cpu"), tmp_path, nowhere, nowhere, 1, dtype="float32")
    assert said.startswith(f"{bisect.NOT_FOUND}: looking for it raised ")
    assert str(nowhere) in said
    said = bisect.cause_of(Subject(name="nobody"), tmp_path, nowhere, nowhere, 1, dtype="float32")
    assert said.startswith(bisect.NOT_FOUND)
    assert "nobody" in said


# -- how far losses may be ------------------------------------------------------------------------


def run(losses: list[float], evaluations: dict[int, float]) -> Trained:
    steps: list[dict[str, Any]] = [
        {"step": at, "loss": loss, "num_loss_tokens": 80, "lr": 2e-3, "grad_norm": 6.0}
        for at, loss in enumerate(losses, start=1)
    ]
    held_out = [
        {"step": done, "eval_loss": loss, "eval_tokens": 200} for done, loss in evaluations.items()
    ]
    records = sorted([*steps, *held_out], key=lambda each: (each["step"], "eval_loss" in each))
    return Trained(folder=Path(), losses=losses, metrics=json.loads(json.dumps(records)))


def test_bounds_follow_the_type_the_tokens_and_the_steps() -> None:
    found = noise.bounds("float32", run([6.0, 6.0], {0: 6.0, 2: 6.0}).metrics, 4096)
    lower = noise.bounds("bfloat16", run([6.0, 6.0], {}).metrics, 4096)
    assert 1e-7 < found.losses[0] < found.losses[1] < 1e-5
    assert found.evaluations[0] < found.losses[0], "a mean over more tokens"
    assert found.evaluations[0] < found.evaluations[2], "after updates"
    assert 1e-3 < lower.losses[0] < lower.losses[1] < 0.02
    assert found.norms[0] < found.norms[1] < 1e-5 < 1e-3 < lower.norms[0] < 0.02
    assert found.stating(1e-4).losses == [1e-4, 1e-4]
    assert found.at_least(0.0) == found
    assert found.at_least(1e-4).evaluations == {0: 1e-4, 2: 1e-4}


def test_the_first_number_beyond_its_bound_is_told() -> None:
    host = run([6.0, 5.0, 4.0], {0: 6.5, 2: 5.5})
    bounds = noise.Bounds([1e-3] * 3, [1e-2] * 3, {0: 1e-3, 2: 1e-3})
    pairs = differences(run([5.001, 4.0], {2: 5.6}), host, bounds)  # resumed after a step
    assert [(each.what, each.step) for each in pairs] == [
        *((LOSS, 2), (NORM, 2), (EVALUATION, 2), (LOSS, 3), (NORM, 3))
    ]
    assert str(first_beyond(pairs)) == (
        "the loss of the evaluation after step 2 is 5.6, on the host 5.5: 1.8e-02 away, 1.0e-03 "
        "is allowed"
    )
    assert first_beyond(pairs[:2]) is None
    wrong = first_beyond(differences(run([6.0, float("nan"), 4.0], {}), host, bounds))
    assert wrong is not None
    assert (wrong.what, wrong.step) == (LOSS, 2)
