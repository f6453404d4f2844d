"""Rates of a card from how long whole steps took: those that explain all of them best."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anygauge.planning.work import Work

AT_BEST = 0.1
"""Of the cost that was measured directly, what is believed of a cost at least."""
FEED, COPY, ISSUE, CALL, EXCHANGE = "feed", "copy", "issue", "call", "exchange"


def explained(steps: Sequence[tuple[Work, float]], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Rates with which the planned seconds of steps miss the measured ones least.

    The sum of the squares of relative errors is least, while no rate is better than ten times what
    was measured directly.

    Args:
        steps: work, and the seconds it took.
        measured: directly, as `anygauge.interface.Card` names it: ``matmul``, ``copy``, ``issue``,
            and with several ranks ``exchange`` and ``call``.

    Returns:
        As `measured`, with ``feed`` and ``attention``.
    """
    products = [
        (name, kind)
        for name, of in _PRODUCTS.items()
        for kind in measured["matmul"]
        if any(getattr(work, of).get(kind) for work, _ in steps)
    ]
    costs: dict[Any, float] = {one: 1 / measured["matmul"][one[1]] for one in products}
    costs |= {FEED: 1 / measured[COPY], COPY: 1 / measured[COPY], ISSUE: measured[ISSUE]}
    if CALL in measured:
        costs |= {CALL: measured[CALL], EXCHANGE: 1 / measured[EXCHANGE]}
    best = torch.tensor([AT_BEST * cost for cost in costs.values()], dtype=torch.float64)
    shares = torch.tensor(
        [[figures[name] / took for name in costs] for figures, took in _figured(steps, products)],
        dtype=torch.float64,
    )
    found = best + _least_squares(shares, 1 - shares @ best)
    by_name = dict(zip(costs, found.tolist(), strict=True))
    rates: dict[str, Any] = {"matmul": dict(measured["matmul"]), "attention": {}}
    for name, kind in products:
        rates[name][kind] = 1 / by_name.pop((name, kind))
    return {**rates, **{k: v if k in (ISSUE, CALL) else 1 / v for k, v in by_name.items()}}


_PRODUCTS = {"matmul": "flops", "attention": "attention"}
"""Rates by type -> what they are of in `Work`."""


def _figured(
    steps: Sequence[tuple[Work, float]], products: Sequence[tuple[str, str]]
) -> list[tuple[dict[Any, float], float]]:
    """What each cost is multiplied with, and the seconds.

    Args:
        products: rates and types of what was multiplied.
    """
    found = []
    for work, took in steps:
        figures: dict[Any, float] = {
            (name, kind): getattr(work, _PRODUCTS[name]).get(kind, 0.0) for name, kind in products
        }
        figures |= {FEED: work.matrix_bytes, COPY: work.other_bytes, ISSUE: work.operations}
        figures[CALL] = sum(one.times for one in work.traffic)
        figures[EXCHANGE] = sum(one.wire for one in work.traffic)
        found.append((figures, took))
    return found


def _least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """The x >= 0, (columns,), for which matrix @ x is nearest to `right`; few columns."""
    columns = matrix.shape[1]
    best = torch.zeros(columns, dtype=matrix.dtype)
    least = float(right.square().sum())
    for count in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), count)):
            part = torch.linalg.lstsq(matrix[:, chosen], right, driver="gelsd").solution
            missed = float((matrix[:, chosen] @ part - right).square().sum())
            if (part >= 0).all() and missed < least:
                least = missed
                best = torch.zeros_like(best)
                best[chosen] = part
    return best
