"""Which model a command speaks of: a run directory, a model folder or a hub name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.interface import ModelError

if TYPE_CHECKING:
    from anygauge.config.schema import ModelSection

MODEL_HELP = "A run directory, a model folder, or a hub name."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOrigin:
    """A model to use.

    Attributes:
        adapter: folder of its adapter, or None.
        template: how a prompt is put to it: from the run that trained it, else as it stands.
    """

    section: ModelSection
    adapter: Path | None
    template: str


def model_origin(model: str, adapter: Path | None, tokenizer: str | None) -> ModelOrigin:
    """Tell a run directory from a model.

    Raises:
        ModelError: a run directory without a result.
    """
    from anygauge.config.schema import ModelSection

    folder = Path(model)
    if not (folder / "run.yaml").is_file():
        if model.startswith(("/", ".", "~")) and not folder.is_dir():
            raise ModelError(f"no such folder: {model}")
        section = ModelSection(name=model, tokenizer=tokenizer)
        return ModelOrigin(section=section, adapter=adapter, template="{prompt}")
    from anygauge.config import load_run_file
    from anygauge.data import prompt_template

    run = load_run_file(folder / "run.yaml").run
    template = prompt_template(run.data.train)
    if run.adapter is None:
        trained = folder / "model"
        if not trained.is_dir():
            raise ModelError(f"{folder} holds no trained model: did the run end? See {folder}/logs")
        section = ModelSection(name=str(trained), tokenizer=tokenizer)
        return ModelOrigin(section=section, adapter=adapter, template=template)
    own = folder / "adapter"
    if adapter is None and not own.is_dir():
        raise ModelError(f"{folder} holds no adapter: did the run end? See {folder}/logs")
    section = run.model.model_copy(update={"tokenizer": tokenizer or run.model.tokenizer})
    return ModelOrigin(section=section, adapter=adapter or own, template=template)
