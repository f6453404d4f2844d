"""What was trained, as a command names it: a run, a folder or a name of the hub; and
``anygauge merge``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anygauge.cli.shared_options import ModelArgument, TokenizerOption
from anygauge.interface import ModelError, UsageError
from anygauge.util.console import Console
from anygauge.util.files import why_no_folder
from anygauge.util.text import did_you_mean

if TYPE_CHECKING:
    from anygauge.config.schema import DataSection, ModelSection, RunFile
    from anygauge.data.formats import Chat

MAX_FOLDERS = 8
OWN_ADAPTER = "Folder of the adapter; default: the run's own."


def merge(
    model: ModelArgument,
    output: Annotated[Path, typer.Option(help="Folder to write; must be new or empty.")],
    adapter: Annotated[Path | None, typer.Option(help=OWN_ADAPTER)] = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """Fold an adapter into its base model, and compare the result's logits with both."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} exists and is not an empty folder; name a new one")
    if why := why_no_folder(output):
        raise UsageError(f"--output {output}: {why}; name another")
    origin = model_origin(model, adapter, tokenizer)
    if origin.adapter is None:
        raise UsageError(f"{model} is not a run with an adapter: name one with --adapter FOLDER")
    fetch_model(origin.section)

    from anygauge.data.template import read_template, template_to_save
    from anygauge.launch.prepare import render
    from anygauge.models.merge import merge as fold
    from anygauge.models.result_files import ResultFiles
    from anygauge.models.source import quiet_libraries
    from anygauge.models.tokenizer import load_tokenizer

    quiet_libraries()
    loaded = load_tokenizer(origin.section)
    data = origin.data
    given, kwargs = (data.chat_template, data.chat_template_kwargs) if data else (None, {})
    _, ends = render(origin.section, data)
    files = ResultFiles(
        origin.section,
        loaded,
        chat_template=template_to_save(loaded, read_template(given), kwargs),
        end_ids=ends,
        adapter=origin.adapter,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    report = fold(origin.section, origin.adapter, output, files)
    console = Console()
    console.print(f"merged {origin.adapter} into {origin.section.name}: {output}")
    console.print(
        f"the merged model's logits differ by {report.rounding:.1e} of their norm from those of "
        f"the base with the adapter ({report.from_adapter:.1e} before rounding), and by "
        f"{report.from_base:.1e} from those of the base alone"
    )
    if report.from_codes is not None:
        console.print(
            f"the base was quantized ({report.quantized}), and the adapter was merged into its "
            f"dequantized weights; the logits differ by {report.from_codes:.1e} from those of the "
            "adapter on the quantized base"
        )
    if report.untied:
        console.print("input and output embedding share one tensor in the base; they are now two")
    if report.trained_on is not None:
        console.print(f"note: the adapter's configuration names another base: {report.trained_on}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOrigin:
    """A model to use.

    Attributes:
        adapter: folder of its adapter, or None.
        data: what the run that trained it read: it tells how a prompt is put. None where no run
            is known.
        run: that run, as it was resolved.
    """

    section: ModelSection
    adapter: Path | None
    data: DataSection | None
    run: RunFile | None = None


def model_origin(model: str, adapter: Path | None, tokenizer: str | None) -> ModelOrigin:
    """Tell a run directory, or a result in one, from a model and from an adapter alone.

    Raises:
        ModelError: a run directory without a result, or an adapter that names no base.
        UsageError: a path that leads nowhere.
    """
    from anygauge.config.load import load_run_file
    from anygauge.config.schema import ModelSection
    from anygauge.models.hub import CONFIG
    from anygauge.models.model_files import read_fields
    from anygauge.models.result_files import GENERATION_CONFIG, TOKENIZER_CONFIG
    from anygauge.models.warm_start import CONFIG_FILE

    folder, data, run = Path(model), None, None
    section = ModelSection(name=model)
    home = _run_directory(folder)
    if home is not None:
        run = load_run_file(home / "run.yaml")
        section, data = run.model, run.data
        if folder == home:
            folder = home / ("model" if run.adapter is None else "adapter")
            if not folder.is_dir() and (adapter is None or run.adapter is None):
                raise ModelError(
                    f"{home} has no {folder.name}: its run has not finished. See {home}/logs"
                )
    elif not folder.is_dir():
        _refuse_no_folder(model)
    if (folder / "adapter" / CONFIG_FILE).is_file() and not (folder / CONFIG).exists():
        folder = folder / "adapter"  # of a checkpoint
    if (folder / CONFIG_FILE).is_file():
        adapter = adapter or folder
        if home is None:
            named = read_fields(folder / CONFIG_FILE)
            base = named.get("base_model_name_or_path")
            if not base or (Path(base).is_absolute() and not Path(base).is_dir()):
                raise ModelError(
                    f"the base of the adapter {folder} is not here (it names {base or 'none'}); "
                    f"give the base as MODEL, and --adapter {folder}"
                )
            section = ModelSection(name=base, revision=named.get("revision"))
    elif folder.is_dir():
        section = ModelSection(name=str(folder), trust_remote_code=section.trust_remote_code)
    result = adapter or folder
    if tokenizer is None and (result / TOKENIZER_CONFIG).is_file():
        own = {"tokenizer": str(result), "new_tokens": [], "new_special_tokens": []}
        section = section.model_copy(update=own)
        if data is not None and (result / GENERATION_CONFIG).is_file():
            data = data.model_copy(update={"chat_template": None})  # it is the tokenizer's now
    elif tokenizer is not None:
        section = section.model_copy(update={"tokenizer": tokenizer})
    return ModelOrigin(section=section, adapter=adapter, data=data, run=run)


def _run_directory(folder: Path) -> Path | None:
    """The run that a folder is, or that it lies in as a result."""
    if not folder.is_dir():
        return None
    above = [path for path in folder.resolve().parents[:3] if (path / "job.json").is_file()]
    return next((path for path in (folder, *above) if (path / "run.yaml").is_file()), None)


def fetch_model(section: ModelSection) -> None:
    """Bring a model of the hub to this machine, before the libraries that use it are imported.

    Raises:
        ModelError: it cannot be had.
    """
    from anygauge.launch.prepare_call import prepare
    from anygauge.launch.prepare_request import PrepareRequest
    from anygauge.models.hub import download_requests

    names = {"model.name": "MODEL", "model.tokenizer": "--tokenizer"}
    found = [replace(want, field=names[want.field]) for want in download_requests(section)]
    prepare(PrepareRequest(fetch=tuple(found)))


def _refuse_no_folder(model: str) -> None:
    """Refuse a path that is not there; a name such as ``owner/name`` may be on the hub.

    Raises:
        UsageError: names what is there instead.
    """
    folder, parts = Path(model).expanduser(), len(Path(model).parts)
    in_a_folder = parts > 1 and folder.parent.is_dir()
    if not (in_a_folder or parts > 2 or model.startswith(("/", ".", "~"))):
        return
    what = "a file, not a folder" if folder.is_file() else "no such folder"
    there = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if in_a_folder else []
    near = did_you_mean(folder.name, there)
    if there and not near:
        near = f"; {folder.parent} has {', '.join(there[:MAX_FOLDERS])}"
    raise UsageError(
        f"{model}: {what} (looked at {folder.absolute()}){near}; give a run directory, a model "
        "folder, or a name of the hub such as owner/name"
    )


def question_ids(
    origin: ModelOrigin, tokenizer: Any, questions: Sequence[Chat], *, raw: bool = False
) -> tuple[list[list[int]], list[int]]:
    """The tokens of questions as training put them, and tokens other than EOS that end an answer.

    Several turns, and tools, always go through the chat template.

    Raises:
        DataError: the source that would show the format can no longer be read; or the template
            does not take a question.
        ModelError: the tokenizer has no chat template.
        AnygaugeError: see `anygauge.launch.prepare.render`.
    """
    from anygauge.data import prompt_ids
    from anygauge.launch import prepare

    put = prompt_format(origin, tokenizer, raw=raw)
    texts = [
        None if len(one.turns) > 1 or one.tools else put(one.turns[0]["content"])
        for one in questions
    ]
    chats = [one for one, text in zip(questions, texts, strict=True) if text is None]
    if raw and chats:
        raise UsageError(f"--raw: {chats[0].origin} has turns or tools, which need a template")
    found, stop_ids = prepare.render(origin.section, origin.data, chats) if chats else ([], [])
    rendered = iter(found)
    ids = [next(rendered) if text is None else prompt_ids(tokenizer, text) for text in texts]
    return ids, stop_ids


def prompt_format(
    origin: ModelOrigin, tokenizer: Any, *, raw: bool = False
) -> Callable[[str], str | None]:
    """How a prompt becomes what the model reads; of None where it goes through the chat template.

    Where several sources were trained on, the first tells how. Where no run is known, the
    tokenizer's chat template does, if it has one.

    Raises:
        DataError: the source that would show the format can no longer be read.
    """
    from anygauge.data import first_records
    from anygauge.data.formats import of_objective, question_text

    data = origin.data
    has_template = bool(getattr(tokenizer, "chat_template", None) or (data and data.chat_template))
    if raw or (data is None and not has_template):
        return str
    if data is None:
        return lambda prompt: None
    pairs = origin.run is not None and origin.run.objective_spec.pairs
    source = of_objective(data.train_sources[0], "data.train", pairs=pairs)
    first = first_records(source, 1, "data.train")[0]
    return lambda prompt: question_text(first, source, prompt, has_chat_template=has_template)
