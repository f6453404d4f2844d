"""One tiny model through everything: saved by transformers, loaded, trained, merged.

``python -m tests.models.zoo_one MODEL_TYPE FOLDER``, where FOLDER has a tokenizer, writes what came
of each part to FOLDER/row.json, after each of them: what ends the process is then known, too.
"""

from __future__ import annotations

import json
import math
import re
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import torch

from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError
from anygauge.kernels.attention import library_attention
from anygauge.models.factory import dtype_name
from anygauge.models.merge import merge
from anygauge.models.quiet import quiet_libraries
from anygauge.models.result_files import ResultFiles
from anygauge.models.verify import relative_difference
from tests.helpers.build import model_factory, on_host
from tests.helpers.forked import RunPart, start
from tests.helpers.runs import Run, run_file
from tests.models.zoo import RESULTS

MEMORY = 6 * 2**30
"""Bytes of data that the process may have."""
STEPS = 5
SAME = 1e-5
"""Largest relative difference of losses, and of a merged model's logits."""
FIXED = json.loads(RESULTS.read_text())
"""`counts`: size -> patterns of fields that count something, of which a tiny model has so many (the
first that matches holds). `fields`: model type -> what does not follow from names."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}
"""As the tokenizer of the tests has them."""
BY_CHANCE = re.compile("jitter|dropout|pdrop|layerdrop|drop_rate|drop_path")
"""In names of fields that make a forward a matter of chance."""


def tiny_config(kind: Any) -> Any:
    """A configuration of a class with a few thousand parameters, out of the class's defaults."""
    from transformers import PretrainedConfig

    given = FIXED["fields"].get(kind.model_type, {})
    try:
        usual = kind()
    except Exception:  # some refuse their own defaults
        usual = kind(**given)
    values = {name: value for name, value in vars(usual).items() if not name.startswith("_")}
    parts = {
        name: tiny_config(type(value)).to_dict()
        for name, value in values.items()
        if isinstance(value, PretrainedConfig) and name not in given
    }
    return kind(**{**shrunk(values), **parts, **given})


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that are smaller in a tiny one; each kind of layer stays."""
    depth = max(values.get(name) or 0 for name in DEPTHS)
    lists = {n: list(v) for n, v in values.items() if isinstance(v, list | tuple)}
    kinds = {
        name: [value for index, value in enumerate(each) if value not in each[:index]]
        for name, each in lists.items()
        if len(each) == depth > 1
    }
    layers = max([2, *(len(kind) for kind in kinds.values() if isinstance(kind[0], str))])
    found: dict[str, Any] = {n: (k + k[-1:] * layers)[:layers] for n, k in kinds.items()}
    for name, value in values.items():
        sizes = (int(s) for s, p in FIXED["counts"].items() if re.fullmatch("|".join(p), name))
        if name.endswith(("token_id", "token_index")) and value is not None:
            found[name] = TOKENS.get(name, 511)
        elif BY_CHANCE.search(name) and isinstance(value, float):
            found[name] = 0.0
        elif type(value) is int and (size := next(sizes, None)) is not None:
            # What a family leaves out stays out.
            found[name] = value and (layers if name in DEPTHS else size)
    heads = found.get("num_attention_heads", found.get("n_head", 0))
    if "qk_rope_head_dim" in values:
        found["num_key_value_heads"] = heads
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            found["head_dim"] = found["qk_rope_head_dim"]
    # Left out, some of them are computed from the others, and some are not.
    for name, size in (("head_dim", 16), ("num_key_value_heads", heads), ("is_decoder", True)):
        if name in values and values[name] in (None, False):
            found[name] = size
    return found


def main(model_type: str, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    quiet_libraries()
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"failed": {}}

    def part(name: str, work: Callable[[], dict[str, Any]]) -> bool:
        (folder / "row.json").write_text(json.dumps({**row, "in": name}))
        try:
            row.update(work())
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            ours = isinstance(error, AnygaugeError | AssertionError)
            said = ("" if ours else f"{type(error).__name__}: ") + " ".join(lines[:2])[:600]
            row["failed"][name] = said.replace(str(folder), "FOLDER")
        return name not in row["failed"]

    if part("made", lambda: made(model_type, folder)) and part("loads", lambda: loads(folder)):
        recomputed = "recomputes" not in row
        if part("single", lambda: trained("single", folder, recomputed)):
            part("merges", lambda: merges(folder))
            part("zero", lambda: trained("zero", folder, recomputed))
    if not row["failed"]:
        del row["failed"]
    (folder / "row.json").write_text(json.dumps(row))


def made(model_type: str, folder: Path) -> dict[str, Any]:
    """Save a tiny model with random weights, in the layout that transformers publishes."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[model_type])
    model = AutoModelForCausalLM.from_config(config, **{dtype_name(): torch.float32}).eval()
    # Of a size at which logits differ; what starts as a constant is seen in them, too.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict().values()}.values():
            if tensor.is_floating_point() and tensor.numel():
                wide = 0.5 / math.sqrt(tensor.shape[-1]) if tensor.dim() >= 2 else 0.05
                tensor.add_(torch.randn(tensor.shape, generator=generator) * wide)
    base = folder / "base"
    model.save_pretrained(base)
    assert logits(model).isfinite().all(), "its logits are not finite"
    logits(plain(base, "eager" if model.config._attn_implementation == "eager" else "sdpa"))
    copytree(folder / "tokenizer", base, dirs_exist_ok=True)
    return {} if model.supports_gradient_checkpointing else {"recomputes": False}


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


def loads(folder: Path) -> dict[str, Any]:
    """Load as a strategy does, and compare with transformers' own way."""
    from anygauge import open_backend

    factory = model_factory(folder / "base")
    attention = library_attention(open_backend("cpu"), factory.config).name
    found = logits(on_host(factory.having(attention, None)).eval())
    wanted = logits(plain(folder / "base", attention))
    assert torch.equal(found, wanted), f"logits differ by {relative_difference(found, wanted):.1e}"
    return {}


def trained(strategy: str, folder: Path, recomputed: bool) -> dict[str, Any]:
    """A run as the command line makes it: one rank, or two with ZeRO-3, whose losses are equal."""
    # Of parameters that are this small, the engine would keep each rank a whole copy.
    whole = {"stage3_param_persistence_threshold": 0}
    optimizer = {"lr": 5.0e-3, "eps": 1.0e-6}
    file = run_file(
        folder,
        name=strategy,
        model={"name": str(folder / "base")},
        strategy={"name": strategy, **({"options": whole} if strategy == "zero" else {})},
        data={"max_length": 64},
        launch={"devices": 2 if strategy == "zero" else 1},
        train={"steps": STEPS, "gradient_checkpointing": recomputed, "optimizer": optimizer},
    )
    told = start(RunPart(file=str(file)))
    if told["status"]:
        events = [json.loads(line) for line in told["out"].splitlines() if line.startswith("{")]
        failed = [event for event in events if event["event"] == "failed"]
        first = min(failed, key=lambda event: not event["for_user"], default=None)
        assert first is not None, f"a rank ended with {told['status']}: {told['log'][-300:]}"
        kind = "" if first["for_user"] else f"{first['error']}: "
        raise AssertionError(kind + first["message"])
    one, run = (
        Run(folder=folder / "out" / name, status=0, out="", err="") for name in ("single", strategy)
    )
    found, wanted = run.steps("loss"), one.steps("loss")
    assert all(map(math.isfinite, found)) and len(set(found)) == STEPS, f"its losses are {found}"
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    assert apart <= SAME, f"losses differ from one rank's by {apart:.1e}: {found}, {wanted}"
    choices = json.loads((run.folder / "report.json").read_text())["choices"]
    loss = choices["kernels"].get("linear_cross_entropy", {}).get("name", "reference")
    return {"attention": choices["attention"]["name"], "loss": loss}


def merges(folder: Path) -> dict[str, Any]:
    """Merge, and load the result by transformers alone beside what peft alone merges."""
    from peft import PeftModel
    from transformers import AutoTokenizer

    base, adapter, output = (
        folder / "base",
        folder / "out" / "single" / "adapter",
        folder / "merged",
    )
    section = ModelSection(name=str(base))
    merge(section, adapter, output, ResultFiles(section, AutoTokenizer.from_pretrained(base)))
    whole = PeftModel.from_pretrained(plain(base, "eager"), str(adapter)).merge_and_unload().eval()
    apart = relative_difference(logits(plain(output, "eager")), logits(whole))
    assert apart <= SAME, f"logits of the merged model differ by {apart:.1e}"
    return {}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
