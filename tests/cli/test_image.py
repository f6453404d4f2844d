"""`anygauge image`: what it tells and what it starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import anygauge, called

ENGINE = """#!{python}
import json, sys
open({log!r}, "a").write(json.dumps(sys.argv) + "\\n")
if sys.argv[1:3] == ["image", "inspect"]:
    sys.exit({known})
if sys.argv[1] == "info":
    print("cannot connect to the daemon", file=sys.stderr)
    sys.exit({silent})
sys.exit(7)
"""


def engine(folder: Path, name: str, *, knows_images: bool = True, answers: bool = True) -> Path:
    """A container engine that writes down how it is called; its containers end with status 7."""
    folder.mkdir(exist_ok=True)
    log, program = folder / "log", folder / name
    statuses = {"known": int(not knows_images), "silent": int(not answers)}
    program.write_text(ENGINE.format(python=sys.executable, log=str(log), **statuses))
    program.chmod(0o755)
    return log


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


RUN = ("image", "--backend", "cpu", "--run")


def told(*arguments: str, **environment: str) -> Any:
    done = called(["image", "--json", *arguments], environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("cpu", "--shm-size=1g"),
        ("cuda", "--gpus=all --ipc=host --ulimit=memlock=-1 --ulimit=stack=67108864"),
        (
            "hpu",
            "--runtime=habana -e=HABANA_VISIBLE_DEVICES=all "
            "-e=OMPI_MCA_btl_vader_single_copy_mechanism=none "
            "--cap-add=sys_nice --net=host --ipc=host",
        ),
    ],
)
def test_the_command_hands_the_devices_in(backend: str, flags: str) -> None:
    found = told("--backend", backend, "--engine", "docker", "--", "train", "a run.yaml")
    here = Path.cwd()
    assert found["run"] == [
        *("docker", "run", "--rm", *flags.split()),
        f"--user={os.getuid()}:{os.getgid()}",
        f"--volume={here}:/work",
        "--workdir=/work",
        found["image"],
        *("train", "a run.yaml"),
    ]


def test_podman_has_other_flags_for_gpus() -> None:
    run = told("--backend", "cuda", "--engine", "podman")["run"]
    assert "--device=nvidia.com/gpu=all" in run and "--ipc=host" in run and "--gpus=all" not in run


def test_for_people_it_is_a_list_to_copy_from() -> None:
    done = anygauge(["image", "--backend", "hpu", "--", "train", "a run.yaml"])
    assert done.returncode == 0
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
    assert [line[0] for line in lines] == [
        "image", "base", "has", "source", "note", "build", "run", "others",
    ]  # fmt: skip
    assert "train 'a run.yaml'" in done.stdout and "1.19.0 (no image)" in done.stdout


def test_another_release_is_another_tag() -> None:
    newest, older = told("--backend", "hpu"), told("--backend", "hpu", "--release", "1.22.0")
    assert str(older["image"]).endswith("-hpu-1.22.0") and older["image"] != newest["image"]
    assert "older transformers" in older["release"]["note"]


def test_run_becomes_the_engine(tmp_path: Path) -> None:
    log = engine(tmp_path / "bin", "podman")
    done = anygauge(
        [*RUN, "--engine=podman", "--volume=/models:/models:ro", "--", "train", "run.yaml"],
        environment={"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        cwd=tmp_path,
    )
    assert done.returncode == 7
    inspected, ran = calls(log)
    assert inspected[1:3] == ["image", "inspect"]
    assert ran[1:3] == ["run", "--rm"] and ran[-3:] == [inspected[3], "train", "run.yaml"]
    assert f"--volume={tmp_path}:/work" in ran and "--volume=/models:/models:ro" in ran


def test_an_image_that_is_not_built_is_said_before(tmp_path: Path) -> None:
    log = engine(tmp_path / "bin", "docker", knows_images=False)
    where = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = anygauge([*RUN, "--engine=docker"], environment=where)
    assert done.returncode == 1 and "docker has no image anygauge:" in done.stderr
    # On a registry, it is fetched.
    where["ANYGAUGE_REPOSITORY"] = "example.com/a/b"
    done = anygauge([*RUN, "--engine=docker"], environment=where)
    assert done.returncode == 7
    assert [call[1] for call in calls(log)] == ["image", "run"]


def test_an_engine_that_answers_is_taken(tmp_path: Path) -> None:
    where = {"PATH": f"{tmp_path / 'bin'}:{tmp_path / 'more'}"}
    log = engine(tmp_path / "bin", "docker", answers=False)
    done = anygauge(RUN, environment=where)
    assert done.returncode == 1
    assert "docker does not answer: cannot connect to the daemon" in done.stderr
    engine(tmp_path / "bin", "podman")
    done = anygauge(RUN, environment=where)
    assert done.returncode == 7 and Path(calls(log)[-1][0]).name == "podman"


def test_without_an_engine_the_command_is_still_told(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert told("--backend", "cpu", **nothing)["run"][0] == "docker"
    done = anygauge(RUN, environment=nothing)
    assert done.returncode == 1
    assert "docker is not installed here. The command would be: docker run" in done.stderr
