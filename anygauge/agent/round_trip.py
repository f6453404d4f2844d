"""A collective round trip: real ranks on this machine join, sum tensors, and time it.

``python -m anygauge.agent.round_trip --job JOB`` is one rank, started by an agent, so that it gets
the environment that a run's ranks get.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import AnygaugeError, Check, Job, LaunchSettings, Outcome
from anygauge.registry import Registry
from anygauge.util.events import EventWriter
from anygauge.util.files import write_text
from anygauge.util.processes import die_with_parent

CHECK = "collective round trip"
SIZES = (1_024, 1_048_576, 67_108_864)
"""Bytes of float32 in a tensor."""
REPEATS = 5
COLLECTIVE_TIMEOUT_S = 60.0
MIB = 2**20


def measure(
    backend: str, options: Mapping[str, Any], ranks: int, timeout_s: float = 180.0
) -> Check:
    """Start `ranks` ranks on this machine and let them sum tensors of several sizes.

    Args:
        timeout_s: seconds that all of it may take.
    """
    name = CHECK
    remedy = f"anygauge env --backend {backend} --devices {ranks} shows the ranks' variables"
    with tempfile.TemporaryDirectory(prefix="anygauge-doctor-") as folder:
        job = Job(
            name="doctor",
            run_directory=folder,
            run_file="",
            backend=backend,
            launch=LaunchSettings(devices=ranks, collective_timeout_s=COLLECTIVE_TIMEOUT_S),
            rendezvous=f"file://{folder}/rendezvous",
            token=secrets.token_hex(16),
            backend_options=dict(options),
        )
        path = Path(folder) / "job.json"
        write_text(path, job.dump(), mode=0o600)
        argv = [sys.executable, "-m", "anygauge.agent.round_trip", "--agent", "--job", str(path)]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            seen = f"{ranks} ranks were not done within {timeout_s:.0f} s"
            return Check(name=name, outcome=Outcome.FAIL, seen=seen, remedy=remedy)
        result = Path(folder) / "round_trip.json"
        if done.returncode or not result.is_file():
            seen = f"{ranks} ranks: {_cause(done.stdout, done.stderr)}"
            return Check(name=name, outcome=Outcome.FAIL, seen=seen, remedy=remedy)
        return _judged(json.loads(result.read_text(encoding="utf-8")), ranks, remedy)


def _judged(result: Mapping[str, Any], ranks: int, remedy: str) -> Check:
    lines = [
        f"{_size(one['bytes'])} in {one['seconds'] * 1e3:.2f} ms ({one['bytes_per_s'] / MIB:,.0f} "
        "MiB/s)"
        for one in result["sizes"]
    ]
    seen = f"{ranks} ranks, {result['library']}: " + ", ".join(lines)
    if result["wrong"]:
        return Check(
            name=CHECK,
            outcome=Outcome.FAIL,
            seen=f"{seen}; sums of {_size(result['wrong'][0])} are wrong",
            remedy=remedy,
        )
    return Check(name=CHECK, outcome=Outcome.PASS, seen=seen)


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


def _cause(stdout: str, stderr: str) -> str:
    """The cause that the agent reported, or else the last line it printed."""
    for line in reversed(stdout.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("cause"):
            return str(event["cause"]).splitlines()[0]
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "they ended without a report"


def run_rank(job: Job, rank: int, world_size: int, local_rank: int) -> dict[str, Any]:
    """Join, sum, time; what rank 0 returns is the result.

    Returns:
        ``library``; ``sizes``: bytes, median seconds, and bytes a second that left this rank by
        the usual count for a ring (2 (n-1)/n of the tensor); ``wrong``: sizes with wrong sums.
    """
    import torch

    with Registry.load().create_backend(job.backend, job.backend_options) as backend:
        device = backend.open(local_rank)
        backend.collectives.open(
            rendezvous=job.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout_s=job.launch.collective_timeout_s,
            device=device,
            secret=job.token,
        )
        wanted = float(sum(range(1, world_size + 1)))
        sizes, wrong = [], []
        for size in SIZES:
            seconds = []
            for _ in range(REPEATS):
                tensor = torch.full((size // 4,), float(rank + 1), device=device)
                backend.placement.synchronize()
                backend.collectives.barrier()
                began = time.perf_counter()
                backend.collectives.all_reduce(tensor)
                backend.placement.synchronize()
                seconds.append(time.perf_counter() - began)
                if not bool((tensor == wanted).all()):
                    wrong.append(size)
            median = sorted(seconds)[REPEATS // 2]
            moved = 2 * (world_size - 1) / world_size * size
            sizes.append({"bytes": size, "seconds": median, "bytes_per_s": moved / median})
        found = backend.collectives.gather_objects(wrong)
        return {
            "library": backend.collectives.backend_name(device),
            "sizes": sizes,
            "wrong": sorted({size for each in found for size in each}),
        }


def main(argv: list[str]) -> int:
    """One rank; with ``--agent`` the agent that starts all of them."""
    agent, path = argv[0] == "--agent", argv[-1]
    if agent:
        from anygauge.agent.__main__ import main as start

        rank_argv = (sys.executable, "-m", "anygauge.agent.round_trip", "--job", path)
        return start(["--job", path], rank_argv=rank_argv)
    die_with_parent()
    job, rank = Job.load(path), int(os.environ["RANK"])
    events = EventWriter.of_rank(rank)
    try:
        result = run_rank(job, rank, int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    except Exception as error:
        events.send(
            "failed",
            error=type(error).__name__,
            message=str(error).strip() or type(error).__name__,
            for_user=isinstance(error, AnygaugeError),
            exit_status=1,
        )
        raise
    if rank == 0:
        write_text(Path(job.run_directory) / "round_trip.json", json.dumps(result) + "\n")
    events.send("finished")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
