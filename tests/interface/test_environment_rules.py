"""A rule of an environment sets its variable or skips it, and its reason is told either way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anygauge.interface import Backend, EnvironmentRule, Node, RuleContext, Scope, Setting, Skip
from tests.helpers.jobs import make_job

JOB = make_job(backend="fake", run_directory="/r")
Decision = Callable[[RuleContext], Setting | Skip]


def backend_with(decide: Decision, scope: Scope = Scope.NODE) -> Backend:
    rule = EnvironmentRule(
        name="A", value="in words", scope=scope, reason="in general", source="page", decide=decide
    )

    class Fake(Backend):
        name = "fake"
        device_type = "meta"
        environment_rules = (rule,)

    return Fake()


@pytest.mark.parametrize("value", ["1", None])
def test_what_a_rule_sets_or_removes_is_a_setting_of_its_variable(value: str | None) -> None:
    backend = backend_with(lambda context: context.set_to(value, "here it is needed"))
    wanted = Setting(
        name="A", value=value, scope=Scope.NODE, reason="here it is needed", source="page"
    )
    assert list(backend.environment(JOB, Node())) == [wanted]
    ((rule, explained),) = backend.explain_environment(JOB, Node())
    assert (rule.name, explained) == ("A", wanted)


def test_a_rule_that_skips_is_explained_but_sets_nothing() -> None:
    backend = backend_with(lambda context: Skip("not needed"))
    assert list(backend.environment(JOB, Node())) == []
    assert [found for _, found in backend.explain_environment(JOB, Node())] == [Skip("not needed")]


def test_rules_of_ranks_are_asked_for_ranks_only() -> None:
    backend = backend_with(lambda c: c.set_to(str(c.local_rank), "which"), Scope.RANK)
    assert list(backend.environment(JOB, Node())) == []
    assert [one.value for one in backend.environment(JOB, Node(), 3)] == ["3"]
