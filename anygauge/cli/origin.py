"""Which model a command speaks of: a run directory, a model folder or a hub name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import ModelError, UsageError

if TYPE_CHECKING:
    from anygauge.config.schema import DataSection, ModelSection

SHOWN = 8
TOKENIZER_FILE = "tokenizer_config.json"

MODEL_HELP = "A run directory, a model folder, or a hub name."


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOrigin:
    """A model to use.

    Attributes:
        adapter: folder of its adapter, or None.
        data: what the run that trained it read: it tells how a prompt is put. None where no run
            is known: a prompt is given as it stands.
    """

    section: ModelSection
    adapter: Path | None
    data: DataSection | None


def model_origin(model: str, adapter: Path | None, tokenizer: str | None) -> ModelOrigin:
    """Tell a run directory from a model.

    Raises:
        ModelError: a run directory without a result.
        UsageError: a path that leads nowhere.
    """
    from anygauge.config.schema import ModelSection

    folder = Path(model)
    if not (folder / "run.yaml").is_file():
        if not folder.is_dir():
            _refuse_no_folder(model, folder)
        if tokenizer is None and adapter is not None and (adapter / TOKENIZER_FILE).is_file():
            tokenizer = str(adapter)  # it has tokens that the model's own lacks
        section = ModelSection(name=model, tokenizer=tokenizer)
        return ModelOrigin(section=section, adapter=adapter, data=None)
    from anygauge.config import load_run_file

    run = load_run_file(folder / "run.yaml").run
    if run.adapter is None:
        trained = folder / "model"
        if not trained.is_dir():
            raise ModelError(
                f"{folder} has no trained model: its run has not finished. See {folder}/logs"
            )
        section = ModelSection(name=str(trained), tokenizer=tokenizer)
        return ModelOrigin(section=section, adapter=adapter, data=run.data)
    own = folder / "adapter"
    if adapter is None and not own.is_dir():
        raise ModelError(f"{folder} has no adapter: its run has not finished. See {folder}/logs")
    section = run.model.model_copy(update={"tokenizer": tokenizer or run.model.tokenizer})
    return ModelOrigin(section=section, adapter=adapter or own, data=run.data)


def fetch_wanted(section: ModelSection) -> None:
    """Bring a model of the hub to this machine, before the libraries that use it are imported.

    Raises:
        ModelError: it cannot be had.
    """
    from dataclasses import replace

    from anygauge.cli.fetch import fetched
    from anygauge.models.hub import wanted

    names = {"model.name": "MODEL", "model.tokenizer": "--tokenizer"}
    fetched([replace(want, field=names[want.field]) for want in wanted(section)])


def _refuse_no_folder(model: str, folder: Path) -> None:
    """Answer at once where a path is meant; a name such as ``owner/name`` may be on the hub.

    Raises:
        UsageError: names what is there instead.
    """
    named = folder.expanduser()
    in_a_folder = len(folder.parts) > 1 and named.parent.is_dir()
    if not (model.startswith(("/", ".", "~")) or len(folder.parts) > 2 or in_a_folder):
        return
    what = "a file, not a folder" if named.is_file() else "no such folder"
    there = (
        sorted(one.name for one in named.parent.iterdir() if one.is_dir()) if in_a_folder else []
    )
    near = get_close_matches(named.name, there, 1)
    raise UsageError(
        f"{model}: {what} (looked at {named.absolute()})"
        + (f"; did you mean {folder.parent / near[0]}?" if near else "")
        + (f"; {folder.parent} has {', '.join(there[:SHOWN])}" if there and not near else "")
        + ("; give a run directory, a model folder, or a name of the hub such as owner/name")
    )


def question_ids(
    data: DataSection | None, tokenizer: Any, prompt: str
) -> tuple[list[int], list[int]]:
    """The tokens of a question as training put it, and tokens other than EOS that end an answer.

    Where several sources were trained on, the first tells how.

    Raises:
        DataError: the source that would show the format can no longer be read.
        ModelError: the tokenizer has no chat template.
    """
    from anygauge.data import first_records, prompt_ids
    from anygauge.data.formats import prompt_template, render
    from anygauge.data.template import ChatTemplate, read_template

    if data is None:
        return prompt_ids(tokenizer, prompt), []
    source = data.train_sources[0]
    template = prompt_template(first_records(source, 1, "data.train")[0], source)
    if template is not None:
        return prompt_ids(tokenizer, render(template, prompt)), []
    chat = ChatTemplate(tokenizer, read_template(data.chat_template))
    return chat.question_ids(prompt), chat.stop_ids()
