"""Reads a TOML file of cards and machines; what it may say, and in which units."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from anygauge.interface.hardware import Card, Machine, Rates
from anygauge.util.errors import UsageError
from anygauge.util.schema import Section
from anygauge.util.text import did_you_mean

__all__ = [
    "BY_TYPE",
    "CARD_FIGURES",
    "FLOPS_TYPES",
    "MACHINE_FIGURES",
    "THIS_MACHINE",
    "read_hardware",
]

_PREFIXES = "kMGTP"
_BYTES = {
    "B": 1.0,
    **{f"{p}B": 1000.0 ** (n + 1) for n, p in enumerate(_PREFIXES)},
    **{f"{p.upper()}iB": 1024.0 ** (n + 1) for n, p in enumerate(_PREFIXES)},
}
_RATES = {
    **{f"{unit}/s": size for unit, size in _BYTES.items()},
    **{f"{p}b/s": 1000.0 ** (n + 1) / 8 for n, p in enumerate(_PREFIXES)},
}
_FLOPS = {"GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_PLAIN: Mapping[str, float] = {}

THIS_MACHINE = "this machine"
"""Stands for a figure that `BackendSpec.this_machine` gives."""

_QUANTITY = re.compile(r"([0-9]+(?:[.][0-9]+)?)\s*(\S+)")


class _Figure(NamedTuple):
    """A number, None where it is asked of the machine at hand, and its source."""

    number: float | int | None
    source: str


def _refused(value: Any, valid: str) -> PydanticCustomError:
    return PydanticCustomError("figure", "{valid}", {"value": value, "valid": valid})


def _read(
    units: Mapping[str, float], *, whole: bool = False, may_be_0: bool = False
) -> PlainValidator:
    """Of a figure in one of these units, or a plain number where there are none."""

    def read(value: Any, info: ValidationInfo) -> _Figure:
        source, sourced = info.context  # type: ignore[misc]
        if isinstance(value, list):
            if len(value) != 2 or not isinstance(value[1], str) or not value[1].strip():
                raise _refused(value, 'a figure and its source: ["79.1 GiB", "measured"]')
            value, source = value[0], value[1].strip()
        elif sourced:
            raise _refused(value, f'its source beside it: [{value!r}, "where from"]')
        if units and value == THIS_MACHINE:
            return _Figure(None, source)
        if not units:
            plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not plain or (whole and value % 1):
                raise _refused(value, f"{'a whole' if whole else 'a'} number, without quotes")
            number = float(value)
        else:
            found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
            if found is None or found[2] not in units:
                valid = f"a number and its unit in quotes, of {', '.join(units)}"
                raise _refused(value, valid)
            number = float(found[1]) * units[found[2]]
        if not (0 <= number < 1e18) or (number == 0 and not may_be_0):
            raise _refused(value, "a number above 0")
        return _Figure(int(number) if whole else number, source)

    return PlainValidator(read)


def _count(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) <= 1024):
        raise _refused(text, "a number of ranks, 1 to 1024: [card.mine.ranks.2]")
    return int(text)


_Bytes = Annotated[_Figure | None, _read(_BYTES, whole=True)]
_Reserved = Annotated[_Figure | None, _read(_BYTES, whole=True, may_be_0=True)]
_Rate = Annotated[_Figure | None, _read(_RATES)]
_Link = Annotated[_Figure | None, _read(_RATES, may_be_0=True)]
_Time = Annotated[_Figure | None, _read(_SECONDS)]
_Number = Annotated[_Figure | None, _read(_PLAIN, whole=True)]
_Price = Annotated[_Figure | None, _read(_PLAIN, may_be_0=True)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Type = Literal["float32", "tf32", "bfloat16", "float16", "float8", "int8"]
_ByType = dict[_Type, Annotated[_Figure, _read(_FLOPS)]]


class _Table(Section):
    model_config = ConfigDict(strict=True)


class _Rates(_Table):
    """What ranks that share a card may have of their own."""

    matmul: _ByType = {}
    copied: _Rate = Field(None, alias="copy")
    exchange: _Rate = None
    call: _Time = None
    issue: _Time = None


class _Card(_Table):
    names: list[str] = []
    backend: str = ""
    shared_memory: bool = False
    memory: _Bytes = None
    reserved: _Reserved = None
    bandwidth: _Rate = None
    link: _Link = None
    host_link: _Rate = None
    copied: _Rate = Field(None, alias="copy")
    exchange: _Rate = None
    call: _Time = None
    issue: _Time = None
    flops: _ByType = {}
    matmul: _ByType = {}
    ranks: dict[Annotated[int, PlainValidator(_count)], _Rates] = {}


class _Machine(_Table):
    names: list[str] = []
    card: str = ""
    cards: _Number = None
    link: _Link = None
    network: _Rate = None
    host_memory: _Bytes = None
    cores: _Number = None
    disk: _Bytes = None
    disk_rate: _Rate = None
    price: _Price = None


class _HardwareFile(_Table):
    card: dict[_Name, _Card] = {}
    machine: dict[_Name, _Machine] = {}


FLOPS_TYPES: tuple[str, ...] = get_args(_Type)
BY_TYPE = ("flops", "matmul")
"""Rates of a card that have a figure for each type."""


def _keys(table: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in table.model_fields.items())


_NO_FIGURES = ("names", "backend", "shared_memory", "ranks", "card", *BY_TYPE)
CARD_FIGURES = tuple(name for name in _keys(_Card) if name not in _NO_FIGURES)
"""Figures of a card other than those by type, read as bytes, bytes per second or seconds."""
MACHINE_FIGURES = tuple(name for name in _keys(_Machine) if name not in _NO_FIGURES)


def read_hardware(
    text: str, where: str, *, backend: str = "", sourced: bool = True
) -> tuple[tuple[Card, ...], tuple[Machine, ...]]:
    """The cards and machines of a TOML file, in its order.

    Args:
        text: the file.
        where: what messages and `Card.origin` call it.
        backend: the backend whose file it is.
        sourced: whether each figure must have its source, as in what plugins ship; without, a bare
            figure's source is the file.

    Raises:
        UsageError: it is not TOML, or says what cannot be; names the place and what is valid.
    """
    try:
        document = tomllib.loads(text.removeprefix("\ufeff"))
        file = _HardwareFile.model_validate(document, context=(where, sourced))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not TOML: {error}") from None
    except ValidationError as error:
        raise UsageError(f"{where}: {_complaint(error)}") from None
    cards = tuple(_card(name, table, where, backend) for name, table in file.card.items())
    return cards, tuple(_machine(name, table, where) for name, table in file.machine.items())


def _card(name: str, table: _Card, where: str, backend: str) -> Card:
    figures, sources = _figures(table)
    ranks: dict[int, Rates] = {}
    for count, rates in table.ranks.items():
        found, origins = _figures(rates)
        ranks[count] = Rates(**found)
        sources |= {f"ranks.{count}.{key}": source for key, source in origins.items()}
    return Card(
        name=name,
        names=tuple(table.names),
        backend=table.backend or backend,
        shared_memory=table.shared_memory,
        ranks=ranks,
        asked=tuple(key for key in CARD_FIGURES if key in sources and figures[key] is None),
        sources=sources,
        origin=where,
        **figures,
    )


def _machine(name: str, table: _Machine, where: str) -> Machine:
    figures, sources = _figures(table)
    figures["cards"] = figures["cards"] or 0
    names = tuple(table.names)
    return Machine(
        name=name, names=names, card=table.card, sources=sources, origin=where, **figures
    )


def _figures(table: BaseModel) -> tuple[dict[str, Any], dict[str, str]]:
    """(figure -> number or numbers by type, figure -> source)."""
    numbers: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in zip(_keys(type(table)), dict(table).values(), strict=True):
        if name in BY_TYPE:
            types = [kind for kind in FLOPS_TYPES if kind in value]
            numbers[name] = {kind: value[kind].number for kind in types}
            sources |= {f"{name}.{kind}": value[kind].source for kind in types}
        elif name not in _NO_FIGURES:
            numbers[name] = value and value.number
            sources |= {name: value.source} if value else {}
    return numbers, sources


_VALID = {
    "bool_type": "true or false",
    "string_type": "a name in quotes",
    "list_type": "a list of texts",
}


def _complaint(error: ValidationError) -> str:
    """The first fault, by its place in the file."""
    first = error.errors(include_url=False)[0]
    loc = [str(part) for part in first["loc"] if part != "[key]"]
    kind, place, value = first["type"], ".".join(loc), first["input"]
    if kind in ("extra_forbidden", "literal_error"):
        return _unknown(loc, value)
    if kind == "string_pattern_mismatch":
        return (
            f"[{place}]: a name is letters, digits, '.', '_' and '-'; in quotes where it has a dot"
        )
    valid = _VALID.get(kind, f"a table: [{place}], then a line for each figure")
    if kind == "figure":
        value, valid = first["ctx"]["value"], first["ctx"]["valid"]
    return f"{place} is {value!r}; it must be {valid}"


def _unknown(loc: list[str], value: Any) -> str:
    *above, key = loc
    place = ".".join(above)
    valid: Iterable[str] = _keys(_Card if above[:1] == ["card"] else _Machine)
    if not above:
        valid = _keys(_HardwareFile)
    elif above[-1] in BY_TYPE:
        valid = FLOPS_TYPES
    elif len(above) > 2:
        valid = _keys(_Rates)
    hint = did_you_mean(key, tuple(valid)) or ";"
    said = f"{f'[{place}]' if place else 'it'} has an unknown key {key!r}{hint} valid keys: "
    said += ", ".join(valid)
    quotes = '. A name with a dot stands in quotes: [machine."a.b"]'
    return said + (quotes if isinstance(value, dict) else "")
