"""Every causal architecture of the installed transformers, tiny: which of them load, train, merge.

``make zoo``, by hand and before a release, adds what it finds to ``zoo.json`` and writes the tables
of docs/models.md anew; what is there already for the installed versions stays. To try some again:
``python -m tests.models.zoo mixtral gemma3``. It ends with status 1 if a failure has no
explanation: a pattern of ``limits`` in ``zoo.json``, which says whose limit it is.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.helpers.tokenizer import make_tokenizer
from tests.helpers.zygote import Fork, run_forks

RESULTS = Path(__file__).with_name("zoo.json")
PAGE = ROOT / "docs" / "models.md"
TABLES = "| versions |"
"""Where the generated part of the page begins."""
LIMIT_S = 150.0
"""For one architecture."""
LIBRARIES = ("transformers", "peft", "torch", "deepspeed", "accelerate")
PARTS = {
    "made": "cannot be built",
    "loads": "does not load",
    "single": "does not train",
    "merges": "does not merge",
    "zero": "not under ZeRO-3",
}
"""What is tried of an architecture, in this order -> what it means if it fails."""
NO_RECOMPUTATION = (
    "transformers cannot recompute its layers; it trains with `gradient_checkpointing: false`"
)

Row = Mapping[str, Any]


def architectures() -> dict[str, str]:
    """Model type -> class, of every one that the installed transformers calls causal."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kinds = {name: NAMES[name] for name in sorted(NAMES) if name in CONFIG_MAPPING}
    return {name: kind[0] if isinstance(kind, tuple) else kind for name, kind in kinds.items()}


def versions() -> dict[str, str]:
    """Of what decides the results."""
    return {name: metadata.version(name).partition("+")[0] for name in LIBRARIES}


def result(name: str) -> dict[str, Any]:
    """What came of a model type in a process; if that dies, the part that it was in has failed."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        make_tokenizer(Path(folder, "tokenizer"))
        fork = Fork(
            module="tests.models.zoo_one",
            arguments=[name, folder],
            log=str(Path(folder, "log")),
            environment={"ANYGAUGE_BLOCK_PLUGINS": "", "HF_HUB_OFFLINE": "1"},
        )
        (code,) = run_forks([fork], timeout_s=LIMIT_S)
        output = Path(folder, "row.json")
        row = json.loads(output.read_text()) if output.exists() else {"in": "made"}
    if (unfinished := row.pop("in", None)) is not None:
        late = f"no end within {LIMIT_S:.0f} s"
        row["failed"] = {unfinished: late if code == -9 else f"ended with status {code}"}
    return {"class": architectures()[name], **row}


def limit(stored: Mapping[str, Any], name: str, message: str) -> str | None:
    """Which limit a message about an architecture is of; None if it is not known."""
    line = f"{name}: {message}"
    return next((said for form, said in stored["limits"].items() if re.search(form, line)), None)


def unexplained(stored: Mapping[str, Any]) -> list[str]:
    """Failures for which there is no limit."""
    return [
        f"{name}: {text}"
        for stack in stored["stacks"].values()
        for name, row in stack["rows"].items()
        for text in row.get("failed", {}).values()
        if limit(stored, name, text) is None
    ]


def tables(stored: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page that are made of the results; versions with more models come first."""
    stacks = sorted(stored["stacks"].values(), key=lambda stack: -len(stack["rows"]))
    notes: dict[str, tuple[int, str]] = {}
    """What is said of a limit -> its number, and the first message."""

    def note(name: str, message: str) -> str:
        text = limit(stored, name, message) or message
        return f"[{notes.setdefault(text, (len(notes) + 1, message))[0]}](#notes)"

    def cells(name: str, row: Row | None) -> list[str]:
        if row is None:
            return ["", "", ""]
        failed = row.get("failed", {})
        said = "; ".join(f"{PARTS[part]} {note(name, text)}" for part, text in failed.items())
        if "recomputes" in row and "single" not in failed:
            said = f"{said or 'yes'} {note(name, NO_RECOMPUTATION)}"
        loss = {"": "", "reference": "logits"}.get(row.get("loss", ""), "kernel")
        return [said or "yes", row.get("attention", ""), loss]

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    yield f"{TABLES} listed | can be built | all tests |\n|---|---|---|---|"
    for stack in stacks:
        failed = [row.get("failed", {}) for row in stack["rows"].values()]
        named = ", ".join(f"{name} {version}" for name, version in stack["versions"].items())
        built = sum("made" not in parts for parts in failed)
        yield line([named, len(failed), built, sum(not parts for parts in failed)])
    heads = ((f"transformers {s['versions']['transformers']}", "attention", "loss") for s in stacks)
    columns = ["model type", "class", *(cell for head in heads for cell in head)]
    yield f"\n## Architectures\n\n{line(columns)}\n|{'---|' * len(columns)}"
    for name in sorted({name for stack in stacks for name in stack["rows"]}):
        found = [stack["rows"].get(name) for stack in stacks]
        kind = next(row["class"] for row in found if row is not None)
        yield line([f"`{name}`", kind, *(cell for row in found for cell in cells(name, row))])
    yield "\n## Notes\n"
    for text, (number, first) in notes.items():
        message = re.sub(r"\s+", " ", first.replace("`", "'")).strip()
        if len(message) > 200:
            message = message[:197].rsplit(" ", 1)[0] + " ..."
        yield f"{number}. {text}" + (f": `{message}`" if first != text else "")


def main(again: Sequence[str]) -> int:
    """Add to the results, and write the page; 1 if something failed that nobody has explained."""
    stored = json.loads(RESULTS.read_text())
    name = f"transformers {metadata.version('transformers')}"
    here = stored["stacks"].setdefault(name, {"rows": {}})
    here["versions"] = versions()
    for model in again or [n for n in architectures() if n not in here["rows"]]:
        row = result(model)
        here["rows"] = dict(sorted({**here["rows"], model: row}.items()))
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
        print(model, row.get("failed", "yes"), flush=True)
    PAGE.write_text(PAGE.read_text().partition(TABLES)[0] + "\n".join(tables(stored)) + "\n")
    left = unexplained(stored)
    print("\n".join(left) or f"every failure has its explanation; {PAGE} is written")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
