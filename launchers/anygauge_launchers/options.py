"""What the run file's ``launch.options`` may hold, launcher by launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anygauge.interface import RunFileError

Seconds = Annotated[float, Field(ge=0, lt=86400)]


class Part(BaseModel):
    """A part of options."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Options(Part):
    """Options of every launcher.

    Attributes:
        grace_s: seconds from SIGTERM to SIGKILL when ranks are ended.
    """

    grace_s: Seconds = 5.0


Read = TypeVar("Read", bound=Options)


def read_options(model: type[Read], launcher: str, options: Mapping[str, Any]) -> Read:
    """The options, checked.

    Raises:
        RunFileError: one that the launcher does not have, or a bad value; names all of them.
    """
    try:
        return model(**options)
    except ValidationError as error:
        raise RunFileError(
            "\n".join(_sentence(model, launcher, dict(one)) for one in error.errors())
        ) from None


def _sentence(model: type[Options], launcher: str, one: Mapping[str, Any]) -> str:
    place = ".".join(("launch.options", *map(str, one["loc"])))
    if one["type"] == "extra_forbidden":
        has = f"; it has: {', '.join(model.model_fields)}" if len(one["loc"]) == 1 else ""
        return f"{place}: the {launcher} launcher has no such option{has}"
    if one["type"] == "missing":
        return f"{place}: the {launcher} launcher needs it"
    message = str(one["msg"]).removeprefix("Value error, ")
    if isinstance(one["input"], dict):
        return f"{place}: {message}"
    return f"{place}: {one['input']!r}: {message[:1].lower()}{message[1:]}"
