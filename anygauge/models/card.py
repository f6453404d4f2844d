"""The model card: README.md beside a result, for people and for the model hub.

It names no folder above a file's own and no variable's value: a card is made to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from anygauge.config.paths import names_address, names_data_set
from anygauge.config.schema import AdapterSection, DataSection, ModelSection, RunFile
from anygauge.interface import ModelError
from anygauge.models import curve
from anygauge.models.quantization import in_words, quantization
from anygauge.models.source import local_folder
from anygauge.util.files import read_bounded, write_text
from anygauge.util.text import first_line

FILE = "README.md"
_TEMPLATE = Path(__file__).with_suffix(".jinja")
_LARGEST, _LARGEST_HEADER = 2**20, 2**16
"""Of a card that a stranger wrote, in bytes; of its header, in characters."""
_BY_FOLDER = " by its folder: put its name on the hub there"
LARGEST_PERPLEXITY = 1e9
"""Beyond it, it says no more than the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a run came to.

    Attributes:
        data: what became of the training rows, in words.
        result_step: the weights are those after it; None: those after the last.
        tokens: real tokens of all steps.
        first_loss, final_loss: nats per loss token, or pair.
        evaluations: records with step, name, eval_loss, and eval_tokens or eval_pairs.
        curve: see `loss_curve`; "" for none.
        strategy: see `Strategy.description`.
        verified: `Verification.record`.
        versions: package -> version.
    """

    device: str
    backend: str
    strategy: str
    ranks: int
    precision: str
    data: str
    steps: int
    result_step: int | None = None
    tokens: int
    first_loss: float
    final_loss: float
    evaluations: Sequence[Mapping[str, Any]]
    curve: str = ""
    verified: Mapping[str, Any]
    versions: Mapping[str, str]


def write_card(folder: Path, run: RunFile, facts: Facts) -> None:
    """Write the card of a run's result into its folder, and the picture that it shows."""
    if facts.curve:
        write_text(folder / curve.FILE, facts.curve)
    write_text(folder / FILE, run_card(run, facts))


def run_card(run: RunFile, facts: Facts) -> str:
    """The card of an adapter, or of a whole model where the run has no adapter."""
    adapter, model = run.adapter, run.model
    what, use, tags, relation = "whole model", "model", ["anygauge"], "finetune"
    if adapter is not None:
        what, relation = f"{_kind(adapter)} adapter", "adapter"
        use = "tests" if model.name is None else "adapter"
        tags += ["lora", *["rslora"] * adapter.rslora, *["dora"] * adapter.dora]
    return _make_card(
        model,
        tags,
        relation,
        name=run.name,
        summary=f"A {what} trained from {_base_name(model)}.",
        use=use,
        place="" if _on_hub(model) else _BY_FOLDER,
        settings=_settings(run, facts),
        losses=_loss_rows(facts),
        unit="pair" if run.objective_spec.pairs else "loss token",
        curve=facts.curve and curve.FILE,
        verified=_verification(facts.verified),
        versions=facts.versions,
    )


def merged_card(name: str, base: ModelSection, adapter: Path, checks: Mapping[str, str]) -> str:
    """The card of a merged model; tells of the adapter's training what its own card tells."""
    _, _, training = _text_of(adapter).partition("\n## Training\n")
    return _make_card(
        base,
        ["anygauge", "merged"],
        "merge",
        name=name,
        summary=f"{_base_name(base).capitalize()}, with an adapter folded into its weights.",
        checks=checks,
        training=training.split("\n## ", 1)[0].strip("\n"),
    )


def _make_card(model: ModelSection, tags: list[str], relation: str, **parts: Any) -> str:
    from huggingface_hub import ModelCard, ModelCardData

    header = _header_of(model)
    # The hub takes names of its own only: of a folder, the one that its card gives.
    known = header.pop("base_model", None)
    base = model.name if _on_hub(model) else known
    if base and not Path(base).is_absolute():
        header |= {"base_model": base, "base_model_relation": relation}
    data = ModelCardData(
        library_name="peft" if relation == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        **header,
    )
    return str(ModelCard.from_template(data, template_path=str(_TEMPLATE), **parts)).rstrip() + "\n"


def published_card(folder: Path, name: str, base: str | None) -> str:
    """The card of a result as it stands on the hub under a name; empty where there is none.

    Raises:
        ModelError: its header cannot be read.
    """
    from huggingface_hub import ModelCard

    text = _text_of(folder)
    for here, there in (
        (_BY_FOLDER, ""),
        ("In the folder of this card", "From the hub"),
        ('from_pretrained(".")', f'from_pretrained("{name}")'),
    ):
        text = text.replace(here, there)
    if not text or base is None:
        return text
    try:
        made = ModelCard(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ModelError(f"{folder / FILE}: its header is damaged: {first_line(error)}") from None
    made.data["base_model"] = base
    return str(made)


def public_name(text: str) -> str:
    """A hub name as it is; of a path or an address, only its last part."""
    if names_address(text):
        return Path(urlsplit(text).path).name
    path = Path(text)
    return path.name if path.is_absolute() else text


def _on_hub(model: ModelSection) -> bool:
    return model.name is not None and not Path(model.name).is_absolute()


def _text_of(folder: Path) -> str:
    """The card that a folder has of its own; empty without one."""
    try:
        # In another encoding, its ASCII still is what it was.
        return read_bounded(folder / FILE, _LARGEST).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _header_of(model: ModelSection) -> dict[str, Any]:
    """Fields of the base's own card that hold for what was trained from it: strings alone."""
    try:
        text = "" if model.name is None else _text_of(local_folder(model))
        begin, header, _ = f"{text}\n---\n---\n".split("---\n", 2)
        fields = None if begin else yaml.safe_load(header[:_LARGEST_HEADER])
    except (ModelError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    wanted = ("base_model", "license", "license_name", "license_link")
    found = fields.items() if isinstance(fields, dict) else ()
    return {name: value for name, value in found if name in wanted and isinstance(value, str)}


def _base_name(model: ModelSection) -> str:
    if model.config is not None:
        return f"random weights of a {model.config['model_type']} architecture"
    assert model.name is not None
    revision = f", revision `{model.revision}`" if model.revision else ""
    return f"`{public_name(model.name)}`{revision}"


def _kind(adapter: AdapterSection) -> str:
    if adapter.dora:
        return "DoRA (scaled as rsLoRA)" if adapter.rslora else "DoRA"
    return "rsLoRA" if adapter.rslora else "LoRA"


def packed_in_words(data: DataSection) -> str:
    """Describe what packing does to rows, to stand behind their length; "" for nothing."""
    mixed = "" if data.isolates else ": each row attends to those before it in its pack"
    return f", packed{mixed}" if data.packs else ""


def _settings(run: RunFile, facts: Facts) -> dict[str, str]:
    train = run.train
    found = {
        "data": ", ".join(_sources(run)),
        "rows": facts.data,
        "longest row": f"{run.data.max_length} tokens"
        + packed_in_words(run.data)
        + f"; loss on: {run.data.loss_on}",
    }
    quantized = quantization(run.model)
    if run.objective_spec.pairs:
        options = _in_a_line({"name": run.objective, **run.objective_options})
        found["objective"] = options
    if quantized is not None:
        found["base"] = f"quantized: {in_words(quantized)}"
    if run.adapter is not None:
        found |= _adapter_settings(run.adapter)
    optimizer = train.optimizer.model_dump(exclude_none=True)
    schedule = train.schedule.model_dump(exclude_none=True)
    steps = f"{facts.steps}, {facts.tokens:,} tokens"
    if facts.result_step is not None:
        steps += f"; the weights are those after step {facts.result_step}, of the lowest loss"
    found |= {
        "steps": steps,
        "batch": f"{train.global_batch_size} sequences a step, up to {train.micro_batch_size} at a "
        "time",
        "optimizer": _in_a_line(optimizer),
        "schedule": _in_a_line(schedule),
        "clipping": f"{train.max_grad_norm:g}",
        "seed": str(train.seed),
        "precision": facts.precision,
        "strategy": facts.strategy,
        "ranks": str(facts.ranks),
        "backend": f"{facts.backend}, device `{facts.device}`",
    }
    return found


def _sources(run: RunFile) -> list[str]:
    sources = [*run.data.train_sources]
    return [
        f"`{public_name(source.path)}`{f' ({source.split})' if names_data_set(source.path) else ''}"
        for source in sources
    ]


def _adapter_settings(adapter: AdapterSection) -> dict[str, str]:
    if adapter.start_from is not None:
        return {
            "adapter": f"{Path(adapter.start_from).name}, trained on; its configuration is in "
            "`adapter_config.json`",
            "dropout": f"{adapter.dropout:g}",
        }
    groups = [
        f"{_targets(group.targets)}: rank {group.r or adapter.r}, "
        f"alpha {group.alpha or adapter.alpha:g}"
        for group in adapter.groups
    ]
    return {
        "adapter": f"{_kind(adapter)}, rank {adapter.r}, alpha {adapter.alpha:g}, dropout "
        f"{adapter.dropout:g}",
        "layers": "; ".join([_targets(adapter.targets), *groups]),
    }


def _targets(targets: str | list[str]) -> str:
    return f"`{targets}`" if isinstance(targets, str) else ", ".join(f"`{t}`" for t in targets)


def _in_a_line(fields: Mapping[str, Any]) -> str:
    name = fields["name"]
    rest = [f"{key} {value}" for key, value in fields.items() if key != "name"]
    return ", ".join([str(name), *rest])


def _loss_rows(facts: Facts) -> dict[str, str]:
    found = {"first step": f"{facts.first_loss:.4f}", "last step": f"{facts.final_loss:.4f}"}
    for record in facts.evaluations:
        loss, pairs = record["eval_loss"], record.get("eval_pairs")
        of = f"{pairs:,} pairs" if pairs else f"{record['eval_tokens']:,} tokens{_perplexity(loss)}"
        found[f"`{record['name']}` after step {record['step']}"] = f"{loss:.4f} ({of})"
    return found


def _perplexity(loss: float) -> str:
    return f", perplexity {math.exp(loss):.2f}" if loss < math.log(LARGEST_PERPLEXITY) else ""


def _verification(verified: Mapping[str, Any]) -> str:
    if not verified["reloaded"]:
        return f"The result was read back, but its logits were {verified['why']}."
    effect = verified["effect"]
    moved = "" if effect is None else f"; that of the base alone is {effect:.1e}"
    return (
        "Loaded again from its files, it gives the trained model's logits: their difference is "
        f"{verified['logits']:.1e} of their norm{moved} ({verified['why']})."
    )
