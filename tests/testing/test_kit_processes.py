"""The kit's processes: how they begin, how they end, and what of it is held against the backend."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.registry import BLOCK_VARIABLE
from anygauge.testing.check import Verdict
from anygauge.testing.contract import CHECKS
from anygauge.testing.process import PartVerdicts, Subject, ask, merge, rank_environments
from tests.testing.mutation_forks import mutant_site

Odd = Callable[[str], Subject]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Odd:
    """The backend `mutant` by what is odd or wrong with it, beside a plugin that is heavy."""
    site = mutant_site(tmp_path_factory.mktemp("odd"))
    info = site / "mutant-1.0.dist-info"  # the other's distribution is named like this plugin
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mutant\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anygauge]\nheavy = a_heavy_one\n")
    (site / "a_heavy_one.py").write_text("import jax\n")
    (site / "jax.py").touch()  # heavy by its name
    return lambda oddity: Subject(
        name="mutant", environment={"PYTHONPATH": str(site), "ANYGAUGE_MUTATION": oddity}
    )


def results(part: str, answers: PartVerdicts) -> dict[str, tuple[str, str]]:
    """Results of a part's checks by name, but for those of what is left after closing."""
    return {
        name: answers.of(check)
        for name, check in CHECKS.items()
        if check.part == part and not check.of_the_close
    }


def answered(path: Path, **verdicts: Verdict) -> Path:
    lines = [json.dumps([name, *verdict]) for name, verdict in verdicts.items()]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# -- how they begin -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_environment_is_that_of_as_many_ranks_as_there_are(ranks: int, odd: Odd) -> None:
    found, trouble = rank_environments("device", odd("sets a variable"), ranks)
    assert trouble == ""
    assert [each["ODD_RANKS"] for each in found] == [str(ranks)] * ranks
    assert [each["RANK"] for each in found] == [str(rank) for rank in range(ranks)]
    assert "ODD_WAS_HERE" not in os.environ, "the backend's code ran in this process"


@pytest.mark.parametrize(
    ("oddity", "said"),
    [
        ("refuses the environment", "two variables contradict each other"),
        ("ends while it is asked", "with status 9"),
    ],
)
def test_an_environment_that_cannot_be_made_is_held_against_the_backend(
    oddity: str, said: str, odd: Odd, tmp_path: Path
) -> None:
    found = results("basic", ask("basic", odd(oddity), tmp_path))
    result, why = found.pop("ends_on_paper")
    assert result == "failed"
    assert said in why
    assert found["settings_are_sound"] == ("passed", ""), "the others are asked, too"


def test_what_another_plugin_imports_is_not_held_against_the_backend(
    odd: Odd, tmp_path: Path
) -> None:
    (found,), _ = rank_environments("basic", odd("none"), 1)
    assert "heavy" in found[BLOCK_VARIABLE].split(",")
    assert "mutant" not in found[BLOCK_VARIABLE].split(","), "the other's name, but this one's, too"
    assert results("basic", ask("basic", odd("none"), tmp_path))["announced"] == ("passed", "")
    (found,), _ = rank_environments("device", odd("none"), 1)
    assert BLOCK_VARIABLE not in found, "runs have all plugins"


# -- how they end ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "oddity", "check", "said"),
    [
        ("basic", "aborts at its end", "ends_on_paper", "ended with status -6"),
        ("device", "close raises", "ends_on_device", "the driver is gone"),
    ],
)
def test_a_process_that_ends_badly_after_all_answers_fails(
    part: str, oddity: str, check: str, said: str, odd: Odd, tmp_path: Path
) -> None:
    found = results(part, ask(part, odd(oddity), tmp_path))
    result, why = found[check]
    assert result == "failed"
    assert said in why


def test_a_rank_that_gave_no_answer_does_not_hide_behind_the_others(tmp_path: Path) -> None:
    files = [
        answered(tmp_path / "0", sums=("passed", ""), means=("passed", "")),
        answered(tmp_path / "1", sums=("passed", "")),
        tmp_path / "2",
    ]
    found = merge(files).verdicts
    assert found["means"] == ("failed", "rank 1: gave no answer")
    assert found["sums"] == ("failed", "rank 2: gave no answer")


def test_what_is_declared_missing_explains_no_other_rank_s_end(tmp_path: Path) -> None:
    missing = ("declared", "unsupported")
    files = [answered(tmp_path / "0", sums=missing), tmp_path / "1"]
    assert merge(files).verdicts["sums"] == ("failed", "rank 1: gave no answer")
    files = [answered(tmp_path / "0", sums=missing), answered(tmp_path / "1", sums=missing)]
    assert merge(files).verdicts["sums"] == missing


# -- what is declared missing ---------------------------------------------------------------------


def test_collectives_that_do_not_open_are_missing_as_declared(odd: Odd, tmp_path: Path) -> None:
    found = results("ranks", ask("ranks", odd("no collectives"), tmp_path, ranks=2))
    assert found.pop("ends_on_ranks") == ("passed", "")
    assert set(found.values()) == {("declared", "not written yet (so it says)")}


def test_collectives_that_open_though_declared_missing_fail(odd: Odd, tmp_path: Path) -> None:
    found = results("ranks", ask("ranks", odd("collectives declared missing"), tmp_path, ranks=2))
    assert found.pop("ends_on_ranks") == ("passed", "")
    assert {result for result, _ in found.values()} == {"failed"}
    assert "declared as not written yet (so it says), but it works" in found["contract_sum"][1]
