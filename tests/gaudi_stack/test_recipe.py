"""The dry run of the 8-card recipe beside what optimum-habana's own tools do for the same job.

Every difference is a row of docs/gaudi-measured.md, with its reason; a row without a difference
fails, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli.env import rank_environments
from anygauge.launch.prepare import prepare_run
from anygauge.launch.rank_start import rank_numbers
from anygauge.launch.request import RunRequest, read_request
from tests.gaudi_stack import needs_optimum_habana
from tests.helpers.gaudi import standin_environment, standin_site
from tests.helpers.runs import FIXTURES, anygauge
from tests.helpers.sizes import LLAMA_70B
from tests.helpers.tiny_tokenizer import make_tokenizer

pytestmark = needs_optimum_habana

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples/llama2-70b-lora-gaudi2.yaml"
SCRIPT = Path(__file__).with_name("their_job.py")
TOOLS = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_MAX_COMPOUND_OP_SIZE": "10"}
"""What its README's command sets before its launcher."""

SIDE_EFFECTS = ("KMP_", "TORCHINDUCTOR_", "_MLFLOW", "ANYGAUGE_SIM_", "_", "OLDPWD", "PWD", "SHLVL")
"""Left behind in the launcher's process by libraries, the stand-in and the shell."""


def theirs(what: str, folder: Path) -> Path:
    """Run optimum-habana's part; where it wrote."""
    output = folder / what
    before = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    site = standin_site(folder)
    environment = {
        **before,
        **standin_environment(site, folder / "record"),
        **TOOLS,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DS_ACCELERATOR": "hpu",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, what, output],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "given.json").write_text(json.dumps(environment), encoding="utf-8")
    return output


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Rows of the repository and the sizes of the model: neither hub can be reached by a test."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(
        json.dumps({**LLAMA_70B, "architectures": ["LlamaForCausalLM"]}), encoding="utf-8"
    )
    make_tokenizer(model)
    torch.save({}, model / "pytorch_model.bin")  # weights that only ranks would open
    return [f"data.train.path={FIXTURES / 'alpaca.json'}", f"model.name={model}"]


@pytest.fixture(scope="module")
def recipe(overrides: list[str]) -> RunRequest:
    return read_request(RECIPE, overrides, {}, need_device=False)


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        whole = f"{prefix}{name}"
        found |= flat(value, f"{whole}.") if isinstance(value, Mapping) else {whole: value}
    return found


def documented(title: str) -> dict[str, tuple[str, str]]:
    """The rows below a title of docs/gaudi-measured.md: name -> (anygauge, optimum-habana)."""
    page = (ROOT / "docs/gaudi-measured.md").read_text(encoding="utf-8")
    _, _, text = page.partition(f"### {title}\n")
    assert text, title
    rows: dict[str, tuple[str, str]] = {}
    for line in text.partition("\n#")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            assert cells[3], f"no reason for {cells[0]}"
            for name in cells[0].split(", "):
                rows[name.strip("`")] = (cells[1].strip("`"), cells[2].strip("`"))
    return rows


def told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def differences(ours: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    found = {}
    for name in {*ours, *other}:
        pair = tuple(told(side[name]) if name in side else "" for side in (ours, other))
        if pair[0] != pair[1]:
            found[name] = (pair[0], pair[1])
    return found


def assert_documented(
    found: Mapping[str, tuple[str, str]], rows: Mapping[str, tuple[str, ...]]
) -> None:
    """The same names and values; ``*`` is any value but none."""
    seen = {
        name: tuple(
            "*" if cell and name in rows and rows[name][side] == "*" else cell
            for side, cell in enumerate(pair)
        )
        for name, pair in found.items()
    }
    assert seen == rows


def test_the_engine_is_configured_alike(recipe: RunRequest, tmp_path: Path) -> None:
    filled = flat(json.loads(theirs("config", tmp_path).read_text(encoding="utf-8")))
    assert filled["train_batch_size"] == 80 and filled["zero_optimization.stage"] == 3
    _, found, _ = prepare_run(recipe, engine=True, plan=False)
    assert found.settings and not found.engine_note
    # Whose code drives the device is not a setting of DeepSpeed's configuration.
    ours = {s.name: s.value for s in found.settings if s.name != "accelerator"}
    assert_documented(differences(ours, filled), documented("DeepSpeed's configuration"))


def test_eight_processes_see_the_same_variables(recipe: RunRequest, tmp_path: Path) -> None:
    output = theirs("launch", tmp_path)
    given = json.loads((tmp_path / "given.json").read_text(encoding="utf-8"))
    rows = documented("Variables of a process")
    settings = rank_environments(recipe.registry, recipe.job, range(8))
    assert len(settings) == recipe.job.launch.devices == 8
    for rank in range(8):
        found = json.loads(Path(f"{output}.{rank}").read_text(encoding="utf-8"))
        assert found["argv"] == ["rank", str(output)], "the script alone, no number of the rank"
        other = {
            name: value
            for name, value in found["environment"].items()
            if (name in TOOLS or given.get(name) != value) and not name.startswith(SIDE_EFFECTS)
        }
        ours = {s.name: s.value for s in settings[rank] if s.value is not None}
        ours |= rank_numbers(recipe.job, 0, rank)
        expected = {
            name: tuple(cell.replace("RANK", str(rank)) for cell in pair)
            for name, pair in rows.items()
        }
        assert_documented(differences(ours, other), expected)


def test_the_dry_run_shows_what_was_compared(
    overrides: list[str], recipe: RunRequest, tmp_path: Path
) -> None:
    values = [*overrides, f"data.cache={tmp_path}"]
    sets = [word for value in values for word in ("--set", value)]
    done = anygauge(
        ["train", RECIPE, "--dry-run", *sets], environment={"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    assert str(file) in done.stdout
    found = prepare_run(recipe, engine=True, plan=False)[1].settings or ()
    shown = {name: one["value"] for name, one in json.loads(file.read_text()).items()}
    assert shown == {setting.name: setting.value for setting in found}
    for setting in rank_environments(recipe.registry, recipe.job, range(8))[7]:
        assert setting.name in done.stdout
    assert "the command starts 8: python -m anygauge.launch.rank" in done.stdout
    assert "with RANK=0..7 LOCAL_RANK=0..7 WORLD_SIZE=8 LOCAL_WORLD_SIZE=8" in done.stdout
