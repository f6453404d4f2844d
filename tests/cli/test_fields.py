"""``anygauge fields`` and ``anygauge schema``: what they print, and what they find by a word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from anygauge.config.describe import all_places, field_kind, meaning_in
from anygauge.config.sections import OptimizerSection
from tests.helpers.runs import called


def found(word: str) -> list[str]:
    """The paths that a word finds."""
    done = called(["fields", word, "--json"])
    assert done.returncode == 0, done.stderr
    return [one["path"] for one in json.loads(done.stdout)]


def test_every_field_is_printed_with_its_meaning() -> None:
    text = called(["fields"]).stdout
    counted = 1  # extends
    of_all = OptimizerSection.model_fields.keys() - {"name"}  # printed once
    for place in all_places()[0]:
        for name, field in place.section.model_fields.items():
            if str(field_kind(field)) != "section":
                assert (meaning := meaning_in(place.section, name)), (place.owner, name)
                assert f"  {'.'.join((*place.path, name))}  (" in text
                assert f"      {meaning}\n" in text
                counted += place.owner in ("", "optimizer adamw") or name not in of_all
    assert text.count("\n      ") == counted


def test_type_and_default() -> None:
    done = called(["fields", "train.schedule.warmup_ratio"])
    assert done.stdout == (
        "train.schedule\n"
        "Learning rate over the run: linear warmup, then one of four shapes.\n"
        "  train.schedule.warmup_ratio  (number >= 0 and <= 1; default 0)\n"
        "      The same as a share of all steps.\n"
    )
    assert "  data.train.path  (text; required)\n" in called(["fields", "data.train"]).stdout


@pytest.mark.parametrize(
    ("word", "first", "count"),
    [
        ("train.schedule", "train.schedule.name", 7),
        ("schedule", "train.schedule.name", 9),
        ("Adapter.R", "adapter.r", 1),
        ("slurm", "launch.options.grace_s", 16),
        ("tracker wandb", "tracker_options.wandb.project", 7),
        ("learning_rate", "train.optimizer.lr", 1),
        ("perplexit", "", 0),
        ("bitsandbytes", "model.quantize.type", 1),
        ("extends", "extends", 1),
    ],
)
def test_what_a_word_finds(word: str, first: str, count: int) -> None:
    if not count:
        assert called(["fields", word]).returncode == 2
        return
    paths = found(word)
    assert (paths[0], len(paths)) == (first, count)


def test_a_section_comes_before_fields_of_its_name() -> None:
    paths = found("train")
    assert paths[0] == "train.steps"
    assert all(path.startswith("train.") for path in paths)


def test_the_nearest_name_where_nothing_matches() -> None:
    done = called(["fields", "optimzer"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "no field has 'optimzer'; did you mean 'optimizer'?" in done.stderr


def test_help_of_train_points_to_them(capfd: pytest.CaptureFixture[str]) -> None:
    assert "anygauge fields" in " ".join(called(["train", "--help"]).stdout.split())


def test_the_schema_goes_to_a_file_or_to_standard_output(tmp_path: Path) -> None:
    printed = called(["schema"]).stdout
    Draft202012Validator.check_schema(json.loads(printed))
    done = called(["schema", "--output", tmp_path / "new" / "schema.json"])
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "new" / "schema.json").read_text() == printed


@pytest.mark.parametrize("command", ["fields", "schema"])
def test_the_installed_package_suffices(command: str, tmp_path: Path) -> None:
    source = f"import sys; from anygauge.cli import run; run([{command!r}]); "
    source += "print([n for n in ('docs', 'tests', 'torch', 'datasets') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
