"""A run file as a flat table for trackers, without what nobody else should read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.util.hiding import is_secret

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
"""User and password in an address."""

Plain = str | int | float | bool | None


def flat_parameters(run: RunFile) -> dict[str, Plain]:
    """Dotted path -> value; a list as JSON.

    Left out: the values of ``environment``, texts whose name says that they are a secret, and
    user and password within an address.
    """
    found: dict[str, Plain] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, below in value.items():
                add(f"{path}.{name}" if path else name, below)
        elif isinstance(value, list):
            found[path] = json.dumps(value)
        else:
            found[path] = value

    add("", _public(run.model_dump(mode="json", exclude={"environment"})))
    return found


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _public(below)
            for name, below in value.items()
            # A number such as a count of key heads is not a secret.
            if not (is_secret(str(name)) and isinstance(below, str))
        }
    if isinstance(value, list):
        return [_public(item) for item in value]
    return _CREDENTIALS.sub("", value) if isinstance(value, str) else value
