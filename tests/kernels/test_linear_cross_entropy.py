"""The loss of chunks of logits against torch's of all of them: value, gradients, memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge_kernels.linear_cross_entropy import linear_cross_entropy
from tests.helpers.dispatched_operations import VIEW, Operations

ROWS, WIDTH, CLASSES = 37, 16, 51


def inputs(
    dtype: torch.dtype = torch.float64, *, bias: bool = False, low_rank: bool = False
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    targets = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    targets[::5] = -100
    return {
        "hidden": normal(ROWS, WIDTH),
        "weight": normal(CLASSES, WIDTH),
        "targets": targets,
        "bias": normal(CLASSES) if bias else None,
        "low_rank": (normal(ROWS, 4), normal(CLASSES, 4)) if low_rank else None,
    }


def held(given: Any, *, softcap: float | None, scale: float) -> Tensor:
    """The same by torch, with all logits."""
    logits = nn.functional.linear(given["hidden"], given["weight"], given["bias"])
    if given["low_rank"] is not None:
        logits = logits + given["low_rank"][0] @ given["low_rank"][1].t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return nn.functional.cross_entropy(logits, given["targets"], reduction="sum")


def gradients(loss: Tensor, given: Any) -> list[Tensor]:
    wanted = [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]
    return list(torch.autograd.grad(loss * 0.7, [*wanted, *(given["low_rank"] or ())]))


@pytest.mark.parametrize(
    ("softcap", "scale", "bias", "low_rank", "skip"),
    list(itertools.product((None, 5.0), (1.0, 0.25), *[(False, True)] * 3)),
)
@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_value_and_gradients_are_torchs(
    softcap: float | None, scale: float, bias: bool, low_rank: bool, skip: bool, rows: int
) -> None:
    given: Any = inputs(bias=bias, low_rank=low_rank)
    loss = linear_cross_entropy(
        **given, softcap=softcap, scale=scale, skip_ignored=skip, chunk_bytes=rows * CLASSES * 4
    )
    wanted = held(given, softcap=softcap, scale=scale)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    for found, exact in zip(gradients(loss, given), gradients(wanted, given), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_lower_types_are_as_exact_as_with_all_logits(dtype: str, tolerance: float) -> None:
    given: Any = inputs(getattr(torch, dtype))
    exact = dict(given)
    for name in ("hidden", "weight"):
        exact[name] = given[name].detach().double().requires_grad_()
    wanted = held(exact, softcap=None, scale=1.0)
    loss = linear_cross_entropy(**given, chunk_bytes=10 * CLASSES * 4)
    plain = held(given, softcap=None, scale=1.0)
    assert loss.dtype is torch.float32
    assert abs(loss.item() - wanted.item()) <= max(
        1.5 * abs(plain.item() - wanted.item()), 1e-6 * wanted.item()
    )
    for found, its, true in zip(
        gradients(loss, given), gradients(plain, given), gradients(wanted, exact), strict=True
    ):
        largest = float(true.abs().max())
        error, theirs = (float((g.double() - true).abs().max()) / largest for g in (found, its))
        assert error <= max(1.5 * theirs, tolerance)


def test_float16_keeps_the_many_small_probabilities() -> None:
    classes = 50_000
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float16, requires_grad=True)
    # One class takes all but a share of 2e-8 of each of the others, which together are 1e-3.
    weight = torch.zeros(classes, 2, dtype=torch.float16)
    weight[0, 0] = 17.7
    weight[1:, 1] = 1.0
    targets = torch.tensor([0])
    loss = linear_cross_entropy(hidden, weight, targets)
    (found,) = torch.autograd.grad(loss * 64, hidden)
    exact = hidden.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(
        64 * nn.functional.cross_entropy(exact @ weight.double().t(), targets), exact
    )
    assert float(true[0, 1]) > 0.05
    torch.testing.assert_close(found.double(), true, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(("factor", "rtol", "atol"), [(1e-3, 1e-2, 1e-6), (3e-5, 2e-2, 1e-7)])
def test_a_factor_that_float16_cannot_hold_is_not_lost(
    factor: float, rtol: float, atol: float
) -> None:
    """3e-5 / 1024 would be nothing in float16."""
    given = inputs(torch.float16)
    loss = linear_cross_entropy(**given, chunk_bytes=10 * CLASSES * 4)
    (plain,) = torch.autograd.grad(loss, given["hidden"], retain_graph=True)
    (found,) = torch.autograd.grad(loss * factor, given["hidden"])
    torch.testing.assert_close(found.float(), plain.float() * factor, rtol=rtol, atol=atol)


def test_weights_gradients_of_float16_are_summed_in_float32() -> None:
    hidden = torch.full((4096, 4), 60.0, dtype=torch.float16)
    weight = torch.zeros(3, 4, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.long)
    # The sum over tokens, 60 * 4096 * 2 / 3, is beyond float16; what is asked for is not.
    loss = linear_cross_entropy(hidden, weight, targets)
    (found,) = torch.autograd.grad(loss / 4096, weight)
    assert torch.allclose(found[0].float(), torch.tensor(-40.0), rtol=2e-3)


def test_one_factor_for_all_gradients_is_not_rounded_to_bfloat16() -> None:
    given = inputs(torch.bfloat16)
    loss = linear_cross_entropy(**given)
    (one,) = torch.autograd.grad(loss, given["hidden"], retain_graph=True)
    factor = 1.00195  # halfway between two numbers of bfloat16
    (found,) = torch.autograd.grad(loss * factor, given["hidden"])
    assert torch.equal(found, (one.float() * torch.tensor(factor)).bfloat16())


def test_a_trained_layer_as_wide_as_there_are_tokens_is_chunked_too() -> None:
    rows, width, classes = 40, 64, 500
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    with LargestTensor() as seen:
        loss = linear_cross_entropy(hidden, weight, torch.arange(rows), chunk_bytes=4 * 2 * classes)
        loss.backward()
    # Logits of four chunks; the weight's own gradient is the largest.
    assert seen.logits(classes) == 4 * 2
    with torch.no_grad(), LargestTensor() as unlearned:
        linear_cross_entropy(hidden, weight, torch.arange(rows), chunk_bytes=4 * 2 * classes)
    assert unlearned.logits(classes) == 2


def test_nothing_supervised_is_zero_with_a_gradient() -> None:
    given: Any = inputs()
    given["targets"] = torch.full((ROWS,), -100)
    for skip in (False, True):
        loss = linear_cross_entropy(**given, skip_ignored=skip)
        assert float(loss) == 0
        assert all(float(g.abs().sum()) == 0 for g in gradients(loss, given))


class LargestTensor(TorchDispatchMode):
    """The largest tensor that any operation returned, in elements; and products by the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.products = 0
        self._shapes: set[tuple[int, ...]] = set()

    def logits(self, classes: int) -> int:
        """Most rows of a tensor with so many columns, but for the weight on its side (64)."""
        wide = {shape[0] for shape in self._shapes if shape[1:] == (classes,)}
        return max(wide - {64})

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        self.products += function.overloadpacket in products
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
                self._shapes.add(tuple(each.shape))
        return result


@pytest.mark.parametrize(("trained", "products"), [(False, 2), (True, 3)])
def test_no_more_than_a_chunk_of_logits_is_held(trained: bool, products: int) -> None:
    rows, width, classes, chunk = 256, 4, 1000, 32
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=trained)
    targets = torch.arange(rows)
    with LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, targets, chunk_bytes=4 * chunk * classes).backward()
    assert seen.elements == chunk * classes
    # Logits, gradient of the hidden state, of the weight: none is computed twice.
    assert seen.products == products * rows // chunk
    with torch.no_grad(), LargestTensor() as unlearned:
        linear_cross_entropy(hidden, weight, targets, chunk_bytes=4 * chunk * classes)
    assert unlearned.products == rows // chunk


def test_rows_that_do_not_count_are_never_computed() -> None:
    given: Any = inputs()
    with LargestTensor() as seen:
        linear_cross_entropy(**given, skip_ignored=True)
    counted = int((given["targets"] != -100).sum())
    assert seen.elements == counted * CLASSES


CASES = [
    {},
    {"trained": True, "bias": True},
    {"low_rank": True, "dtype": torch.bfloat16},
    {"learns": False},
    {"softcap": 5.0, "scale": 0.5},
]


def of_chunks(
    count: int,
    *,
    trained: bool = False,
    learns: bool = True,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    low_rank: bool = False,
    **options: Any,
) -> Operations:
    """What a loss of chunks of 8 rows dispatches where each new graph is compiled.

    Loss and gradients are those of chunks that are views.
    """
    width, classes = 16, 40
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, weight = normal(count, width), normal(classes, width)
    targets = torch.randint(0, classes, (count,), generator=generator)
    targets[::3] = -100
    given = (hidden.requires_grad_(learns), weight.requires_grad_(trained), targets)
    options["bias"] = normal(classes).requires_grad_(trained) if bias else None
    options["low_rank"] = (
        (normal(count, 4).requires_grad_(), normal(classes, 4).requires_grad_())
        if low_rank
        else None
    )
    bytes_of_one = 4 * classes
    with Operations() as seen:
        loss = linear_cross_entropy(
            *given, mark_step=seen.mark_step, chunk_bytes=bytes_of_one, **options
        )
    with_views = linear_cross_entropy(*given, chunk_bytes=3 * bytes_of_one, **options)
    torch.testing.assert_close(loss, with_views)
    if learns:
        learnt = [given[0], *(options["low_rank"] or ()), *([given[1]] if trained else [])]
        for found, wanted in zip(
            torch.autograd.grad(loss, learnt), torch.autograd.grad(with_views, learnt), strict=True
        ):
            near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
            torch.testing.assert_close(found, wanted, **near)
    return seen


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [32, 29])
def test_one_graph_serves_all_chunks(case: dict[str, Any], count: int) -> None:
    seen = of_chunks(count, **case)
    before, *chunks, after = seen.graphs
    assert len(chunks) == 4
    assert all(chunk == chunks[0] for chunk in chunks), "each chunk would be compiled"
    assert not any(name.startswith(VIEW) for name, _ in chunks[0])
    assert max(len(before), len(after)) < len(chunks[0]), "all is in the first chunk, or the last"


def test_the_last_chunk_is_filled_up_with_rows_that_do_not_count() -> None:
    even, uneven = (of_chunks(count).graphs[1] for count in (32, 29))
    products = [[args for name, args in chunk if name == "aten::mm"] for chunk in (even, uneven)]
    assert products[0] == products[1]


@pytest.mark.parametrize("graphs", [False, True])
def test_no_product_writes_into_a_view(graphs: bool) -> None:
    """A lazy device may lose what an operation's `out` is a view of."""
    seen = Operations()
    hidden = torch.randn(20, 8, requires_grad=True)
    weight = torch.randn(30, 8, requires_grad=True)
    low = torch.randn(20, 2, requires_grad=True), torch.randn(30, 2, requires_grad=True)
    with seen:
        linear_cross_entropy(
            hidden,
            weight,
            torch.arange(20),
            low_rank=low,
            chunk_bytes=4 * 30 * 6,
            mark_step=seen.mark_step if graphs else None,
        )
    names = [name for graph in seen.graphs for name, _ in graph]
    assert "aten::mm" in names
    assert not any(name.endswith(("out", "_out")) for name in names)


def test_targets_are_subtracted_without_a_scattered_sum() -> None:
    """Its deterministic form costs a sort on some devices."""
    with Operations() as seen:
        linear_cross_entropy(**inputs())
    assert not seen.names() & {"aten::scatter_add_", "aten::scatter_add", "aten::index_put_"}
    assert "aten::scatter_" in seen.names()
