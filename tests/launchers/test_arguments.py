"""Paths and values of any kind arrive on every node as they were, through every launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.jobs import make_job
from tests.launch.fakes import FAKE_AGENT, FINISHED, write_script
from tests.launchers.targets import PROGRAMS, LaunchTarget, reason, target

pytestmark = pytest.mark.launchers

ODD = 'it\'s a "test" $HOME `id` $(id) \\ \n %j;&|<>*?[~]!#ü 雪 \t'
# Neither a path nor a variable can hold NUL, and half a character is not a text.
VALUES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40
)
NAMES = VALUES.map(lambda text: text.replace("/", "_")).filter(
    lambda text: text not in (".", "..") and len(text.encode()) <= 100
)


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchTarget]:
    why = reason(request.param)
    if why is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("target")
    script = write_script(folder, {r: [["environment", f"seen{r}"], FINISHED] for r in (0, 1)})
    wrapper = folder / "python"
    wrapper.write_text(
        f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{FAKE_AGENT}" "{script}" "$@"\n'
    )
    wrapper.chmod(0o755)
    with target(request.param, folder) as made:
        made.options = {**made.options, "python": str(wrapper)}
        yield made


def through(up: LaunchTarget, name: str, value: str) -> None:
    folder = up.machines.folder
    run = folder / "runs" / name
    shutil.rmtree(folder / "runs", ignore_errors=True)
    run.mkdir(parents=True)
    job = make_job(
        run_directory=run,
        nodes=2,
        token=value,
        working_directory=str(run),
        pass_environment=("ODD_VALUE", "PATH"),
    )
    (folder / "job.json").write_text(job.dump())
    (folder / "options.json").write_text(json.dumps(up.options))
    for rank in (0, 1):
        (folder / f"seen{rank}").unlink(missing_ok=True)
    done = subprocess.run(
        up.machines.command(
            "login",
            [
                *(sys.executable, "-m", "tests.launchers.drive", up.name),
                *(folder / "job.json", folder / "options.json"),
            ],
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **up.environment, "ODD_VALUE": value},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert json.loads(done.stdout.splitlines()[-1])["state"] == "ok"
    for rank in (0, 1):
        assert json.loads((folder / f"seen{rank}").read_text())["ODD_VALUE"] == value
        assert json.loads((run / "ranks" / f"rank{rank}.json").read_text())["state"] == "ok"
    assert {path.name for path in (folder / "runs").iterdir()} == {name}


def test_the_worst_that_we_know_arrives(up: LaunchTarget) -> None:
    through(up, ODD.replace("/", "_"), ODD)


@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # each example starts a job
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(name=NAMES, value=VALUES)
def test_anything_arrives(up: LaunchTarget, name: str, value: str) -> None:
    through(up, name, value)
