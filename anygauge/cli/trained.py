"""``anygauge generate`` and ``anygauge merge``: use a model, from a run, a folder or the hub."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anygauge.cli.intent import BackendOption
from anygauge.interface import ModelError, UsageError
from anygauge.util.files import why_no_folder

if TYPE_CHECKING:
    from anygauge.config.schema import DataSection, ModelSection

ModelArgument = Annotated[
    str, typer.Argument(help="A run directory, a model folder, or a hub name.", metavar="MODEL")
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", help="Folder, hub name or tokenizer.json.")
]

SHOWN = 8
TOKENIZER_FILE = "tokenizer_config.json"
EMPTY = (
    "the answer is empty: the model ended it with its first token. The model may expect another "
    "prompt format (try --raw) or need more training; a --temperature above 0 samples other tokens"
)


def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The prompt; default: standard input.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Folder of an adapter for this model.")
    ] = None,
    no_adapter: Annotated[
        bool, typer.Option("--no-adapter", help="Use only the base model of an adapter's run.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the prompt unchanged, without a template.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For temperatures above 0.")] = 0,
    tokenizer: TokenizerOption = None,
    backend: BackendOption = None,
) -> None:
    """Let a model answer, and print only the answer; if it is empty, a line on standard error."""
    if prompt is None:
        prompt = sys.stdin.read().rstrip("\n")
    origin = model_origin(model, adapter, tokenizer)
    fetch_wanted(origin.section)

    import anygauge
    from anygauge.models.generate import generate as answer
    from anygauge.models.generate import load_for_inference
    from anygauge.models.quiet import quiet_libraries
    from anygauge.models.tokenizer import check_vocabulary, load_tokenizer
    from anygauge.strategies.common import torch_dtype

    quiet_libraries()
    loaded_tokenizer = load_tokenizer(origin.section)
    ids, stop_ids = question_ids(None if raw else origin.data, loaded_tokenizer, prompt)
    if not ids:
        raise UsageError("the prompt is empty: give --prompt TEXT, or text on standard input")
    with anygauge.open_backend(backend or "auto") as opened:
        opened.placement.seed(seed)
        from anygauge.config.schema import PrecisionSection, resolve_precision

        precision = resolve_precision(PrecisionSection(), opened.support)
        loaded = load_for_inference(
            origin.section,
            adapter=None if no_adapter else origin.adapter,
            device=opened.placement.device,
            dtype=torch_dtype(precision.param_dtype),
            attention=opened.attention,
        )
        check_vocabulary(loaded.config, loaded_tokenizer)
        text = answer(
            loaded,
            loaded_tokenizer,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_ids=stop_ids,
            show=lambda piece: print(piece, end="", flush=True),
        )
        print()
    if not text.strip():
        print(EMPTY, file=sys.stderr)


def merge(
    model: ModelArgument,
    output: Annotated[
        Path, typer.Option("--output", help="Folder to write; must be new or empty.")
    ],
    adapter: Annotated[
        Path | None,
        typer.Option("--adapter", help="Folder of the adapter; default: the run's own."),
    ] = None,
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
    fetch_wanted(origin.section)

    from anygauge.models.merge import merge as fold
    from anygauge.models.quiet import quiet_libraries
    from anygauge.models.tokenizer import load_tokenizer

    quiet_libraries()
    report = fold(origin.section, origin.adapter, output, load_tokenizer(origin.section))
    print(f"merged {origin.adapter} into {origin.section.name}: {output}")
    print(
        f"the merged model's logits differ by {report.rounding:.1e} of their norm from those of "
        f"the base with the adapter ({report.from_adapter:.1e} before rounding), and by "
        f"{report.from_base:.1e} from those of the base alone"
    )
    if report.from_codes is not None:
        print(
            f"the base was quantised ({report.quantised}), and the adapter was merged into its "
            f"dequantised weights; the logits differ by {report.from_codes:.1e} from those of the "
            "adapter on the quantised base"
        )
    if report.untied:
        print("input and output embedding share one tensor in the base; they are now two")
    if report.trained_on is not None:
        print(f"note: the adapter's configuration names another base: {report.trained_on}")


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
    from anygauge.config.load import load_run_file

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
