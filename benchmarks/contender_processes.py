"""Starts a contender's processes and waits; ends all of them when one fails or time is up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anygauge.util.processes import describe_exit
from benchmarks.contender_plan import ContenderPlan

ROOT = Path(__file__).resolve().parents[1]
SHIM = Path(__file__).resolve().parent / "shim"
GRACE_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """What to start: one process for each environment, each with its log.

    Attributes:
        environments: variables on top of this process's own.
        bound: bind each process to its share of our processors, as anygauge binds its ranks.
    """

    argv: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    logs: Sequence[Path]
    bound: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended.

    Attributes:
        problem: None where all processes succeeded.
        status: of the first that failed, negative for a signal; None where the time was over.
    """

    seconds: float
    problem: str | None
    status: int | None


SHARED = ("PYTHONPATH", "ANYGAUGE_BENCHMARK_TRACE", "ANYGAUGE_BENCHMARK_WATCH")
"""Those of `shared_environment` by which ranks of another machine are measured."""


def shared_environment(plan: ContenderPlan) -> dict[str, str]:
    """Variables that are the same for every contender; what ranks record is in ``plan.output``."""
    trace = Path(plan.output)
    path = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "ANYGAUGE_BENCHMARK_TRACE": str(trace),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": plan.device,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(trace / "datasets"),
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
    }
    if plan.watched:
        variables["ANYGAUGE_BENCHMARK_WATCH"] = f"{plan.steps - plan.watched}:{plan.watched // 2}"
    if plan.evaluates:
        variables["ANYGAUGE_BENCHMARK_PHASES"] = "1"
    return variables


def identities(plan: ContenderPlan) -> list[dict[str, str]]:
    """The variables by which launchers tell ranks of one machine who they are."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # nobody listens on it
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(plan.ranks),
            "LOCAL_WORLD_SIZE": str(plan.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **settings_of_accelerate(plan),
        }
        for rank in range(plan.ranks)
    ]


def settings_of_accelerate(plan: ContenderPlan) -> dict[str, str]:
    """What its own launcher would say to each rank of a peer."""
    # Never "use the CPU", which it says too: Accelerate then leaves DeepSpeed out. The device is
    # named instead, and contenders name the process group.
    named = {"ACCELERATE_TORCH_DEVICE": "cpu"} if plan.device == "cpu" else {}
    return {"ACCELERATE_USE_DEEPSPEED": str(plan.deepspeed).lower(), **named}


def run(processes: Processes, timeout_s: float) -> Ended:
    """Start, wait, and leave nothing running, whatever happens."""
    with started(processes) as running:
        return wait(running, timeout_s)


@contextlib.contextmanager
def started(processes: Processes) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Processes that run until the block ends, at the latest."""
    running: list[subprocess.Popen[bytes]] = []
    binds = processes.bound and hasattr(os, "sched_setaffinity")
    processors = sorted(os.sched_getaffinity(0)) if binds else []
    share = len(processors) // len(processes.environments)  # 0: there are fewer than processes
    try:
        for index, environment in enumerate(processes.environments):
            with processes.logs[index].open("wb") as log:
                process = subprocess.Popen(
                    list(processes.argv),
                    cwd=ROOT,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            running.append(process)
            if share:
                with contextlib.suppress(OSError):  # it has ended already
                    own = processors[index * share : (index + 1) * share]
                    os.sched_setaffinity(process.pid, own)
        yield running
    finally:
        _end(running)


def wait(running: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> Ended:
    """Until all have succeeded, one has failed, or the time is over."""
    began = time.monotonic()
    problem, status = None, None
    while problem is None and status is None:
        codes = [process.poll() for process in running]
        failed = next((index for index, code in enumerate(codes) if code), None)
        if failed is not None:
            status = codes[failed]
            problem = f"process {failed} ended with {describe_exit(codes[failed] or 0)}"
        elif all(code == 0 for code in codes):
            status = 0
        elif time.monotonic() > began + timeout_s:
            problem = f"not done after {timeout_s:.3g} s (--timeout)"
        else:
            time.sleep(POLL_S)
    return Ended(seconds=time.monotonic() - began, problem=problem, status=status)


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_S
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            # What one that has ended left behind is in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        deadline += GRACE_S


def last_lines(folder: Path, count: int = 15, logs: str = "run*/logs/rank*.log") -> list[str]:
    """The end of the log that says most: of the ranks where there are any, else the newest."""
    found = sorted(folder.glob(logs)) or sorted(folder.glob("*.log"))
    if not found:
        return []
    # The rank that failed first has a traceback of its own; others report a lost connection.
    first = min(found, key=lambda path: path.stat().st_mtime)
    text = first.read_text(encoding="utf-8", errors="replace")
    return text.rstrip().splitlines()[-count:]


def cause(lines: Sequence[str]) -> str:
    """The error that the end of a log names; empty where it names none."""
    errors = [text for text in lines if re.match(r"(?i)(error|[\w.]+(Error|Exception))\b", text)]
    return errors[-1] if errors else ""


def raise_when_terminated() -> None:
    """Have SIGTERM raise an exception in this process, so that what it has started is ended."""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
