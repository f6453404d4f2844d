"""``anygauge report``: what is on the page, and what a folder that a stranger made cannot do."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import report, report_charts
from anygauge.cli.report_runs import differences, read_run
from tests.helpers.runs import called

NASTY = "<script>alert(1)</script>$\\frac{\x1b[31m&\"'"
GIB = 2**30


def make_run(folder: Path, *, steps: int = 8, lines: list[str] | None = None, **files: Any) -> Path:
    """A run of so many steps: of 2 s each, after 10 s; an evaluation of 1 s follows each 4th."""
    folder.mkdir(parents=True)
    metrics, now = [], 1_000_010.0
    for step in range(1, steps + 1):
        now += 2
        record = {
            **{"time": now, "step": step, "loss": 3.0 - step / steps, "lr": 1e-3 / step},
            **{"grad_norm": 0.5, "tokens": 100, "seconds": 2.0, "tokens_per_s": 50.0},
            **{"mfu": 0.4, "peak_memory": GIB * 2},
        }
        metrics.append(json.dumps(record))
        if step % 4 == 0:
            now += 1
            found = {"name": "eval", "eval_loss": 2.5, "eval_tokens": 7, "perplexity": 12.1}
            metrics.append(json.dumps({"time": now, "step": step, **found}))
    (folder / "metrics.jsonl").write_text("\n".join([*metrics, *(lines or [])]) + "\n")
    train = {"optimizer": {"name": "adamw", "lr": 1e-3}, "schedule": {"name": "cosine"}}
    documents: dict[str, Any] = {
        "run": {
            **{"name": "r", "model": {"name": "m"}, "adapter": {"type": "lora", "r": 8}},
            **{"train": train, "environment": {"HF_TOKEN": "hf_secret"}},
        },
        "job": {"backend": "cpu", "strategy": "ddp", "token": "sesame"},
        "report": {
            **{"seconds": now - 1_000_000, "start_s": 10.0, "warmup_extra_s": 1.5},
            "data": "8 of 8 rows",
            "memory": {
                "predicted": {"load": GIB, "forward": GIB, "backward": 3 * GIB},
                "measured": {"load": GIB // 2, "training": 2 * GIB},
            },
        },
        "versions": {"torch": "2.13.0"},
        **files,
    }
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "ranks").mkdir()
    rank = {"rank": 0, "state": "ok", "started": 1e6, "finished": now, "ended": now, "what": None}
    (folder / "ranks/rank0.json").write_text(json.dumps(rank))
    (folder / "checkpoints/step-00000008").mkdir(parents=True)
    return folder


class Parsed(HTMLParser):
    """Tags, and the text in them, of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("href", "src", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def page_of(*runs: Path) -> str:
    done = called(["report", *runs])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"report: {runs[0]}/report.html (")
    return (runs[0] / "report.html").read_text()


def test_one_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "one"))
    parsed = Parsed(page)
    assert parsed.tags.count("svg") == 8
    text = re.sub(r"\s+", " ", parsed.text)
    for part in (
        *("status finished", "model m", "trained lora, r 8", "rows 8 of 8 rows", "backend cpu"),
        *("strategy ddp", "optimizer adamw, lr 0.001, cosine", "steps 8", "tokens 800"),
        *("loss 2.8750 to 2.0000", "evaluation loss eval 2.5000 to 2.5000", "torch 2.13.0"),
        *("one: load 512.0 MiB 1.0 GiB", "one: training 2.0 GiB 3.0 GiB"),
        "one 10.0 s 1.5 s 14.5 s 2.0 s",
        *("eval after step 4: loss 2.5000", "checkpoints/step-00000008", "rank 0 ended: ok"),
    ):
        assert part in text
    assert "hf_secret" not in page
    assert "sesame" not in page


def test_nothing_on_it_runs_or_is_fetched(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "one"), make_run(tmp_path / "two"))
    parsed = Parsed(page)
    assert "script" not in parsed.tags
    assert all(link.startswith("#") for link in parsed.links)
    assert "default-src 'none'" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_runs_side_by_side(tmp_path: Path) -> None:
    train = {"optimizer": {"name": "adamw", "lr": 5e-4}}
    run = {"name": "b", "model": {"name": "m"}, "train": train, "environment": {"A": "1"}}
    folders = [make_run(tmp_path / "a/same"), make_run(tmp_path / "b/same", steps=4, run=run)]
    found = [read_run(folder, folder.name) for folder in folders]
    assert ["train.optimizer.lr", "0.001", "0.0005"] in differences(found)
    assert not [name for name, *_ in differences(found) if name.startswith(("environment", "name"))]
    page = page_of(*folders)
    for label in ("a/same", "b/same"):
        assert f"</span>{label}</th>" in page
    assert page.count("var(--run1)") > page.count("var(--run2)") == 0


def test_a_run_that_has_not_finished(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    for name in ("report", "versions"):
        (folder / f"{name}.json").unlink()
    rank = {"rank": 1, "state": "failed", "started": 1e6, "ended": 1e6 + 20, "what": "no memory"}
    (folder / "ranks/rank1.json").write_text(json.dumps(rank))
    run = read_run(folder, "one")
    assert run.time_split() == {
        **{"start-up": 0.0, "warm-up": 0.0, "steps": 16.0},
        "evaluation, saving": 1.0,
    }
    assert run.memory() == {"training": {"measured": 2.0 * GIB}}
    text = Parsed(page_of(folder)).text
    assert "not finished, rank 0: ok; rank 1: failed" in text
    assert "rank 1 ended: failed, no memory" in text


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", steps=0, report={}, job={})
    assert Parsed(page_of(folder)).text.count("No step was recorded.") == 6


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    evaluation = {"step": 1, "name": NASTY, "eval_loss": 1.0}
    folder = make_run(
        tmp_path / "<b>$x_{2}$",
        lines=[json.dumps(evaluation)],
        run={"model": {"name": NASTY}, NASTY: 1, "data": {"path": "https://me:pw@host/x"}},
        report={"data": NASTY, "choices": {"kernels": {NASTY: {"name": NASTY}}}},
        versions={"torch": NASTY},
    )
    other = make_run(tmp_path / "other")
    page = page_of(folder, other)
    parsed = Parsed(page)
    assert not {"script", "b"} & set(parsed.tags)
    assert "\x1b" not in page
    assert "me:pw" not in page
    assert "<script>alert(1)</script>$\\frac" in parsed.text


WRONG: tuple[Any, ...] = (
    *("text", None, [[]]),
    {"choices": {"kernels": [1]}, "memory": 3, "step_s": "x", "model": 1, "train": "x"},
    {"memory": {"predicted": [1], "measured": {"load": "x", "training": 1e308}}},
    {"seconds": "x", "start_s": math.inf, "tokens_per_s": "fast", "warmup_extra_s": {}},
)


def test_what_is_not_as_a_run_writes_it_counts_as_missing(tmp_path: Path) -> None:
    lines = [
        *("", "17", "[[1]]", '"x"', "{", '{"step": "x"}', '{"step": 1e400}', '{"step": true}'),
        *('{"step": 3, "loss": NaN}', '{"step": 4, "loss": 1e29}', '{"step": -1e29, "loss": -1}'),
        '{"a": ' * 2000,
        "x" * 200_000,
    ]
    folders = []
    for at, wrong in enumerate(WRONG):
        files = {name: wrong for name in ("run", "job", "report", "versions")}
        folders.append(make_run(tmp_path / f"run{at}", lines=lines, **files))
        (folders[-1] / "ranks/rank0.json").write_text(json.dumps(wrong))
        odd = {"started": "x", "ended": [1], "what": {"a": 1}}
        (folders[-1] / "ranks/rank1.json").write_text(json.dumps(odd))
        os.mkfifo(folders[-1] / "ranks/rank2.json")
    text = Parsed(page_of(*folders)).text
    assert text.count(": 10 lines of metrics.jsonl cannot be read") == len(WRONG)


def test_a_page_of_six_long_runs_is_small(tmp_path: Path) -> None:
    page = page_of(*(make_run(tmp_path / str(at), steps=3000) for at in range(6)))
    assert len(page) < 1.5e6


def test_bad_input(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "one"), tmp_path / "other.txt"
    other.write_text("mine")
    for arguments, message in (
        (
            [tmp_path / "on"],
            "there is no such folder; did you mean 'one'? give the folder of a run",
        ),
        ([other], "it is a file; give the folder of a run"),
        ([tmp_path], "is not the folder of a run: it has neither run.json nor metrics.jsonl"),
        ([run] * 7, "7 runs: at most 6 can be told apart on one page"),
        ([run, "--output", other], "it exists and is not a report; name another"),
        ([run, "--output", tmp_path], "it is a folder; name a file, such as"),
    ):
        done = called(["report", *arguments])
        assert (done.returncode, done.stdout) == (2, "")
        assert message in " ".join(done.stderr.split())
    assert other.read_text() == "mine"
    deep = make_run(tmp_path / "deep", run=json.loads('{"a":' * 900 + "1" + "}" * 900))
    assert called(["report", deep, run]).returncode in (0, 2)


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = called(["report", make_run(tmp_path / "one")])
    assert done.returncode == 1
    assert "need matplotlib" in done.stderr
    assert "pip install 'anygauge[report]'" in done.stderr


def test_samples_are_shown_whole(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one"), "one")
    long = "<i>" + "word " * 200
    sample = report.Sample(run="one", prompt=NASTY, before=long, after="\n".join("ab"))
    parsed = Parsed(report.page_of([run], [sample]))
    assert long in parsed.text
    assert {"i", "script"}.isdisjoint(parsed.tags)


def test_many_steps_are_drawn_as_means_within_a_band() -> None:
    points = [(step, float(step % 2)) for step in range(1, 1001)]
    steps, means, least, most = report_charts._blocks(points, 2.0)
    assert len(steps) == len(means) <= report_charts.MOST_POINTS
    assert (steps[0], least[0], most[0], steps[-1]) == (3, 0.0, 0.5, 1000)
    assert sum(means) / len(means) == pytest.approx(0.25, abs=0.01)
