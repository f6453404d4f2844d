"""Who wins a variable: the user, then the run file, then a site, then the backend."""

from __future__ import annotations

import pytest

from anygauge.interface import EnvironmentRule, Node, PluginError, Scope, Setting
from anygauge.registry import apply_settings, resolve_environment
from tests.helpers import sample_machines
from tests.registry.test_registry_kernels import BareBackend


def setting(name, value, **more):
    return Setting(name=name, value=value, reason="a reason", source="a manual", **more)


def backend_with(*settings):
    class WithSettings(BareBackend):
        def environment(self, job, node, local_rank=None):
            for one in settings:
                if isinstance(one, Exception):
                    raise one
                yield one

    return WithSettings()


def job(**environment):
    return sample_machines.job(environment=environment)


@pytest.fixture
def site(install):
    """``site("return [...]")`` installs a plugin whose tuning hook has that body."""

    def put(body, name="site"):
        source = f"""\
from anygauge.interface import hookimpl, Setting

def setting(name, value):
    return Setting(name=name, value=value, reason="this site's network", source="its handbook")

@hookimpl
def anygauge_tune_environment(backend, settings):
    {body}
"""
        install(f"{name}-dist", "1.0", {name: f"fake_{name}"}, **{f"fake_{name}": source})

    return put


def resolve(registry, backend, run=None, **user):
    return resolve_environment(registry, backend, run or job(), Node(), 0, user)


def test_all_four_in_order(site, load):
    site("return [setting('A', 'site')]")
    backend = backend_with(setting("A", "backend", scope=Scope.RANK))
    registry = load()

    (one,) = resolve(registry, backend, job(A="file"), A="user", UNRELATED="x")
    assert (one.name, one.value, one.origin) == ("A", "user", "user")
    assert one.overruled == (("run file", "file"), ("site hook", "site"), ("backend", "backend"))

    (one,) = resolve(registry, backend, job(A="file"))
    assert (one.value, one.origin) == ("file", "run file")

    (one,) = resolve(registry, backend)
    assert (one.value, one.origin) == ("site", "site hook")
    assert one.setting.reason == "this site's network"

    (one,) = resolve(load("site"), backend)
    assert (one.value, one.origin, one.overruled) == ("backend", "backend", ())
    assert (one.setting.reason, one.setting.source) == ("a reason", "a manual")
    assert one.setting.scope is Scope.RANK


def test_variables_that_only_the_run_file_or_a_site_mentions(site, load):
    site("return [setting('SITE', '1')]")
    resolved = resolve(load(), backend_with(), job(MINE="2"))
    assert [(r.name, r.value, r.origin) for r in resolved] == [
        ("SITE", "1", "site hook"),
        ("MINE", "2", "run file"),
    ]


def test_hook_sees_what_the_backend_proposes(site, load):
    site("return [setting(s.name, s.value + backend.name) for s in settings]")
    (one,) = resolve(load(), backend_with(setting("A", "by ")))
    assert one.value == "by plain"


def test_none_removes_a_variable_unless_the_user_set_it(load):
    backend = backend_with(setting("A", None), setting("B", "1"))
    resolved = resolve(load(), backend, job(B="2"))
    assert apply_settings(resolved, {"A": "inherited", "C": "3"}) == {"B": "2", "C": "3"}
    assert resolved[0].display(resolved[0].value) == "(removed)"
    kept = resolve(load(), backend, A="")
    assert apply_settings(kept, {})["A"] == ""


def test_the_last_of_a_backends_own_values_counts(load):
    (one,) = resolve(load(), backend_with(setting("A", "1"), setting("A", "2")))
    assert (one.value, one.overruled) == ("2", (("backend", "1"),))


def test_the_backend_is_asked_about_all_that_a_rank_starts_with(load, monkeypatch):
    seen = []
    monkeypatch.setattr(
        BareBackend, "check_environment", lambda self, environ: seen.append(environ)
    )
    resolve(load(), backend_with(setting("A", "backend")), job(B="run file"), A="user", C="user")
    assert seen == [{"A": "user", "B": "run file", "C": "user"}]


def test_what_the_run_file_sets_is_hidden_also_where_another_wins(load):
    (one,) = resolve(load(), backend_with(), job(A="a word"), A="mine")
    assert one.record()["overruled"] == [{"by": "run file", "value": "(hidden)"}]
    assert one.record(values=True)["overruled"] == [{"by": "run file", "value": "a word"}]


def test_secrets_are_not_shown(load):
    backend = backend_with(setting("PLAIN", "hush", secret=True), setting("HF_TOKEN", "old"))
    plain, token = resolve(load(), backend, PLAIN="hash", HF_TOKEN="new")
    assert (plain.display(plain.value), token.display(token.value)) == ("(hidden)", "(hidden)")
    assert [(o, plain.display(v)) for o, v in plain.overruled] == [("backend", "(hidden)")]
    assert token.value == "new"


@pytest.mark.parametrize("southern", ["1", "2"])
def test_two_sites_agree_or_are_both_named(site, load, southern):
    site("return [setting('A', '1')]", name="north")
    site(f"return [setting('A', '{southern}')]", name="south")
    if southern == "2":
        with pytest.raises(PluginError, match=r"north-dist 1.0 and .*south-dist 1.0 set A"):
            resolve(load(), backend_with())
    (one,) = resolve(load(*["south"] * (southern == "2")), backend_with())
    assert (one.value, one.overruled) == ("1", ())


UNDECIDED = EnvironmentRule(
    name="A", value="in words", scope=Scope.NODE, reason="in general", source="a manual",
    decide=lambda context: None,
)  # fmt: skip


class DecidesNothing(BareBackend):
    environment_rules = (UNDECIDED,)


@pytest.mark.parametrize(
    ("body", "backend", "told"),
    [
        ("raise ValueError('bad site')", backend_with(), "site-dist 1.0: .* ValueError: bad site"),
        ("return [('A', '1')]", backend_with(), "site-dist 1.0 gave .* it must give Setting"),
        ("return [setting('A', 1)]", backend_with(), "site-dist 1.0: A has a value of type int"),
        ("return [setting('A=B', '1')]", backend_with(), "site-dist 1.0: 'A=B' is not the name"),
        ("", backend_with(setting("A", 1)), "backend 'plain': A has a value of type int"),
        ("", backend_with(KeyError("no")), r"backend 'plain': environment\(\) raised KeyError"),
        ("", DecidesNothing(), "backend 'plain' gave None .* must give Setting"),
    ],
)
def test_broken_site_hook_or_backend_is_named(site, load, body, backend, told):
    if body:
        site(body)
    with pytest.raises(PluginError, match=told):
        resolve(load(), backend)
