"""The demo: its rows keep apart what must be apart, and it goes from nothing to an answer."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from anygauge.config.load import load_run_file
from tests.helpers.child_processes import begin

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def load(name: str) -> ModuleType:
    """A script of the demo as a module; it is not a package, so that it can be copied and run."""
    spec = importlib.util.spec_from_file_location(f"anygauge_demo_{name}", DEMO / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


docstrings = load("docstrings")
tokenizer = load("train_tokenizer")
demo = load("demo")

MODULE = '''
"""A module."""

def halve(value: float, *, exactly: bool = False) -> float:
    """Return half of a value
    that was given.

    More words.
    """
    def inner():
        """A function inside a function is not taken."""
    return value / 2

class Box:
    """A box that holds things."""

    def put(self, thing):
        """Put a thing into the box."""

    def short(self):
        """Too short."""

    def old(self):
        """old(self) -> what it was in earlier days"""

def bare():
    return None
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for folder in ("package", "test", "site-packages"):
        (root / folder).mkdir(parents=True)
    (root / "package" / "__init__.py").write_text(MODULE)
    (root / "test" / "support.py").write_text(MODULE)
    (root / "site-packages" / "other.py").write_text(MODULE)
    (root / "broken.py").write_text("def half(:\n")
    return root


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a part of the standard library that runs the tests."""
    folder = tmp_path_factory.mktemp("rows")
    docstrings.build(folder, files=60)
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def item(summary: str, snippet: str = "def f(): ...\n") -> object:
    return docstrings.Documented(prompt="m.f()", summary=summary, snippet=snippet)


def answers_on(side: bool, count: int) -> list[str]:
    """Answers that fall on one side of the split."""
    tried = (f"Return the value with number {number}." for number in range(1000))
    return [answer for answer in tried if docstrings._is_held_out(answer) is side][:count]


# -- rows ----------------------------------------------------------------------------------------


def test_functions_methods_and_classes_become_rows(library: Path) -> None:
    found = {row.prompt: row for row in docstrings.documented(library)}
    assert {prompt: row.summary for prompt, row in found.items()} == {
        "package.halve(value, *, exactly=False)": "Return half of a value that was given.",
        "package.Box": "A box that holds things.",
        "package.Box.put(thing)": "Put a thing into the box.",
    }
    assert found["package.halve(value, *, exactly=False)"].snippet.startswith("def halve(")
    assert "put" not in found["package.Box"].snippet


def test_a_long_function_is_cut_at_a_line(tmp_path: Path) -> None:
    body = "".join(f"    value += {number}\n" for number in range(100))
    (tmp_path / "long.py").write_text(
        f'def add(value):\n    """Add a great many numbers."""\n{body}'
    )
    (row,) = docstrings.documented(tmp_path)
    assert len(row.snippet) <= docstrings.LONGEST_SNIPPET
    assert row.snippet.splitlines()[-1].startswith("    value += ")


def test_no_held_out_answer_can_be_read_in_the_training_text(real: Path) -> None:
    texts = [
        value
        for name in ("pretrain.jsonl", "train.jsonl")
        for row in rows(real / name)
        for value in row.values()
    ]
    held_out = rows(real / "heldout.jsonl")
    assert len(held_out) >= 5
    flat = [" ".join(text.split()) for text in texts]
    for row in held_out:
        assert not [text for text in flat if row["completion"] in text]


def test_repeated_answers_fall_on_one_side() -> None:
    train, held = answers_on(False, 3), answers_on(True, 3)
    found = [item(answer, f"snippet {turn} {answer}") for turn in (1, 2) for answer in train + held]
    split = docstrings.split(found)
    assert [row.summary for row in split.held_out] == held
    assert sorted(row.summary for row in split.train) == sorted(train * 2)
    assert not [text for text in split.pretrain for answer in held if answer in text]


def test_an_answer_that_stands_inside_another_text_is_not_held_out() -> None:
    (kept,) = answers_on(False, 1)
    known, unknown = answers_on(True, 2)
    found = [item(kept, f"def f():\n    # {known.replace(' ', chr(10), 1)}\n"), item(known)]
    split = docstrings.split([*found, item(unknown)])
    assert [row.summary for row in split.held_out] == [unknown]


def test_check_finds_a_leak() -> None:
    leaked = docstrings.DocstringRows(
        pretrain=["def f():\n    Return the\n    value."], train=[], held_out=[item("the value.")]
    )
    with pytest.raises(ValueError, match=r"held-out answer of m\.f\(\)"):
        leaked.check()


def test_rows_are_the_same_in_every_process(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, DEMO / "docstrings.py", tmp_path / seed, "--files", "20"],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.DEVNULL,
        )
    for name in ("pretrain.jsonl", "train.jsonl", "heldout.jsonl"):
        first, second = (tmp_path / seed / name for seed in ("1", "2"))
        assert first.read_bytes() == second.read_bytes()
        assert first.stat().st_size


def test_a_python_without_sources_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="without the sources of its standard library"):
        docstrings.build(tmp_path / "out", root=tmp_path)


# -- tokenizer and run files ---------------------------------------------------------------------


def test_the_tokenizer_fits_the_run_file_and_is_the_same_each_time(
    real: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    files = [real / "pretrain.jsonl", real / "train.jsonl"]
    config = load_run_file(DEMO / "pretrain.yaml").model.config
    assert config is not None
    assert config["vocab_size"] == tokenizer.VOCABULARY
    for name in ("one", "two"):
        assert tokenizer.train(files, tmp_path / name, vocabulary=400) == 400
    one, two = (tmp_path / name / "tokenizer.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "one")
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(loaded, role) == config[role]
    text = "def naïve(x):\n    return 'é'  # never seen\n"
    ids = loaded(text)["input_ids"]
    assert ids[0] == loaded.bos_token_id
    assert loaded.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_run_files_find_what_the_demo_makes(name: str, tmp_path: Path) -> None:
    run = load_run_file(DEMO / f"{name}.yaml", cwd=tmp_path)
    assert Path(run.data.train.path).parent == demo.DEFAULT_FOLDER / "data"
    assert Path(run.output) == tmp_path / "runs" / "demo"
    assert run.name == name
    origin = run.model.name or run.model.tokenizer
    assert origin is not None and Path(origin).is_relative_to(demo.DEFAULT_FOLDER)


# -- the demo itself -----------------------------------------------------------------------------


def evaluation(step: int, loss: float | None) -> dict[str, object]:
    return {"step": step, "name": "eval", "eval_loss": loss, "eval_tokens": 10}


STEP = {"step": 1, "loss": 9.0}
BEFORE, BETWEEN, AFTER = evaluation(0, 5.0), evaluation(1, 4.0), evaluation(2, 3.0)


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([BEFORE, STEP, BETWEEN, {"step": 2, "loss": 8.0}, AFTER], (5.0, 3.0, 10)),
        ([STEP, BETWEEN], None),
        ([BEFORE, STEP], None),
        ([BEFORE, STEP, evaluation(1, None)], None),
    ],
    ids=["whole", "no base", "no end", "no number"],
)
def test_losses_are_those_before_the_first_and_after_the_last_step(
    records: list[dict[str, object]], found: tuple[float, float, int] | None, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    if found is not None:
        assert demo.held_out_losses(file) == found
        return
    with pytest.raises(demo.DemoError, match="step 0 and the last step were expected"):
        demo.held_out_losses(file)


@pytest.mark.parametrize("tuned", [5.0, 4.8, 6.0, float("nan")])
def test_an_adapter_that_learned_nothing_fails_the_demo(tuned: float, tmp_path: Path) -> None:
    demo.check_loss_fell(5.0, 4.7, tmp_path)
    with pytest.raises(demo.DemoError, match="not clearly below the base's"):
        demo.check_loss_fell(5.0, tuned, tmp_path)


def test_only_what_a_demo_made_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo.make_anew(folder)
    (folder / "old.txt").write_text("of an earlier demo")
    demo.make_anew(folder)
    assert [path.name for path in folder.iterdir()] == [demo.MARKER]
    (tmp_path / "mine.txt").write_text("somebody's own")
    (tmp_path / "link").symlink_to(folder)
    for other in (tmp_path, tmp_path / "mine.txt", tmp_path / "link"):
        with pytest.raises(demo.DemoError, match="left alone"):
            demo.make_anew(other)
    assert (tmp_path / "mine.txt").read_text() == "somebody's own"


def test_the_question_is_the_first_of_public_name(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    prompts = ["_a.b()", "a._b.c()", "a.b(c)", "d.e()"]
    file.write_text("".join(json.dumps({"prompt": p, "completion": p}) + "\n" for p in prompts))
    assert demo.a_question(file) == ("a.b(c)", "a.b(c)")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_in_order(signum: int, tmp_path: Path) -> None:
    program = (sys.executable, "-u", DEMO / "demo.py")
    with begin("--folder", tmp_path / "demo", program=program) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("$ "):
                break
        process.send_signal(signum)
        _, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "ended on request" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("device", [(), ("--backend", "sim", "--devices", "4")], ids=["cpu", "sim"])
def test_from_nothing_to_an_answer(device: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, DEMO / "demo.py", "--quick", "--folder", folder, *device],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    base, tuned, tokens = demo.held_out_losses(folder / "finetune" / "metrics.jsonl")
    assert tuned < base
    assert tokens > 0
    assert (folder / "finetune" / "adapter" / "adapter_model.safetensors").is_file()
    assert f"{base:.4f}" in done.stdout and f"{tuned:.4f}" in done.stdout
    assert "What next" in done.stdout.splitlines()[-9:]
    shutil.rmtree(folder)
