"""Descriptions of cards, and the reader of the TOML files that they stand in.

Cards come with the backend that drives them. Each figure stands beside its source, and what nobody
has published is left out::

    [card.mine]
    names = ["Maker Mine 80GB"]
    memory = ["79.1 GiB", "torch's total on such a card"]
    bandwidth = ["3.35 TB/s", "the maker's data sheet"]
    flops.bfloat16 = ["989 TFLOPS", "the same: 1,979 with sparsity, halved"]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from anygauge.util.errors import UsageError
from anygauge.util.section import Flag
from anygauge.util.text import did_you_mean

__all__ = ["CARD_FIGURES", "FLOPS_TYPES", "Card", "Rates", "read_cards"]

FLOPS_TYPES = ("float32", "tf32", "bfloat16", "float16", "float8", "int8")
BY_TYPE = ("flops", "matmul")
"""Rates of a card that have a figure for each type."""
THIS_MACHINE = "this machine"
"""Stands for a figure that `BackendSpec.this_machine` gives."""
_OTHERS = ("names", "backend", "card", "shared_memory", "ranks", *BY_TYPE)
"""Keys of a file that are no figures; what else a description has is set by its reader."""

_BYTES = {
    **{f"{p}B": 1000.0**n for n, p in enumerate(("", "k", "M", "G", "T", "P"))},
    **{f"{p}iB": 1024.0 ** (n + 1) for n, p in enumerate("KMGTP")},
}
_RATES = {
    **{f"{unit}/s": size for unit, size in _BYTES.items()},
    **{f"{p}b/s": 1000.0 ** (n + 1) / 8 for n, p in enumerate("kMGTP")},
}
_FLOPS = {"GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]+)?)\s*(\S+)")


def figure(
    units: Mapping[str, float], *, whole: bool = False, may_be_0: bool = False, asked: bool = True
) -> PlainValidator:
    """Reads a figure in one of these units, or a plain number where there are none.

    Args:
        asked: it may be left to the machine at hand, and is then None.
    """

    def read(value: Any) -> float | int | None:
        if asked and units and value == THIS_MACHINE:
            return None
        if not units:
            plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not plain or (whole and value % 1):
                raise _bad_figure(value, f"{'a whole' if whole else 'a'} number, without quotes")
            number = float(value)
        else:
            found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
            if found is None or found[2] not in units:
                raise _bad_figure(value, f"a number and its unit in quotes, of {', '.join(units)}")
            number = float(found[1]) * units[found[2]]
        if not (0 <= number < 1e18) or (number == 0 and not may_be_0):
            raise _bad_figure(value, "a number above 0")
        return int(number) if whole else number

    return PlainValidator(read)


def _count(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= 1024):
        raise _bad_figure(text, "a number of ranks, 1 to 1024: [card.mine.ranks.2]")
    return int(text)


def _bad_figure(value: Any, valid: str) -> PydanticCustomError:
    return PydanticCustomError("figure", "{valid}", {"value": value, "valid": valid})


Bytes = Annotated[int | None, figure(_BYTES, whole=True)]
Rate = Annotated[float | None, figure(_RATES)]
Link = Annotated[float | None, figure(_RATES, may_be_0=True)]
Number = Annotated[int | None, figure({}, whole=True)]
_Time = Annotated[float | None, figure(_SECONDS)]
_ByType = Mapping[str, Annotated[float, figure(_FLOPS, asked=False)]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a card, or each of several ranks that share one, was measured to reach.

    Attributes:
        copy: what large copies within its memory read and write, bytes per second.
        exchange: what leaves each card where all of a machine gather large tensors, bytes per
            second.
        call: what a collective takes that sends next to nothing, seconds.
        issue: what an operation takes its host, in seconds, beside what it computes and moves.
        matmul: type, such as ``bfloat16``, -> what large matrix products reach, operations per
            second.
    """

    copy: Rate = None
    exchange: Rate = None
    call: _Time = None
    issue: _Time = None
    matmul: _ByType = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card(Rates):
    """One device as a process sees it. A figure that nobody has published is None.

    Attributes:
        name: what users write, such as ``h100``.
        names: other names it goes by; those of its driver are written as the driver does.
        backend: the backend that drives it; "" where there is none.
        shared_memory: its memory is the host's, and all cards of a machine share it.
        memory: bytes that a process can have of it at most, its own context included: the total
            that torch reports, which is less than what is printed on the card.
        reserved: bytes of `memory` that its context and libraries take before any tensor.
        bandwidth: of its memory, bytes per second.
        link: to the other cards of its machine, bytes per second, one direction, all links of one
            card together; 0 where cards cannot reach each other.
        host_link: to the memory of its host, bytes per second, one direction.
        flops: type -> dense peak, operations per second, without sparsity; ``float32`` without any
            shorter type inside.
        ranks: ranks of a machine -> what each reaches where so many share it.
        sources: figure -> where it is from; ``flops.bfloat16`` for one of `flops`, and so `matmul`.
        origin: the plugin or file that describes it.
    """

    name: str
    names: tuple[str, ...] = ()
    backend: str = ""
    shared_memory: Flag = False
    memory: Bytes = None
    reserved: Annotated[int | None, figure(_BYTES, whole=True, may_be_0=True)] = None
    bandwidth: Rate = None
    link: Link = None
    host_link: Rate = None
    flops: _ByType = field(default_factory=dict)
    ranks: Mapping[Annotated[int, PlainValidator(_count)], Rates] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""

    @property
    def to_measure(self) -> tuple[str, ...]:
        """Figures that the machine at hand gives, by `BackendSpec.this_machine`."""
        return tuple(
            name for name in CARD_FIGURES if name in self.sources and getattr(self, name) is None
        )

    def of_ranks(self, ranks: int) -> Card:
        """The card as each of so many ranks of a machine has it.

        Where it is shared, by as many as were measured, or by more: they then divide what those
        reached.
        """
        if not self.shared_memory:
            return self
        known = min((n for n in self.ranks if n >= ranks), default=max(self.ranks, default=0))
        one = replace(self, **asdict(self.ranks[known])) if known else self
        share = max(1.0, ranks / known) if known else ranks
        rates = ("copy", "exchange", *(() if known else ("bandwidth", "link")))
        divided = {name: getattr(one, name) / share for name in rates if getattr(one, name)}
        return replace(
            one,
            **divided,
            matmul={kind: rate / share for kind, rate in one.matmul.items()},
            flops={kind: rate / ranks for kind, rate in one.flops.items()},
        )


@cache
def figures_of(described: type) -> tuple[str, ...]:
    """Names of the figures of a card or a machine, other than those by type."""
    hints = get_type_hints(described, include_extras=True)
    read = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return tuple(name for name, by in read.items() if by and isinstance(by[0], PlainValidator))


CARD_FIGURES = figures_of(Card)
"""Figures of a card other than those by type: bytes, bytes per second or seconds."""


def read_cards(
    text: str, where: str, *, backend: str = "", sourced: bool = True
) -> tuple[Card, ...]:
    """The cards of a TOML file that describes nothing else; see `read_tables`.

    Args:
        backend: the backend whose file it is.
    """
    return read_tables(text, where, {"card": Card}, sourced=sourced, backend=backend)["card"]


def read_tables(
    text: str, where: str, kinds: Mapping[str, type], *, sourced: bool = True, backend: str = ""
) -> dict[str, tuple[Any, ...]]:
    """What a TOML file describes, by kind, in its order.

    Args:
        text: the file.
        where: what messages and `Card.origin` call it.
        kinds: section of the file, such as ``card`` -> dataclass of what its tables describe.
        sourced: whether each figure must have its source, as in what plugins ship; without, a bare
            figure's source is the file.
        backend: of cards that name none.

    Raises:
        UsageError: it is not TOML, or says what cannot be; names the place and what is valid.
    """
    try:
        document = tomllib.loads(text.removeprefix("\ufeff"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not TOML: {error}") from None
    if sourced:
        document.pop("release", None)  # what images are built of: see `read_releases`
    reader = _Reader(where, None if sourced else where)
    document = reader.table(document, "", kinds)
    found: dict[str, tuple[Any, ...]] = {}
    for section, kind in kinds.items():
        tables = reader.table(document.get(section, {}), section)
        given = {"backend": backend} if kind is Card else {}
        found[section] = tuple(
            reader.describe(kind, section, name, table, given) for name, table in tables.items()
        )
    return found


class _Reader:
    """Reads one file.

    Args:
        source: of figures that have none; None: each must have one.
    """

    def __init__(self, where: str, source: str | None) -> None:
        self._where = where
        self._source = source
        self._sources: dict[str, str] = {}

    def describe(
        self, kind: type, section: str, name: str, table: Any, given: Mapping[str, Any]
    ) -> Any:
        place = f"{section}.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise UsageError(
                f"{self._where}: [{place}]: a name is letters, digits, '.', '_' and '-'; in quotes "
                "where it has a dot"
            )
        self._sources = {}
        values = {**given, **self._values(kind, table, place)}
        sources = {at.removeprefix(f"{place}."): source for at, source in self._sources.items()}
        values |= {"name": name, "sources": sources, "origin": self._where}
        try:
            return _adapter(kind).validate_python(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join([place, *(str(part) for part in first["loc"] if part != "[key]")])
            if first["type"] == "figure":
                raise self._error_at(at, first["ctx"]["value"], first["ctx"]["valid"]) from None
            words = {"bool_type": "true or false", "string_type": "a name in quotes"}
            valid = words.get(first["type"], "a list of texts")
            raise self._error_at(at, first["input"], valid) from None

    def table(self, value: Any, place: str, valid: Collection[str] | None = None) -> dict[str, Any]:
        """A table whose keys are all valid; None: any."""
        if not isinstance(value, dict):
            raise self._error_at(place, value, f"a table: [{place}], then a line for each figure")
        unknown = [] if valid is None else [key for key in value if key not in valid]
        if valid is not None and unknown:
            said = f"{f'[{place}]' if place else 'it'} has an unknown key {unknown[0]!r}"
            said += f"{did_you_mean(unknown[0], valid) or ';'} valid keys: {', '.join(valid)}"
            if isinstance(value[unknown[0]], dict):
                said += '. A name with a dot stands in quotes: [machine."a.b"]'
            raise UsageError(f"{self._where}: {said}")
        return value

    def _values(self, kind: type, table: Any, place: str) -> dict[str, Any]:
        """A table as it is, but for the sources of its figures, which are kept apart."""
        figures = figures_of(kind)
        valid = [one.name for one in fields(kind) if one.name in (*figures, *_OTHERS)]
        given = self.table(table, place, valid)
        values: dict[str, Any] = {}
        for key, value in given.items():
            below = f"{place}.{key}"
            if key in BY_TYPE:
                by_type = self.table(value, below, FLOPS_TYPES).items()
                value = {one: self._figure(rate, f"{below}.{one}") for one, rate in by_type}
            elif key == "ranks":
                ranks = self.table(value, below).items()
                value = {n: self._values(Rates, rates, f"{below}.{n}") for n, rates in ranks}
            elif key in figures:
                value = self._figure(value, below)
            values[key] = value
        return values

    def _figure(self, value: Any, place: str) -> Any:
        source = self._source
        if isinstance(value, list):
            if len(value) != 2 or not isinstance(value[1], str) or not value[1].strip():
                valid = 'a figure and its source: ["79.1 GiB", "measured"]'
                raise self._error_at(place, value, valid)
            value, source = value[0], value[1].strip()
        elif source is None:
            raise self._error_at(place, value, f'its source beside it: [{value!r}, "where from"]')
        self._sources[place] = source
        return value

    def _error_at(self, place: str, value: Any, valid: str) -> UsageError:
        return UsageError(f"{self._where}: {place} is {value!r}; it must be {valid}")


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
