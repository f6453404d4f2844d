"""A run file that grows from another tool's keys by a table, and what became of each key.

A table (`tables/*.toml`) sorts keys: one is one of `ours`; it means `nothing` here, since it
sets speed, logging, naming, upload or telemetry alone; or it is `not_offered`, with the nearest
thing. Of the last, values are harmless that say what anygauge does anyway: off, or as listed.
What differs with a key that `changes` the result is said. In lists of keys, `*` stands for any
text. What a tool does without a key, where that is not our default, is `usual`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from anygauge.config.paths import DATA_SUFFIXES, data_suffix
from anygauge.config.yaml_text import write_flow
from anygauge.interface import RunFileError
from anygauge.util.text import shorten

OFF = (False, 0, "no", "none", "None", "auto", "off")
BLANK: tuple[Any, ...] = (None, "", [], {})
"""Values of a key that is left empty."""
PARTS = ("ours", "nothing", "not_offered", "changes", "harmless", "usual")
PATHS = (".path", "model.name", ".tokenizer", ".chat_template", ".start_from")
"""How fields of ours end that may name a file or folder."""


def load_table(*names: str) -> dict[str, dict[str, Any]]:
    """Tables of these names as one."""
    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name in names:
        text = (Path(__file__).parent / "tables" / f"{name}.toml").read_text()
        for part, rules in tomllib.loads(text).items():
            by_reason = part in ("nothing", "not_offered", "changes")
            for left, right in rules.items():
                found[part] |= dict.fromkeys(right.split(), left) if by_reason else {left: right}
    return found


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
        given: all of its keys, and those of the mappings in its lists, with their values.
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
    given: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    meaningless: dict[str, list[str]] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    needed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.keys.items():
            items = [*value] if isinstance(value, (list, tuple)) else []
            inner = [one for one in items if isinstance(one, dict)]
            for one in inner or [{key: value}]:
                self.given |= one

    def take(self, key: str, default: Any = None) -> Any:
        """A key's value, which is read once; `default` where it is left out or empty."""
        value = self.keys.pop(key, None)
        return default if value in BLANK else value

    def number(self, key: str, default: Any = None) -> Any:
        """A number, or text that holds one; None where it is left out.

        Raises:
            RunFileError: it is none.
        """
        value = self.take(key, default)
        try:
            return value if value is None else as_number(value)
        except (TypeError, ValueError):
            raise self.error(key, value, "a number") from None

    def forget(self, pattern: str) -> None:
        """Leave out keys that begin so, which mean nothing there without another."""
        for key in [key for key in self.keys if re.match(pattern, key)]:
            del self.keys[key]

    def mapping(self, key: str) -> dict[str, Any]:
        """A mapping; empty where it is left out."""
        if not isinstance(value := self.take(key, {}), dict):
            raise self.error(key, value, "a mapping")
        return value

    def items(self, key: str) -> list[Any]:
        """A list, also where it is written as text with commas; empty where it is left out."""
        if not isinstance(value := self.take(key, []), str | list):
            raise self.error(key, value, "a list")
        return as_list(value)

    def error(self, key: str, value: Any, expected: str) -> RunFileError:
        """An error about a key's value."""
        got = shorten(write_flow(value))
        return RunFileError(f"{self.file}: {key}: got {got}, expected {expected}")

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set a field of ours, which came from there; None sets nothing."""
        if value is None:
            return
        *sections, name = path.split(".")
        at = self.tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise RunFileError(f"{self.file}: {origin}: {section!r} is set already")
        at[name] = Leaf(self.path(value) if path.endswith(PATHS) else value, origin)

    def note(self, path: str, value: Any, key: str) -> Any:
        """Set a field to a value that a key has there, and return it."""
        self.put(path, value, given(key, value))
        return value

    def put_sources(self, place: str, sources: list[dict[str, Leaf]]) -> None:
        """Set ``data.train`` or ``data.eval``."""
        if sources:
            self.tree.setdefault("data", {})[place] = sources[0] if len(sources) == 1 else sources

    def at(self, path: str) -> Any:
        """The value of a field of ours, or None."""
        found: Any = self.tree
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found.value if isinstance(found, Leaf) else found

    def usual(self, path: str, value: Any) -> None:
        """What the tool does where no key has set a field."""
        if self.at(path) is None:
            self.put(path, value, f"{self.tool}'s default")

    def path(self, name: Any) -> Any:
        """A local file or folder, which is relative to the current directory there, as our run file
        has it; anything else is a name on the hub, and stays."""
        if not isinstance(name, str) or re.match(r"[/~$]|.*(://|\{)", name):
            return name
        is_local = name.startswith(("./", "../")) or data_suffix(name) in DATA_SUFFIXES
        return self.local(name) if is_local or Path(name).exists() else name

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

    def skip(self, key: str, value: Any, why: str) -> None:
        """Say that a key means nothing here."""
        self.meaningless.setdefault(why, []).append(given(key, value))

    def apply(self, *tables: str, values: Mapping[str, Any] | None = None, above: str = "") -> None:
        """Follow tables for all keys that are left, or for those of a file beside this one.

        Args:
            values: of that file, dotted; its fields may be listed by the last parts of their names.
            above: its name, for messages.
        """
        table, beside = load_table(*tables), dict[str, list[str]]()
        for key, value in {**(self.keys if values is None else values)}.items():
            if value in BLANK:
                continue
            name, last = f"{above}{key}", key.rpartition(".")[2] if above else key
            if key in table["changes"] and value is not False:
                self.change(f"{given(name, value)}: {table['changes'][key]}")
            if key in table["ours"]:
                path, _, conversion = table["ours"][key].partition(": ")
                try:
                    converted = convert(value, conversion)
                except (TypeError, ValueError):
                    raise self.error(name, value, f"what {path} can be") from None
                self.put(path, converted, given(name, value))
            elif nearest := find_rule(table["not_offered"], key):
                if not is_one_of(value, table["harmless"].get(key, OFF)):
                    self.block(name, value, nearest)
            elif why := find_rule(table["nothing"], key, last):
                if above:
                    beside.setdefault(why, []).append(last)
                else:
                    self.skip(key, value, why)
            elif key not in table["changes"]:
                self.block(name, value, f"no key of {self.tool}'s that is known here")
        for why, names in beside.items():
            self.meaningless.setdefault(why, []).append(f"{above}{', '.join(names)}")
        for path, value in table["usual"].items():
            self.usual(path, value)
        if values is None:
            self.keys.clear()


def find_rule(rules: Mapping[str, str], *names: str) -> str | None:
    """What a part of a table says of a key with one of these names; exact ones come first."""
    for pattern in (*names, *(each for each in rules if fnmatchcase(names[0], each))):
        if pattern in rules:
            return rules[pattern]
    return None


def as_number(value: Any) -> Any:
    """A number, also where it is written as text; whole ones are int.

    Raises:
        ValueError: it is none.
        TypeError: the same.
    """
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, float):
        return value
    return int(value) if re.fullmatch(r"[-+]?\d+", str(value)) else float(value)


def as_list(value: Any) -> list[Any]:
    """A list, also where it is written as text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value)


def targets(value: Any) -> Any:
    """Layers of an adapter: `all`, names, or an expression."""
    if isinstance(value, str) and re.search(r"[\\^$*|()\[\]]", value):
        return value
    names = as_list(value)
    return "all-linear" if names in (["all"], ["all-linear"]) else names


def whole_names(patterns: Any) -> list[str]:
    """Axolotl's expressions, which begin a name, as ones for whole names; a range of rows fails."""
    if any(re.search(r"\[\d*:?\d*\]$", one) for one in patterns):
        raise ValueError(patterns)
    return [one if one.endswith("$") else f"(?:{one}).*" for one in patterns]


CONVERSIONS: dict[str, Any] = {
    "": lambda value: value,
    "number": as_number,
    "positive": lambda value: as_number(value) if as_number(value) > 0 else None,
    "steps": lambda value: max(1, int(value)),
    "bool": bool,
    "not": lambda value: not value,
    "branch": lambda value: None if value == "main" else value,
    "list": as_list,
    "targets": targets,
    "names": whole_names,
}
"""What may stand after a field in a table: how its value is made; None leaves the field out."""


def convert(value: Any, how: str) -> Any:
    """A value for a field of ours: by one of `CONVERSIONS`, or `how` itself where a key is on.

    Raises:
        TypeError, ValueError: it is not such a value.
    """
    if how in CONVERSIONS:
        return CONVERSIONS[how](value)
    return (True if how == "true" else how) if value else None


def is_one_of(value: Any, values: Any) -> bool:
    """Whether a value is listed, where True is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def given(key: str, value: Any) -> str:
    """A key as it stands in their file, on a line."""
    return f"{key}: {shorten(write_flow(value))}"
