"""``anygauge merge``: fold an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anygauge.cli.origin import MODEL_HELP, fetch_wanted, model_origin
from anygauge.interface import UsageError


def merge(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")],
    output: Annotated[
        Path, typer.Option("--output", help="Folder to write; must be new or empty.")
    ],
    adapter: Annotated[
        Path | None,
        typer.Option("--adapter", help="Folder of the adapter; default: the run's own."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Folder, hub name or tokenizer.json.")
    ] = None,
) -> None:
    """Fold an adapter into its base model, and compare the result's logits with both."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} exists and is not an empty folder; name a new one")
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
