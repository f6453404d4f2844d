"""What checks on several ranks share: values that show a mistake, and how results are compared.

Values are functions of the rank and the place in the tensor, so that each rank knows what all have
without a message. Sums of those of `exact` and `whole` lose nothing in any order, so they must be
right to the last bit. A result that is wrong is noted, and the check runs to its end: a rank that
left it early would leave the others waiting.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anygauge.interface import HOST_DEVICE, Backend
from anygauge.testing.check import NotAsked, check, sharding

BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
"""Significant bits of a type, with the one that is not stored; its unit roundoff is 2**-bits."""
WHOLE = {torch.int64: 2**54, torch.int32: 2**28, torch.uint8: 60}
"""Largest integers that are tried: float64, float32 and a signed byte cannot hold their sums."""
SCALE = 2.0**-7
"""Of exact values, so that most are fractions."""
LARGE = 2**21 + 5
"""Elements beyond the buffers of any library: 8 MiB of float32 and a little more."""
PERIOD = 8191
"""Elements after which values repeat."""
GUARD = 3
"""Elements before and after a view: its start is not aligned, and 16 does not divide its size."""
Shape = Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """One of several ranks, each with its device.

    Attributes:
        complaints: what was wrong so far in the check that runs.
        kept: what checks share, such as groups.
    """

    backend: Backend
    device: torch.device
    rank: int
    world_size: int
    complaints: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def collectives(self) -> Any:
        """The backend's."""
        return self.backend.collectives

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.world_size)

    def dtypes(self) -> list[torch.dtype]:
        """Types that a reduction must serve here."""
        found = [torch.float32]
        if self.backend.support("bfloat16"):
            found.append(torch.bfloat16)
        if self.backend.support("float16"):
            found.append(torch.float16)
        return found

    # -- values -------------------------------------------------------------------------------

    def exact(self, shape: Shape, dtype: torch.dtype, rank: int, salt: int = 0) -> torch.Tensor:
        """A rank's values, in float64 on the host; those of all ranks have an exact sum."""
        span = 2 ** BITS[dtype] >> (self.world_size - 1).bit_length()
        return _drawn(shape, rank, salt, span).double() * SCALE

    def fractions(self, shape: Shape, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """A rank's values in float64, rounded to the type: each sum of them is rounded, too."""
        return (_drawn(shape, rank, 7, 2**12).double() / 3).to(dtype).double()

    def whole(self, shape: Shape, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """A rank's integers in int64; odd ones, of which no shorter type holds the sum."""
        span = WHOLE[dtype]
        found = _drawn(shape, rank, 3, span // 2) * 2 + 1
        return found if dtype.is_signed else found.abs() % (256 // self.world_size)

    def put(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Values of the host on this device, in a memory of their own."""
        return values.to(dtype, copy=True).to(self.device)

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """A tensor for a result; it holds what no result is."""
        # NaN, where there is one: what is left of it cannot pass for a result.
        unlike = math.nan if dtype.is_floating_point else 77
        if dtype is torch.bool:
            unlike = True
        return self.put(torch.full(tuple(shape), unlike), dtype)

    def guarded(self, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(memory, a contiguous view into it that begins at an odd place, with more behind it)."""
        size = math.prod(shape)
        memory = self.put(torch.full((size + 2 * GUARD,), 5.0), dtype)
        return memory, memory[GUARD : GUARD + size].view(tuple(shape))

    # -- results ------------------------------------------------------------------------------

    def hold(self, condition: bool, complaint: str) -> None:
        """Note the complaint unless the condition holds."""
        if not condition:
            self.complaints.append(complaint)

    def same(
        self,
        found: torch.Tensor,
        wanted: torch.Tensor,
        what: str,
        *,
        within: torch.Tensor | None = None,
    ) -> None:
        """Note unless `found`, on the device, holds the values `wanted`, float64 or int64.

        Args:
            within: largest error of each element; without it none may have any.
        """
        if found.device.type != self.device.type:
            self.complaints.append(f"{what}: the result is on {found.device}")
            return
        got = found.detach().to(HOST_DEVICE).to(wanted.dtype)
        if got.shape != wanted.shape:
            self.complaints.append(f"{what}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}")
            return
        fits = (got == wanted) | ((got != got) & (wanted != wanted))
        if within is not None:
            fits |= (got - wanted).abs() <= within
        if bool(fits.all()):
            return
        got, wanted, wrong = got.reshape(-1), wanted.reshape(-1), (~fits).reshape(-1)
        first = int(wrong.nonzero()[0])
        self.complaints.append(
            f"{what}, {tuple(found.shape)} of {found.dtype}: {int(wrong.sum())} of "
            f"{wanted.numel()} elements are wrong; number {first} should be "
            f"{wanted[first].item()!r} and is {got[first].item()!r}"
        )

    def unharmed(self, memory: torch.Tensor, what: str) -> None:
        """Note unless what lies around the view of `guarded` is as it was."""
        found = memory.to(HOST_DEVICE)
        around = torch.cat([found[:GUARD], found[-GUARD:]]).tolist()
        self.hold(
            around == [5.0] * (2 * GUARD), f"{what} wrote beside its tensor: {around}, not all 5"
        )

    def attempt(self, action: Callable[[], Any], what: str) -> str:
        """Do what a library may refuse; all ranks must refuse it, or none.

        Returns:
            What it raised, in words; empty if it did it.
        """
        refused = ""
        try:
            action()
            self.backend.placement.synchronize()
        except Exception as error:
            refused = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        everyone = self.collectives.gather_objects(refused)
        some = [rank for rank in self.ranks if everyone[rank]]
        reason = next(filter(None, everyone), "")
        self.hold(
            len(some) in (0, self.world_size),
            f"{what}: ranks {some} refuse it, the others do not: {reason}",
        )
        return refused

    def required_or_not_asked(self, action: Callable[[], Any], what: str) -> None:
        """The same for what not every library has.

        Raises:
            NotAsked: it has not.
        """
        refused = self.attempt(action, what)
        if refused:
            raise NotAsked(f"the library refuses {what}: {refused}")

    def asked_by_engines(self) -> None:
        """Raises: NotAsked: this backend does not run the engine that is tried most."""
        engine = sharding().engine
        if engine in self.backend.unsupported_engines:
            raise NotAsked(f"it cannot run {engine}: {self.backend.unsupported_engines[engine]}")


def _drawn(shape: Shape, rank: int, salt: int, span: int) -> torch.Tensor:
    """Integers from -span to span that look like drawn ones, in int64."""
    count = math.prod(shape)
    place = torch.arange(min(count, PERIOD))
    number = (place * 1_103_515_245 + rank * 123_456_791 + salt * 987_654_323 + 12_345) % (
        2**31 - 1
    )
    number = number * 48_271 % (2**31 - 1)
    wide = number * 2**24 + number * 69_621 % (2**31 - 1)
    found = wide % (2 * span + 1) - span
    # Again and again, which takes less time: libraries cut messages at even numbers.
    return found.repeat(-(-count // PERIOD))[:count].view(tuple(shape))


def total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum."""
    return torch.stack(list(values)).sum(0)


def bound(values: Sequence[torch.Tensor], dtype: torch.dtype, roundings: int) -> torch.Tensor:
    """Largest error of a sum of the values in a type whose partial results are rounded that often.

    |error| <= roundings * u * the sum of magnitudes, u the type's unit roundoff; the 1.1 covers
    products of roundings.
    """
    magnitude = torch.stack([each.abs() for each in values]).sum(0)
    return 1.1 * roundings * 2.0 ** -BITS[dtype] * magnitude


def limits_of(group: Any) -> Iterator[tuple[str, float]]:
    """(library, how many seconds its collectives may wait) of a group, as far as it can be read."""
    for kind in group._device_types:
        try:
            library = group._get_backend(kind)
        except RuntimeError:  # named, but never made: no collective of it can hang
            continue
        limit = getattr(getattr(library, "options", None), "_timeout", None)
        if isinstance(limit, datetime.timedelta):
            yield f"{library.name()} for {kind.type}", limit.total_seconds()


def check_on_ranks(
    title: str, *, means: str
) -> Callable[[Callable[[Together], None]], Callable[[Together], None]]:
    """Decorator: a check of the part ``ranks``, which fails with the first complaint."""

    def register(function: Callable[[Together], None]) -> Callable[[Together], None]:
        @functools.wraps(function)
        def asked(on: Together) -> None:
            on.complaints.clear()
            try:
                function(on)
            except Exception as error:
                # What went wrong first is the cause of what was raised later.
                if not on.complaints:
                    raise
                raise AssertionError(on.complaints[0]) from error
            assert not on.complaints, on.complaints[0]

        return check(title, part="ranks", capability="collectives", means=means)(asked)

    return register
