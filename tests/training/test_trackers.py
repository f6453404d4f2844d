"""The group of trackers: nothing that one of them does reaches training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError, NotAvailableError, RunFileError, RunStatus
from anygauge.registry import Registry
from anygauge.training.trackers.group import (
    Trackers,
    check_trackers,
    flat_parameters,
    open_trackers,
)
from anygauge.training.trackers.tracker_options import WandbOptions, wandb_login


def run(**fields: object) -> RunFile:
    base = {"model": {"name": "m"}, "data": {"train": {"path": "rows.jsonl"}}}
    return RunFile.model_validate({**base, **fields})


class FakeTracker:
    """Keeps what it is given, and in which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads = {threading.current_thread().name}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("log", step, dict(metrics)))

    def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("close", status, dict(summary)))


class Failing(FakeTracker):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if step == 2:
            raise ConnectionError("no route to host")


class Stuck(FakeTracker):
    """Answers only when it is let go."""

    def __init__(self, go: threading.Event) -> None:
        super().__init__()
        self._go = go

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._go.wait(20)


def group(
    trackers: Mapping[str, FakeTracker], *, close_s: float = 10.0
) -> tuple[Trackers, list[str]]:
    warnings: list[str] = []

    def keep(fake: FakeTracker) -> Callable[[], FakeTracker]:
        def make() -> FakeTracker:
            fake.threads = {threading.current_thread().name}
            return fake

        return make

    makers = {name: keep(fake) for name, fake in trackers.items()}
    return Trackers(makers, warnings.append, close_s=close_s), warnings


def alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tracker-")]


def test_calls_arrive_in_order_in_one_thread_that_ends() -> None:
    fake = FakeTracker()
    trackers, warnings = group({"x": fake})
    trackers.log(1, {"train/loss": 2.0})
    trackers.log(2, {"train/loss": math.nan})
    trackers.close("stopped", {"final_loss": 1.0})
    trackers.close("failed", {})
    assert [call[:2] for call in fake.calls] == [("log", 1), ("log", 2), ("close", "stopped")]
    assert fake.calls[-1] == ("close", "stopped", {"final_loss": 1.0})
    assert fake.threads == {"tracker-x"}
    assert not alive() and not warnings and not trackers.troubles


def test_one_that_fails_is_told_once_and_harms_no_other() -> None:
    failing, sound = Failing(), FakeTracker()
    trackers, warnings = group({"bad": failing, "good": sound})
    for step in range(1, 5):
        trackers.log(step, {})
        time.sleep(0.05)
    trackers.close("finished", {})
    assert [c[1] for c in failing.calls] == [1, 2, "finished"], "closed, so that it can flush"
    assert [c[1] for c in sound.calls] == [1, 2, 3, 4, "finished"]
    assert trackers.troubles == warnings and len(warnings) == 1
    assert "'bad' is disabled from step 2 on: ConnectionError: no route" in warnings[0]


def test_one_that_hangs_holds_up_neither_training_nor_its_end() -> None:
    go = threading.Event()
    trackers, warnings = group({"slow": Stuck(go)}, close_s=0.2)
    began = time.monotonic()
    for step in range(10_050):
        trackers.log(step, {})
    trackers.close("finished", {})
    assert time.monotonic() - began < 5
    assert "10,000 records behind" in warnings[0]
    assert "did not shut down in time" in warnings[1]
    go.set()
    deadline = time.monotonic() + 10
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive()


def test_one_that_cannot_be_made_ends_the_run_and_the_others() -> None:
    fake = FakeTracker()

    def broken() -> FakeTracker:
        raise ConnectionError("refused")

    with pytest.raises(AnygaugeError, match="'broken' could not start: ConnectionError: refused"):
        Trackers({"x": lambda: fake, "broken": broken}, lambda text: None)
    assert fake.calls == [("close", "failed", {})]

    def refusing() -> FakeTracker:
        raise RunFileError("change this")

    with pytest.raises(RunFileError, match="change this"):
        Trackers({"x": refusing}, lambda text: None)


def test_one_that_does_not_start_in_time_ends_the_run() -> None:
    go = threading.Event()

    def waiting() -> FakeTracker:
        go.wait(20)
        return FakeTracker()

    with pytest.raises(AnygaugeError, match="did not start in time"):
        Trackers({"x": waiting}, lambda text: None, open_s=0.1, close_s=0.1)
    go.set()


def test_an_error_while_closing_is_told() -> None:
    class Unclosed(FakeTracker):
        def close(self, status: RunStatus, summary: Mapping[str, float]) -> None:
            raise OSError("disk full")

    trackers, warnings = group({"x": Unclosed()})
    trackers.close("finished", {})
    assert "could not be closed: OSError: disk full" in warnings[0]


# -- what the run file says --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("jsonl", {}, "jsonl.path: the jsonl tracker needs it: File to append to"),
        ("jsonl", {"path": 3}, "jsonl.path: 3: input should be a valid string"),
        ("tensorboard", {"x": 1}, "tensorboard.x: .*it has none"),
        (
            "wandb",
            {"projet": "x"},
            "wandb.projet: the wandb tracker has no such option; did you mean 'project'. it has: ",
        ),
        ("wandb", {"tags": "x"}, "wandb.tags: 'x': input should be a valid list"),
        (
            "wandb",
            {"mode": "onlin"},
            "wandb.mode: 'onlin': input should be 'online' or 'offline'; did you mean 'online'",
        ),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    asked = run(trackers=[name], tracker_options={name: options})
    with pytest.raises(RunFileError, match=rf"tracker_options\.{message}"):
        check_trackers(Registry.load(), asked, None)


def test_trackers_are_checked_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry.load()
    with pytest.raises(RunFileError, match="wandb is listed twice"):
        check_trackers(registry, run(trackers=["wandb", "wandb"]), None)
    nowhere = run(trackers=["mlflow"])
    check_trackers(registry, nowhere, None)
    with pytest.raises(NotAvailableError, match="'mlflow': no server or store is set"):
        check_trackers(registry, nowhere, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotAvailableError, match=r"pip install 'anygauge\[mlflow\]'"):
        check_trackers(registry, nowhere, {"MLFLOW_TRACKING_URI": "x"})


def test_a_missing_login_is_told_and_not_asked_for(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert "run `wandb login`" in str(wandb_login(WandbOptions(), home))
    assert wandb_login(WandbOptions(mode="offline"), home) is None
    assert wandb_login(WandbOptions(), {**home, "WANDB_MODE": "offline"}) is None
    assert wandb_login(WandbOptions(mode="online"), {**home, "WANDB_MODE": "offline"}) is not None
    assert wandb_login(WandbOptions(), {**home, "WANDB_API_KEY": "k"}) is None
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password p\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_login(WandbOptions(), home) is None
    assert "to here.example:" in str(
        wandb_login(
            WandbOptions(), {**home, "WANDB_BASE_URL": "http://here.example:80", "NETRC": "/none"}
        )
    )


def test_parameters_are_flat_and_hold_no_secret() -> None:
    found = flat_parameters(
        run(
            environment={"NAME": "private-value"},
            model={"config": {"num_key_value_heads": 2, "model_type": "x"}, "tokenizer": "t"},
            trackers=["mlflow"],
            tracker_options={
                "mlflow": {"tracking_uri": "https://me:hidden@host/x", "api_key": "hidden"}
            },
            backend_options={"list": [{"password": "hidden", "x": 1}]},
        )
    )
    assert found["train.optimizer.name"] == "adamw"
    assert found["adapter"] is None
    assert found["model.config.num_key_value_heads"] == 2
    assert found["tracker_options.mlflow.tracking_uri"] == "https://host/x"
    assert found["backend_options.list"] == '[{"x": 1}]'
    assert "hidden" not in str(found) and "private-value" not in str(found)


def test_a_third_partys_tracker_gets_the_whole_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Board(FakeTracker):
        def __init__(self, context: Any) -> None:
            super().__init__()
            seen.append(context)

    registry = Registry.load()
    monkeypatch.setattr("anygauge.training.trackers.group.load_factory", lambda provided: Board)
    asked = run(name="mine", trackers=["jsonl"], tracker_options={"jsonl": {"path": "metrics"}})
    open_trackers(registry, asked, tmp_path, lambda text: None, resumed_from_step=7).close(
        "finished", {}
    )
    (context,) = seen
    assert (context.run_name, context.run_directory) == ("mine", tmp_path)
    assert (context.options.path, context.resumed_from_step) == ("metrics", 7)
    assert context.parameters["name"] == "mine"
