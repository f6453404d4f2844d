"""Generated run files through ``train --dry-run`` and rows through ``data``, each in a child.

    python -m tests.generated.trial --files 1000 --rows 500 --seed 1

One process imports everything; each case is its fork, with limits. No case may show a traceback,
take more than 10 s of the processor or 1 GB, or end with another status than 0, 1 or 2. With
``--run N``, one step is trained of N files that a dry run accepted: a run must not refuse them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.generated.rows import file_of_rows
from tests.generated.run_files import run_file
from tests.helpers.runs import TINY
from tests.helpers.tokenizer import FIXTURES, make_tokenizer

MOST_S = 10.0
MOST_MIB = 1024
WAIT_S = 180.0
SOUND = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseOutcome:
    """How one case ended.

    Attributes:
        case: its number and kind.
        status: exit status; negative for a signal.
        cpu_s: of the child and of what it started.
        mib: the most memory that one of them had.
        complaint: what is wrong with that; "" if nothing.
        said: the end of what it wrote.
    """

    case: str
    status: int
    cpu_s: float
    mib: int
    complaint: str
    said: str


def child(work: Callable[[], int], folder: Path, case: str, most_s: float) -> CaseOutcome:
    """Do something in a fork with limits, its output in a file."""
    written = folder / "output"
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 70
        try:
            os.setsid()
            os.chdir(folder)
            output = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            hard = int(most_s * 2) + 5
            resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            status = work()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + WAIT_S
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)
    _, raw, usage = ended
    status = os.waitstatus_to_exitcode(raw)
    text = written.read_text(errors="replace") if written.exists() else ""
    cpu_s, mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024
    complaints = [
        "a traceback" if "Traceback (most recent call last)" in text else "",
        f"status {status}" if status not in SOUND else "",
        f"{cpu_s:.1f} s" if cpu_s > most_s else "",
        f"{mib} MiB" if mib > MOST_MIB else "",
        "a program was run" if (folder / "pwned").exists() else "",
        "nothing said" if status and not text.strip() else "",
    ]
    complaint = ", ".join(filter(None, complaints))
    return CaseOutcome(
        case=case, status=status, cpu_s=cpu_s, mib=mib, complaint=complaint, said=text[-3000:]
    )


def command(*arguments: str) -> Callable[[], int]:
    def work() -> int:
        from anygauge import cli

        sys.argv = ["anygauge", *arguments]
        cli.main()

    return work


def one_step(file: str) -> Callable[[], int]:
    """Train one step of a run file, in ranks that are forks."""

    def work() -> int:
        from tests.helpers.forked import RunPart, start

        overrides = ("train.steps=1", "launch.launcher=local", "checkpoint.resume=never")
        done = start(RunPart(file=file, overrides=overrides))
        print(done["log"])
        return 1 if done["status"] else 0

    return work


def base_of(folder: Path) -> dict[str, Any]:
    """A run that is sound."""
    make_tokenizer(folder / "tokenizer")
    return {
        "name": "tiny",
        "output": "out",
        "backend": "cpu",
        "model": {"config": dict(TINY), "tokenizer": str(folder / "tokenizer")},
        "adapter": {"r": 4},
        "data": {
            "train": {"path": str(FIXTURES / "rows.jsonl")},
            "max_length": 96,
            "cache": "off",
        },
        "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
        "strategy": {"name": "single"},
        "precision": {"param_dtype": "float32"},
    }


def preload(folder: Path, base: dict[str, Any], *, trains: bool) -> None:
    """Import what commands import: by doing each once."""
    from anygauge.cli import run

    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(base))
    before = Path.cwd()
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(["train", "run.yaml", "--dry-run"]) == 0
        assert run(["data", "run.yaml"]) == 0
    os.chdir(before)
    if trains:
        from tests.helpers import zygote

        zygote.preload()


def trial(arguments: argparse.Namespace, root: Path) -> list[CaseOutcome]:
    """All cases, reported one by one where something is wrong."""
    base = base_of(root)
    preload(root / "first", base, trains=bool(arguments.run))
    outcomes = []
    accepted = []
    for number in range(arguments.files):
        kind, data = run_file(Random(f"{arguments.seed}:f{number}"), base, broken=arguments.broken)
        folder = root / f"file{number}"
        folder.mkdir()
        (folder / "run.yaml").write_bytes(data)
        (folder / "base.yaml").write_text(yaml.safe_dump(base))
        work = command("train", "run.yaml", "--dry-run")
        outcome = child(work, folder, f"file {number} {kind}", arguments.seconds)
        outcomes.append(outcome)
        if outcome.status == 0:
            accepted.append((number, kind, folder))
        report(outcome)
    for number in range(arguments.rows):
        kind, suffix, data, settings = file_of_rows(Random(f"{arguments.seed}:r{number}"))
        folder = root / f"rows{number}"
        folder.mkdir()
        path = folder / f"rows.{suffix}"
        path.write_bytes(data)
        section = {**base["data"], **settings, "train": {"path": str(path)}}
        (folder / "run.yaml").write_text(yaml.safe_dump({**base, "data": section}))
        work = command("data", "run.yaml", "--rows", "1")
        outcome = child(work, folder, f"rows {number} {kind} .{suffix}", arguments.seconds)
        outcomes.append(outcome)
        report(outcome)
        path.unlink()
    chosen = Random(arguments.seed).sample(accepted, min(arguments.run, len(accepted)))
    for number, kind, folder in chosen:
        outcome = child(one_step("run.yaml"), folder, f"run {number} {kind}", 120)
        # A rank's log has a traceback. What a loss becomes is not a reason that is in the file.
        refused = outcome.status and "NonFiniteLossError" not in outcome.said
        said = "a run refuses what a dry run accepts" if refused else ""
        outcome = replace(outcome, complaint=said)
        outcomes.append(outcome)
        report(outcome)
    return outcomes


def report(outcome: CaseOutcome) -> None:
    if outcome.complaint:
        print(f"{outcome.case}: {outcome.complaint}\n{outcome.said[-1500:]}\n", flush=True)


def summary(outcomes: list[CaseOutcome]) -> dict[str, Any]:
    """Counts by exit status, and the slowest and the largest."""
    found: dict[str, Any] = {"cases": len(outcomes)}
    for kind in ("file", "rows", "run"):
        of_kind = [each for each in outcomes if each.case.startswith(f"{kind} ")]
        if of_kind:
            slowest = max(of_kind, key=lambda each: each.cpu_s)
            largest = max(of_kind, key=lambda each: each.mib)
            found[kind] = {
                "by status": dict(sorted(Counter(each.status for each in of_kind).items())),
                "slowest": f"{slowest.cpu_s:.1f} s: {slowest.case}",
                "largest": f"{largest.mib} MiB: {largest.case}",
            }
    found["wrong"] = [f"{each.case}: {each.complaint}" for each in outcomes if each.complaint]
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--run", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=MOST_S)
    parser.add_argument("--broken", action="store_true")
    arguments = parser.parse_args(given)
    # Threads do not survive a fork.
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory(prefix="anygauge-generated-") as root:
        found = summary(trial(arguments, Path(root)))
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
