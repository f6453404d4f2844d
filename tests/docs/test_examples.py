"""What README and docs show is true today: examples run, files load, messages are what is said."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.cli import COMMANDS, run
from anygauge.data import first_records
from anygauge.data.formats import AnswerPair, Row, detect_format, of_objective, parse
from anygauge.interface import AnygaugeError
from anygauge.launch.request import read_request
from anygauge.registry import BLOCK_VARIABLE
from tests.docs.pages import ROOT, Block, blocks, click_command, marked, section, table_names
from tests.helpers.runs import TINY
from tests.helpers.tiny_tokenizer import make_tokenizer

ROWS = ROOT / "tests/fixtures/rows.jsonl"
RUN_FILE = {
    "name": "tiny",
    "backend": "cpu",
    "model": {"config": TINY, "tokenizer": "tokenizer"},
    "adapter": {"r": 4},
    "data": {"train": {"path": "rows.jsonl"}, "max_length": 96},
    "train": {"steps": 3, "global_batch_size": 8, "micro_batch_size": 2, "optimizer": {"lr": 0.01}},
}
"""The run.yaml that the pages speak of."""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with run.yaml, its rows and its tokenizer."""
    shutil.copy(ROWS, tmp_path / "rows.jsonl")
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN_FILE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    # Messages name every backend; the pages are of an installation without the examples.
    monkeypatch.setenv(BLOCK_VARIABLE, "anygauge-lazy,anygauge-sim")
    return tmp_path


# -- run files ---------------------------------------------------------------------------------


def write_run_file(block: Block, folder: Path, known: dict[str, Block]) -> Path:
    """The block as a file, with the one that it goes over beside it."""
    name, below = block.option("file"), block.option("over")
    assert name is not None, f"{block}: a run file needs file=NAME"
    text = block.text
    if below is not None:
        write_run_file(known[below], folder, known)
        text = f"extends: {below}\n{text}"
    (folder / name).write_text(text)
    return folder / name


def put_rows(source: Any) -> None:
    """A data file with the columns that a run file names."""
    asked, answered = "What is 1 + 1?", "2"
    row: dict[str, Any] = {source["prompt"]: asked, source["completion"]: answered}
    if source.get("format") == "messages":
        said = (("user", asked), ("assistant", answered))
        row = {"messages": [{"role": role, "content": content} for role, content in said]}
    if "objective" in source:
        row = {"prompt": asked, "chosen": answered, "rejected": "3"}
    Path(source["path"]).write_text(f"{json.dumps(row)}\n" * 40)


@pytest.mark.parametrize("block", marked("run-file"), ids=str)
def test_run_files_describe_a_run(block: Block, tmp_path: Path) -> None:
    known = {b.option("file") or "": b for b in marked("run-file")}
    path = write_run_file(block, tmp_path, known)
    text = yaml.safe_load(block.text)
    source = text["data"]["train"]
    put_rows({**text, "prompt": "prompt", "completion": "completion", **source,
              "path": tmp_path / source["path"]})  # fmt: skip
    request = read_request(path, [], {"backend": "cpu"}, need_device=True)
    assert request.job.backend == "cpu"
    pairs = request.run.objective_spec.pairs
    source = of_objective(request.run.data.train, "data.train", pairs=pairs)
    records = first_records(source, 40, "data.train")
    assert len(records) == 40
    row = parse(records[0], detect_format(records[0], source, "data.train"), source, "data.train")
    row = row.chosen if isinstance(row, AnswerPair) else row
    if isinstance(row, Row):
        prompt, answer = row.prompt, row.text
    else:
        prompt, answer = (turn["content"] for turn in row.turns)
    assert answer == "2"
    assert prompt is not None
    assert "What is 1 + 1?" in prompt


def test_three_lines_change_for_other_rows() -> None:
    files = {b.option("file"): b.text.splitlines() for b in marked("run-file")}
    changed = set(files["gsm8k.yaml"]) - set(files["my-run.yaml"])
    assert len(changed) == 3
    assert all(line.startswith("    ") for line in changed), "they stand under data.train"


# -- commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", [b for b in marked("run") if b.language == "sh"], ids=str
)  # fmt: skip
def test_commands_succeed(block: Block, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program, *arguments in block.commands():
        assert program == "anygauge"
        assert run(arguments) == 0
        assert capsys.readouterr().out.strip(), arguments
    assert not (desk / "runs").exists(), "these commands start nothing"


@pytest.mark.parametrize("block", marked("fails"), ids=str)
def test_messages_are_what_is_said(block: Block, desk: Path) -> None:
    ((_, *arguments),) = block.commands()
    with pytest.raises(AnygaugeError) as caught:
        run(arguments)
    assert f"{caught.value}\n" == block.following


@pytest.mark.parametrize("block", [b for b in marked("run") if b.language == "python"], ids=str)
def test_python_runs(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "example"})


def command_lines() -> list[tuple[str, list[str]]]:
    """(place, arguments) of every line that calls anygauge, whether it is run here or not."""
    return [
        (str(block), arguments[1:])
        for block in blocks()
        if block.language == "sh"
        for arguments in block.commands()
        if Path(arguments[0]).name == "anygauge"
    ]


def test_every_command_line_has_options_that_exist() -> None:
    lines = command_lines()
    assert {arguments[0] for _, arguments in lines} >= set(COMMANDS)
    for place, (name, *arguments) in lines:
        if name.startswith("-"):
            continue
        assert name in COMMANDS, place
        # Fails with click's own message for an unknown option, a missing one, or a wrong value.
        click_command(name).make_context(name, list(arguments))


# -- what a run leaves -------------------------------------------------------------------------


def test_a_run_leaves_what_the_pages_say(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anygauge.launch.run_directory import write_run
    from anygauge.training.worker import run_rank
    from anygauge.util.events import EventWriter

    options = ["strategy.name=single", "data.eval_fraction=0.2"]
    request = read_request(desk / "run.yaml", options, {}, need_device=True)
    folder = Path(request.job.run_directory)
    write_run(Path(request.job.run_file), request.run)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as opened:
        run_rank(request.job, 0, EventWriter(None), opened)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    fields = {name for line in lines for name in json.loads(line)}
    documented = table_names(section(ROOT / "docs/run-folder.md", "## Metrics"))
    assert documented - fields == {"mfu", "skipped", "graph_..."}, "not on this device"
    assert not fields - documented
    page = section(ROOT / "docs/run-folder.md", "## Files")
    assert {path.name for path in folder.iterdir()} <= {n.rstrip("/") for n in table_names(page)}
