"""Cards and machines by name: from the files of plugins and of the user, and as measured here.

Node types come with the launcher that starts jobs on them. Imports no torch.
"""

from __future__ import annotations

import difflib
import importlib.resources
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

from anygauge.interface import BackendSpec, Card, PluginError, UnknownNameError, UsageError
from anygauge.interface.hardware import Bytes, Link, Number, Rate, figure, figures_of, read_tables
from anygauge.registry import BLOCK_VARIABLE, PluginFailure, Provided, Registry
from anygauge.util.text import describe, join_names

_PAGE = "docs/hardware.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One node type. A figure that nobody has published is None.

    Attributes:
        name: what users write, such as ``p5.48xlarge``.
        names: other names it goes by.
        card: name of its cards.
        cards: how many of them.
        link: as `Card.link`, where this machine's differs from its cards'.
        network: to other machines, bytes per second, one direction, the whole machine.
        host_memory: bytes.
        cores: of its processors, as its provider counts them (clouds: vCPUs).
        disk: bytes of its local disks.
        disk_rate: of its local disks, bytes per second.
        sources: figure -> where it is from.
        origin: the plugin or file that describes it, or its card.
        imagined: it is named by its cards, and no description has a machine of so many.
    """

    name: str
    names: tuple[str, ...] = ()
    card: str = ""
    cards: Annotated[int, figure({}, whole=True)] = 0
    link: Link = None
    network: Rate = None
    host_memory: Bytes = None
    cores: Number = None
    disk: Bytes = None
    disk_rate: Rate = None
    sources: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    imagined: bool = False


MACHINE_FIGURES = figures_of(Machine)
DescribedT = TypeVar("DescribedT", bound=Card | Machine)


def read_hardware(
    text: str, where: str, *, backend: str = "", sourced: bool = True
) -> tuple[tuple[Card, ...], tuple[Machine, ...]]:
    """The cards and machines of a TOML file; see `anygauge.interface.hardware.read_tables`."""
    kinds = {"card": Card, "machine": Machine}
    found = read_tables(text, where, kinds, sourced=sourced, backend=backend)
    return found["card"], found["machine"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The cards and machines that are described on this machine.

    Of two plugins that describe one name, neither is believed. A user's file comes over plugins,
    figure by figure, and a later one over an earlier one. Names are compared without case, spaces
    and punctuation.

    Attributes:
        failures: files of plugins that could not be read, and why; the others are there.
    """

    failures: tuple[PluginFailure, ...]
    _cards: Mapping[str, Sequence[Card]]
    _machines: Mapping[str, Sequence[Machine]]
    _ask: Mapping[str, Callable[[], Mapping[str, float]]]

    @classmethod
    def load(cls, registry: Registry, files: Iterable[Path | str] = ()) -> Hardware:
        """Read what the plugins ship, then the user's files.

        Raises:
            UsageError: a user's file cannot be read, or says what cannot be.
        """
        shipped, failures = _read_shipped(registry)
        users = [_read_user_file(Path(file)) for file in files]
        ask = {backend.spec.name: backend.spec.this_machine for backend in registry.backends}
        cards = _by_name([one for one, _ in shipped], [one for one, _ in users])
        machines = _by_name([one for _, one in shipped], [one for _, one in users])
        return cls(tuple(failures), cards, machines, ask)

    @property
    def cards(self) -> tuple[Card, ...]:
        """All cards, by name, without the figures that the machine at hand gives."""
        return _sorted(self._cards)

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All machines, by name, as they are described."""
        return _sorted(self._machines)

    def card(self, name: str) -> Card:
        """The card of a name, or of one of its other names.

        Raises:
            UnknownNameError: none has it.
            PluginError: several plugins describe it.
        """
        found = self.of_devices([name])
        if found is None:
            raise UnknownNameError(self._unknown("card", name, self.cards))
        return found

    def of_devices(self, names: Sequence[str]) -> Card | None:
        """The card that a machine's devices are (`Probe.cards`); None where they are of several
        kinds, or none of those that are described.

        Raises:
            PluginError: several plugins describe it.
        """
        found = _find_name(self._cards, names[0]) if len(names) == 1 else None
        return self._with_answers(found) if found is not None and found.to_measure else found

    def machine(self, name: str) -> Machine:
        """The machine of a name; ``h100:8`` is one of eight such cards, ``h100`` of one.

        Its `Machine.link` is filled in from its card. Nothing is known of the network, host and
        disks of a machine that is named by its cards.

        Raises:
            UnknownNameError: none has it, or there is no description of its card.
            PluginError: several plugins describe it.
            UsageError: the number is none, or its description lacks its card or their number.
        """
        found = _find_name(self._machines, name) or self._of_cards(name)
        if not found.card or not found.cards:
            raise UsageError(
                f"{found.origin}: [machine.{found.name}] lacks "
                f"{'card: the name of its cards' if not found.card else 'cards: their number'}. "
                f"{_PAGE} has a whole one"
            )
        try:
            card = self.card(found.card)
        except UnknownNameError as error:
            raise UnknownNameError(f"machine {found.name!r} of {found.origin}: {error}") from None
        return replace(found, link=card.link) if found.link is None else found

    def note_on(self, machine: Machine) -> str:
        """Return a note on a machine that is imagined, and which described one has such cards."""
        if not machine.imagined:
            return ""
        said = (
            f"no description has a machine of {machine.cards} {machine.card}: one is imagined, "
            "with the link of such cards between all of them"
        )
        for one in self._with_cards(machine.card)[:1]:
            nodes = math.ceil(machine.cards / one.cards)
            said += f". {one.name} has {one.cards}: --machine {one.name} --nodes {nodes}"
        return said

    def _of_cards(self, name: str) -> Machine:
        card, colon, count = name.partition(":")
        found = _find_name(self._cards, card)
        if found is None:
            raise UnknownNameError(self._unknown("machine", name, (*self.machines, *self.cards)))
        if colon and not (count.strip().isdecimal() and 0 < int(count) <= 1024):
            raise UsageError(
                f"machine {name!r}: {count!r} is not a number of cards; write 1 to 1024 behind the "
                f"colon, such as {found.name}:8"
            )
        # A part of a machine can be had; where cards share a host, their number is that of ranks.
        most = max([1, *(one.cards for one in self._with_cards(found.name))])
        new = int(count or 1) > most and not found.shared_memory
        one = Machine(name=name, card=found.name, cards=int(count or 1), origin=found.origin)
        return replace(one, imagined=new)

    def _with_cards(self, card: str) -> list[Machine]:
        """The described machines that have a card, the largest first."""
        known = self._cards[_key(card)]
        having = [m for m in self.machines if m.cards and self._cards.get(_key(m.card)) == known]
        return sorted(having, key=lambda one: -one.cards)

    def _with_answers(self, card: Card) -> Card:
        """Fill in what the machine at hand reports; the rest stays None."""
        if card.backend not in self._ask:
            raise UsageError(
                f"{card.origin}: [card.{card.name}] leaves figures to this machine, and "
                f"{card.backend or 'none'} is not a backend that is installed: name it with "
                'backend = "...", or write the figures'
            )
        try:
            numbers: dict[str, Any] = dict(self._ask[card.backend]())
        except Exception as error:
            raise PluginError(
                f"card {card.name!r} of {card.origin}: asking this machine raised {describe(error)}"
            ) from error
        return replace(card, **{key: numbers[key] for key in card.to_measure if key in numbers})

    def _unknown(self, kind: str, name: str, valid: Sequence[Card | Machine]) -> str:
        """Suggest up to three names: those that begin alike, then those that are spelt alike."""
        plain = _key(name.partition(":")[0])
        spelt = {_key(other): one.name for one in valid for other in (one.name, *one.names)}
        near = sorted(one for one in spelt if len(plain) > 1 and one.startswith(plain))
        near += difflib.get_close_matches(plain, spelt, n=5)
        nearest = list(dict.fromkeys(repr(spelt[one]) for one in near))[:3]
        hint = f"; did you mean {' or '.join(nearest)}?" if near else ""
        cards = f"  cards: {join_names(card.name for card in self.cards)}"
        machines = (
            f"  machines: {join_names(machine.name for machine in self.machines)}",
            "  or a card and how many of it, as in CARD:8",
        )
        unread = (
            f"  {one.entry_point} of {one.origin} may describe it and cannot be read: {one.reason}"
            for one in self.failures
        )
        own = f"Others are described in a file of your own: {_PAGE}; examples/hardware has some"
        first = f"there is no {kind} named {name!r}{hint}"
        return "\n".join([first, *(machines if kind == "machine" else ()), cards, *unread, own])


def _key(name: str) -> str:
    """A name as it is compared."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _by_name(
    shipped: Iterable[Sequence[DescribedT]], users: Iterable[Sequence[DescribedT]]
) -> dict[str, list[DescribedT]]:
    """Plain name -> whose it is: several where plugins' descriptions are at odds."""
    found: dict[str, list[DescribedT]] = {}
    for one in chain.from_iterable(shipped):
        for name in {_key(one.name), *map(_key, one.names)}:
            found.setdefault(name, []).append(one)
    for over in chain.from_iterable(users):
        base = found.get(_key(over.name), ())
        merged = _override(base[0], over) if len(base) == 1 else over
        found |= {_key(name): [merged] for name in (merged.name, *merged.names)}
    return found


def _override(base: DescribedT, over: DescribedT) -> DescribedT:
    """A description with each figure that another one has."""
    changed: dict[str, Any] = {"origin": f"{base.origin} and {over.origin}"}
    for name in {one.name for one in fields(over)} - {"name", "origin"}:
        old, new = getattr(base, name), getattr(over, name)
        if isinstance(new, Mapping | tuple):
            changed[name] = {**old, **new} if isinstance(new, Mapping) else (*old, *new)
        elif new or name in over.sources:
            changed[name] = new
    return replace(base, **changed)


def _sorted(found: Mapping[str, Sequence[DescribedT]]) -> tuple[DescribedT, ...]:
    one_each = {listed[0].name: listed[0] for listed in found.values() if len(listed) == 1}
    return tuple(one_each[name] for name in sorted(one_each))


def _find_name(found: Mapping[str, Sequence[DescribedT]], name: str) -> DescribedT | None:
    """Raises: PluginError: several plugins describe it."""
    listed = found.get(_key(name), ())
    if len(listed) > 1:
        raise PluginError(
            f"{name!r} is described by {' and '.join(one.origin for one in listed)}; uninstall all "
            f"but one, name the plugins to skip in {BLOCK_VARIABLE}, or describe it in a file of "
            f"your own ({_PAGE})"
        )
    return listed[0] if listed else None


Described = tuple[Sequence[Card], Sequence[Machine]]


def _read_shipped(registry: Registry) -> tuple[list[Described], list[PluginFailure]]:
    """What the plugins' files describe; several specs may name one file."""
    found: list[Described] = []
    failures: list[PluginFailure] = []
    provided: tuple[Provided[Any], ...] = (*registry.launchers, *registry.backends)
    for place, one in {one.spec.hardware: one for one in provided if one.spec.hardware}.items():
        package, _, file = place.partition(":")
        backend = one.spec.name if isinstance(one.spec, BackendSpec) else ""
        try:
            text = importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")
            found.append(read_hardware(text, f"{file} of {one.origin}", backend=backend))
        except Exception as error:
            why = str(error) if isinstance(error, UsageError) else describe(error)
            of = {"distribution": one.distribution, "version": one.version}
            failures.append(PluginFailure(**of, entry_point=place, reason=why))
    return found, failures


def _read_user_file(file: Path) -> Described:
    """Raises: UsageError: it cannot be read, or says what cannot be."""
    try:
        return read_hardware(file.read_text(encoding="utf-8"), str(file), sourced=False)
    except (OSError, UnicodeDecodeError, UsageError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        said = f"{file}: cannot be read as a description of hardware: {why}"
        said = str(error) if isinstance(error, UsageError) else said
        if file == measured_file():
            said += ". Remove the file, or write it anew: anygauge plan --calibrate"
        raise UsageError(said) from None


def measured_file() -> Path:
    """Return the path in the user's folder of configurations, as XDG has it."""
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "anygauge" / "measured.toml"


def measured_files() -> list[Path]:
    """The file, where there is one."""
    return [file for file in [measured_file()] if file.is_file()]
