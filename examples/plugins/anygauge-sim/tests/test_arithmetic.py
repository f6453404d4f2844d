"""Results are those of the host to the last bit; views are views; gradients arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


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


def test_writing_through_a_view_changes_the_original() -> None:
    t = torch.zeros(3, 4, device="sim")
    t[1].fill_(2)
    t.view(-1)[0] = 5
    t.diagonal().add_(1)
    assert t.cpu().tolist() == [[6, 0, 0, 0], [2, 3, 2, 2], [0, 0, 1, 0]]


def test_results_given_an_empty_tensor_make_it_grow() -> None:
    out = torch.empty(0, device="sim")
    torch.add(torch.ones(3, device="sim"), 1, out=out)
    assert out.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_block_has_the_hosts_gradients(dtype: torch.dtype) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 3))
        block = block.to(device, dtype)
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
        for _ in range(3):
            loss = nn.functional.cross_entropy(
                block(X.to(device, dtype)).float(), torch.tensor([0, 1, 2, 0], device=device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().cpu() for p in block.parameters()]

    for here, there in zip(trained("cpu"), trained("sim"), strict=True):
        assert torch.equal(here, there)


def test_autocast_computes_in_the_lower_type() -> None:
    a = torch.ones(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert a.sum().dtype == torch.float32
    assert (a @ a).dtype == torch.float32


def test_random_numbers_are_the_cards_own(sim: Any) -> None:
    sim.manual_seed(3)
    host = torch.get_rng_state()
    first = torch.rand(5, device="sim"), torch.dropout(torch.ones(50, device="sim"), 0.5, True)
    assert torch.equal(torch.get_rng_state(), host), "the host's generator was left alone"
    state = sim.get_rng_state()
    sim.manual_seed(3)
    again = torch.rand(5, device="sim"), torch.dropout(torch.ones(50, device="sim"), 0.5, True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(sim.get_rng_state(), state)
    generator = torch.Generator("sim").manual_seed(9)
    one = torch.randn(4, device="sim", generator=generator)
    generator.manual_seed(9)
    assert torch.equal(one, torch.randn(4, device="sim", generator=generator))


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
