"""One tiny model through everything: saved by transformers, loaded, trained, merged.

``python -m tests.models.zoo_one MODEL_TYPE FOLDER TOKENIZER OUTPUT`` writes what came of each part
to OUTPUT, as JSON, after each of them: what ends the process is then known, too.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError
from anygauge.models.factory import CausalModelFactory, dtype_name
from anygauge.models.merge import merge
from anygauge.models.quiet import quiet_libraries
from anygauge.models.result_files import ResultFiles
from anygauge.models.verify import relative_difference
from anygauge.strategies.materialise import materialise
from tests.helpers.forked import RunPart, start
from tests.helpers.tokenizer import FIXTURES
from tests.models.zoo_configs import LENGTH, tiny_config

MEMORY = 6 * 2**30
"""Bytes of data that a process may have."""
STEPS = 5
SAME = 1e-5
"""Largest relative difference of losses, and of a merged model's logits."""


class Upstream(Exception):
    """The library itself cannot do it: nothing to judge anygauge by."""


def main(model_type: str, folder: Path, tokenizer: Path, output: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    quiet_libraries()
    row: dict[str, Any] = {}
    base = folder / "base"

    def step(name: str, work: Callable[[], dict[str, Any]]) -> bool:
        output.write_text(json.dumps({**row, "in": name}))
        try:
            row.update(work())
        except Exception as error:
            text = said(error).replace(str(folder), "FOLDER")
            row[name] = {"failed": text, "kind": kind_of(error)}
        output.write_text(json.dumps(row))
        return "failed" not in row.get(name, {})

    if step("made", lambda: made(model_type, base, tokenizer)):
        step("loads", lambda: {"loads": loads(base)})
        trains = step("single", lambda: trained("single", base, folder))
        if not trains and row["single"]["failed"].startswith("train.gradient_checkpointing"):
            row["recomputes"] = row["single"]
            trains = step("single", lambda: trained("single", base, folder, False))
        if trains:
            step("merges", lambda: {"merges": merges(base, folder, Path(row["single"]["folder"]))})
        recomputed = "recomputes" not in row
        step("zero", lambda: compared(row, trained("zero", base, folder, recomputed)))
    for part in ("single", "zero"):
        row.get(part, {}).pop("folder", None)
    output.write_text(json.dumps(row))


def said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (" ".join(lines[:2]) if lines else type(error).__name__)[:600]


def kind_of(error: BaseException) -> str:
    """Whose words they are."""
    if isinstance(error, Upstream):
        return "upstream"
    return "refused" if isinstance(error, AnygaugeError) else type(error).__name__


def made(model_type: str, folder: Path, tokenizer: Path) -> dict[str, Any]:
    """Save a tiny model with random weights, in the layout that transformers publishes."""
    from transformers import AutoModelForCausalLM

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = tiny_config(model_type)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, **{dtype_name(): torch.float32}).eval()
            scale(model)
            model.save_pretrained(folder)
            wanted = logits(model)
            again = plain(
                folder, "eager" if model.config._attn_implementation == "eager" else "sdpa"
            )
    except Exception as error:
        raise Upstream(f"{type(error).__name__}: {said(error)}") from error
    if not wanted.isfinite().all():
        raise Upstream("its logits are not finite")
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    count = sum(p.numel() for p in model.parameters())
    return {
        "class": type(model).__name__,
        "parameters": count,
        "reads back": relative_difference(logits(again), wanted),
    }


def scale(model: nn.Module) -> None:
    """Give random weights a size at which logits differ, and move what starts as a constant.

    A tensor that is not loaded, and so has its initial value, is then seen in the logits.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict().values()}.values():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            drawn = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() >= 2:
                tensor.add_(drawn * 0.5 / math.sqrt(tensor.shape[-1]))
            else:
                tensor.add_(drawn * 0.05)


def probe() -> torch.Tensor:
    """(2, 24) int64."""
    return torch.randint(3, 400, (2, 24), generator=torch.Generator().manual_seed(2))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=probe(), use_cache=False).logits
    return found


def plain(folder: Path, attention: str) -> Any:
    """The model as transformers alone loads it, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, **{dtype_name(): torch.float32}
    ).eval()


def loads(folder: Path) -> str:
    """Load as a strategy does, and compare with transformers' own way."""
    from anygauge import open_backend
    from anygauge.kernels.attention import library_attention

    section = ModelSection(name=str(folder))
    factory = CausalModelFactory(
        section, None, dtype=torch.float32, seed=0, gradient_checkpointing=False
    )
    attention = library_attention(open_backend("cpu"), factory.config).name
    factory = factory.having(attention, None)
    model = factory.skeleton()
    materialise(model, factory, device=torch.device("cpu"), dtype=torch.float32)
    found, wanted = logits(model.eval()), logits(plain(folder, attention))
    if torch.equal(found, wanted):
        return "equal"
    raise AssertionError(f"logits differ by {relative_difference(found, wanted):.1e}")


def trained(strategy: str, base: Path, folder: Path, recomputed: bool = True) -> dict[str, Any]:
    """A run as the command line makes it: one rank, or two with ZeRO-3."""
    options: dict[str, Any] = {"name": strategy}
    if strategy == "zero":
        # Of parameters that are this small, the engine would keep each rank a whole copy.
        options["options"] = {"stage3_param_persistence_threshold": 0}
    fields = {
        "name": strategy,
        "output": str(folder / "runs"),
        "backend": "cpu",
        "model": {"name": str(base)},
        "adapter": {"r": 4},
        "strategy": options,
        "data": {
            "train": {"path": str(FIXTURES / "rows.jsonl")},
            "max_length": LENGTH // 2,
            "cache": str(folder.parent / "cache"),
        },
        "launch": {"devices": 2 if strategy == "zero" else 1},
        "train": {
            "steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "gradient_checkpointing": recomputed,
            "optimizer": {"lr": 5.0e-3, "eps": 1.0e-6},
        },
    }
    path = folder / f"{strategy}.yaml"
    path.write_text(yaml.safe_dump(fields))
    run = start(RunPart(file=str(path)))
    where = Path(run["folder"])
    if run["status"]:
        raise failure(run)
    records = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    if not all(map(math.isfinite, losses)) or len(set(losses)) < STEPS:
        raise AssertionError(f"its losses are {losses}")
    choices = json.loads((where / "report.json").read_text())["choices"]
    loss = choices["kernels"].get("linear_cross_entropy", {})
    return {
        strategy: {"losses": losses, "folder": str(where)},
        "attention": choices["attention"]["name"],
        "loss": loss.get("name", "reference"),
        "loss because": loss.get("reason", ""),
    }


def failure(run: dict[str, Any]) -> Exception:
    """The first failure of a run's ranks, as its kind of error."""
    events = [json.loads(line) for line in run["out"].splitlines() if line.startswith("{")]
    failures = [event for event in events if event.get("event", event.get("kind")) == "failed"]
    failures.sort(key=lambda event: not event["for_user"])
    if not failures:
        return RuntimeError(f"a rank ended with {run['status']}: {run['log'][-300:]}")
    first = failures[0]
    if first["for_user"]:
        return AnygaugeError(first["message"])
    return RuntimeError(f"{first['error']}: {first['message']}")


def compared(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The losses of two ranks beside those of one."""
    losses = found["zero"]["losses"]
    wanted = row.get("single", {}).get("losses")
    if wanted is None:
        return found
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    if not apart <= SAME:
        raise AssertionError(f"losses differ from one rank's by {apart:.1e}: {losses}, {wanted}")
    return {"zero": {"losses": losses, "apart": apart}}


def merges(base: Path, folder: Path, run: Path) -> str:
    """Merge, and load the result by transformers alone beside what peft alone merges."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    adapter = run / "adapter"
    output = folder / "merged"
    section = ModelSection(name=str(base))
    merge(section, adapter, output, ResultFiles(section, AutoTokenizer.from_pretrained(base)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = PeftModel.from_pretrained(plain(base, "eager"), str(adapter)).merge_and_unload()
        found, wanted = logits(plain(output, "eager")), logits(whole.eval())
    apart = relative_difference(found, wanted)
    if not apart <= SAME:
        raise AssertionError(f"logits of the merged model differ by {apart:.1e}")
    return "equal" if apart == 0 else "within 1e-5"


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
