"""``anygauge data RUN.yaml``: what a run's rows become, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from anygauge.cli.shared_options import BackendOption, RunFileArgument, SetOption
from anygauge.util.console import Console, make_table

if TYPE_CHECKING:
    from anygauge.config.schema import DataSection, RunFile
    from anygauge.data import Layout, TokenizedRows

STREAMED_ROWS = 2000
BINS = 10
BAR = 40
MAX_CHARACTERS = 600

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control characters become pictures of themselves, so that no row changes the terminal."""


def data(
    run_file: RunFileArgument,
    rows: Annotated[
        int, typer.Option("--rows", min=0, help="How many rows to show, as the model reads them.")
    ] = 3,
    backend: BackendOption = None,
    set_: SetOption = None,
) -> None:
    """Show what a run trains on: counts, lengths, padding, and which are loss tokens."""
    import secrets

    from anygauge.config.load import check_paths, load_run_file
    from anygauge.config.resolved import run_json
    from anygauge.data import Layout, TokenizedRows, accumulation, addresses, advice, peek
    from anygauge.data import prepare as read_rows
    from anygauge.launch.prepare_call import prepare
    from anygauge.launch.prepare_request import PrepareRequest
    from anygauge.models.hub import download_requests
    from anygauge.models.source import quiet_libraries
    from anygauge.models.tokenizer import load_tokenizer
    from anygauge.registry import Registry, select_backend

    run = load_run_file(run_file, list(set_ or ()), {"backend": backend})
    check_paths(run)
    peek(run.data, pairs=run.objective_spec.pairs)
    ranks = run.launch.nodes * run.launch.devices
    registry = Registry.load()
    share = registry.find_strategy(run.strategy.name).spec.share(run.strategy, 0, ranks)
    micro_batch = run.train.sequences_at_once(share.count)
    accumulation(run.train.global_batch_size, micro_batch, share.count)
    selection = select_backend(registry, run.backend, need_device=False)
    shapes = registry.create_backend(selection.spec.name, run.backend_options).graph.shapes
    console = Console()
    quiet_libraries()
    section, first = run.data, None
    if section.streaming:
        console.print(f"streamed: the first {STREAMED_ROWS:,} rows of each source\n", style="dim")
        first = STREAMED_ROWS
    start = secrets.token_hex(8)
    fetch = tuple(download_requests(run.model, model=False))
    request = PrepareRequest(
        fetch=fetch,
        copies=tuple(addresses(run.data)),
        stages=("rows",),
        run=run_json(run),
        id=start,
        first=first,
    )
    steps = prepare(request).found.steps
    tokenizer = load_tokenizer(run.model)
    pairs = run.objective_spec.pairs
    prepared = read_rows(section, tokenizer, run.train.seed, run=start, first=first, pairs=pairs)
    trained = prepared.train
    if steps is not None:
        console.print(f"the run has {steps:,} steps\n", style="bold")
    assert isinstance(trained, TokenizedRows)
    _show_counts(console, section, trained, "train")
    if prepared.eval is not None:
        _show_counts(console, section, prepared.eval, "eval")
    _show_lengths(console, trained)
    if short := advice(trained, section):
        console.print(f"  {short}", style="yellow")
    _show_padding(console, run, trained, Layout.of(run, share, tokenizer.pad_token_id, shapes))
    in_color = console.is_terminal and not console.no_color
    each = 1 + pairs  # both answers of a pair
    rows = min(rows, len(trained) // each)
    for place in range(rows * each):  # evenly spaced, the first among them
        number, answer = divmod(place, each)
        tokens = trained.tokens(number * (len(trained) // each) // rows * each + answer)
        console.print(f"\n{tokens.origin}  {len(tokens.ids):,} tokens", style="bold")
        console.print(example_text(tokenizer, tokens, in_color=in_color))


def example_text(tokenizer: Any, tokens: Any, *, in_color: bool) -> Text:
    """One row as the model reads it: loss tokens in color, or between ⟦ and ⟧.

    Args:
        tokens: with `ids` and `loss_mask`.
    """
    text = Text()
    in_loss = False
    for has_loss, is_special, part in _token_stretches(tokenizer, tokens):
        if has_loss != in_loss and not in_color:
            text.append("⟦" if has_loss else "⟧")
        in_loss = has_loss
        style = ("bold green" if has_loss else "bold blue") if is_special else ""
        text.append(part, style=style or ("green" if has_loss else "dim"))
    if in_loss and not in_color:
        text.append("⟧")
    return text


def _token_stretches(tokenizer: Any, tokens: Any) -> Iterator[tuple[bool, bool, str]]:
    """Neighbouring tokens that are alike: loss tokens or not, special or not; and their text."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokens.ids.tolist()
    kinds = zip(tokens.loss_mask.tolist(), [token in special for token in ids], strict=True)
    for kind, group in groupby(zip(kinds, ids, strict=True), key=lambda pair: pair[0]):
        part = tokenizer.decode(
            [token for _, token in group],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        ).translate(_PICTURES)
        if len(part) > MAX_CHARACTERS:
            left_out = len(part) - MAX_CHARACTERS
            half = MAX_CHARACTERS // 2
            part = f"{part[:half]} [... {left_out:,} characters ...] {part[-half:]}"
        yield *kind, part


def _show_counts(console: Console, section: DataSection, rows: TokenizedRows, which: str) -> None:
    from anygauge.config.paths import names_address
    from anygauge.data.remote_files import describe_address

    held_out = which == "eval" and section.eval is None
    sources = section.train_sources if held_out or which == "train" else section.eval_sources
    title = f"data.{which}" if not held_out else f"data.eval_fraction {section.eval_fraction:g}"
    kept = f" (from the cache of {rows.built})" if rows.built else ""
    console.print(f"{title}{kept}", style="bold")
    for source, piece in zip(sources, rows.pieces, strict=True):
        weight = f"; weight {source.weight:g}" if source.weight != 1 else ""
        name = describe_address(source.path) if names_address(source.path) else source.path
        console.print(f"  {name}\n    {piece.counts}{weight}")


def _show_lengths(console: Console, rows: TokenizedRows) -> None:
    import numpy as np

    lengths = rows.lengths
    shortest, longest = int(lengths.min()), int(lengths.max())
    middle, most = np.quantile(lengths, [0.5, 0.95], method="higher").tolist()
    console.print(
        f"\n[bold]Tokens per row[/bold]: median {middle:,}, 95% up to {most:,}, "
        f"longest {longest:,}",
        markup=True,
    )
    edges = np.unique(np.linspace(shortest - 1, longest, BINS + 1).round().astype(int))
    counts, _ = np.histogram(lengths, bins=edges + 1)
    width = len(f"{longest:,}")
    for first, last, count in zip(edges[:-1] + 1, edges[1:], counts.tolist(), strict=True):
        bar = "█" * -(-count * BAR // max(counts.tolist()))
        console.print(f"  {first:>{width},} to {last:>{width},}  {count:>9,}  {bar}".rstrip())


def _show_padding(console: Console, run: RunFile, rows: TokenizedRows, layout: Layout) -> None:
    from dataclasses import replace

    from anygauge.data import Schedule
    from anygauge.data.batches import measure_padding

    schedule = Schedule(
        seed=run.train.seed,
        global_batch=run.train.global_batch_size,
        weights=tuple(source.weight for source in run.data.train_sources),
    )
    chosen = (run.data.packs, run.data.group_by_length)
    unit = "Pairs" if layout.pairs else "Sequences"
    titles = ("One epoch", unit, "Steps", "Positions", "Padding", "Filled")
    shown: list[tuple[str, ...]] = [titles]
    for title, packing, grouping in (
        ("padded", False, False),
        ("group_by_length", False, True),
        ("packing", True, False),
    )[: 2 if layout.pairs else 3]:
        found = measure_padding(
            rows, replace(schedule, grouping=grouping), replace(layout, packing=packing)
        )
        numbers = (f"{n:,}" for n in (found.sequences, found.steps, found.positions))
        fill = "" if found.fill is None else f"{found.fill:.1%}"
        this = " (this run)" * (chosen == (packing, grouping))
        shown.append((title + this, *numbers, f"{found.share:.1%}", fill))
    console.print(
        f"\n[bold]Batches[/bold] of {run.train.global_batch_size}, "
        f"{layout.micro_batch * (1 + layout.pairs)} sequences per forward",
        markup=True,
    )
    console.print(make_table(shown))
