"""Runs a script, or a function of a test, as several ranks and waits for them."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.zygote import Fork, run_forks


def run_ranks(
    module: str,
    arguments: Sequence[str],
    *,
    world: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> None:
    """Run ``python -m module arguments`` as `world` ranks that meet in `folder`.

    The ranks are forks of a process that has imported torch, transformers, peft and DeepSpeed.
    """
    rendezvous = folder / f"rendezvous-{module.rsplit('.', 1)[-1]}-{os.urandom(4).hex()}"
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    forks = [
        Fork(
            module=module,
            arguments=arguments,
            log=str(log),
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "RENDEZVOUS": f"file://{rendezvous}",
                **(environment or {}),
            },
        )
        for rank, log in enumerate(logs)
    ]
    codes = run_forks(forks, timeout_s=timeout_s)
    said = "\n".join(log.read_text(errors="replace")[-10_000:] for log in logs)
    assert codes == [0] * world, f"exit statuses {codes}\n{said}"


def on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world: int,
    backend: str = "cpu",
    alone: bool = True,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> list[Any]:
    """What a module's function returns on each of `world` ranks that have met, by rank.

    It is given the opened backend, then the arguments; these and its results pass through JSON.

    Args:
        alone: as for `open_rank`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        output = Path(temporary, "found")
        named = [function.__module__, function.__name__, json.dumps(arguments), str(output)]
        run_ranks(
            __name__,
            [*named, backend, "alone" * alone],
            world=world,
            folder=Path(temporary),
            environment=environment,
            timeout_s=timeout_s,
        )
        return [json.loads(output.with_suffix(f".{rank}").read_text()) for rank in range(world)]


def main(
    module: str, name: str, arguments: str, output: str, backend_name: str, alone: str
) -> None:
    from anygauge.registry import Registry
    from tests.helpers.build import open_rank

    function = getattr(importlib.import_module(module), name)
    backend = Registry.load().create_backend(backend_name)
    rank, _ = open_rank(backend, alone=bool(alone))
    found = function(backend, *json.loads(arguments))
    backend.close()
    Path(output).with_suffix(f".{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
