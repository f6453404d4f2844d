"""Holds what a run's memory plan found before it starts, and what strategy `auto` becomes.

Who prepares a run decides it for all ranks: the command, where ranks run on its machine; else the
job's first machine. From there it goes to the agents with the start, and from each to its ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from anygauge.interface import Job
from anygauge.util.section import Count, Number, Text

UNDECIDED = "the ranks decide once their devices are open"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Plain values: lines between agents are not signed, so none of it is a setting.

    Attributes:
        lines: for whoever starts the run.
        note: what should be looked at; "" for nothing.
        memory: phase -> planned bytes of tensors; empty where there was no plan.
        step_s: planned seconds of a step; None: not known.
        form: which of `anygauge.training.auto.forms_of` strategy `auto` is; None: the ranks decide.
        strategy: its name there.
        why: why that one.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    lines: tuple[Text, ...] = ()
    note: Text = ""
    memory: Mapping[Text, Count] = field(default_factory=dict)
    step_s: Number | None = None
    form: Count | None = None
    strategy: Text = ""
    why: Text = ""

    def applied_to(self, job: Job) -> Job:
        """The job with what was found."""
        job = replace(job, expected_memory=dict(self.memory), expected_step_s=self.step_s)
        if self.form is None:
            return job
        return replace(job, auto_form=self.form, strategy=self.strategy, strategy_why=self.why)

    def dump(self) -> str:
        """Return the decision as JSON text, without what is only shown."""
        return json.dumps(asdict(replace(self, lines=(), note="")))

    @classmethod
    def load(cls, text: str) -> Decision:
        """Read what `dump` has written.

        Raises:
            ValueError: it is something else.
        """
        return DECISION.validate_json(text)


DECISION = TypeAdapter(Decision)
