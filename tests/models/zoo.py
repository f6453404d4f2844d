"""Every causal architecture of the installed transformers, tiny: which of them load, train, merge.

``python -m tests.models.zoo [--only NAME ...] [--results FILE] [--again] [--out docs/models.md]``
adds what it finds to FILE under the installed stack's name, one architecture after another, and
writes the page of all stacks in it. What FILE has already is kept unless `--again` is given.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.helpers.tokenizer import make_tokenizer
from tests.helpers.zygote import Fork, run_forks
from tests.models.zoo_page import page

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("zoo.json")
PAGE = ROOT / "docs" / "models.md"
LIMIT_S = 150.0
"""For one architecture."""


def architectures() -> dict[str, str]:
    """Model type -> class, of every one that the installed transformers calls causal."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        name: kind[0] if isinstance(kind, tuple) else kind
        for name, kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
        if name in CONFIG_MAPPING_NAMES
    }


def stack_name() -> str:
    """What the installed stack is called in results."""
    return f"transformers {metadata.version('transformers')}"


def stack() -> dict[str, str]:
    """The versions that results are of."""
    names = ("transformers", "peft", "torch", "deepspeed", "accelerate")
    return {name: metadata.version(name).partition("+")[0] for name in names}


def results(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Model type, what came of it), one after another, each in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        tokenizer = Path(temporary, "tokenizer")
        make_tokenizer(tokenizer)
        for name in names:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                row = result(name, Path(folder), tokenizer)
            row = {"class": architectures()[name], **row}
            yield name, {**row, "seconds": round(time.monotonic() - begun, 1)}


def result(name: str, folder: Path, tokenizer: Path) -> dict[str, Any]:
    """One architecture's; a process that dies or hangs is what came of the part that it was in."""
    output, log = folder / "row.json", folder / "log"
    fork = Fork(
        module="tests.models.zoo_one",
        arguments=[name, *map(str, (folder, tokenizer, output))],
        log=str(log),
        environment={"ANYGAUGE_BLOCK_PLUGINS": "", "HF_HUB_OFFLINE": "1"},
    )
    (code,) = run_forks([fork], timeout_s=LIMIT_S)
    row: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"in": "made"}
    if (unfinished := row.pop("in", None)) is not None:
        why = f"no end within {LIMIT_S:.0f} s" if code == -9 else f"ended with status {code}"
        row[unfinished] = {"failed": why, "kind": "ended"}
    return row


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """What is stored of a row: no figures that another machine would have others of."""
    row = {name: value for name, value in row.items() if name not in ("seconds", "reads back")}
    for part in ("single", "zero"):
        if "losses" in row.get(part, {}):
            row[part] = {"steps": len(row[part]["losses"])}
    if row.get("loss") != "reference":
        row.pop("loss because", None)
    return row


def main() -> None:
    """Add to the results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="model types; all without it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also those that FILE has")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    stored = json.loads(asked.results.read_text()) if asked.results.exists() else {}
    here = stored.setdefault(stack_name(), {"versions": stack(), "rows": {}})
    names = asked.only or list(architectures())
    if not asked.again:
        names = [name for name in names if name not in here["rows"]]
    for name, row in results(names):
        here["rows"][name] = kept(row)
        here["rows"] = dict(sorted(here["rows"].items()))
        asked.results.write_text(json.dumps(stored, indent=1) + "\n")
        print(name, json.dumps(row)[:400], flush=True)
    if asked.out is not None:
        asked.out.write_text(page(stored))


if __name__ == "__main__":
    main()
