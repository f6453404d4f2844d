"""The options that a run file may give a plugin: the base of all, and those of every launcher."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from anygauge.util.section import Section

__all__ = ["LauncherOptions", "Options"]


class Options(Section):
    """Base of the options that a plugin takes from the run file, and of the parts of such options.

    A plugin derives a class from it, gives each field a type, a default and a description, and
    names the class in the ``options`` of its spec. anygauge checks the run file against it before
    ranks start. Types are not converted, and a field that the class lacks is refused. The class's
    module imports no torch.
    """

    model_config = ConfigDict(strict=True)


class LauncherOptions(Options):
    """Options that every launcher of anygauge has."""

    grace_s: Annotated[float, Field(ge=0, lt=86400)] = Field(
        5.0, description="Seconds from SIGTERM to SIGKILL when ranks are ended."
    )
