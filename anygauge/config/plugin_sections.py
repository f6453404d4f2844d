"""Sections of a run file whose other fields are those of the plugin that their ``name`` names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, create_model, field_validator, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from anygauge.interface import PluginError
from anygauge.registry import Provided, installed_plugins
from anygauge.registry.specs import load_options
from anygauge.util.section import Section


class PluginSection(Section):
    """Base of the sections of a kind of plugin, each of which has a class of its own.

    Values are checked by the class of the plugin that they name.

    Attributes:
        plugin_kind, plugin_kinds: what the plugins are: one, several.
        default_plugin: the one of a run file that names none.
        plugin_name: of a class for one plugin, its name.
    """

    plugin_kind: ClassVar[str]
    plugin_kinds: ClassVar[str]
    default_plugin: ClassVar[str]
    plugin_name: ClassVar[str] = ""

    name: str

    @classmethod
    def of_plugin(cls, name: str | None = None) -> type[Self]:
        """The section of the plugin of a name; None: of the default.

        Raises:
            UnknownNameError: there is no such plugin; names the nearest.
            PluginError: several claim the name, or its fields cannot be read.
        """
        find = getattr(installed_plugins(), f"find_{cls.plugin_kind}")
        return _section_class(cls.of_all(), find(cls.default_plugin if name is None else name))

    @classmethod
    def of_all(cls) -> type[Self]:
        """The section with the fields that all plugins of this kind have."""
        return next(one for one in cls.__mro__ if PluginSection in one.__bases__)

    @classmethod
    def of_default(cls) -> Self:
        """Return the section of a run file that has none."""
        return cls.of_plugin().model_validate({})

    @classmethod
    def of_plugins(cls) -> dict[str, type[Self]]:
        """Plugin -> its section; the default comes first."""
        provided = getattr(installed_plugins(), cls.plugin_kinds)
        names = sorted((p.spec.name for p in provided), key=lambda n: (n != cls.default_plugin, n))
        return {name: cls.of_plugin(name) for name in names}

    @field_validator("name")
    @classmethod
    def _check_known(cls, name: str) -> str:
        try:
            cls.of_plugin(name)
        except PluginError as error:
            raise ValueError("; ".join(str(error).splitlines())) from None
        return name

    @model_validator(mode="wrap")
    @classmethod
    def _as_named(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate a section as that of the plugin that it names."""
        if cls.plugin_name or not isinstance(value, Mapping):
            return handler(value)
        name = value.get("name")
        try:
            section = cls.of_plugin(name)
        except (PluginError, TypeError):
            return handler({"name": name})  # what is wrong with the name, and nothing else
        return section.model_validate(dict(value))


@cache
def _section_class(base: Any, provided: Provided[Any]) -> Any:
    name = provided.spec.name
    fields: dict[str, Any] = {
        "name": (Literal[name], Field(name, description=base.model_fields["name"].description))
    }
    bases: Any = (load_options(provided), base)
    doc = provided.spec.summary or base.__doc__
    made = create_model(f"{base.__name__}_{name}", __base__=bases, __doc__=doc, **fields)
    cast("Any", made).plugin_name = name
    return made
