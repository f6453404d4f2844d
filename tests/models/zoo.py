"""Every causal architecture of the installed transformers, tiny: which of them load, train, merge.

``make zoo``, by hand and before a release, adds what it finds to ``zoo.json`` and writes the tables
of docs/models.md anew (docs/make_docs.py); what is there already for the installed versions stays.
To try some again: ``python -m tests.models.zoo mixtral gemma3``. It ends with status 1 if a failure
has no explanation among `limits`. What else ``zoo.json`` has, its `about` says.
"""

from __future__ import annotations

import json
import math
import re
import resource
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from anygauge.cli import run as command
from anygauge.interface import Backend
from anygauge.kernels.attention import library_attention
from anygauge.models.verify import relative_difference
from docs import make_docs
from tests.helpers.build import model_factory, on_host
from tests.helpers.forked import RunPart, finished
from tests.helpers.run_ranks import on_ranks
from tests.helpers.runs import Run, run_file
from tests.helpers.tiny_tokenizer import make_tokenizer

RESULTS = Path(__file__).with_name("zoo.json")
STORED = json.loads(RESULTS.read_text())
STACK = f"transformers {version('transformers')}"
ERROR = r"^(?:\w+\.)*(\w+(?:Error|Exception)\b.*(?:\n.*){0,2})"
LIMIT_S, MEMORY = 150.0, 6 * 2**30
"""Seconds, and bytes of data in a process, for each part of what is tried."""
STEPS, SAME = 5, 1e-5
"""Of a run; largest relative difference of losses, and of a merged model's logits."""


def main(again: list[str]) -> None:
    """Add to the results, and write the page; ends with what failed and nobody has explained."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # inherited by all processes
    libraries = ("transformers", "peft", "torch", "deepspeed", "accelerate")
    here = STORED["stacks"].setdefault(STACK, {"rows": {}})
    here["versions"] = {name: version(name).partition("+")[0] for name in libraries}
    for model in again or sorted({*NAMES} & {*CONFIG_MAPPING} - {*here["rows"]}):
        here["rows"] = dict(sorted({**here["rows"], model: result(model)}.items()))
        RESULTS.write_text(json.dumps(STORED, indent=1) + "\n")
        print(model, here["rows"][model].get("failed", "yes"), flush=True)
    make_docs.main()
    text = make_docs.architectures()
    sys.exit("\n".join(line for line in text.splitlines() if make_docs.UNEXPLAINED in line) or 0)


def result(name: str) -> dict[str, Any]:
    """What came of a model type; each part has processes of its own, and one that fails ends it."""
    row: dict[str, Any] = {"class": NAMES[name]}
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        for part in STORED["parts"]:
            try:
                if part in ("single", "zero"):
                    row |= trained(Path(folder), part, "recomputes" not in row)
                else:
                    row |= on_ranks(globals()[part], folder, name, world=1, timeout_s=LIMIT_S)[0]
            except AssertionError as error:
                # The error that a log ends with; else all of it (exit status -9: no end in time).
                log = str(error).replace(folder, "FOLDER")
                said = [log, *re.findall(ERROR, log, re.MULTILINE)][-1]
                row.setdefault("failed", {})[part] = " ".join(said.split())[:600]
                if part != "merges":  # ZeRO-3 does not need it
                    break
    return row


def tiny_config(kind: Any) -> Any:
    """A configuration of a class with a few thousand parameters, out of the class's defaults; each
    kind of layer stays."""
    given = STORED["fields"].get(kind.model_type, {})
    # Some refuse their own defaults.
    usual = kind(**{name: part for name, part in given.items() if name == "text_config"})
    values = {name: value for name, value in vars(usual).items() if not name.startswith("_")}
    depth = max(values.get(name) or 0 for name in STORED["depths"])
    kinds = {
        name: list(dict.fromkeys(value))
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == depth > 1
    }
    layers = max([2, *(len(kind) for kind in kinds.values() if isinstance(kind[0], str))])
    found: dict[str, Any] = {n: (k + k[-1:] * layers)[:layers] for n, k in kinds.items()}
    for name, value in values.items():
        sizes = (int(s) for s, p in STORED["counts"].items() if re.fullmatch("|".join(p), name))
        if isinstance(value, PretrainedConfig) and name not in given:
            found[name] = tiny_config(type(value)).to_dict()
        elif name.endswith(("token_id", "token_index")) and value is not None:
            found[name] = STORED["tokens"].get(name, 511)
        elif type(value) in (int, float) and (size := next(sizes, None)) is not None:
            # What a family leaves out stays out.
            found[name] = value and type(value)(layers if name in STORED["depths"] else size)
    heads = found.get("num_attention_heads", found.get("n_head", 0))
    if "qk_rope_head_dim" in values:
        found["num_key_value_heads"] = heads
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            found["head_dim"] = found["qk_rope_head_dim"]
    # Left out, some of them are computed from the others, and some are not.
    for name, size in (("head_dim", 16), ("num_key_value_heads", heads), ("is_decoder", True)):
        if name in values and values[name] in (None, False):
            found[name] = size
    return kind(**{**found, **given})


def logits(model: Any) -> Any:
    """Of 2 rows of 24 tokens."""
    tokens = torch.randint(3, 400, (2, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


def plain(folder: Path, attention: str | None = None) -> Any:
    """The model as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)


def made(backend: Backend, folder: str, model_type: str) -> dict[str, Any]:
    """Save a tiny model with random weights, in the layout that transformers publishes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING[model_type]))
    # Of a size at which logits differ; what starts as a constant is seen in them, too.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict().values()}.values():
            if tensor.is_floating_point() and tensor.numel():
                wide = 0.5 / math.sqrt(tensor.shape[-1]) if tensor.dim() >= 2 else 0.05
                tensor.add_(torch.randn(tensor.shape, generator=generator) * wide)
    model.save_pretrained(base := Path(folder, "base"))
    make_tokenizer(base)
    assert logits(plain(base)).isfinite().all(), "its logits are not finite"
    return {} if model.supports_gradient_checkpointing else {"recomputes": False}


def loads(backend: Backend, folder: str, model_type: str) -> dict[str, Any]:
    """Load as a strategy does, and compare with transformers' own way."""
    factory = model_factory(base := Path(folder, "base"))
    attention = library_attention(backend, factory.config).name
    found = logits(on_host(factory.with_kernels(attention, None)))
    wanted = logits(plain(base, attention))
    assert torch.equal(found, wanted), f"logits differ by {relative_difference(found, wanted):.1e}"
    return {}


def trained(folder: Path, strategy: str, recomputed: bool) -> dict[str, Any]:
    """A run as the command line makes it: one rank, or two with ZeRO-3, whose losses are equal."""
    # Of parameters that are this small, the engine would keep each rank a whole copy.
    whole = {"options": {"stage3_param_persistence_threshold": 0}} if strategy == "zero" else {}
    optimizer = {"lr": 5.0e-3, "eps": 1.0e-6}
    file = run_file(
        folder,
        name=strategy,
        model={"name": str(folder / "base")},
        strategy={"name": strategy, **whole},
        data={"max_length": 64},
        launch={"devices": 2 if strategy == "zero" else 1},
        train={"steps": STEPS, "gradient_checkpointing": recomputed, "optimizer": optimizer},
    )
    (run,) = finished([RunPart(file=str(file))], timeout_s=LIMIT_S)
    found = run.steps("loss")
    wanted = Run(folder=folder / "out" / "single", status=0, out="", err="").steps("loss")
    assert all(map(math.isfinite, found)) and len(set(found)) == STEPS, f"its losses are {found}"
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    assert apart <= SAME, f"losses differ from one rank's by {apart:.1e}: {found}, {wanted}"
    choices = json.loads((run.folder / "report.json").read_text())["choices"]
    loss = choices["kernels"].get("linear_cross_entropy", {"name": "reference"})["name"]
    words = "logits" if loss == "reference" else "kernel"
    return {"attention": choices["attention"]["name"], "loss": words}


def merges(backend: Backend, folder: str, model_type: str) -> dict[str, Any]:
    """Merge, and load the result by transformers alone beside what peft alone merges."""
    from peft import PeftModel

    run, merged = Path(folder, "out", "single"), Path(folder, "merged")
    command(["merge", str(run), "--output", str(merged)])
    whole = PeftModel.from_pretrained(plain(Path(folder, "base"), "eager"), run / "adapter")
    apart = relative_difference(logits(plain(merged, "eager")), logits(whole.merge_and_unload()))
    assert apart <= SAME, f"logits of the merged model differ by {apart:.1e}"
    return {}


if __name__ == "__main__":
    from tests.models import zoo  # as the processes of its parts import it

    zoo.main(sys.argv[1:])
