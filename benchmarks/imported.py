"""How many of a tool's own files `anygauge import` takes, and which keys keep it from the others.

    python -m benchmarks.imported FOLDER

FOLDER holds the tool's tree, or its examples. Each file of it that is one of the tool's is imported
without --allow-dropped, and what it became goes through `anygauge train --dry-run --no-model`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from anygauge.cli import run
from anygauge.cli.imports.detect import read_files, tool_of
from anygauge.cli.imports.engine_files import read_mapping
from anygauge.interface import AnygaugeError
from anygauge.util.text import first_line

NEEDS = {"fp8: true": "hpu", "paged: true": "cuda"}
"""What only some backends have -> one that a dry run of such a file names."""


@dataclass
class ImportCounts:
    """Of one tool's files.

    Attributes:
        imported: those that became a run file, which a dry run took.
        blocked: key -> files that it keeps from it.
        alone: the same, where it is the only one.
        refused: file -> what is wrong with it, for other reasons than a key.
    """

    files: int = 0
    imported: int = 0
    blocked: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)


def files_of(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files in a folder that are a tool's that import reads, each with the tool."""
    for path in sorted(folder.rglob("*.y*ml")):
        try:
            yield path, tool_of(read_mapping(path, str(path)), path)
        except AnygaugeError:
            continue


def count(folder: Path) -> dict[str, ImportCounts]:
    """Tool -> how its files in a folder fare."""
    found: dict[str, ImportCounts] = {}
    for path, tool in files_of(folder):
        counts = found.setdefault(tool, ImportCounts())
        counts.files += 1
        try:
            draft = read_files(path, [], Path.cwd(), None, 1)
            keys = {key.split(":")[0].split("[")[0] for key in draft.blocked}
            counts.blocked.update(keys)
            if len(keys) == 1:
                counts.alone.update(keys)
            if not keys:
                import_and_try(path)
                counts.imported += 1
        except AnygaugeError as error:
            counts.refused[str(path.relative_to(folder))] = first_line(error)
    return found


def import_and_try(path: Path) -> None:
    """Import a file, and hold it against everything but its model and rows.

    Raises:
        AnygaugeError: what is wrong with it.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        written = Path(folder) / "run.yaml"
        run(["import", str(path), "--output", str(written)])
        text = written.read_text()
        named = [("--backend", backend) for field, backend in NEEDS.items() if field in text]
        run(["train", str(written), "--dry-run", "--no-model", *(named[0] if named else ())])


def main(folder: Path) -> None:
    """Print a table for each tool."""
    for tool, counts in count(folder).items():
        share = counts.imported / counts.files
        print(f"\n{tool}: {counts.imported} of {counts.files} files imported ({share:.0%})\n")
        print("| key | files | the only one in |\n|---|---:|---:|")
        for key, files in counts.blocked.most_common():
            print(f"| `{key}` | {files} | {counts.alone[key]} |")
        for file, why in counts.refused.items():
            print(f"- {file}: {why}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
