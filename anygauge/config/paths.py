"""Paths in a run file: `~` and variables expanded, made absolute, and looked for.

A data file, a chat template, the cache, a model folder, a tokenizer and an adapter to start from
are relative to the file they are written in (as is a checkpoint to resume from), so that a run file
can be used from any directory; `output` is relative to the current directory, because that is where
a user expects results. A model, tokenizer or data set that is not a path is a name on the hub; a
source of data may also be an address: `https://...`, `hf://...`, `s3://...`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from anygauge.config.tree import Problem, YamlNode, dotted_path, plain_value
from anygauge.util.text import did_you_mean, near_file

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".txt")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

NAMED_TEMPLATES = ("chatml", "llama3", "gemma", "mistral", "qwen3", "phi")
"""Chat templates that come with anygauge; see `anygauge/data/templates`."""

Place = tuple[str | int, ...]

SOURCES = (("data", "train"), ("data", "eval"))
CHAT_TEMPLATE = ("data", "chat_template")
CACHE = ("data", "cache")
OUTPUT = ("output",)
_MODEL = ("model", "name")
_TOKENIZER = ("model", "tokenizer")
_CHECKPOINT = ("checkpoint", "resume")
_TOKEN_LISTS = (("model", "new_tokens"), ("model", "new_special_tokens"))
_PATH_FIELDS: tuple[Place, ...] = (
    *(CHAT_TEMPLATE, CACHE, _MODEL, _TOKENIZER, ("adapter", "start_from"), _CHECKPOINT, OUTPUT),
    *_TOKEN_LISTS,
)
_NO_FOLDER: Mapping[Place, tuple[str, ...]] = {_CHECKPOINT: ("auto", "never"), CACHE: ("off",)}
_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<braced>[^}]*)\}|(?P<bare>[A-Za-z_]\w*))")
_SURELY_A_PATH = re.compile(r"\.{0,2}/|\.{1,2}$|~")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_SET = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def paths_in(values: Any) -> Iterator[tuple[Place, str]]:
    """The paths that a run has, each with its place; templates and null are none.

    Args:
        values: the run in dicts and lists, right or wrong.
    """
    for place in (*_places_of_data(values), *_PATH_FIELDS):
        text = value_at(values, place)
        if isinstance(text, str) and not holds_template(place, text):
            yield place, text


def _places_of_data(values: Any) -> Iterator[Place]:
    for source in SOURCES:
        given = value_at(values, source)
        if isinstance(given, list):
            yield from ((*source, number, "path") for number in range(len(given)))
        else:
            yield (*source, "path")


def value_at(values: Any, place: Place) -> Any:
    """Return what stands at a place; None where there is no such place."""
    for part in place:
        try:
            values = values[part]
        except (KeyError, TypeError):
            return None
    return values


def names_data_set(text: str) -> bool:
    """Whether a source's path is a name on the hub, such as ``owner/name``: no file's suffix."""
    return bool(_DATA_SET.match(text)) and data_suffix(text) not in DATA_SUFFIXES


def names_address(text: str) -> bool:
    """Whether a source's path is a file of another machine: ``https://host/data.jsonl``."""
    return bool(_ADDRESS.match(text))


def is_remote(text: str) -> bool:
    """Whether a source's rows come over the network: an address, or a name on the hub."""
    return names_address(text) or names_data_set(text)


def data_suffix(text: str) -> str:
    """A source's suffix in lower case: ``.jsonl``, also of ``rows.jsonl.gz``; "" for none."""
    path = Path(urlsplit(text).path if names_address(text) else text)
    if path.suffix.lower() in _COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def holds_template(path: Place, text: str) -> bool:
    """Whether a field is not a path at all, but a chat template's name, or the template itself."""
    return path == CHAT_TEMPLATE and (text in NAMED_TEMPLATES or "{{" in text or "{%" in text)


def resolve_paths(
    root: YamlNode, environ: Mapping[str, str], cwd: Path, problems: list[Problem]
) -> None:
    """Expand the paths of a tree and make them absolute; names on the hub are left alone.

    Args:
        root: the merged tree.
        environ: variables for `$NAME`, `${NAME}` and `~`.
        cwd: what `output` is relative to.
        problems: a variable that is not set, and the like, is added here.
    """
    for place, written in paths_in(plain_value(root)):
        node = root.nearest(*place)
        text, complaint = expand_path(written, environ)
        if complaint:
            problems.append(Problem(node.origin, dotted_path(place), complaint))
        else:
            node.value = locate(place, text, cwd if place == OUTPUT else node.origin.folder)


def expand_path(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """`text` with `~`, `$NAME` and `${NAME}` replaced and `$$` as a dollar sign, and a complaint.

    The complaint is "" unless a variable is not set, a home is not known, or no path is left.
    """
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        name = match["bare"] or match["braced"]
        if name not in environ:
            unset.append(name or "")
        return environ.get(name or "", "")

    expanded = _VARIABLE.sub(value, text)
    if unset:
        return text, f"the variable '{unset[0]}' in {text!r} is not set; export it"
    if text.startswith("~"):
        home, slash, rest = expanded.partition("/")
        known = environ.get("HOME") if home == "~" else None
        expanded = (known or os.path.expanduser(home)) + slash + rest  # noqa: PTH111
        if expanded.startswith("~"):
            return text, f"no home folder is known for {home!r}"
    if not expanded.strip() or "\0" in expanded:
        return text, f"{text!r} is not a path"
    return expanded, ""


def locate(path: Place, text: str, folder: Path) -> str:
    """The absolute path that `text` at `path` means in `folder`; a hub name is left unchanged."""
    if text in _NO_FOLDER.get(path, ()) or (_is_source(path) and names_address(text)):
        return text
    joined = folder / text
    is_named = path in (_MODEL, _TOKENIZER) and not _SURELY_A_PATH.match(text)
    is_named = is_named and not text.endswith(".json")
    if (is_named or (_is_source(path) and names_data_set(text))) and not joined.exists():
        return text
    normal = os.path.normpath(joined)
    # `link/..` is not where the text says if `link` points to another folder: then the dots stay.
    same = os.path.realpath(normal) == os.path.realpath(joined)
    return normal if same else str(joined)


def complaint_about(path: Place, text: str) -> str:
    """Tell what is wrong with the path in a resolved field; "" if it can be used."""
    if path in (OUTPUT, CACHE) or (_is_source(path) and is_remote(text)):
        return ""
    target = Path(text)
    if _is_source(path) or path in (CHAT_TEMPLATE, *_TOKEN_LISTS):
        if target.is_file():
            return ""
        if target.is_dir():
            return f"is a folder, expected a file: {target}"
        if target.exists():
            return f"is a pipe, socket or device, expected a file: {target}"
        named = did_you_mean(target.name, NAMED_TEMPLATES) if path == CHAT_TEMPLATE else ""
        return f"no such file: {target}{named or _neighbour(target)}"
    if not target.is_absolute() or target.is_dir():
        return ""
    if path == _TOKENIZER:
        return "" if target.is_file() else f"no such file or folder: {target}{_neighbour(target)}"
    if target.is_file():
        return f"is a file, expected a folder: {target}"
    return f"no such folder: {target}{_neighbour(target)}"


def _is_source(path: Place) -> bool:
    return path[:2] in SOURCES and path[-1] == "path"


def _neighbour(target: Path) -> str:
    if not target.parent.is_dir():
        return "" if target.parent == target else f" (nor is there a folder {target.parent})"
    return near_file(target)
