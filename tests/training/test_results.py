"""What a run leaves behind: usable with plain transformers and peft, and by our own commands.

And how often a run of two ranks is parsed and checked, and makes its backend: once each.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from anygauge.config.load import load_run_file
from anygauge.data import EvaluationBatches, Layout, prepare
from anygauge.kernels.loss import summed_cross_entropy
from anygauge.models.factory import dtype_name
from anygauge.models.inputs import model_inputs
from tests.docs.pages import ROOT, section, table_names
from tests.helpers.runs import Run, run_file, train, trained_here

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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All weights of a tiny model, trained in one process."""
    folder = tmp_path_factory.mktemp("base")
    return trained_here(
        run_file(
            folder,
            adapter=None,
            strategy={"name": "single"},
            trackers=["tensorboard"],
            train={"steps": 3},
        )
    )


@pytest.fixture(scope="module")
def adapted(base: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An adapter on it, trained under ZeRO-3 on two ranks; its processes count what they call."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "sitecustomize.py").write_text(COUNTER)
    path = run_file(
        folder,
        model={"name": str(base.folder / "model")},
        adapter={"r": 4, "alpha": 32},
        strategy={"name": "zero", "options": {"stage3_param_persistence_threshold": 0}},
        data={"eval_fraction": 0.2, "packing": True},
        train={"eval_at_start": True, "optimizer": {"lr": 2.0e-2}},
    )
    counting = {"WATCHED": json.dumps(WATCHED), "COUNTED": str(folder / "counted")}
    run = train(path, "--devices", "2", environment={"PYTHONPATH": str(folder), **counting})
    assert run.status == 0, run.out + run.err
    return run


def plain_loss(model: Any, run: Run) -> float:
    """Loss on the run's held-out rows, with nothing of anygauge's engines."""
    from transformers import AutoTokenizer

    loaded = load_run_file(run.folder / "run.yaml")
    tokenizer = AutoTokenizer.from_pretrained(loaded.model.tokenizer or loaded.model.name)
    rows = prepare(loaded.data, tokenizer, loaded.train.seed).eval
    assert rows is not None
    layout = Layout(micro_batch=1, max_length=96, pad_id=tokenizer.pad_token_id)
    batches = EvaluationBatches(rows, layout)
    with torch.no_grad():
        total = sum(
            summed_cross_entropy(
                model(**model_inputs(b.tensors(), torch.float32)).logits, b.shift_labels
            ).item()
            for b in batches
        )
    return total / rows.report.num_loss_tokens


def load_base(run: Run) -> Any:
    from transformers import AutoModelForCausalLM

    name = yaml.safe_load((run.folder / "run.yaml").read_text())["model"]["name"]
    return AutoModelForCausalLM.from_pretrained(name, **{dtype_name(): torch.float32}).eval()


def test_the_whole_model_loads_with_plain_transformers(base: Run, adapted: Run) -> None:
    # The adapter's run saw this base before its first step, on two ranks, sharded and packed.
    assert plain_loss(load_base(adapted), adapted) == pytest.approx(
        adapted.evaluations()[0], rel=1e-5
    )
    assert (base.folder / "model" / "tokenizer.json").is_file()


def test_the_adapter_loads_with_plain_peft(adapted: Run) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    folder = adapted.folder / "adapter"
    state = load_file(folder / "adapter_model.safetensors")
    assert len(state) == 2 * 7 * 2, "two factors of seven linear layers in two decoder layers"
    assert all(t.numel() and t.abs().sum() > 0 for t in state.values())
    model = PeftModel.from_pretrained(load_base(adapted), folder).eval()
    before, after = adapted.evaluations()[0], adapted.evaluations()[-1]
    assert after != pytest.approx(before, rel=1e-3), "the adapter does something"
    assert plain_loss(model, adapted) == pytest.approx(after, rel=1e-5)
    verified = json.loads((folder.parent / "report.json").read_text())["verified"]
    assert verified["reloaded"] and verified["logits"] < 1e-5 < verified["effect"]


def test_the_run_directory_tells_all(base: Run, adapted: Run) -> None:
    report = json.loads((adapted.folder / "report.json").read_text())
    assert report["steps"] == 4
    assert report["final_loss"] == adapted.steps("loss")[-1]
    # Three of its four steps are the warm-up.
    assert report["timed_steps"] == 1
    assert report["tokens_per_s"] == pytest.approx(adapted.steps("tokens_per_s")[-1])
    assert report["warmup_s"] == pytest.approx(sum(adapted.steps("seconds")[:3]))
    assert 0 < report["start_s"] < report["seconds"]
    assert report["memory"]["counted"].startswith("process")
    # The evaluation after the last step is part of training, and may take more than any step.
    assert report["memory"]["measured"]["training"] >= max(adapted.steps("peak_memory"))
    versions = json.loads((adapted.folder / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    environment = json.loads((adapted.folder / "environment-node0.json").read_text())
    threads = {s["name"]: s for s in environment["1"]}["OMP_NUM_THREADS"]
    assert (threads["value"], threads["set_by"]) == ("1", "user")
    for name in ("run.yaml", "run.json", "job.json", "environment-node0.json"):
        assert (adapted.folder / name).stat().st_mode & 0o777 == 0o600, name
    told = table_names(section(ROOT / "docs/run-folder.md", "## Files"))
    for entry in (*base.folder.iterdir(), *adapted.folder.iterdir()):
        assert {entry.name, f"{entry.name}/"} & told or entry.name.startswith("."), entry
    assert list((base.folder / "tensorboard").glob("events.*")), "TensorBoard was asked for"
    assert not (adapted.folder / "tensorboard").exists(), "and not here"


def test_each_is_done_once_in_a_process(adapted: Run) -> None:
    counted = adapted.folder.parents[1] / "counted"
    found = [json.loads(line) for line in counted.read_text().splitlines()]
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


def test_the_terminal_shows_anygauges_lines_only(adapted: Run) -> None:
    assert adapted.err == ""
    lines = adapted.out.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 4
    assert not [line for line in lines if "DeepSpeed" in line or "Warning" in line]


def test_a_resolved_run_file_runs_again_unchanged(
    base: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder this time."""
    monkeypatch.chdir(tmp_path)
    again = trained_here(base.folder / "run.yaml", output=str(tmp_path))
    assert again.folder == tmp_path / "tiny"
    assert again.steps("loss") == base.steps("loss")


def test_a_type_that_works_at_a_price_is_a_warning_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("anygauge.training.setup.Rank.warn", lambda rank, text: warned.append(text))
    for dtype, expected in (("float16", 1), ("float32", 0)):
        path = run_file(
            tmp_path,
            name=dtype,
            precision={"param_dtype": dtype},
            strategy={"name": "single"},
            train={"steps": 1},
        )
        trained_here(path)
        told = [text for text in warned if "float16" in text and "slower than float32" in text]
        assert len(told) == expected
        warned.clear()
