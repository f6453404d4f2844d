"""The jobs on the page of the clouds can be rendered, and its tables leave no option out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.launch.request import read_request, render_plan
from tests.docs.pages import ROOT, blocks, section, table_names

PAGE = ROOT / "docs/clouds.md"
JOBS = {block.option("job"): block for block in blocks() if block.option("job")}
OPTIONS = {
    "## Kubernetes": "kubernetes:KubernetesOptions",
    "## Azure ML": "azureml:AzuremlOptions",
    "## SageMaker": "sagemaker:SagemakerOptions",
}


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


@pytest.mark.parametrize("heading", OPTIONS)
def test_every_option_is_in_a_table(heading: str) -> None:
    module, _, name = OPTIONS[heading].partition(":")
    model = getattr(importlib.import_module(f"anygauge_clouds.{module}"), name)
    listed = table_names(section(PAGE, heading))
    common = {"grace_s", "in_image", "python"} | ({"image"} if "Kube" in heading else set())
    assert listed == set(model.model_fields) - common | {"image"} - common
