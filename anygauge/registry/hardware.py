"""Cards and machines by name: from the files of plugins and of the user, and as measured here."""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from anygauge.interface import (
    BY_TYPE,
    AnygaugeError,
    BackendSpec,
    Card,
    LauncherSpec,
    Machine,
    PluginError,
    UnknownNameError,
    UsageError,
    read_hardware,
)
from anygauge.registry.plugins import BLOCK_VARIABLE, PluginFailure, Provided
from anygauge.registry.registry import Registry
from anygauge.util.files import write_text
from anygauge.util.text import describe

DescribedT = TypeVar("DescribedT", bound=Card | Machine)

_PAGE = "docs/hardware.md"


class Hardware:
    """The cards and machines that are described on this machine; imports no torch.

    Of two plugins that describe one name, neither is believed. A user's file comes over plugins,
    figure by figure, and a later file over an earlier one: a card may be completed or corrected
    by a line. Names are compared without case, spaces and punctuation.

    Attributes:
        failures: files of plugins that could not be read, and why; the others are there.
    """

    def __init__(
        self,
        plugins: Iterable[tuple[Sequence[Card], Sequence[Machine]]],
        users: Iterable[tuple[Sequence[Card], Sequence[Machine]]] = (),
        *,
        failures: Sequence[PluginFailure] = (),
        asks: Mapping[str, Any] | None = None,
    ) -> None:
        plugins, users = list(plugins), list(users)
        self._cards = _Names([c for c, _ in plugins], [c for c, _ in users])
        self._machines = _Names([m for _, m in plugins], [m for _, m in users])
        self._asks = dict(asks or {})
        self.failures: tuple[PluginFailure, ...] = tuple(failures)

    @classmethod
    def load(cls, registry: Registry, files: Iterable[Path | str] = ()) -> Hardware:
        """Read what the plugins ship, then the user's files.

        Args:
            files: the user's, a later one coming over an earlier one.

        Raises:
            UsageError: a user's file cannot be read, or says what cannot be.
        """
        plugins, failures = _shipped((*registry.backends, *registry.launchers))
        asks = {p.spec.name: p.spec.this_machine for p in registry.backends}
        users = [_users(Path(file)) for file in files]
        return cls(plugins, users, failures=failures, asks=asks)

    @property
    def cards(self) -> tuple[Card, ...]:
        """All cards, by name; what is asked of the machine at hand is not filled in."""
        return self._cards.all()

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All machines, by name, as they are described."""
        return self._machines.all()

    def card(self, name: str) -> Card:
        """The card of a name, or of one of its other names.

        Raises:
            UnknownNameError: none has it.
            PluginError: several plugins describe it.
        """
        found = self._cards.find(name)
        if found is None:
            raise UnknownNameError(self._unknown("card", name, self._cards))
        return self._asked(found) if found.asked else found

    def of_devices(self, names: Sequence[str]) -> Card | None:
        """The card that a machine's devices are (`Probe.cards`); None where they are of several
        kinds, or none of those that are described.

        Raises:
            PluginError: several plugins describe it.
        """
        if len(names) != 1:
            return None
        found = self._cards.find(names[0])
        return self._asked(found) if found is not None and found.asked else found

    def machine(self, name: str) -> Machine:
        """The machine of a name; ``h100:8`` is one of eight such cards, ``h100`` of one.

        Its `Machine.link` is filled in from its card. Nothing is known of the network, host and
        disks of a machine that is named by its cards.

        Raises:
            UnknownNameError: none has it, or there is no description of its card.
            PluginError: several plugins describe it.
            UsageError: the number is none, or its description lacks its card or their number.
        """
        found = self._machines.find(name)
        if found is None:
            found = self._of_cards(name)
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
        """What to say of a machine that is imagined."""
        if not machine.imagined:
            return ""
        said = f"no description has a machine of {machine.cards} {machine.card}: one is imagined, "
        return said + "with the link of such cards between all of them"

    def _of_cards(self, name: str) -> Machine:
        card, colon, count = name.partition(":")
        found = self._cards.find(card)
        if found is None:
            raise UnknownNameError(self._unknown("machine", name, self._machines, self._cards))
        if colon and not (count.strip().isdecimal() and 0 < int(count) <= 1024):
            raise UsageError(
                f"machine {name!r}: {count!r} is not a number of cards; write 1 to 1024 behind the "
                f"colon, such as {found.name}:8"
            )
        return Machine(
            name=name,
            card=found.name,
            cards=int(count or 1),
            imagined=True,
            origin=found.origin,
        )

    def _asked(self, card: Card) -> Card:
        """With what the machine at hand says; what it does not say stays None."""
        if card.backend not in self._asks:
            raise UsageError(
                f"{card.origin}: [card.{card.name}] leaves figures to this machine, and "
                f"{card.backend or 'none'} is not a backend that is installed: name it with "
                'backend = "...", or write the figures'
            )
        try:
            numbers = dict(self._asks[card.backend]())
        except Exception as error:
            raise PluginError(
                f"card {card.name!r} of {card.origin}: asking this machine raised {describe(error)}"
            ) from error
        return replace(card, **{key: numbers[key] for key in card.asked if key in numbers})

    def _unknown(self, kind: str, name: str, *valid: _Names[Any]) -> str:
        near = _nearest(name.partition(":")[0], [one for names in valid for one in names.all()])
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        lines = [f"there is no {kind} named {name!r}{hint}"]
        if kind == "machine":
            lines.append(f"  machines: {', '.join(m.name for m in self.machines) or 'none'}")
            lines.append("  or a card and how many of it, as in CARD:8")
        lines.append(f"  cards: {', '.join(c.name for c in self.cards) or 'none'}")
        lines += [
            f"  {failure.entry_point} of {failure.origin} may describe it and cannot be read"
            f": {failure.reason}"
            for failure in self.failures
        ]
        own = f"Others are described in a file of your own: {_PAGE}; examples/hardware has some"
        return "\n".join([*lines, own])


class _Names(Generic[DescribedT]):
    """Cards, or machines, by all of their names."""

    def __init__(
        self, plugins: Sequence[Sequence[DescribedT]], users: Sequence[Sequence[DescribedT]]
    ) -> None:
        self._by_name: dict[str, DescribedT] = {}
        self._doubled: dict[str, list[DescribedT]] = {}
        claims: dict[str, list[DescribedT]] = {}
        for one in itertools.chain.from_iterable(plugins):
            for name in dict.fromkeys(map(_plain, (one.name, *one.names))):
                claims.setdefault(name, []).append(one)
        for name, claimed in claims.items():
            if len(claimed) == 1:
                self._by_name[name] = claimed[0]
            else:
                self._doubled[name] = claimed
        for over in itertools.chain.from_iterable(users):
            base = self._by_name.get(_plain(over.name))
            merged = over if base is None else _over(base, over)
            for name in map(_plain, (merged.name, *merged.names)):
                self._by_name[name] = merged
                self._doubled.pop(name, None)

    def all(self) -> tuple[DescribedT, ...]:
        return tuple(sorted({one.name: one for one in self._by_name.values()}.values(), key=_name))

    def find(self, name: str) -> DescribedT | None:
        """Raises: PluginError: several plugins describe it."""
        plain = _plain(name)
        if plain in self._doubled:
            origins = " and ".join(one.origin for one in self._doubled[plain])
            raise PluginError(
                f"{name!r} is described by {origins}; uninstall all but one, name the plugins to "
                f"skip in {BLOCK_VARIABLE}, or describe it in a file of your own ({_PAGE})"
            )
        return self._by_name.get(plain)


def _name(described: Card | Machine) -> str:
    return described.name


def _plain(name: str) -> str:
    """A name as it is compared."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _nearest(name: str, valid: Sequence[Card | Machine]) -> list[str]:
    """Up to three names: those that begin alike, then those that are spelt alike."""
    plain = _plain(name)
    spelt: dict[str, str] = {}
    for described in valid:
        for one in (described.name, *described.names):
            spelt.setdefault(_plain(one), described.name)
    begin = sorted(one for one in spelt if len(plain) > 1 and one.startswith(plain))
    near = (*begin, *difflib.get_close_matches(plain, spelt, n=5))
    return list(dict.fromkeys(spelt[one] for one in near))[:3]


def _over(base: DescribedT, over: DescribedT) -> DescribedT:
    """A description with each figure that another one has."""
    kept = {one.name for one in fields(over)}
    changed: dict[str, Any] = {key: getattr(over, key) for key in over.sources if key in kept}
    changed["names"] = (*base.names, *over.names)
    changed["sources"] = {**base.sources, **over.sources}
    changed["origin"] = f"{base.origin} and {over.origin}"
    if isinstance(base, Card) and isinstance(over, Card):
        for kind in BY_TYPE:
            changed[kind] = {**getattr(base, kind), **getattr(over, kind)}
        changed["ranks"] = {**base.ranks, **over.ranks}
        changed["backend"] = over.backend or base.backend
        changed["shared_memory"] = over.shared_memory or base.shared_memory
        changed["asked"] = (*(one for one in base.asked if one not in over.sources), *over.asked)
    elif isinstance(base, Machine) and isinstance(over, Machine):
        changed["card"] = over.card or base.card
    return replace(base, **changed)


def _shipped(
    provided: Sequence[Provided[BackendSpec] | Provided[LauncherSpec]],
) -> tuple[list[tuple[Sequence[Card], Sequence[Machine]]], list[PluginFailure]]:
    """What the plugins' files describe; several specs may name one file."""
    read: dict[str, tuple[Sequence[Card], Sequence[Machine]]] = {}
    failures: list[PluginFailure] = []
    for one in provided:
        spec = one.spec
        if not spec.hardware or spec.hardware in read:
            continue
        package, _, file = spec.hardware.partition(":")
        backend = spec.name if isinstance(spec, BackendSpec) else ""
        read[spec.hardware] = (), ()
        try:
            text = importlib.resources.files(package).joinpath(file).read_text(encoding="utf-8")
            where = f"{file} of {one.origin}"
            read[spec.hardware] = read_hardware(text, where, backend=backend)
        except Exception as error:
            reason = str(error) if isinstance(error, AnygaugeError) else describe(error)
            failures.append(
                PluginFailure(
                    distribution=one.distribution,
                    version=one.version,
                    entry_point=spec.hardware,
                    reason=reason,
                )
            )
    return list(read.values()), failures


def _users(file: Path) -> tuple[Sequence[Card], Sequence[Machine]]:
    """Raises: UsageError: it cannot be read, or says what cannot be."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise UsageError(f"{file}: cannot be read as a description of hardware: {why}") from None
    return read_hardware(text, str(file), sourced=False)


# -- what `anygauge plan --calibrate` measured -----------------------------------------------------

_UNITS = {"copy": "GB/s", "exchange": "GB/s", "call": "us", "issue": "us"}
_SIZES = {"GB/s": 1e9, "us": 1e-6}
_toml = partial(json.dumps, ensure_ascii=False)  # JSON's texts, and lists of them, are TOML's too


def measured_file() -> Path:
    """Where it is: in the user's folder of configurations, as XDG has it."""
    folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(folder) / "anygauge" / "measured.toml"


def measured_files() -> list[Path]:
    """The file, where there is one.

    Raises:
        UsageError: it cannot be read; says what to do.
    """
    file = measured_file()
    if not file.is_file():
        return []
    try:
        read_hardware(file.read_text(encoding="utf-8"), str(file), sourced=False)
    except (UsageError, OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{error}. Remove the file, or write it anew: anygauge plan --calibrate"
        ) from None
    return [file]


def make_room() -> None:
    """Make the file's folder, before anything is measured.

    Raises:
        UsageError: it cannot be written.
    """
    folder = measured_file().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"what is measured is kept in {folder}, which cannot be written: {error.strerror}. "
            "Name another folder of configurations: XDG_CONFIG_HOME=FOLDER"
        ) from None


def write_measured(card: Card, found: Mapping[int, Mapping[str, Any]], how: str) -> Path:
    """Write a card's figures, in place of what was there.

    Args:
        found: ranks -> figures, as `anygauge.planning.calibration` finds them; of one number of
            ranks where each has a card of its own.
        how: the source of each figure.
    """
    make_room()
    file = measured_file()
    lines = [f"# Written by `anygauge plan --calibrate`: {how}", f'[card."{card.name}"]']
    if card.names and not card.sources:
        lines.append(f"names = {_toml(card.names)}")
    if card.backend and not card.sources:
        lines.append(f"backend = {_toml(card.backend)}")
    for ranks, figures in found.items():
        source = f"{how}, {ranks} rank{'s' if ranks > 1 else ''}"
        if card.shared_memory:
            lines.append(f'[card."{card.name}".ranks.{ranks}]')
        shown = shown_figures(figures).items()
        lines += [f"{name} = {_toml([value, source])}" for name, value in shown]
    write_text(file, "\n".join(lines) + "\n")
    return file


def shown_figures(figures: Mapping[str, Any]) -> dict[str, str]:
    """Figure -> number and unit."""
    shown = {
        f"matmul.{kind}": f"{rate / 1e9:.1f} GFLOPS"
        for kind, rate in figures.get("matmul", {}).items()
    }
    for name, unit in _UNITS.items():
        if name in figures:
            shown[name] = f"{figures[name] / _SIZES[unit]:.2f} {unit}"
    return shown
