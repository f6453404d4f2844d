"""``anygauge fields`` and ``anygauge schema``: what a run file may say, for people and editors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.shared_options import JsonOption
from anygauge.config.describe import (
    SectionPlace,
    all_places,
    default_text,
    field_kind,
    meaning_in,
    section_summary,
)
from anygauge.config.json_schema import EXTENDS, run_file_schema
from anygauge.config.plugin_sections import PluginSection
from anygauge.config.problems import PEER_ALIASES
from anygauge.interface import UsageError
from anygauge.util.console import Console
from anygauge.util.files import write_text
from anygauge.util.text import did_you_mean

WORD = "A section or field (train.optimizer), a plugin's name, another tool's name, or any word."


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """What is printed of a field; `of` is the plugin whose it is, "" for all runs."""

    path: str
    type: str
    default: str
    meaning: str
    of: str

    def names(self) -> tuple[set[str], set[str]]:
        """Return paths of itself and of sections around it, and their parts with its plugin."""
        parts = self.path.lower().split(".")
        paths = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        return paths, {*parts, *self.of.split(" "), self.of} - {""}


def fields(
    word: Annotated[str | None, typer.Argument(help=WORD, metavar="WORD")] = None,
    json_: JsonOption = False,
) -> None:
    """Print the fields of a run file and of plugins' options: meaning, type and default."""
    places, unread = all_places()
    found = list(field_entries(places))
    if word is not None:
        found = find_fields(found, word.strip().lower())
    if json_:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    console = Console()
    titles = {
        (".".join(place.path), place.owner): section_summary(place.section) for place in places
    }
    before = None
    for one in found:
        section = one.path.rpartition(".")[0], one.of
        if section != before:
            title = " ".join(filter(None, [section[0] or "Top level", one.of and f"({one.of})"]))
            console.print(f"{chr(10) if before else ''}{title}", style="bold", soft_wrap=True)
            console.print(titles[section], style="dim")
        before = section
        default = one.default if one.default == "required" else f"default {one.default}"
        console.print(f"  {one.path}  ({one.type}; {default})")
        console.print(f"      {one.meaning}")
    _warn_unread(unread)


def field_entries(places: Iterable[SectionPlace]) -> Iterator[FieldEntry]:
    """Yield every field that is not a section; those of the run file itself come first.

    Of what all plugins of a kind have, the default's stands for all.
    """
    yield FieldEntry("extends", "text or list of text", "null", EXTENDS, "")
    for place in places:
        section, known = place.section, set[str]()
        if issubclass(section, PluginSection) and section.plugin_name != section.default_plugin:
            known = section.of_all().model_fields.keys() - {"name"}
        for name, field in section.model_fields.items():
            if name in known:
                continue
            path, kind = ".".join((*place.path, name)), str(field_kind(field))
            if kind != "section":
                texts = default_text(field), meaning_in(section, name)
                yield FieldEntry(path, kind, *texts, place.owner)


def find_fields(every: list[FieldEntry], word: str) -> list[FieldEntry]:
    """Find the fields of a name, section or plugin; else those whose path or meaning has the word.

    Raises:
        UsageError: there is none; names the nearest.
    """
    peer = PEER_ALIASES.get(word, "").partition(": ")[0]
    names = [one.names() for one in every]
    for has in (
        lambda one, paths, parts: word in paths,
        lambda one, paths, parts: word in parts,
        lambda one, paths, parts: peer in paths,
        lambda one, paths, parts: word in f"{one.path} {one.meaning}".lower(),
    ):
        if found := [one for one, of in zip(every, names, strict=True) if has(one, *of)]:
            return found
    known = set().union(*(name for of in names for name in of)) | PEER_ALIASES.keys()
    near = did_you_mean(word, known, 0.6) or ";"
    raise UsageError(f"no field has {word!r}{near} `anygauge fields` shows them all")


def schema(
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Write it to this file, instead of standard output."),
    ] = None,
) -> None:
    """Write the JSON schema of run files, with the options of the installed plugins."""
    made, unread = run_file_schema()
    if output is None:
        typer.echo(schema_text(made), nl=False)
    else:
        write_text(output, schema_text(made))
    _warn_unread(unread)


def schema_text(made: dict[str, Any]) -> str:
    """Write a schema as it stands in a file."""
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _warn_unread(unread: Iterable[str]) -> None:
    for line in unread:
        typer.echo(f"note: options that cannot be shown: {line}", err=True)
