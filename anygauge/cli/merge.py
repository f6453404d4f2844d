"""``anygauge merge``: fold an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anygauge.cli.origin import MODEL_HELP, fetch_wanted, model_origin
from anygauge.interface import UsageError


def merge(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write; must be new.")],
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="Folder of the adapter; a run has its own.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder, hub name or tokenizer.json.")
    ] = None,
) -> None:
    """Fold an adapter into its base model, and check the result's logits against the two."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} exists already; name a new folder")
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
        f"difference of logits, by their norm: {report.rounding:.1e} to base with adapter "
        f"({report.from_adapter:.1e} before rounding), {report.from_base:.1e} to the base alone"
    )
    if report.from_codes is not None:
        print(
            f"merged into the dequantised weights of a base that was quantised: "
            f"{report.quantised}; {report.from_codes:.1e} to the adapter on that base"
        )
    if report.untied:
        print("input and output embedding, one tensor in the base, are now two")
    if report.trained_on is not None:
        print(f"note: the adapter's configuration names another base: {report.trained_on}")
