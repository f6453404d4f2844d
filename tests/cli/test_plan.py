"""``anygauge plan`` on the command line: tiny runs planned, what is refused, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge import cli
from anygauge.cli import plan
from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import AnygaugeError
from anygauge.planning.machines import Hardware
from anygauge.planning.trials import Target, Trials
from anygauge.registry import Registry
from tests.helpers.child_processes import begin, running
from tests.helpers.runs import TINY, anygauge, run_file
from tests.standins.hub import Hub, Repository

PATIENCE_S = 120.0


def small_card(folder: Path) -> Path:
    """A file with a machine whose cards have too little for what is kept of rows."""
    path = folder / "small.toml"
    path.write_text(
        '[card.small]\nbackend = "cuda"\nmemory = "1.2 GiB"\nreserved = "1 GiB"\n'
        '[card.blank]\nbackend = "cuda"\n[machine.blanks]\ncard = "blank"\ncards = 2\n'
    )
    return path


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(["plan", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == "", "no warning of a library, and no progress where nobody watches"
    return shown.out


@pytest.mark.slow
def test_answers_of_a_run_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run_file(
        tmp_path,
        model={"config": {**TINY, "vocab_size": 32_000}, "tokenizer": "./missing"},
        data={"train": {"path": "missing.jsonl"}, "max_length": 128},
        train={"global_batch_size": 64, "micro_batch_size": 32},
        strategy={"name": "single"},
    )
    options = ["--hardware", str(small_card(tmp_path)), "--machine", "small"]
    found: dict[str, Any] = json.loads(planned([str(path), *options, "--json"], capsys))
    assert found["fits"] is False and found["fit"]["phase"] in ("loss", "backward")
    change = found["changes"][0]
    assert change["lines"]["train.micro_batch_size"] < 32
    assert change["fit"]["fits"] and change["fit"]["left"] > 0
    largest = found["largest"]["batch"]
    assert change["lines"]["train.micro_batch_size"] <= largest["lines"]["train.micro_batch_size"]
    assert largest["lines"]["train.micro_batch_size"] < 32
    assert 0 <= largest["fit"]["left"] < 0.02 * 2**30
    lines = [word for option in change["set"] for word in ("--set", option)]
    said = f"Fits: each small needs {change['fit']['needed'] / 2**30:.1f} of 1.2 GiB"
    again = planned([str(path), *options, *lines], capsys)
    assert again.startswith(said)


@pytest.mark.slow
def test_every_way_to_spread_and_the_largest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, train={"global_batch_size": 8, "micro_batch_size": 4})
    ways = ["--strategies", "--compare", "l4:2", "--compare", "v100-16:4"]
    found = json.loads(planned([str(path), *ways, "--json"], capsys))
    assert [(one["name"], one["ranks"], one["fit"]["fits"]) for one in found["machines"]] == [
        ("l4:2", 2, True),
        ("v100-16:4", 4, True),
    ]
    assert found["machine"] == "l4:2"
    refused = {one["name"]: one["why"] for one in found["strategies"]}
    made = {"zero", "fsdp", "ddp", "ddp, tp 2", "fsdp, offload both"}
    assert {name for name in made if refused[name] is None} == made
    rows = found["largest"]["rows"]
    assert rows["lines"] == {"data.max_length": 256}
    assert rows["why"] == "the model was made for no more positions"


def test_without_a_machine_a_run_is_held_against_the_cards_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, probe = SimpleNamespace(name="cuda"), SimpleNamespace(cards=("NVIDIA L4",))
    here = SimpleNamespace(spec=spec, probe=probe)
    monkeypatch.setattr(plan, "select_backend", lambda *_, **__: here)
    registry = Registry.load()
    read = partial(load_run_file, run_file(tmp_path))
    _, target = plan.read_case(read, [], {}, None, Hardware.load(registry), registry)
    assert target.backend == "cuda" and target.card is not None and target.card.name == "l4"


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        ("--compare p4d --compare nothing", 2, "there is no machine named 'nothing'"),
        ("--machine h100:8 --devices 9", 2, "has 8 cards; leave --devices out"),
        ("--hardware small.toml --machine blanks --suggest", 2, r'[card.blank] memory = "80'),
        (
            "--set model.name=nobody/nothing",
            1,
            "and the hub (http://127.0.0.1:9) cannot be reached",
        ),
        ("--set model.name=./empty", 2, "config.json cannot be read"),
    ],
)
def test_what_is_wrong_gets_one_message(
    options: str, status: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    small_card(tmp_path)
    (tmp_path / "empty").mkdir()
    if "model.name" in options:
        options += " --set model.config=null"
    with pytest.raises(AnygaugeError) as caught:
        cli.run(["plan", str(run_file(tmp_path)), *options.split()])
    assert expected in str(caught.value) and "Traceback" not in str(caught.value)
    assert caught.value.exit_status == status


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--machine h100:8", ("cuda", 8, "bfloat16")),
        ("--machine h100:8 --set launch.devices=4 --set backend=cpu", ("cpu", 4, "bfloat16")),
        ("--machine h100:8 --devices 2 --backend hpu", ("hpu", 2, "bfloat16")),
        ('--machine h100:8 --set launch={"devices":4}', ("cuda", 4, "bfloat16")),
        # What the card is fast in.
        ("--machine v100-16", ("cuda", 1, "float16")),
        ("--machine v100-16 --set precision.param_dtype=float32", ("cuda", 1, "float32")),
        ("--machine l4", ("cuda", 1, "bfloat16")),
        ("--machine gaudi2", ("hpu", 1, "bfloat16")),
        # A card that no backend drives is not planned as this machine's processors would have it.
        ("--machine other:8 --hardware other.toml", ("cuda", 8, "auto")),
    ],
)
def test_a_machine_gives_what_is_not_given(
    options: str, expected: tuple[str, int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.toml").write_text('[card.other]\nmemory = "64 GiB"\n')
    asked: list[tuple[str, int, str]] = []

    def tried(trials: Trials, run: RunFile, target: Target) -> None:
        asked.append((target.backend, run.launch.devices, run.precision.param_dtype))
        raise AnygaugeError("that is all")

    monkeypatch.setattr(Trials, "__call__", tried)
    run = run_file(tmp_path, precision={"param_dtype": "auto"})
    with pytest.raises(AnygaugeError, match="that is all"):
        cli.run(["plan", str(run), *options.split()])
    assert asked == [expected]


def test_a_card_without_memory_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    small = str(small_card(tmp_path))
    # Neither rows nor a tokenizer are needed.
    path = run_file(tmp_path, model={"config": TINY}, data={"train": {"path": "no.jsonl"}})
    options = ["--hardware", small, "--machine", "blanks"]
    out = planned([str(path), *options], capsys)
    flat = " ".join(out.split())
    assert flat.startswith(f"No verdict: the description of blank ({small}) does not say how much")


@pytest.mark.slow
def test_a_model_of_the_hub_needs_its_configuration_alone(tmp_path: Path) -> None:
    """And no hub, once that is here."""
    config = json.dumps(TINY).encode()
    path = run_file(
        tmp_path,
        model={"name": "some/model", "tokenizer": "./missing"},
        strategy={"name": "single"},
    )
    with Hub({"some/model": Repository(files={"config.json": config, "a.bin": b"0"})}) as hub:
        environment = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hub")}
        environment["HF_HUB_OFFLINE"] = "0"
        for asked in (["config.json"], []):
            done = anygauge(["plan", path, "--json"], environment=environment)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["numbers"][0] > 10_000
            assert hub.files() == asked
            environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
            hub.requests.clear()


def test_ctrl_c_ends_it_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    process = begin("plan", run_file(tmp_path), "--strategies", start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():  # it plans, or will
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert time.monotonic() - sent < 5
    assert group(process.pid) == []


def group(leader: int) -> list[int]:
    """Processes of a group that are alive."""

    def is_one(entry: Path) -> bool:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        return int(fields[2]) == leader and fields[0] != "Z"

    return running(is_one)
