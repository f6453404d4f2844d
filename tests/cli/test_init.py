"""``anygauge init``: a run file that fits, from flags or answers, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from anygauge.cli import init
from anygauge.config.load import load_run_file
from tests.helpers.runs import called, save_tiny
from tests.helpers.tiny_tokenizer import FIXTURES

SMALL = """
[card.small]
backend = "cuda"
memory = "1.05 GiB"
reserved = "1 GiB"
[card.full]
backend = "cuda"
memory = "1 GiB"
reserved = "1 GiB"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def desk(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with rows and a model."""
    (tmp_path / "rows.jsonl").write_bytes((FIXTURES / "rows.jsonl").read_bytes())
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "cards.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", ScriptInput())
    return tmp_path


class ScriptInput:
    """Standard input of a script."""

    def isatty(self) -> bool:
        return False


class AnsweringTerminal:
    """Standard input at which somebody answers."""

    def __init__(self, *answers: str) -> None:
        self.left = [*answers]

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return f"{self.left.pop(0)}\n"


BASE = ("init", "--model", "./model", "--rows", "rows.jsonl", "--max-length", "64")


def fields(file: str = "run.yaml") -> Any:
    return yaml.safe_load(Path(file).read_text())


def test_what_is_written_fits_and_is_what_an_editor_takes(desk: Path) -> None:
    done = called([*BASE, "--hardware", "cards.toml", "--machine", "small"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fits: each small needs 1.0 of 1.")
    largest = int(re.search(r"the largest that the card holds: ([\d,]+)", done.stdout)[1])  # type: ignore[index]
    text = Path("run.yaml").read_text()
    first, *lines = text.splitlines()
    assert first == "# yaml-language-server: $schema=anygauge.schema.json"
    schema = json.loads(Path("anygauge.schema.json").read_text())
    assert list(Draft202012Validator(schema).iter_errors(fields())) == []
    # Each field stands below its meaning.
    named = [number for number, line in enumerate(lines) if re.match(r" *[a-z_]+:", line)]
    assert len(named) == 19
    assert all(lines[number - 1].lstrip().startswith("# ") for number in named)
    run = load_run_file("run.yaml")
    share = run.train.global_batch_size
    assert run.train.micro_batch_size == max(
        n for n in range(1, min(share, largest) + 1) if share % n == 0
    )
    assert (run.backend, run.launch.devices, run.data.max_length) == ("cuda", 1, 64)
    again = called(["plan", "run.yaml", "--hardware", "cards.toml", "--machine", "small"])
    assert again.stdout.partition("\n")[0] == done.stdout.partition("\n")[0]


def test_a_machine_of_several_cards(desk: Path) -> None:
    done = called([*BASE, "--machine", "h100:3", "--goal", "full", "--set", "train.steps=5"])
    assert done.returncode == 0, done.stderr
    found = fields()
    assert found["launch"] == {"devices": 3}
    assert "adapter" not in found and found["train"]["steps"] == 5
    assert found["train"]["global_batch_size"] == 18, "16 is no multiple of 3 ranks"
    assert found["train"]["micro_batch_size"] == 6
    assert found["train"]["optimizer"] == {"lr": init.LR_OF_ALL_WEIGHTS}


def test_goals_and_settings(desk: Path) -> None:
    arguments = [*BASE, "out.yaml", "--machine", "h100", "--goal", "qlora"]
    done = called([*arguments, "--set", "strategy=zero", "--set", "strategy.stage=2"])
    assert done.returncode == 0, done.stderr
    found = fields("out.yaml")
    assert found["model"]["quantize"] == "nf4"
    assert found["adapter"] == {"r": 16, "alpha": 32, "targets": "all-linear"}
    assert found["strategy"] == {"name": "zero", "stage": 2}


def test_a_run_that_does_not_fit_is_not_written(desk: Path) -> None:
    before = sorted(desk.rglob("*"))
    done = called([*BASE, "--hardware", "cards.toml", "--machine", "full"])
    assert done.returncode == 1
    assert done.stdout.startswith("Does not fit: each full needs ")
    assert "What to change, cheapest first:" in done.stdout
    assert "no run file is written: such a run does not fit" in done.stderr
    assert sorted(desk.rglob("*")) == before


def test_nothing_is_overwritten_without_force(desk: Path) -> None:
    Path("run.yaml").write_text("mine")
    Path("anygauge.schema.json").write_text("mine")
    arguments = [*BASE, "--machine", "h100"]
    assert called(arguments).returncode == 2
    assert Path("run.yaml").read_text() == "mine"
    done = called([*arguments, "other.yaml"])
    assert done.returncode == 0
    assert Path("anygauge.schema.json").read_text() == "mine"
    assert "anygauge schema --output anygauge.schema.json" in done.stdout
    assert called([*arguments, "--force"]).returncode == 0
    assert fields()["model"] == {"name": "./model"}
    assert json.loads(Path("anygauge.schema.json").read_text())["$schema"]


def test_what_is_missing_is_asked_at_a_terminal(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = AnsweringTerminal(
        "", "./model", "rowz.jsonl", "rows.jsonl", "h1000", "h100", "fast", ""
    )
    monkeypatch.setattr("sys.stdin", terminal)
    done = called(["init", "--max-length", "64"])
    assert done.returncode == 0, done.stderr
    assert terminal.left == []
    for complaint in (
        "no such file: rowz.jsonl; did you mean 'rows.jsonl'?",
        "there is no machine named 'h1000'; did you mean 'h100'",
        "'fast' is not one of lora, qlora, full",
    ):
        assert complaint in done.stdout
    assert fields()["adapter"]["r"] == 16


def test_this_machine_is_the_default(desk: Path) -> None:
    done = called([*BASE])
    assert done.returncode == 0, done.stderr
    assert fields()["launch"] == {"devices": 1}
    assert "backend" not in fields()
