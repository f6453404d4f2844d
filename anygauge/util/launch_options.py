"""The run file's ``launch.options``: what all launchers' options share, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anygauge.util.errors import RunFileError
from anygauge.util.hiding import holds_secret, is_secret
from anygauge.util.text import did_you_mean

Seconds = Annotated[float, Field(ge=0, lt=86400)]


class OptionsPart(BaseModel):
    """A part of a launcher's options: frozen, and closed to unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LauncherOptions(OptionsPart):
    """Options that every launcher has.

    Attributes:
        grace_s: seconds from SIGTERM to SIGKILL when ranks are ended.
    """

    grace_s: Seconds = 5.0


OptionsT = TypeVar("OptionsT", bound=LauncherOptions)


def read_options(model: type[OptionsT], launcher: str, options: Mapping[str, Any]) -> OptionsT:
    """The options, checked.

    Raises:
        RunFileError: the launcher does not have an option, or a value is wrong; names all of them.
    """
    try:
        return model(**options)
    except ValidationError as error:
        raise RunFileError(
            "\n".join(_sentence(model, launcher, dict(one)) for one in error.errors())
        ) from None


_SECRET = (
    "say where the secret is kept (docs/clouds.md), not what it is; what was received is not shown"
)


def _sentence(model: type[LauncherOptions], launcher: str, one: Mapping[str, Any]) -> str:
    # Names of alternatives that pydantic has tried are not part of the place.
    parts = [str(part) for part in one["loc"] if not re.search(r"constrained|\[key\]", str(part))]
    parts = [part for part in parts if not part[:1].isupper() or part.isupper()]
    place = ".".join(("launch.options", *parts))
    if one["type"] == "extra_forbidden":
        has = ""
        if len(one["loc"]) == 1:
            near = did_you_mean(str(one["loc"][-1]), model.model_fields)
            has = f"{near}; it has: {', '.join(model.model_fields)}"
        return f"{place}: the {launcher} launcher has no such option{has}"
    if one["type"] == "missing":
        return f"{place}: the {launcher} launcher needs it"
    message = str(one["msg"]).removeprefix("Value error, ")
    named = any(is_secret(str(part)) for part in one["loc"])
    if "secrets" in one["loc"] or named or holds_secret(str(one["input"])):
        return f"{place}: {_SECRET}"
    if isinstance(one["input"], dict):
        return f"{place}: {message}"
    if one["type"] == "string_type" and isinstance(one["input"], (int, float)):
        message += " (put it in quotes)"
    return f"{place}: {one['input']!r}: {message[:1].lower()}{message[1:]}"
