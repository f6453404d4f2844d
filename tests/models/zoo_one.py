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
from torch import nn

from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError
from anygauge.models.factory import dtype_name
from anygauge.models.merge import merge
from anygauge.models.quiet import quiet_libraries
from anygauge.models.result_files import ResultFiles
from anygauge.models.verify import relative_difference
from tests.helpers.build import model_factory, on_host
from tests.helpers.forked import RunPart, start
from tests.helpers.runs import run_file
from tests.models.zoo_configs import LENGTH, tiny_config

MEMORY = 6 * 2**30
"""Bytes of data that a process may have."""
STEPS = 5
SAME = 1e-5
"""Largest relative difference of losses, and of a merged model's logits."""


def main(model_type: str, folder: Path, tokenizer: Path, output: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    quiet_libraries()
    row: dict[str, Any] = {}
    base = folder / "base"

    def part(name: str, work: Callable[[], dict[str, Any]]) -> bool:
        output.write_text(json.dumps({**row, "in": name}))
        try:
            row.update(work())
        except Exception as error:
            row[name] = {"failed": said(error).replace(str(folder), "FOLDER")}
        output.write_text(json.dumps(row))
        return "failed" not in row.get(name, {})

    if part("made", lambda: made(model_type, base, tokenizer)):
        part("loads", lambda: {"loads": loads(base)})
        losses: dict[str, list[float]] = {}
        single = part("single", lambda: trained("single", folder, losses))
        if not single and row["single"]["failed"].startswith("train.gradient_checkpointing"):
            row["recomputes"] = row["single"]
            single = part("single", lambda: trained("single", folder, losses, recomputed=False))
        if single:
            part("merges", lambda: {"merges": merges(base, folder)})
        recomputed = "recomputes" not in row
        part("zero", lambda: trained("zero", folder, losses, recomputed=recomputed))
    output.write_text(json.dumps(row))


def said(error: BaseException) -> str:
    """Its first two lines; an error that is not ours comes with its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (" ".join(lines[:2]) if lines else type(error).__name__)[:600]
    ours = isinstance(error, AnygaugeError | AssertionError)
    return text if ours else f"{type(error).__name__}: {text}"


def made(model_type: str, folder: Path, tokenizer: Path) -> dict[str, Any]:
    """Save a tiny model with random weights, in the layout that transformers publishes."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            tiny_config(model_type), **{dtype_name(): torch.float32}
        ).eval()
        scale(model)
        model.save_pretrained(folder)
        wanted = logits(model)
        logits(plain(folder, "eager" if model.config._attn_implementation == "eager" else "sdpa"))
    assert wanted.isfinite().all(), "its logits are not finite"
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return {"parameters": sum(p.numel() for p in model.parameters())}


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
            tensor.add_(drawn * (0.5 / math.sqrt(tensor.shape[-1]) if tensor.dim() >= 2 else 0.05))


def logits(model: Any) -> torch.Tensor:
    """Of 2 rows of 24 tokens."""
    tokens = torch.randint(3, 400, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
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

    factory = model_factory(folder)
    attention = library_attention(open_backend("cpu"), factory.config).name
    model = on_host(factory.having(attention, None))
    found, wanted = logits(model.eval()), logits(plain(folder, attention))
    apart = relative_difference(found, wanted)
    assert torch.equal(found, wanted), f"logits differ by {apart:.1e}"
    return "equal"


def trained(
    strategy: str, folder: Path, losses: dict[str, list[float]], *, recomputed: bool = True
) -> dict[str, Any]:
    """A run as the command line makes it: one rank, or two with ZeRO-3, whose losses are equal."""
    options: dict[str, Any] = {"name": strategy}
    if strategy == "zero":
        # Of parameters that are this small, the engine would keep each rank a whole copy.
        options["options"] = {"stage3_param_persistence_threshold": 0}
    file = run_file(
        folder,
        name=strategy,
        model={"name": str(folder / "base")},
        strategy=options,
        data={"max_length": LENGTH // 2},
        launch={"devices": 2 if strategy == "zero" else 1},
        train={
            "steps": STEPS,
            "gradient_checkpointing": recomputed,
            "optimizer": {"lr": 5.0e-3, "eps": 1.0e-6},
        },
    )
    run = start(RunPart(file=str(file)))
    assert not run["status"], first_failure(run)
    where = Path(run["folder"])
    records = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    found = losses[strategy] = [record["loss"] for record in records if "loss" in record]
    assert all(map(math.isfinite, found)) and len(set(found)) == STEPS, f"its losses are {found}"
    wanted = losses.get("single", found)
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    assert apart <= SAME, f"losses differ from one rank's by {apart:.1e}: {found}, {wanted}"
    choices = json.loads((where / "report.json").read_text())["choices"]
    kernel = choices["kernels"].get("linear_cross_entropy", {})
    loss = kernel.get("name", "reference")
    return {
        strategy: {"steps": len(found)},
        "attention": choices["attention"]["name"],
        "loss": loss,
        **({"loss because": kernel.get("reason", "")} if loss == "reference" else {}),
    }


def first_failure(run: dict[str, Any]) -> str:
    """What the first of a run's ranks that failed has said."""
    events = [json.loads(line) for line in run["out"].splitlines() if line.startswith("{")]
    failed = [event for event in events if event["event"] == "failed"]
    first = min(failed, key=lambda event: not event["for_user"], default=None)
    if first is None:
        return f"a rank ended with {run['status']}: {run['log'][-300:]}"
    return f"{'' if first['for_user'] else first['error'] + ': '}{first['message']}"


def merges(base: Path, folder: Path) -> str:
    """Merge, and load the result by transformers alone beside what peft alone merges."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    adapter, output = folder / "out" / "single" / "adapter", folder / "merged"
    section = ModelSection(name=str(base))
    merge(section, adapter, output, ResultFiles(section, AutoTokenizer.from_pretrained(base)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = PeftModel.from_pretrained(plain(base, "eager"), str(adapter)).merge_and_unload()
        found, wanted = logits(plain(output, "eager")), logits(whole.eval())
    apart = relative_difference(found, wanted)
    assert apart <= SAME, f"logits of the merged model differ by {apart:.1e}"
    return "equal" if apart == 0 else "within 1e-5"


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
