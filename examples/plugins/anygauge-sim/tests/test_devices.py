"""Tensors of two devices in one operation raise, as on real accelerators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

HOST = torch.ones(4)
MIXED: dict[str, Callable[[Any], Any]] = {
    "add": lambda t: t + HOST,
    "add in place": lambda t: t.add_(HOST),
    "product": lambda t: t.reshape(2, 2) @ HOST.reshape(2, 2),
    "cat": lambda t: torch.cat([t, HOST]),
    "stack": lambda t: torch.stack([HOST, t]),
    "where": lambda t: torch.where(t > 0, t, HOST),
    "embedding": lambda t: torch.nn.functional.embedding(torch.tensor([0, 1]), t.reshape(2, 2)),
    "out": lambda t: torch.add(t, t, out=torch.empty(4)),
    "linear": lambda t: torch.nn.functional.linear(t, HOST.reshape(1, 4)),
    "cross entropy": lambda t: torch.nn.functional.cross_entropy(
        t.reshape(2, 2), torch.tensor([0, 1])
    ),
    "a host's number in place": lambda t: torch.zeros(()).add_(t.sum()),
    "a host's number as out": lambda t: torch.sum(t, (0,), out=torch.empty(())),
    "a host's number in a written list": lambda t: torch._amp_foreach_non_finite_check_and_unscale_(
        [torch.zeros(())], t[0], t[1]
    ),
    "another card": lambda t: t + torch.ones(4, device="sim:1"),
    "index of another card": lambda t: t[torch.tensor([0], device="sim:1")],
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_raise(name: str) -> None:
    with pytest.raises(RuntimeError, match="device"):
        MIXED[name](torch.ones(4, device="sim"))


@pytest.mark.parametrize("way", ["numpy", "cuda"])
def test_what_needs_another_device_raises(way: str) -> None:
    with pytest.raises((RuntimeError, TypeError, AssertionError)):
        getattr(torch.ones(2, device="sim"), way)()


def test_numbers_and_host_indices_are_allowed() -> None:
    t = torch.arange(4.0, device="sim")
    one = torch.tensor(1.0)
    assert (t + one).tolist() == [1, 2, 3, 4]
    assert t.clone().mul_(one).tolist() == t.tolist()
    assert torch.add(t, one, out=torch.empty(4, device="sim")).tolist() == [1, 2, 3, 4]
    assert torch.where(t > 2, t, one).tolist() == [1, 1, 1, 3]
    assert torch.zeros(3).fill_(t[1]).tolist() == [1, 1, 1], "a copy, to wherever it is filled"
    assert t.clone().fill_(t[2]).tolist() == t.clone().fill_(2 * one).tolist() == [2, 2, 2, 2]
    assert (t.sum() / torch.tensor(2.0)).item() == 3, "both without dimensions"
    assert t[torch.tensor([2, 0])].tolist() == [2, 0]
    t[torch.tensor([1])] = 9.0
    assert t.tolist() == [0, 9, 2, 3]


def test_copies_between_host_and_cards_are_counted(sim: Any) -> None:
    there = torch.ones(100).to("sim")
    assert sim.counters()["host_to_card_bytes"] == 400
    there.to("cpu")
    assert sim.counters()["card_to_host_bytes"] == 400
    pageable, pinned = torch.empty(100), torch.empty(100, pin_memory=True)
    pinned.copy_(there, non_blocking=True)
    assert sim.counters()["card_to_host_copies"] == 2
    assert sim.counters()["host_waits"] == 1, "the card copies into pinned memory by itself"
    pageable.copy_(there, non_blocking=True)
    pinned.copy_(there)
    there[0].item()
    assert sim.counters()["card_to_host_copies"] == 5
    assert sim.counters()["host_waits"] == 4
    other = there.to("sim:1")
    assert other.device.index == 1
    assert sim.counters()["card_to_card_bytes"] == 400


def test_kernels_are_counted_by_name(sim: Any) -> None:
    a = torch.ones(4, 4, device="sim")
    sim.reset_counters()
    _ = a @ a
    _ = a.exp()
    counted = sim.counters()
    assert counted["kernels"] == 2
    assert set(counted["operations"]) == {"aten::mm", "aten::exp"}


def test_a_card_that_does_not_exist_is_named() -> None:
    with pytest.raises(RuntimeError, match="sim:2 does not exist"):
        torch.ones(1, device="sim:2")
