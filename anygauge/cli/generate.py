"""``anygauge generate``: let a model answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from anygauge.cli.intent import BackendOption
from anygauge.cli.origin import MODEL_HELP, fetch_wanted, model_origin, question_ids
from anygauge.interface import UsageError

EMPTY = (
    "the answer is empty: the model ended it with its first token. The model may expect another "
    "prompt format (try --raw) or need more training; a --temperature above 0 samples other tokens"
)


def generate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
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
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder, hub name or tokenizer.json.")
    ] = None,
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
