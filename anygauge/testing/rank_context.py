"""What checks on several ranks share: values that show a mistake, and how results are compared.

Values are functions of the rank and the place in the tensor, so each rank knows what all have
without a message. Sums of `values` and of `integers` lose nothing in any order, so they must be
right to the last bit. The check notes a wrong result and runs to its end: a rank that left it
early would leave the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import Backend
from anygauge.testing.bounds import compare, on_host
from anygauge.testing.check import ConformanceCheck, SkipCheck, check, sharding_spec

BITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
"""Significant bits of a type, with the one that is not stored; its unit roundoff is 2**-bits."""
WHOLE = {torch.int64: 2**54, torch.int32: 2**28, torch.uint8: 60}
"""Largest integers that are tried: float64, float32 and a signed byte cannot hold their sums."""
SCALE = 2.0**-7
"""Of exact values, so that most are fractions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """One of several ranks, with its device.

    Attributes:
        complaints: what was wrong so far in the check that runs.
        kept: what checks share, such as groups.
    """

    backend: Backend
    device: torch.device
    rank: int
    world_size: int
    complaints: list[str] = field(default_factory=list)
    kept: dict[Any, Any] = field(default_factory=dict)

    def ask(self, check: ConformanceCheck) -> None:
        """Fail with the check's first complaint."""
        self.complaints.clear()
        try:
            check.function(self)
        except Exception as error:
            # What went wrong first is the cause of what was raised later.
            if not self.complaints:
                raise
            raise AssertionError(self.complaints[0]) from error
        assert not self.complaints, self.complaints[0]

    @property
    def collectives(self) -> Any:
        """The backend's."""
        return self.backend.collectives

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.world_size)

    def values(self, size: int, dtype: torch.dtype, rank: int, salt: int = 0) -> Tensor:
        """A rank's values, in float64 on the host; those of all ranks have an exact sum."""
        span = 2 ** BITS[dtype] >> (self.world_size - 1).bit_length()
        return _draw(size, rank, salt, span).double() * SCALE

    def integers(self, size: int, dtype: torch.dtype, rank: int, salt: int = 3) -> Tensor:
        """A rank's integers in int64; odd ones, of which no shorter type holds the sum."""
        found = _draw(size, rank, salt, WHOLE[dtype] // 2) * 2 + 1
        return found if dtype.is_signed else found.abs() % (256 // self.world_size)

    def to_device(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Values of the host on this device, in a memory of their own."""
        return values.to(dtype, copy=True).to(self.device)

    def expect(self, condition: bool, complaint: str) -> None:
        """Note the complaint unless the condition holds."""
        if not condition:
            self.complaints.append(complaint)

    def match(self, found: Tensor, wanted: Tensor, what: str, within: Tensor | float = 0.0) -> None:
        """Note unless `found` holds the values `wanted`, float64 or int64.

        Args:
            within: largest error, of each element or of all.
        """
        got = on_host(found)
        try:
            got = got if got.dtype.is_floating_point else got.to(wanted.dtype)
            compare(got, wanted, torch.as_tensor(within), what)
        except AssertionError as wrong:
            self.complaints.append(str(wrong))

    def attempt(self, action: Callable[[], Any], what: str, ranks: Sequence[int]) -> str:
        """Do what a library may refuse; all ranks of `ranks` must refuse it, or none.

        Args:
            ranks: those that are; the others come along.

        Returns:
            What was raised, in words; empty if it was done.
        """
        refused = ""
        try:
            action()
            self.backend.placement.synchronize()
        except Exception as error:
            said = str(error).strip() or "no message"
            refused = f"{type(error).__name__}: {said.splitlines()[0]}"
        everyone = self.collectives.gather_objects(refused)
        some = [rank for rank in ranks if everyone[rank]]
        reason = next(filter(None, everyone), "")
        together = len(some) in (0, len(ranks))
        self.expect(together, f"{what}: ranks {some} refuse it, the others do not: {reason}")
        return reason

    def asked_by_engines(self) -> None:
        """Raises: SkipCheck: this backend does not run the engine that is tried most."""
        engine = sharding_spec().engine
        if engine in self.backend.unsupported_engines:
            raise SkipCheck(f"it cannot run {engine}: {self.backend.unsupported_engines[engine]}")


check_on_ranks = functools.partial(check, part="ranks", capability="collectives")
"""Decorator: register a check of the part ``ranks``."""


def _draw(size: int, rank: int, salt: int, span: int) -> Tensor:
    """Integers from -span to span, in int64."""
    generator = torch.Generator().manual_seed(salt * 64 + rank)
    return torch.randint(-span, span + 1, (size,), generator=generator)
