"""What docker's bake would build, from the bake file and the backends' tables: no docker needed.

It knows the few expressions that our file has, and refuses any other.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hcl2

ROOT = Path(__file__).parents[2]
BACKENDS = ("cpu", "cuda", "hpu")


def table(backend: str) -> list[dict[str, Any]]:
    """A backend's rows."""
    made = runpy.run_path(str(ROOT / "docker/buildx.py"))["variables"]()
    return list(made["variable"][f"{backend.upper()}_RELEASES"]["default"])


def bake_file() -> dict[str, Any]:
    """The parsed file: kind -> name -> block."""
    with (ROOT / "docker/docker-bake.hcl").open() as file:
        parsed = hcl2.load(file)
    return {
        kind: {_text(name): block for one in parsed[kind] for name, block in one.items()}
        for kind in ("variable", "target")
    }


def targets(backend: str, given: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Rendered targets of a backend, name -> args, dockerfile and tags."""
    file = bake_file()
    scope: dict[str, Any] = {
        name: _text(block["default"])
        for name, block in file["variable"].items()
        if block["default"] != []  # a table's place
    }
    scope.update(given or {})
    block = file["target"][backend]
    chosen = re.fullmatch(
        r"\$\{\[for one in (\w+) : one if one\.built\]\}", block["matrix"]["item"]
    )
    assert chosen is not None and chosen[1] == f"{backend.upper()}_RELEASES"
    found = {}
    for row in table(backend):
        if row["built"]:
            here = {**scope, "item": row}
            found[_value(block["name"], here)] = {
                "args": {key: _value(text, here) for key, text in block["args"].items()},
                "dockerfile": _value(block["dockerfile"], here),
                "labels": {_text(k): _value(text, here) for k, text in _plain(block["labels"])},
                "tags": [_value(text, here) for text in block["tags"]],
            }
    return found


def _plain(block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in block.items() if not key.startswith("__"))


def _text(quoted: str) -> str:
    assert quoted[0] == quoted[-1] == '"', quoted
    return quoted[1:-1]


def _value(text: str, scope: Mapping[str, Any]) -> str:
    if text.startswith('"'):
        return re.sub(r"\$\{(.*?)\}", lambda found: _expression(found[1], scope), _text(text))
    whole = re.fullmatch(r"\$\{(.*)\}", text)
    return _expression(whole[1] if whole else text, scope)


def _expression(text: str, scope: Mapping[str, Any]) -> str:
    choice = re.fullmatch(r'(\w+) == "" \? (.+) : ""', text)
    if choice:
        return _expression(choice[2], scope) if scope[choice[1]] == "" else ""
    call = re.fullmatch(r'replace\((.+), "(.*)", "(.*)"\)', text)
    if call:
        return _expression(call[1], scope).replace(call[2], call[3])
    assert re.fullmatch(r"\w+(\.\w+)*", text), f"not known: {text}"
    value: Any = scope
    for name in text.split("."):
        value = value[name]
    assert isinstance(value, str), f"{text} is not a text: {value!r}"
    return value
