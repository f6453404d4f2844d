"""Real runs through the command line, for tests: tiny models on the fixture rows."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import yaml

from anygauge.launch.prepare_call import prepare
from tests.helpers.tiny_tokenizer import FIXTURES, make_tokenizer
from tests.helpers.zygote import Fork, is_early, run_forks

if TYPE_CHECKING:
    from anygauge.launch.prepare_request import PrepareAnswer, PrepareRequest

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that ended: its directory, exit status and what it printed."""

    folder: Path
    status: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def steps(self, field: str) -> list[float]:
        """One field of every step."""
        return [r[field] for r in self.records if "loss" in r]

    def evaluations(self) -> list[float]:
        """Losses of every evaluation."""
        return [r["eval_loss"] for r in self.records if "eval_loss" in r]


def run_file(folder: Path, **changes: Any) -> Path:
    """A tiny run file in `folder`; `changes` are sections merged over it."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        make_tokenizer(tokenizer)
    fields: dict[str, Any] = {
        "name": "tiny",
        "output": str(folder / "out"),
        "backend": "cpu",
        "model": {"config": TINY, "tokenizer": str(tokenizer)},
        "adapter": {"r": 4},
        "data": {
            "train": {"path": str(FIXTURES / "rows.jsonl")},
            "max_length": 96,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "optimizer": {"lr": 1.0e-3},
        },
    }
    path = folder / f"{changes.get('name', 'tiny')}.yaml"
    path.write_text(yaml.safe_dump(merged(fields, changes)))
    return path


def tiny_model(attention: str | None = None, **fields: Any) -> Any:
    """A model of the sizes of TINY but for `fields`, float32, drawn from seed 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given: dict[str, Any] = {**TINY, **fields}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    asked = {} if attention is None else {"attn_implementation": attention}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **asked)


def save_tiny(folder: Path, fields: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """A folder with `tiny_model` and its tokenizer; `save_pretrained` options."""
    tiny_model(**(fields or {})).save_pretrained(folder, **options)
    make_tokenizer(folder)
    return folder


def hashes(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Path -> (SHA-256, mode, time of change) of every file; the lock is empty and no record."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` over it; mappings are merged, except a model's."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both and key != "model" else value
    return result


def anygauge(
    arguments: Sequence[str | Path],
    *,
    timeout_s: float = 400,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command line: as a fork of a process that has imported everything.

    What it starts (checks, agents, ranks) are new processes. So is the command itself where the
    environment has another value of a variable that is read at the start or at an import.
    """
    changed = environment or {}
    folder = (cwd or Path.cwd()).resolve()
    if is_early(changed):
        return subprocess.run(
            [sys.executable, "-m", "anygauge.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **changed},
        )
    with tempfile.TemporaryDirectory(prefix="command-") as written:
        out, err = (Path(written) / name for name in ("out", "err"))
        fork = Fork(
            module="anygauge.cli",
            arguments=[*map(str, arguments)],
            log=str(out),
            errors=str(err),
            folder=str(folder),
            environment=changed,
        )
        (code,) = run_forks([fork], timeout_s=timeout_s)
        return subprocess.CompletedProcess(
            ["anygauge", *map(str, arguments)], code, out.read_text(), err.read_text()
        )


def prepare_here(
    request: PrepareRequest, environ: Mapping[str, str] | None = None, **options: Any
) -> PrepareAnswer:
    """In place of the process that checks model and rows, which imports all that for seconds.

    Not for a dry run of strategy `zero`, whose settings need DeepSpeed.
    """
    from anygauge.config.resolved import parse_run
    from anygauge.training.run_checks import RunChecks

    def others(**changes: Any) -> PrepareAnswer:
        return prepare(request.model_copy(update=changes), environ, **options)

    if "check" not in request.stages:
        return others()
    fetched = others(stages=())
    checks = RunChecks(
        run=parse_run(request.run),
        backend=request.backend,
        id=request.id,
        has_files=request.has_files,
        engine=request.engine,
    )
    found = checks.check()  # before a process is started for nothing
    rest = others(fetch=(), stages=tuple(each for each in request.stages if each != "check"))
    return fetched.model_copy(update={"found": found, "decided": rest.decided})


def check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the checks before a run look at model and rows in this very process."""
    monkeypatch.setattr("anygauge.launch.prepare.prepare", prepare_here)


def called(
    arguments: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    prepare_with: Any = prepare_here,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in this very process: for what starts no rank.

    Args:
        prepare_with: looks at model and rows; None where nothing may look at them.
    """
    from anygauge import cli

    run, words = cli.run, [*map(str, arguments)]
    with contextlib.ExitStack() as changed:
        enter = changed.enter_context
        enter(mock.patch.dict(os.environ, environment or {}))
        enter(mock.patch("anygauge.launch.prepare.prepare", prepare_with))
        enter(mock.patch.object(sys, "argv", ["anygauge", *words]))
        # This process is not the command's own: nothing takes its place.
        enter(mock.patch.object(cli, "run", lambda given, **_: run(given)))
        out = enter(contextlib.redirect_stdout(io.StringIO()))
        err = enter(contextlib.redirect_stderr(io.StringIO()))
        with pytest.raises(SystemExit) as ending:
            cli.main()
    assert isinstance(ending.value.code, int)
    return subprocess.CompletedProcess(words, ending.value.code, out.getvalue(), err.getvalue())


def trained_here(path: Path, **flags: Any) -> Run:
    """A run of one rank in this very process: no launcher, no agent, seconds instead of a minute.

    Not for strategy `zero`: DeepSpeed changes the process that imports it.

    Args:
        flags: fields of the run file as the command's options set them.
    """
    from anygauge.launch.request import read_request
    from anygauge.launch.run_directory import lock_folder, write_run
    from anygauge.training.worker import run_rank
    from anygauge.util.events import EventWriter
    from anygauge.util.run_lock import identity_of

    request = read_request(path, [], flags, need_device=True)
    assert request.run.strategy.name != "zero"
    identity = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, identity), contextlib.ExitStack() as opened:
        lock = identity_of(opened.enter_context(lock_folder(Path(request.job.run_directory))))
        write_run(Path(request.job.run_file), request.run)
        run_rank(request.job, 0, EventWriter(None), opened, lock)
    return Run(folder=Path(request.job.run_directory), status=0, out="", err="")


def train(
    path: Path,
    *options: str | Path,
    timeout_s: float = 400,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """``anygauge train``; the run may have failed."""
    done = anygauge(["train", path, *options], timeout_s=timeout_s, environment=environment)
    fields = yaml.safe_load(path.read_text())
    folder = Path(fields["output"]) / fields["name"]
    return Run(folder=folder, status=done.returncode, out=done.stdout, err=done.stderr)


def trained(path: Path, *options: str | Path, timeout_s: float = 400) -> Run:
    """``anygauge train``, which must succeed."""
    run = train(path, *options, timeout_s=timeout_s)
    logs = "\n".join(p.read_text()[-1500:] for p in sorted(run.folder.glob("logs/rank*.log")))
    assert run.status == 0, f"{run.out}\n{run.err}\n{logs}"
    return run
