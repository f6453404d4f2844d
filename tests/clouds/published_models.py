"""The clouds' own models of a job: `published_models.py KIND FILE`, in an environment of their own.

Prints what they find wrong, one line for each; exit status 1 if anything. No network is needed.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = "1.33"
# Unicode classes that Python's patterns lack; ours are narrower.
JAVA_CLASSES = {r"\p{L}": "A-Za-z", r"\p{Z}": " ", r"\p{N}": "0-9"}
# An amount of a resource, which a number or a text may tell.
QUANTITY = re.compile(r"\.(limits|requests)\.\S+$")


def kubernetes(file: Path) -> Iterator[str]:
    """Kubeflow's and JobSet's models, and Kubernetes' schemas for the pods inside."""
    made = yaml.safe_load(file.read_text())
    kind, spec = made["kind"], made["spec"]
    yield from _of_pydantic(kind, made)
    if kind == "JobSet":
        for one in spec["replicatedJobs"]:
            batch = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": one["template"]["spec"],
            }
            yield from _of_schema(batch, "Job")
    for path, template in _pods(made, kind):
        yield from _of_schema(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}, path
        )


def _pods(made: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    spec = made["spec"]
    if kind == "JobSet":
        for one in spec["replicatedJobs"]:
            yield one["name"], one["template"]["spec"]["template"]
    else:
        # A TrainJob's patch, with what comes from the runtime and the trainer.
        patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
        pod = patch["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        trainer = spec["trainer"]
        whole = {**pod["containers"][0], "image": trainer["image"], "command": trainer["command"],
                 "resources": trainer["resourcesPerNode"]}  # fmt: skip
        yield "node", {"spec": {**pod, "containers": [whole]}}


def _of_schema(made: dict[str, Any], path: str) -> Iterator[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(made, KUBERNETES, strict=True)
    except Exception as error:
        place = "/".join(map(str, getattr(error, "path", ())))
        yield f"{path}: {getattr(error, 'message', error)} at {place}"


def _of_pydantic(kind: str, made: dict[str, Any]) -> Iterator[str]:
    models = importlib.import_module("kubeflow_trainer_api.models")
    model = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}[kind]
    try:
        read = getattr(models, model).from_dict(made)
    except ValueError as error:
        yield f"{kind}: {error}"
        return
    # Unknown fields are dropped without a word: what comes back must be what went in.
    yield from _lost(made, json.loads(read.to_json()), kind)


def _lost(given: Any, back: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict):
        if not isinstance(back, dict):
            yield f"{path}: came back as {back!r}"
            return
        for key, value in given.items():
            if key in back:
                yield from _lost(value, back[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: unknown field"
    elif isinstance(given, list):
        if not isinstance(back, list) or len(given) != len(back):
            yield f"{path}: came back as {back!r}"
            return
        for number, value in enumerate(given):
            yield from _lost(value, back[number], f"{path}[{number}]")
    elif given != back and not (QUANTITY.search(path) and str(given) == back):
        yield f"{path}: {given!r} came back as {back!r}"


def azureml(file: Path) -> Iterator[str]:
    """Azure's own SDK: it loads the job, checks it, and makes the service's request of it."""
    logging.disable(logging.WARNING)
    from azure.ai.ml import load_job

    try:
        job = load_job(str(file))
        checked = job._validate()  # the public way needs a workspace
        yield from (f"{place}: {text}" for place, text in checked.error_messages.items())
        job._to_job()._to_rest_object()
    except Exception as error:
        yield f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def sagemaker(file: Path) -> Iterator[str]:
    """The service's model as botocore ships it, with the enums, patterns and lengths in it."""
    import botocore.session
    from botocore.validate import ParamValidator

    request = json.loads(file.read_text())
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        yield report.generate_report()
    yield from _of_shape(shape, request, "request")


def _of_shape(shape: Any, value: Any, path: str) -> Iterator[str]:
    limits, kind = shape.metadata, shape.type_name
    size = len(value) if isinstance(value, (str, list, dict)) else value
    counted = isinstance(size, (int, float)) and not isinstance(size, bool)
    if counted and not limits.get("min", size) <= size <= limits.get("max", size):
        yield f"{path}: {size} is not within {limits.get('min')} and {limits.get('max')}"
    if kind == "string" and isinstance(value, str):
        if getattr(shape, "enum", None) and value not in shape.enum:
            yield f"{path}: {value!r} is none of {len(shape.enum)} known values"
        pattern = limits.get("pattern", "")
        for java, ours in JAVA_CLASSES.items():
            pattern = pattern.replace(java, ours)
        if pattern and not re.fullmatch(pattern, value):
            yield f"{path}: {value!r} does not match {pattern}"
    elif kind == "structure" and isinstance(value, dict):
        for key in value.keys() & shape.members.keys():
            yield from _of_shape(shape.members[key], value[key], f"{path}.{key}")
    elif kind == "list" and isinstance(value, list):
        for number, part in enumerate(value):
            yield from _of_shape(shape.member, part, f"{path}[{number}]")
    elif kind == "map" and isinstance(value, dict):
        for key, part in value.items():
            yield from _of_shape(shape.key, key, f"{path}.{key}, its name")
            yield from _of_shape(shape.value, part, f"{path}.{key}")


CHECKS: dict[str, Callable[[Path], Iterator[str]]] = {
    "kubernetes": kubernetes,
    "azureml": azureml,
    "sagemaker": sagemaker,
}


def main() -> int:
    problems = list(CHECKS[sys.argv[1]](Path(sys.argv[2])))
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
