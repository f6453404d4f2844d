"""Whatever a user writes arrives as it is, through files alone, where storage is not shared."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.agent.startup import read_variables
from anygauge.interface import Job, Plan
from anygauge_clouds.sagemaker_node import unpacked
from anygauge_clouds.submission import write_files
from tests.clouds import test_azureml, test_kubernetes, test_sagemaker
from tests.clouds.helpers import job
from tests.helpers.options import render

OPTIONS: dict[str, dict[str, Any]] = {
    "kubernetes": test_kubernetes.OPTIONS,
    "azureml": test_azureml.OPTIONS,
    "sagemaker": test_sagemaker.OPTIONS,
}
MARK = "\N{SNOWMAN}mine"
# A variable cannot hold a NUL, and lone surrogates are not text.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)
WITH_ODD = st.one_of(
    TEXTS,
    st.sampled_from(
        [
            "$HOME",
            "$(HOME)",
            "$$(x)",
            "`id`",
            "${{inputs.a}}",
            "a 'b' \"c\"",
            "\n",
            "雪",
            "%s",
            "\\",
        ]
    ),
).map(lambda text: MARK + text)


def job_there(plan: Plan, name: str) -> Job:
    """What an agent reads on its machine."""
    if name == "sagemaker":
        request = json.loads(plan.files[0].text)
        text, _ = unpacked(request["HyperParameters"])
    else:
        text = next(file.text for file in plan.files if file.path.endswith("job.json"))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        return Job.load(file.name)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(deadline=None, max_examples=60)
@given(value=WITH_ODD, text=WITH_ODD)
def test_a_job_arrives_as_it_was_written(name: str, value: str, text: str) -> None:
    there = job(environment={"V": value}, run_text=text, profile=test_sagemaker.GPUS)
    plan = render(name, there, OPTIONS[name])
    arrived = job_there(plan, name)
    assert (arrived.environment["V"], arrived.run_text) == (value, text)
    # Nowhere else: what a cluster or a shell would read has nothing of it.
    spoken = [p.argv for p in plan.processes] + list(plan.operations.values())
    assert MARK not in json.dumps(spoken, ensure_ascii=False)
    for file in plan.files:
        if file.mode & 0o077:
            assert MARK not in file.text and "mine" not in file.text


@settings(deadline=None, max_examples=30)
@given(value=WITH_ODD)
def test_variables_of_the_shell_arrive_as_they_are(value: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", value)
        write_files(render("kubernetes", job(Path(folder) / "run"), OPTIONS["kubernetes"]))
        path = Path(folder) / "run" / "variables.json"
        assert read_variables(str(path)) == {"HF_HOME": value}
