"""The kit itself: verdicts, the class, the pytest plugin."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import anygauge.testing
from anygauge.interface import FULL, Level, Support
from anygauge.registry import Registry
from anygauge.testing import BackendContract
from anygauge.testing.check import CHECKS, SkipCheck, run_check
from anygauge.testing.loop_checks import is_beside
from anygauge.testing.plugin import CONFORMANCE, contents
from tests.testing.mutation_forks import mutant_site


def holds(_: Any) -> None:
    pass


def fails(_: Any) -> None:
    raise AssertionError("no")


def has_no_meaning(_: Any) -> None:
    raise SkipCheck("one device only")


MISSING = Support(Level.UNSUPPORTED_BY_HARDWARE, "no units for it")


@pytest.mark.parametrize(
    ("function", "declared", "result", "why"),
    [
        (holds, None, "passed", ""),
        (fails, None, "failed", "no"),
        (holds, FULL, "passed", ""),
        (fails, FULL, "failed", f"no (declared: {FULL})"),
        (fails, MISSING, "declared", str(MISSING)),
        (holds, MISSING, "failed", f"declared as {MISSING}, but it works"),
        (holds, Support(Level.SWITCHED_OFF, "set x: true"), "declared", "switched off"),
        (has_no_meaning, MISSING, "skipped", "one device only"),
    ],
)
def test_what_is_declared_is_held_against_what_happens(
    function: Any, declared: Support | None, result: str, why: str
) -> None:
    found, said = run_check(function, None, declared)
    assert found == result
    assert said.startswith(why)
    assert said or found == "passed", "everything but a pass has a reason"


def kit(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_failure_is_reported_in_both_forms_and_ends_in_status_1(tmp_path: Path) -> None:
    site = mutant_site(tmp_path)
    done = kit(
        tmp_path,
        *("--anygauge-backend", "mutant", "-k", "on_paper", "-n", "2"),
        *("--anygauge-report", "page.md", "--anygauge-report", "page.json"),
        PYTHONPATH=str(site),
        ANYGAUGE_MUTATION="a setting without a reason",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "anygauge conformance: mutant" in done.stdout
    record = json.loads((tmp_path / "page.json").read_text())
    assert record["conforms"] is False
    (failed,) = [check for check in record["checks"] if check["result"] == "failed"]
    assert failed["name"] == "test_on_paper[settings_are_sound]"
    assert "MUTANT_LEVEL: no reason" in failed["why"]
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# `mutant` does NOT conform")
    assert "FAIL: MUTANT_LEVEL: no reason" in page


def mine(folder: Path, *classes: str) -> str:
    """Write a file of tests; returns its name."""
    text = "import pytest\nfrom anygauge.testing import BackendContract\n"
    (folder / "test_mine.py").write_text(text + "".join(classes))
    return "test_mine.py"


def asked_for(folder: Path, name: str = "page.json") -> Any:
    return json.loads((folder / name).read_text())


# -- what is run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--anygauge-backend", "nobody"), "there is no backend named 'nobody'"),
        (("--anygauge-strategy", "nobody"), "there is no strategy named 'nobody'"),
        (
            ("--anygauge-backend", "cpu", "--anygauge-strategy", "ddp"),
            "--anygauge-backend and --anygauge-strategy: a run of pytest takes one of them",
        ),
        (
            ("--anygauge-backend", "cpu", "--anygauge-report", "page.txt"),
            "must end in .md or .json",
        ),
        (
            ("--anygauge-backend", "cpu", "test_mine.py"),
            "--anygauge-backend cpu runs the kit and takes no other tests: leave out test_mine.py",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    mine(tmp_path, "def test_it(): pass\n")
    done = kit(tmp_path, *arguments)
    assert done.returncode == 4, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_contents_are_what_pytest_collects(tmp_path: Path) -> None:
    done = kit(tmp_path, "--anygauge-backend", "cpu", "--collect-only", "-q")
    collected = [line.split("::")[-1] for line in done.stdout.splitlines() if "::" in line]
    assert sorted(collected) == sorted(contents(BackendContract))


def test_one_test_of_the_kit_can_be_named(tmp_path: Path) -> None:
    name = f"{CONFORMANCE}::TestBackend::test_on_paper[announced]"
    done = kit(
        tmp_path, "--anygauge-backend", "mutant", name, PYTHONPATH=str(mutant_site(tmp_path))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_class_of_the_author_is_enough(tmp_path: Path) -> None:
    mine(tmp_path, "class TestMine(BackendContract):\n    backend = 'cpu'\n")
    done = kit(tmp_path, "-k", "on_paper", "--anygauge-report", "page.md")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# `cpu` is not fully tried"), "a part of the kit is not the contract"
    assert "on a device (all " in page


def test_devices_are_counted_where_they_will_be_used(tmp_path: Path) -> None:
    one = "    backend = 'sim'\n    environment = {'ANYGAUGE_SIM_CARDS': '1'}\n"
    mine(tmp_path, f"class TestMine(BackendContract):\n{one}")
    done = kit(tmp_path, "-k", "on_ranks", "--anygauge-report", "page.json", ANYGAUGE_SIM_CARDS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = asked_for(tmp_path)["checks"]
    assert {line["why"] for line in lines} == {"fewer devices than the 2 ranks that it takes"}


def test_what_was_left_out_by_choice_was_not_tried(tmp_path: Path) -> None:
    mine(
        tmp_path, "class TestMine(BackendContract):\n    backend = 'cpu'\n    rank_counts = (2,)\n"
    )
    done = kit(tmp_path, "-k", "every_strategy and 4", "--anygauge-report", "page.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = asked_for(tmp_path)["checks"]
    assert (line["result"], line["why"]) == ("untried", "rank_counts asks for 2 alone")


def test_without_a_device_the_contract_is_not_fully_tried(tmp_path: Path) -> None:
    done = kit(
        tmp_path,
        *("--anygauge-backend", "mutant", "--anygauge-report", "page.json"),
        PYTHONPATH=str(mutant_site(tmp_path)),
        ANYGAUGE_MUTATION="no device",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = asked_for(tmp_path)
    assert record["conforms"] is False
    assert {part for part, _ in map(contents(BackendContract).get, record["not_tried"])} == {
        *("on a device", "torch's operators", "on several ranks", "the loop")
    }
    assert "is not fully tried" in done.stdout
    assert "on a device (all " in done.stdout


@pytest.mark.slow
def test_a_strategy_has_a_kit_of_its_own(tmp_path: Path) -> None:
    done = kit(tmp_path, "--anygauge-strategy", "ddp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    own = "device-adapter-ddp2-float32"
    for resumed_from in (own, "device-adapter-single1-float32"):
        assert f"cpu in the loop: {own}-from-{resumed_from}" in done.stdout


def test_a_strategy_of_another_distribution_decides_no_verdict() -> None:
    specs = {plugin.spec.name: plugin.spec for plugin in Registry.load().strategies}
    assert not is_beside(specs["ddp"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "anygauge.registry.Registry.find_strategy",
            lambda self, name: types.SimpleNamespace(distribution="their-own"),
        )
        assert is_beside(specs["ddp"])
        patch.undo()
    assert is_beside(dataclasses.replace(specs["ddp"], tolerance=0.01))


# -- what is reported -----------------------------------------------------------------------------

MARKED = """
class TestMine(BackendContract):
    backend = "cpu"

    @pytest.mark.xfail(reason="known")
    def test_mine_fails(self):
        raise AssertionError("so it is")

    @pytest.mark.xfail(reason="known", strict=True)
    def test_mine_holds(self):
        pass

    @pytest.mark.xfail(reason="known")
    def test_mine_holds_at_times(self):
        pass

    @pytest.mark.xfail(reason="known", run=False)
    def test_mine_is_not_run(self):
        pass

    @pytest.mark.skip(reason="later")
    def test_mine_is_skipped(self):
        pass
"""


def test_an_expected_failure_is_one_all_the_same(tmp_path: Path) -> None:
    done = kit(tmp_path, mine(tmp_path, MARKED), "-k", "mine_", "--anygauge-report", "page.json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = {line["name"]: (line["result"], line["why"]) for line in asked_for(tmp_path)["checks"]}
    assert found == {
        "test_mine_fails": ("failed", "so it is (marked as an expected failure: known)"),
        "test_mine_holds": ("failed", "[XPASS(strict)] known"),
        "test_mine_holds_at_times": ("passed", ""),
        "test_mine_is_not_run": ("untried", "marked as an expected failure: [NOTRUN] known"),
        "test_mine_is_skipped": ("untried", "later"),
    }


def test_reports_of_several_backends_are_one_document(tmp_path: Path) -> None:
    one = "class Test{0}(BackendContract):\n    backend = '{0}'\n    def test_mine_(self): pass\n"
    done = kit(
        tmp_path,
        *(mine(tmp_path, one.format("cpu"), one.format("mutant")), "-k", "mine_"),
        *("--anygauge-report", "page.md", "--anygauge-report", "page.json"),
        PYTHONPATH=str(mutant_site(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["backend"] for record in asked_for(tmp_path)] == ["cpu", "mutant"]
    assert (tmp_path / "page.md").read_text().count("\n# `") == 1


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_a_report_of_nothing_is_a_failure(processes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    done = kit(tmp_path, "--anygauge-report", "page.md", *processes)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "--anygauge-report page.md was not written" in done.stdout
    assert not (tmp_path / "page.md").exists()


def test_pytest_without_the_kits_options_imports_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    assert 'anygauge.testing.contract' not in sys.modules\n"
        "    assert 'torch' not in sys.modules\n"
    )
    assert kit(tmp_path).returncode == 0


def test_every_check_of_the_kit_is_asked() -> None:
    """Also those of a module that nothing but the kit's class imports."""
    for module in pkgutil.iter_modules(anygauge.testing.__path__, "anygauge.testing."):
        importlib.import_module(module.name)
    asked = {name.partition("[")[2].removesuffix("]") for name in contents(BackendContract)}
    assert CHECKS.keys() <= asked, CHECKS.keys() - asked
