"""``anygauge generate``: a model's answers to a prompt, to those of a file, or in a chat."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.shared_options import BackendOption, ModelArgument, TokenizerOption
from anygauge.cli.trained import ModelOrigin, fetch_model, model_origin, prompt_format, question_ids
from anygauge.data import prompt_ids, read_questions
from anygauge.data.formats import Chat, Turn, user_chat
from anygauge.interface import DataError, UsageError
from anygauge.util.console import Console

EMPTY_ANSWER = (
    "the answer is empty: the model ended it with its first token. The model may expect another "
    "prompt format (try --raw) or need more training; a --temperature above 0 samples other tokens"
)
PROMPT = "The prompt; default: standard input, or a chat at a terminal."
PROMPTS = "A file of prompts: .txt, one a line, or rows with `prompt` or `messages`."
OUTPUT = "With --prompts: a new file for the answers."
COMPARE = "Let base and adapter answer."
NO_ADAPTER = "Use only the base model of an adapter's run."
RAW = "Use the prompt unchanged, without a template."
LONGEST = "Longest answer, in tokens."
TEMPERATURE = "0: always the likeliest token."
CHAT = "A chat: /new begins again, /quit or Ctrl-D ends it, Ctrl-C takes back a question"
ALONE = ". As in training, each prompt stands alone"

Ask = Callable[[list[int], str, bool], str]
"""Takes a prompt's tokens, who answers, and whether the answer is printed meanwhile."""


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option(help=PROMPT)] = None,
    prompts: Annotated[Path | None, typer.Option(help=PROMPTS, metavar="FILE")] = None,
    output: Annotated[Path | None, typer.Option(help=OUTPUT, metavar="FILE")] = None,
    compare: Annotated[bool, typer.Option("--compare", help=COMPARE)] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of an adapter for this model.")
    ] = None,
    no_adapter: Annotated[bool, typer.Option("--no-adapter", help=NO_ADAPTER)] = False,
    raw: Annotated[bool, typer.Option("--raw", help=RAW)] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help=LONGEST)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help=TEMPERATURE)] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="For temperatures above 0.")] = 0,
    tokenizer: TokenizerOption = None,
    backend: BackendOption = None,
) -> None:
    """Let a model answer a prompt, or all of a file; at a terminal without either, in a chat."""
    if prompts is not None and (prompt is not None or not prompts.is_file()):
        raise UsageError(f"--prompts {prompts}: give a file that is here, without --prompt")
    if output is not None and (prompts is None or output.exists()):
        raise UsageError(f"--output {output}: name a new file, and give --prompts FILE")
    origin = model_origin(model, adapter, tokenizer)
    if compare and (origin.adapter is None or no_adapter):
        raise UsageError(
            f"--compare: there is no adapter to compare {model} with; name one with --adapter "
            "FOLDER. anygauge report --prompt compares a whole model with its base"
        )
    chats = prompt is None and prompts is None and sys.stdin.isatty()
    if prompts is not None:
        source = origin.data.train_sources[0] if origin.data else None
        questions = read_questions(str(prompts), source)
    elif prompt is None and not chats:
        questions = [user_chat(sys.stdin.read().removeprefix("\ufeff").rstrip("\n"))]
    else:
        questions = [user_chat("a trial" if prompt is None else prompt)]
    fetch_model(origin.section)

    import anygauge
    from anygauge.config.schema import PrecisionSection, resolve_precision
    from anygauge.models.generate import generate as answer
    from anygauge.models.generate import load_for_inference
    from anygauge.models.source import quiet_libraries
    from anygauge.models.tokenizer import check_vocabulary, load_tokenizer
    from anygauge.strategies.shared.common import torch_dtype

    quiet_libraries()
    loaded_tokenizer = load_tokenizer(origin.section)
    ids, stop_ids = question_ids(origin, loaded_tokenizer, questions, raw=raw)
    if not all(ids):
        raise UsageError(f"{questions[ids.index([])].origin} is empty; give a text")
    with anygauge.open_backend(backend or "auto") as opened:
        opened.placement.seed(seed)
        precision = resolve_precision(PrecisionSection(), opened.support)
        loaded = load_for_inference(
            origin.section,
            adapter=None if no_adapter else origin.adapter,
            device=opened.placement.device,
            dtype=torch_dtype(precision.param_dtype),
            attention=opened.attention,
        )
        check_vocabulary(loaded.config, loaded_tokenizer)

        def ask(ids: list[int], who: str, stream: bool) -> str:
            with loaded.disable_adapter() if who == "base" else contextlib.nullcontext():
                return answer(
                    loaded,
                    loaded_tokenizer,
                    ids,
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    stop_ids=stop_ids,
                    stream=stream,
                )

        who = ("base", "adapter") if compare else ("answer",)
        if chats:
            _chat(origin, loaded_tokenizer, ask, who, raw=raw)
        elif prompts is not None:
            _answer_all(zip(questions, ids, strict=True), ask, who, output)
        else:
            _answers(dict.fromkeys(who, ids[0]), ask)


def _answers(prompts: dict[str, list[int]], ask: Ask) -> dict[str, str]:
    """Print each answer while it is made, below who gives it where there are several."""
    found = {}
    for who, ids in prompts.items():
        if len(prompts) > 1:
            print(f"{who}:", flush=True)
        found[who] = ask(ids, who, True)
        if not found[who].strip():
            Console(stderr=True).print(EMPTY_ANSWER)
    return found


def _answer_all(
    asked: Iterable[tuple[Chat, list[int]]], ask: Ask, who: Sequence[str], output: Path | None
) -> None:
    """Write a line of JSON for each question, as soon as it is answered."""
    with contextlib.ExitStack() as opened:
        file: Any = sys.stdout
        if output is not None:
            file = opened.enter_context(output.open("x", encoding="utf-8"))
        for chat, ids in asked:
            turns = chat.turns
            row = {"messages": turns} if len(turns) > 1 else {"prompt": turns[0]["content"]}
            row |= {one: ask(ids, one, False) for one in who}
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def _chat(origin: ModelOrigin, tokenizer: Any, ask: Ask, who: Sequence[str], *, raw: bool) -> None:
    """Answer what is typed; what goes through a chat template has what was said before it.

    The template has rendered a trial in a bounded process by then. Here, Ctrl-C stops it.
    """
    from anygauge.data.template import ChatTemplate, read_template

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines that are typed can be edited, and come back

    put, data, template = prompt_format(origin, tokenizer, raw=raw), origin.data, None
    if put("") is None:
        given, kwargs = (data.chat_template, data.chat_template_kwargs) if data else (None, {})
        template = ChatTemplate(tokenizer, read_template(given), kwargs=kwargs)
    Console(stderr=True).print(CHAT if template else CHAT + ALONE)

    def ids_of(turns: Sequence[Turn]) -> list[int]:
        if template is None:
            return prompt_ids(tokenizer, put(turns[-1]["content"]) or "")
        return template.question_ids(Chat(tuple(turns), None, (), "the chat"))

    said: dict[str, list[Turn]] = {one: [] for one in who}
    while True:
        try:
            line = input("> ").strip()
            if line == "/quit":
                return
            if line == "/new":
                said = {one: [] for one in who}
            elif line:
                question = {"role": "user", "content": line}
                asked = {one: ids_of([*turns, question]) for one, turns in said.items()}
                for one, text in _answers(asked, ask).items():
                    said[one] += [question, {"role": "assistant", "content": text}]
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print()
        except MemoryError:
            raise DataError("the chat template takes more memory than there is") from None
