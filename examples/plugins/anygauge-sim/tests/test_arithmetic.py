"""Results are those of the host to the last bit; views are views; gradients arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def both(function: Any, *tensors: torch.Tensor) -> None:
    here = function(*tensors)
    there = function(*(each.to("sim") for each in tensors))
    assert there.device.type == "sim"
    assert torch.equal(there.cpu(), here)


X = torch.linspace(-2, 2, 24).reshape(4, 6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t() @ x,
        lambda x: torch.softmax(x, -1),
        lambda x: x.sum(0, keepdim=True),
        lambda x: x[1:, ::2].contiguous(),
        lambda x: x.reshape(2, 12).permute(1, 0).flatten(),
        lambda x: torch.cat([x, x], 1).chunk(3, 1)[1],
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x.topk(2).values,
        lambda x: x.to(torch.bfloat16).cumsum(0),
        lambda x: torch.nn.functional.pad(x, (1, 2)),
        lambda x: x.unfold(1, 2, 2).sum(-1),
        lambda x: x.masked_fill(x < 0, float("-inf")).logsumexp(-1),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x.sort(descending=True).indices,
        lambda x: torch.outer(x[0], x[1]).triu(),
        lambda x: x.clone().reshape(2, 3, 2, 2).transpose(0, 1).tril_(),
        lambda x: torch.nn.functional.layer_norm(x, (6,)),
    ],
)
def test_digits_are_the_hosts(function: Any) -> None:
    both(function, X)


def test_streams_and_events() -> None:
    stream = torch.Stream("sim")
    start, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    with stream:
        start.record()
        _ = torch.ones(100, 100, device="sim") @ torch.ones(100, 100, device="sim")
        end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert stream.query()


def test_saving_and_loading(tmp_path: Any) -> None:
    path = tmp_path / "tensor.pt"
    torch.save(torch.arange(3.0, device="sim"), path)
    assert torch.load(path).device.type == "sim"
    assert torch.load(path, map_location="cpu").tolist() == [0, 1, 2]
