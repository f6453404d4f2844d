"""A run file that grows from another tool's keys: a rule for each key, and what became of it.

A tool's table has for each of its keys one of three rules: it is `Ours`; it means `Nothing` here,
since it sets speed, logging, naming, upload or telemetry alone; or it is `NotOffered`, with the
nearest thing, but for the values that say what anygauge does anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from anygauge.config.paths import DATA_SUFFIXES, data_suffix
from anygauge.config.yaml_text import write_flow
from anygauge.interface import RunFileError
from anygauge.util.text import short

Reason = Literal["speed", "logging", "naming", "upload", "telemetry"]
BLANK: tuple[Any, ...] = (None, "", [], {})
"""Values of a key that is left empty."""
OFF = (False, 0, "no", "none", "None", "auto", "off")


@dataclass(frozen=True, slots=True)
class Ours:
    """A field of ours; `convert` makes its value, None where theirs says to leave it out."""

    path: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Nothing:
    """A key that cannot change a result."""

    why: Reason


@dataclass(frozen=True, slots=True)
class NotOffered:
    """A key that would change a result, but for values that say what happens here anyway."""

    nearest: str
    harmless: tuple[Any, ...] = OFF


Rule = Ours | Nothing | NotOffered
Table = Mapping[str, Rule]


def ours(path: str, names: str, convert: Callable[[Any], Any] = lambda value: value) -> Table:
    """One field of ours under each of their names."""
    return {name: Ours(path, convert) for name in names.split()}


def nothing(why: Reason, names: str) -> Table:
    """Keys that change no result, for one reason."""
    return {name: Nothing(why) for name in names.split()}


def not_offered(nearest: str, names: str, harmless: tuple[Any, ...] = OFF) -> Table:
    """Keys with one nearest thing."""
    return {name: NotOffered(nearest, harmless) for name in names.split()}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the run file, and the foreign key that it came from."""

    value: Any
    origin: str


@dataclass(slots=True)
class Draft:
    """A run file in the making.

    Attributes:
        file: the foreign file; its folder, and those above it, are searched for what it names.
        tool: whose file it is.
        keys: those of its keys that are not yet read.
        home: the folder that the run file will be in, which its paths are relative to.
        devices: ranks on each machine, where the caller or the file says so.
        sharing: ranks that have the same rows, such as those of tensor parallelism.
        tree: nested sections of `Leaf`; a list under ``data.train`` and ``data.eval``.
        changes: what may make the result another than theirs.
        meaningless: reason -> the keys that mean nothing here for it.
        blocked: key with its value -> the nearest thing.
        needed: fields of ours that the user has to give where the file does not -> why.
    """

    file: Path
    tool: str
    keys: dict[str, Any]
    home: Path
    devices: int | None = None
    nodes: int = 1
    sharing: int = 1
    tree: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    meaningless: dict[str, list[str]] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    needed: dict[str, str] = field(default_factory=dict)

    def take(self, key: str, default: Any = None) -> Any:
        """A key's value, which is read once; `default` where it is left out or empty."""
        value = self.keys.pop(key, None)
        return default if value in BLANK else value

    def take_first(self, names: str, default: Any = None) -> tuple[str, Any]:
        """The first of several names that is there, with its value; "" and `default` for none."""
        found = ("", default)
        for name in names.split():
            if (value := self.take(name)) is not None and not found[0]:
                found = (name, value)
        return found

    def number(self, key: str, default: Any = None) -> Any:
        """A number; text that holds one is read.

        Raises:
            RunFileError: it is none.
        """
        value = self.take(key, default)
        return value if value is None else as_number(value, self.named(key))

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping; empty where it is left out."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise RunFileError(f"{self.named(key)}: got {shown(value)}, expected a mapping")
        return value

    def named(self, key: str) -> str:
        """A key, for a message."""
        return f"{self.file}: {key}"

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set a field of ours, which came from there; None sets nothing."""
        if value is None:
            return
        *sections, name = path.split(".")
        at = self.tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise RunFileError(f"{self.file}: {origin}: '{path}' has a second value")
        at[name] = (
            value if isinstance(value, (list, dict)) and origin == "" else Leaf(value, origin)
        )

    def at(self, path: str) -> Any:
        """The value of a field of ours, or None."""
        found: Any = self.tree
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found.value if isinstance(found, Leaf) else found

    def default(self, path: str, value: Any, whose: str = "") -> None:
        """Set a field to what the tool does without its key, unless it has a value."""
        if self.at(path) is None:
            self.put(path, value, f"{whose or self.tool}'s default")

    def path(self, name: Any) -> Any:
        """A local file or folder, which is relative to the current directory there, as our run file
        has it; anything else is a name on the hub, and stays."""
        if not isinstance(name, str) or name.startswith(("/", "~", "$")) or "://" in name:
            return name
        local = name.startswith(("./", "../")) or data_suffix(name) in DATA_SUFFIXES
        if not local and not os.path.exists(name):
            return name
        return self.local(name)

    def local(self, name: str) -> str:
        """A file or folder that is one, as the run file has it."""
        found = os.path.relpath(name, self.home)
        return found if found.startswith(".") else f"./{found}"

    def change(self, text: str) -> None:
        """Name a difference at the top, once."""
        if text not in self.changes:
            self.changes.append(text)

    def block(self, key: str, value: Any, nearest: str) -> None:
        """Say that a key is not offered."""
        self.blocked[given(key, value)] = nearest

    def skip(self, key: str, value: Any, why: Reason) -> None:
        """Say that a key means nothing here."""
        self.meaningless.setdefault(why, []).append(given(key, value))

    def apply(self, table: Table, values: Mapping[str, Any] | None = None, above: str = "") -> None:
        """Follow a table for all keys that are left, or for those of a file beside this one."""
        beside: dict[Reason, list[str]] = {}
        for key, value in {**(self.keys if values is None else values)}.items():
            rule = table.get(key)
            if value in BLANK:
                continue
            if rule is None:
                self.block(
                    f"{above}{key}", value, f"{self.tool} has no such key that is known here"
                )
            elif isinstance(rule, Nothing) and above:
                beside.setdefault(rule.why, []).append(key.rpartition(".")[2])
            elif isinstance(rule, Nothing):
                self.skip(key, value, rule.why)
            elif isinstance(rule, NotOffered):
                if not is_one_of(value, rule.harmless):
                    self.block(f"{above}{key}", value, rule.nearest)
            else:
                try:
                    converted = rule.convert(value)
                except (TypeError, ValueError, KeyError):
                    what = f"{self.named(above + key)}: got {shown(value)}, which cannot be read"
                    raise RunFileError(f"{what} as '{rule.path}'") from None
                self.put(rule.path, converted, given(f"{above}{key}", value))
        for why, names in beside.items():
            self.meaningless.setdefault(why, []).append(f"{above}{', '.join(names)}")
        if values is None:
            self.keys.clear()


def as_number(value: Any, where: str = "") -> Any:
    """A number, also where it is written as text.

    Raises:
        RunFileError: it is none.
    """
    try:
        if isinstance(value, bool):
            raise ValueError
        found = float(value)
        return int(found) if found.is_integer() and not isinstance(value, float) else found
    except (TypeError, ValueError, OverflowError):
        raise RunFileError(f"{where}: got {shown(value)}, expected a number") from None


def positive(value: Any) -> Any:
    """A count; None for 0 and below, which say that there is none."""
    return found if (found := as_number(value, "a count")) > 0 else None


def is_one_of(value: Any, values: Iterable[Any]) -> bool:
    """Whether a value is listed, where True is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def shown(value: Any) -> str:
    """A value on a line, cut where it is long."""
    return short(write_flow(value))


def given(key: str, value: Any) -> str:
    """A key as it stands in their file."""
    return f"{key}: {shown(value)}"
