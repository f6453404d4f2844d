"""The environment of a rank: who proposes which variable, and whose value wins.

Precedence: the user's own variable, the run file, a site's hook, the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from anygauge.interface import AnygaugeError, Backend, Job, Node, PluginError, Setting
from anygauge.registry.load_plugins import BLOCK_VARIABLE, TUNING_HOOK
from anygauge.registry.registry import Registry
from anygauge.util.hiding import HIDDEN, is_secret, without_secrets
from anygauge.util.text import describe

USER = "user"
RUN_FILE = "run file"
SITE_HOOK = "site hook"
BACKEND = "backend"

REMOVED = "(removed)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSetting:
    """One variable, decided.

    Attributes:
        setting: what the winner proposed, with its reason and source.
        value: the winner's value; None removes the variable.
        origin: ``user``, ``run file``, ``site hook`` or ``backend``.
        overruled: (origin, value) of the others, strongest first.
        secret: whether any of them is kept from screens and records.
        private: whether the run file sets it: a value that its author chose is shown only on
            request.
    """

    setting: Setting
    value: str | None
    origin: str
    overruled: tuple[tuple[str, str | None], ...] = ()
    secret: bool = False
    private: bool = False

    @property
    def name(self) -> str:
        """The variable."""
        return self.setting.name

    def record(self, *, values: bool = False) -> dict[str, Any]:
        """The decision as plain values for files and screens; `values` as of `display`."""
        return {
            "name": self.name,
            "value": None if self.value is None else self.display(self.value, values=values),
            "scope": self.setting.scope.value,
            "set_by": self.origin,
            "reason": self.setting.reason,
            "source": self.setting.source,
            "overruled": [
                {"by": origin, "value": self.display(value, values=values)}
                for origin, value in self.overruled
            ],
        }

    def display(self, value: str | None, *, values: bool = False) -> str:
        """One of its values for screens and records.

        Hidden are secrets, by name or in the value, and, without `values`, what the run file sets.
        """
        if value is None:
            return REMOVED
        hidden = self.secret or (self.private and not values)
        return HIDDEN if hidden else without_secrets(value)


def apply_settings(resolved: Iterable[ResolvedSetting], base: Mapping[str, str]) -> dict[str, str]:
    """A copy of `base` with every decision carried out."""
    environ = dict(base)
    for one in resolved:
        if one.value is None:
            environ.pop(one.name, None)
        else:
            environ[one.name] = one.value
    return environ


def resolve_environment(
    registry: Registry,
    backend: Backend,
    job: Job,
    node: Node,
    local_rank: int | None,
    user_environ: Mapping[str, str],
) -> list[ResolvedSetting]:
    """Decide every variable that the backend, a site's hook or the run file mentions.

    Args:
        local_rank: whose environment; None for what the whole node shares.
        user_environ: the variables that the user has set; only those that somebody else
            mentions appear in the result.

    Returns:
        In the order: the backend's, the sites', the run file's.

    Raises:
        PluginError: a backend or hook raises or proposes what is not a setting, or two hooks
            disagree.
        RunFileError: the backend cannot work with the outcome.
    """
    titles = [p.title for p in registry.backends if p.spec.name == backend.name]
    own = _proposed_settings(
        titles[0] if titles else f"backend {backend.name!r}",
        "environment()",
        lambda: [backend.environment(job, node, local_rank)],
    )
    sites = _ask_sites(registry, backend=backend, job=job, node=node, settings=tuple(own))
    asked = [
        Setting(name=name, value=value, reason="asked for", source="run file: environment")
        for name, value in job.environment.items()
    ]
    offers: dict[str, list[tuple[str, Setting]]] = {}
    for origin, settings in ((BACKEND, own), (SITE_HOOK, sites), (RUN_FILE, asked)):
        for setting in settings:
            # Each source overrules those before it, so the strongest comes first.
            offers.setdefault(setting.name, []).insert(0, (origin, setting))
    for name in offers.keys() & user_environ.keys():
        setting = Setting(
            name=name,
            value=user_environ[name],
            scope=offers[name][0][1].scope,
            reason="already set by the user",
            source="the user's environment",
        )
        offers[name].insert(0, (USER, setting))
    resolved = [_decide_value(*each) for each in offers.values()]
    backend.check_environment(apply_settings(resolved, user_environ))
    return resolved


def _decide_value(winner: tuple[str, Setting], *others: tuple[str, Setting]) -> ResolvedSetting:
    origin, setting = winner
    return ResolvedSetting(
        setting=setting,
        value=setting.value,
        origin=origin,
        overruled=tuple((other, proposal.value) for other, proposal in others),
        secret=is_secret(setting.name) or any(s.secret for _, s in (winner, *others)),
        private=any(other == RUN_FILE for other, _ in (winner, *others)),
    )


def _ask_sites(registry: Registry, **arguments: Any) -> list[Setting]:
    """The settings of all hooks; two that agree on a variable count once."""
    decided: dict[str, tuple[Setting, str]] = {}
    for plugin in registry.plugins:
        title = f"plugin {plugin.entry_point!r} of {plugin.origin}"
        # It gives nothing for a plugin without the hook.
        ask = partial(plugin.manager.hook.anygauge_tune_environment, **arguments)
        advice = f"; to run without it, name it in {BLOCK_VARIABLE}"
        proposed = _proposed_settings(title, TUNING_HOOK, ask, advice)
        # Within one plugin a later value replaces an earlier one, as in a list of assignments.
        for name, setting in {s.name: s for s in proposed}.items():
            earlier, earlier_title = decided.setdefault(name, (setting, title))
            if earlier.value != setting.value:
                raise PluginError(
                    f"{earlier_title} and {title} set {name} to different values; set {name} in "
                    f"the run file's 'environment', or name the plugin to skip in {BLOCK_VARIABLE}"
                )
    return [setting for setting, _ in decided.values()]


def _proposed_settings(
    title: str, what: str, ask: Callable[[], Iterable[Iterable[Any]]], advice: str = ""
) -> list[Setting]:
    """What a plugin's code proposes, each part of it checked."""
    try:
        # A generator runs, and may raise, only here.
        proposed = [setting for part in ask() for setting in part]
    except AnygaugeError:
        raise
    except Exception as error:
        raise PluginError(f"{title}: {what} raised {describe(error)}{advice}") from error
    for setting in proposed:
        _check_setting(setting, title)
    return proposed


def _check_setting(setting: Any, title: str) -> None:
    """Refuse what the operating system would refuse later in fewer words."""
    if not isinstance(setting, Setting):
        raise PluginError(f"{title} gave {setting!r} for the environment; it must give Setting")
    if not setting.name or "=" in setting.name or "\0" in setting.name:
        raise PluginError(f"{title}: {setting.name!r} is not the name of an environment variable")
    if setting.value is not None and not isinstance(setting.value, str):
        raise PluginError(
            f"{title}: {setting.name} has a value of type {type(setting.value).__name__}; "
            "environment variables are strings, or None to remove one"
        )
