"""Bytes in use, peaks, the capacity, and what is read before it was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def test_memory_is_counted_to_the_byte(sim: Any) -> None:
    before = sim.memory_allocated()
    held = torch.empty(1000, device="sim")
    assert sim.memory_allocated() - before == 4000
    view = held[10:20]
    del held
    assert sim.memory_allocated() - before == 4000, "a view keeps the whole storage"
    del view
    assert sim.memory_allocated() == before
    assert sim.max_memory_allocated() >= before + 4000
    sim.reset_peak_memory_stats()
    assert sim.max_memory_allocated() == before


def test_an_operation_takes_no_more_than_its_result(sim: Any) -> None:
    a = torch.ones(100, 100, device="sim")
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    b = a @ a
    assert sim.memory_allocated() - before == b.nbytes
    assert sim.max_memory_allocated() - before == b.nbytes


def test_what_was_never_written_is_no_number() -> None:
    assert torch.empty(5, device="sim").isnan().all().item()
    assert torch.empty(5, dtype=torch.bfloat16, device="sim").isnan().all().item()


def test_storage_that_is_resized_keeps_what_fits(sim: Any) -> None:
    tensor = torch.arange(4.0, device="sim")
    before = sim.memory_allocated()
    tensor.untyped_storage().resize_(0)
    assert sim.memory_allocated() == before - 16
    tensor.untyped_storage().resize_(16)
    tensor.copy_(torch.ones(4))
    tensor.resize_(6)
    assert tensor[:4].tolist() == [1, 1, 1, 1]
    assert sim.memory_allocated() == before + 8


@pytest.mark.parametrize("room", [0, 5, 10, 3], ids=["empty", "fits", "larger", "too small"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_an_out_tensor_gets_the_shape_of_the_result(room: int, sim: Any) -> None:
    def added(device: str) -> torch.Tensor:
        a, b = torch.arange(5.0, device=device), torch.ones(5, device=device)
        out = torch.empty(room, device=device)
        assert torch.add(a, b, out=out) is out
        return out

    here, there = added("cpu"), added("sim")
    assert torch.equal(there.cpu(), here) and there.stride() == here.stride()
    assert there.untyped_storage().nbytes() == here.untyped_storage().nbytes()
    assert there.untyped_storage().device.type == "sim"
    before = sim.memory_allocated()
    del there
    assert before - sim.memory_allocated() == here.untyped_storage().nbytes()


def test_an_out_tensor_of_another_shape_warns_as_on_the_host() -> None:
    a = torch.ones(5, device="sim")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(a, a, out=torch.empty(10, device="sim"))


def test_an_out_tensor_that_grows_stays_within_the_capacity(sim: Any) -> None:
    free, _ = sim.mem_get_info()
    held = torch.empty(free - 4096, dtype=torch.uint8, device="sim")
    a, out = torch.ones(8, 1, device="sim"), torch.empty(0, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.add(a, torch.ones(1, 500, device="sim"), out=out)
    del held


def test_an_out_tensor_that_is_a_view_leaves_what_lies_before_it() -> None:
    base = torch.zeros(4, device="sim")
    torch.add(torch.ones(6, device="sim"), 1, out=base[2:2])
    assert base.tolist() == [0, 0, 2, 2]


def test_a_tensor_that_is_set_shares_the_memory_of_the_other(sim: Any) -> None:
    a, b = torch.zeros(2, device="sim"), torch.arange(6.0, device="sim").view(2, 3)
    before = sim.memory_allocated()
    a.set_(b.t()[1:])
    assert sim.memory_allocated() == before - 8, "its own memory is free"
    assert a.tolist() == [[1, 4], [2, 5]] and a.is_set_to(b.t()[1:])
    a.fill_(9)
    assert b.tolist() == [[0, 9, 9], [3, 9, 9]]
    a.set_()
    assert a.tolist() == [] and a.untyped_storage().nbytes() == 0 and a.device.index == 0
    a.set_(b.untyped_storage())
    assert a.tolist() == [0, 9, 9, 3, 9, 9]


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.ones(2, dtype=torch.int64, device="sim"),
        lambda: torch.ones(2),
        lambda: torch.ones(2, device="sim:1"),
    ],
    ids=["type", "host", "card"],
)
def test_a_tensor_cannot_be_set_to_another_kind(other: Any) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(2, device="sim").set_(other())


def test_resizing_to_the_same_shape_keeps_the_strides() -> None:
    tensor = torch.arange(6.0, device="sim").view(2, 3).t()
    assert tensor.resize_(3, 2).tolist() == [[0, 3], [1, 4], [2, 5]]
