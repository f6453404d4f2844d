"""How often a local run of two ranks is parsed and checked, and makes its backend: once each."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.helpers.runs import anygauge, run_file

WATCHED = {
    "anygauge.config.load": ["load_run_file"],
    "anygauge.config.resolved": ["parse_run"],
    "anygauge.registry.registry": ["Registry.load", "Registry.create_backend"],
    "anygauge.registry.selection": ["select_backend"],
    "anygauge.training.build_strategy": ["check_strategy", "check_ranks", "check_batch"],
    "anygauge.training.checks": ["check_settings", "check_optimizer"],
    "anygauge.training.run_checks": ["RunChecks.check"],
    "anygauge.training.trackers.group": ["check_trackers"],
    "anygauge.kernels.choose": ["kernels_of_run"],
    "anygauge.models.source": ["check_positions"],
    "anygauge.models.tokenizer": ["check_vocabulary", "load_tokenizer"],
}
"""Module -> what is counted in it, as each process imports it."""

COUNTER = """
import functools, importlib.abc, importlib.machinery, json, os, sys

WATCHED = json.loads(os.environ["WATCHED"])

def counted(function, name):
    @functools.wraps(function)
    def count(*given, **named):
        with open(os.environ["COUNTED"], "a") as file:
            file.write(json.dumps([os.getpid(), sys.orig_argv[1:4], name]) + "\\n")
        return function(*given, **named)
    return count

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            for each in WATCHED[name]:
                *owners, last = each.split(".")
                owner = functools.reduce(getattr, owners, module)
                raw = vars(owner)[last]
                of_class = isinstance(raw, classmethod)
                made = counted(raw.__func__ if of_class else raw, each)
                setattr(owner, last, classmethod(made) if of_class else made)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def test_each_is_done_once_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTER)
    path = run_file(tmp_path, train={"steps": 2}, strategy={"name": "ddp"})
    counts = tmp_path / "counted"
    done = anygauge(
        ["train", path, "--devices", "2"],
        environment={
            **{"PYTHONPATH": str(tmp_path), "WATCHED": json.dumps(WATCHED)},
            **{"COUNTED": str(counts), "OMP_NUM_THREADS": "1"},
        },
        timeout_s=200,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in counts.read_text().splitlines()]
    whose = {pid: " ".join(words) for pid, words, _ in found}
    kinds = Counter(
        next((k for k in ("prepare_process", "launch.rank") if k in words), "command")
        for words in whose.values()
    )
    assert kinds == {"command": 1, "prepare_process": 1, "launch.rank": 2}
    several = Counter((pid, name) for pid, _, name in found)
    assert [(whose[pid], name) for (pid, name), count in several.items() if count > 1] == []
    parsed = {pid for pid, _, name in found if name in ("load_run_file", "parse_run")}
    assert parsed == set(whose)
