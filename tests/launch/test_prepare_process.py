"""The process that prepares a run: what its stages answer, with torch and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.resolved import parse_run, run_json
from anygauge.config.schema import ModelSection
from anygauge.interface import DataError, ModelError
from anygauge.launch import prepare_process, prepare_stages
from anygauge.launch.decision import Decision
from anygauge.launch.memory_check import plan_memory
from anygauge.launch.prepare import prepare
from anygauge.launch.prepare_process import failure_event, misses_torch
from anygauge.launch.prepare_request import PrepareRequest
from anygauge.launch.prepare_stages import Stages
from anygauge.models.hub import HubUnreachableError, download_requests
from anygauge.registry import installed_plugins
from anygauge.training.auto import in_words
from anygauge.util.events import EventWriter
from tests.helpers.runs import run_file
from tests.planning.standins import run
from tests.standins.hub import Hub, Repository


def check_of(path: Path) -> PrepareRequest:
    run = run_json(load_run_file(path))
    return PrepareRequest(stages=("check",), run=run, backend="cpu")


def events_of(*arguments: str, request: PrepareRequest) -> tuple[list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=request.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_only_a_missing_torch_leaves_the_checks_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert (
        failure_event(missing, "model")["event"] == "refused"
    )  # it is installed: the error is another
    monkeypatch.setattr(prepare_process, "find_spec", lambda name: None)
    found = failure_event(missing, "model")
    assert (found["event"], found["fields"]) == (
        "found",
        {"unchecked": "torch is not installed here"},
    )
    other = failure_event(KeyError("layers"), "model")
    assert (other["event"], other["error"]) == ("refused", "AnygaugeError")
    assert other["message"] == "the checks before the run failed: KeyError: 'layers'"
    assert (
        failure_event(KeyError("x"), "fetch")["message"]
        == "fetching the model failed: KeyError: 'x'"
    )


def test_a_refusal_keeps_its_exit_status() -> None:
    """Kinds of errors that only one package knows arrive as what they derive from."""

    class NoColumnError(DataError):
        pass

    for error, kind in (
        (NoColumnError("no column"), "DataError"),
        (HubUnreachableError("no answer"), "HubUnreachableError"),
        (ModelError("no model"), "ModelError"),
    ):
        assert failure_event(error, "data")["error"] == kind


def test_the_usual_run_is_checked_without_torch(tmp_path: Path) -> None:
    """torch, and what the model library imports with it, would be most of the cost."""
    request = check_of(run_file(tmp_path))
    module = ("-X", "importtime", "-m", "anygauge.launch.prepare_process")
    events, printed = events_of(*module, request=request)
    found, done = events[-2:]
    assert found["fields"]["found"]["data"].startswith("40 of 40 rows") and done["event"] == "done"
    imported = {line.rpartition("|")[2].strip() for line in printed.splitlines()}
    assert "transformers" in imported
    assert not imported & {"torch", "peft", "accelerate", "deepspeed", "datasets"}


IN_NEED = """
from anygauge.interface import ModelError
from anygauge.launch import prepare_process
from anygauge.training import run_checks

def load_config(section):
    try:
        import torch
    except ImportError as error:
        raise ModelError("model.name: it needs PyTorch") from error

run_checks.load_config = load_config
prepare_process.main()
"""


@pytest.mark.slow
def test_a_model_that_needs_torch_even_for_its_configuration_is_checked_with_it(
    tmp_path: Path,
) -> None:
    """What only the hidden torch explains is never a refusal: the process begins anew."""
    events, printed = events_of("-c", IN_NEED, request=check_of(run_file(tmp_path)))
    names = [event["event"] for event in events]
    assert names == ["stage", "stage", "stage", "found", "done"], printed


def test_what_the_hidden_torch_may_explain() -> None:
    def caused(cause: Exception) -> ModelError:
        try:
            raise ModelError("no") from cause
        except ModelError as error:
            return error

    assert misses_torch(caused(ImportError("x")))
    assert misses_torch(ModelError("AutoX requires the PyTorch library"))
    assert not misses_torch(caused(ValueError("hidden_size")))


# -- the network -----------------------------------------------------------------------------------

NAME = "somebody/model"
FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"0" * 1000}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub({NAME: Repository(files=FILES)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        yield hub


def test_only_a_fetch_has_the_network(tmp_path: Path, hub: Hub) -> None:
    """The stage after it finds the copy, of which it may not ask whether it is the newest."""
    path = run_file(tmp_path, model={"name": NAME})
    shown: list[str] = []
    fetch = tuple(download_requests(load_run_file(path).model))
    request = check_of(path).model_copy(update={"fetch": fetch})
    with pytest.raises(ModelError, match="cannot be read as weights"):
        prepare(request, show=lambda event: shown.append(event["event"]))
    assert hub.files() == sorted(FILES) and shown.count("message") == 2
    hub.requests.clear()
    with pytest.raises(ModelError, match="cannot be read as weights"):
        prepare(check_of(path))
    assert hub.requests == []


def test_a_hub_that_does_not_answer_refuses_a_run_alone(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    request = PrepareRequest(fetch=tuple(download_requests(ModelSection(name=NAME))))
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE is set") as refused:
        prepare(request)
    lenient = request.model_copy(update={"unreachable_refuses": False})
    assert prepare(lenient).unreachable == str(refused.value)


# -- plans -----------------------------------------------------------------------------------------


def small(length: int = 96) -> PrepareRequest:
    found = run(launch={"devices": 1}, strategy={"name": "single"}, data={"max_length": length})
    return PrepareRequest(stages=("plan",), run=run_json(found), backend="cpu", cards=())


@pytest.mark.slow
def test_a_plan_is_what_the_function_says() -> None:
    there = prepare(small()).decided
    assert there == plan_memory(parse_run(small().run), [], installed_plugins(), "cpu", [])
    assert there is not None and there.memory
    refused = prepare(small(512)).decided
    assert refused is not None and "was made for 256 positions" in refused.note


def test_a_run_that_becomes_another_form_is_checked_as_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(Stages, "_check", lambda self, run: checked.append(in_words(run)))
    monkeypatch.setattr(Stages, "enter", lambda self, stage: None)
    found = run(launch={"devices": 2}, strategy={"name": "auto"})
    request = small().model_copy(
        update={"run": run_json(found), "stages": ("check", "plan"), "forms": (0, 3)}
    )
    for form, others in ((0, []), (None, []), (3, ["zero"])):
        decided = Decision(form=form)
        monkeypatch.setattr(prepare_stages, "plan_memory", lambda *_, found=decided, **__: found)
        checked.clear()
        Stages(request, EventWriter(None)).run()
        assert checked == ["ddp", *others]


def test_it_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    spawn = subprocess.Popen

    def started(*args: Any, **options: Any) -> Any:
        process = spawn(*args, **options)
        seen.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    prepare(small(), turn=lambda: not seen)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)
