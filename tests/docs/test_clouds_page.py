"""The jobs on the page of the clouds can be rendered, and tables leave out no launcher's option."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.launch.request import read_request, render_plan
from tests.docs.pages import ROOT, blocks, section, table_names

JOBS = {block.option("job"): block for block in blocks() if block.option("job")}
OPTIONS = [
    ("clouds", "## Kubernetes", "anygauge_clouds.kubernetes:KubernetesOptions"),
    ("clouds", "## Azure ML", "anygauge_clouds.azureml:AzuremlOptions"),
    ("clouds", "## SageMaker", "anygauge_clouds.sagemaker:SagemakerOptions"),
    ("launchers", "## ssh", "anygauge_launchers.hosts:SshOptions"),
    ("launchers", "## Slurm", "anygauge_launchers.slurm:SlurmOptions"),
]


def test_there_is_a_job_for_each() -> None:
    assert set(JOBS) == {"whole", "azureml", "sagemaker"}


def test_the_whole_run_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(JOBS["whole"].text)
    assert not render_plan(read_request(path, [], {}, need_device=True)).notes


@pytest.mark.parametrize("name", ["azureml", "sagemaker"])
def test_the_jobs_on_the_page_can_be_rendered(name: str, tmp_path: Path) -> None:
    root = "/opt/ml/input/data" if name == "sagemaker" else ""
    run: dict[str, Any] = {
        "name": "tiny",
        "output": str(tmp_path / "runs"),
        "backend": "cuda",
        "model": {"name": f"{root}/models/llama"},
        "adapter": {"r": 4},
        "data": {"train": {"path": f"{root}/data/rows.jsonl"}},
        "strategy": {"name": "zero"},
        "train": {"global_batch_size": 64},
        **yaml.safe_load(JOBS[name].text),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    plan = render_plan(read_request(path, [], {}, need_device=True))
    assert plan.operations["submit"]


@pytest.mark.parametrize(("page", "heading", "options"), OPTIONS)
def test_every_option_is_in_a_table(page: str, heading: str, options: str) -> None:
    module, _, name = options.partition(":")
    fields = set(getattr(importlib.import_module(module), name).model_fields)
    common = {"grace_s", "in_image", "python"} | ({"image"} if "Kube" in heading else set())
    assert table_names(section(ROOT / f"docs/{page}.md", heading)) - common == fields - common
