"""Results that are made again are what torch found the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from anygauge.planning.live import LiveBytes
from anygauge.planning.valueless import without_values
from torch import Tensor
from torch._subclasses import FakeTensor

from anygauge.planning import quick

aten = torch.ops.aten
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda a: a[1:3, ::2],
    "transpose": lambda a: a.t(),
    "view": lambda a: a.view(2, -1),
    "strided": lambda a: a.as_strided((2, 2), (1, 4), 3),
    "split": lambda a: a.split(2),
    "other type": lambda a: a.view(torch.int32),
    "matrix product": lambda a: a @ a.t(),
    "into": lambda a: torch.mm(a, a.t(), out=torch.empty(4, 4, device=a.device)),
    "in place": lambda a: a.detach().mul_(2),
    "cast": lambda a: a.to(torch.bfloat16),
    "the same": lambda a: a.to(torch.float32),
    "like": torch.zeros_like,
    "joined": lambda a: torch.cat([a, a], 1),
    "several": lambda a: a.max(1),
    "not a view": lambda a: aten._unsafe_view(a, [32]),
    "filled": lambda a: torch.full((3, 2), 1.5, device=a.device),
    "sum": lambda a: a.sum(),
}


@pytest.fixture(autouse=True)
def _nothing_learned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(quick, "_RECIPES", {})
    yield


def described(found: Any, given: Tensor) -> list[Any]:
    return [
        (
            type(one),
            one.shape,
            one.stride(),
            one.storage_offset(),
            one.dtype,
            one.device,
            one.requires_grad,
            one.untyped_storage().nbytes(),
            one.untyped_storage()._cdata == given.untyped_storage()._cdata,
            torch._C._dispatch_key_set(one),
        )
        for one in (found if isinstance(found, tuple | list) else (found,))
    ]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@torch.no_grad()
def test_what_is_made_again_is_what_was_found(operation: Callable[[Tensor], Any]) -> None:
    with without_values():
        given = torch.empty(4, 8)
        expected = described(operation(given), given)
    with without_values() as answers, LiveBytes("cpu") as live:
        live.answers = answers
        given = torch.empty(4, 8)
        first = described(operation(given), given)
        known = len(quick._RECIPES)
        again = described(operation(given), given)
    assert first == again == expected
    assert issubclass(first[0][0], FakeTensor)
    assert len(quick._RECIPES) == known  # nothing had to be found out again
    assert None not in quick._RECIPES.values()


def test_numbers_of_sizes_keep_their_values() -> None:
    with without_values() as answers, LiveBytes("cpu") as live:
        live.answers = answers
        sizes = [torch.tensor([size]).to(torch.int32).item() for size in (3, 4, 3)]
    assert sizes == [3, 4, 3]


def test_an_operation_that_changes_sizes_is_done_each_time() -> None:
    with without_values() as answers, LiveBytes("cpu") as live:
        live.answers = answers
        for _ in range(2):
            tensor = torch.empty(4)
            tensor.resize_(16)
            assert tensor.shape == (16,)
            assert tensor.untyped_storage().nbytes() == 64


def test_bytes_are_freed_when_the_last_view_is_gone() -> None:
    with without_values() as answers, LiveBytes("cpu") as live:
        live.answers = answers
        before = live.now("cpu")
        for _ in range(2):
            view = torch.empty(8, 8).t()[1:]
            assert live.now("cpu") - before == 256
            del view
            assert live.now("cpu") == before
