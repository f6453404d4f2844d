"""A rule of an environment sets its variable or skips it, and its reason is told either way."""

from __future__ import annotations

from anygauge.interface import Backend, EnvironmentRule, Node, Scope, Setting, Skip
from tests.helpers.jobs import make_job

JOB = make_job(backend="fake", run_directory="/r")


def rule(decide, *, name="A", scope=Scope.NODE):
    return EnvironmentRule(
        name=name,
        value="in words",
        scope=scope,
        reason="in general",
        source="a manual",
        decide=decide,
    )


def backend_with(*rules):
    class Fake(Backend):
        name = "fake"
        device_type = "meta"
        environment_rules = rules

    return Fake()


def test_what_a_rule_sets_is_a_setting_of_its_variable():
    backend = backend_with(rule(lambda context: context.set_to("1", "here it is needed")))
    wanted = Setting(
        name="A", value="1", scope=Scope.NODE, reason="here it is needed", source="a manual"
    )
    assert list(backend.environment(JOB, Node())) == [wanted]
    ((_, explained),) = backend.explain_environment(JOB, Node())
    assert explained == wanted


def test_a_rule_may_remove_its_variable():
    (setting,) = backend_with(rule(lambda c: c.set_to(None, "no"))).environment(JOB, Node())
    assert setting.value is None


def test_a_rule_that_skips_is_explained_but_sets_nothing():
    backend = backend_with(rule(lambda context: Skip("not needed")))
    assert list(backend.environment(JOB, Node())) == []
    ((explained, decision),) = backend.explain_environment(JOB, Node())
    assert (explained.name, decision) == ("A", Skip("not needed"))


def test_rules_of_ranks_are_asked_for_ranks_only():
    backend = backend_with(
        rule(lambda context: context.set_to(str(context.local_rank), "which"), scope=Scope.RANK)
    )
    assert list(backend.environment(JOB, Node())) == []
    assert [one.value for one in backend.environment(JOB, Node(), 3)] == ["3"]
