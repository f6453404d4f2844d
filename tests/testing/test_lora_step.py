"""The list of operators that a LoRA step calls is complete, and the kit tries them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from anygauge.testing.lora_step import OPINFOS

ROOT = Path(__file__).parents[2]
LIST = "docs/conformance/operators.txt"
LISTS = re.fullmatch(
    r"OpInfo: (.*?)\nour own cases: (.*?)\nonly through the loop: (.*?)\n",
    (ROOT / LIST).read_text(encoding="utf-8"),
    re.S,
)
assert LISTS is not None
BY_OPINFO, *OTHERS = (words.split() for words in LISTS.groups())
OPERATORS = {word.partition("=")[0] for words in (BY_OPINFO, *OTHERS) for word in words}
KNOWN = """
import json
from torch.testing._internal.common_methods_invocations import op_db
print(json.dumps(sorted({info.name for info in op_db})))
"""


def printed(*arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", ["cpu", "sim"])
def test_each_operator_of_a_recorded_step_is_listed(backend: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(f"anygauge_{backend}") is None:
        pytest.skip("the simulated cards are not installed (make plugins)")
    found = printed("-m", "tests.testing.recorded_step", backend, ANYGAUGE_SIM_LOCKS=str(tmp_path))
    assert {"mm", "embedding", "copy_"} < set(found), "nothing was recorded"
    missing = set(found) - OPERATORS
    assert not missing, f"{LIST} lacks {', '.join(sorted(missing))}"


@pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) < (2, 13),
    reason="the names are those of torch 2.13; the kit skips what an earlier one lacks",
)
def test_torch_has_the_operators_under_the_names_of_the_list() -> None:
    known = printed("-c", KNOWN)
    assert not set(OPINFOS) - set(known)


def test_the_kit_tries_what_the_list_has() -> None:
    assert all(sorted(words) == words for words in (BY_OPINFO, *OTHERS))
    named = {word.rpartition("=")[2] for word in BY_OPINFO}
    assert named <= set(OPINFOS), named - set(OPINFOS)
