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


def test_memory_ends_at_the_capacity(sim: Any) -> None:
    free, total = sim.mem_get_info()
    assert total == 2**28 and free <= total
    with pytest.raises(torch.OutOfMemoryError, match=r"card 0 is out of memory: .* in use"):
        torch.empty(total + 1, dtype=torch.uint8, device="sim")
    assert torch.ones(2, device="sim").sum().item() == 2


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


def test_pinned_memory_belongs_to_the_host() -> None:
    pinned = torch.arange(3.0).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and pinned.device.type == "cpu"
    assert not torch.arange(3.0).is_pinned()
    assert pinned.to("sim", non_blocking=True).tolist() == [0, 1, 2]
