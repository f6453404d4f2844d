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
    "zero": "not under ZeRO-3",
    "merges": "does not merge",
}
"""The parts of a row -> what a failed one means."""

Row = Mapping[str, Any]


def architectures() -> dict[str, str]:
    """Model type -> class, of every one that the installed transformers calls causal."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {
        name: kind[0] if isinstance(kind, tuple) else kind
        for name, kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
        if name in CONFIG_MAPPING_NAMES
    }


def versions() -> dict[str, str]:
    """Of what decides the results."""
    return {name: metadata.version(name).partition("+")[0] for name in LIBRARIES}


def results(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(Model type, what came of it), one after another, each in processes of its own.

    Of one that dies or hangs, the part that it was in has failed.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        tokenizer = Path(temporary, "tokenizer")
        make_tokenizer(tokenizer)
        for name in names:
            with tempfile.TemporaryDirectory(dir=temporary) as folder:
                output = Path(folder, "row.json")
                fork = Fork(
                    module="tests.models.zoo_one",
                    arguments=[name, folder, str(tokenizer), str(output)],
                    log=str(Path(folder, "log")),
                    environment={"ANYGAUGE_BLOCK_PLUGINS": "", "HF_HUB_OFFLINE": "1"},
                )
                (code,) = run_forks([fork], timeout_s=LIMIT_S)
                row = json.loads(output.read_text()) if output.exists() else {"in": "made"}
            if (unfinished := row.pop("in", None)) is not None:
                late = f"no end within {LIMIT_S:.0f} s"
                row[unfinished] = {"failed": late if code == -9 else f"ended with status {code}"}
            yield name, {"class": architectures()[name], **row}


def failures(row: Row) -> dict[str, str]:
    """Part -> message, of the parts that failed; what a failure of training brings along is one."""
    found = {part: row[part]["failed"] for part in PARTS if "failed" in row.get(part, {})}
    if "single" in found:
        found.pop("zero", None)
    return {"loads": found["loads"]} if "loads" in found else found


def unexplained(stored: Mapping[str, Any]) -> list[str]:
    """Failures, and recomputation that must be off, for which there is no limit."""
    return [
        f"{name}: {text}"
        for stack in stored["stacks"].values()
        for name, row in stack["rows"].items()
        for text in [*failures(row).values(), row.get("recomputes", {}).get("failed", "")]
        if text and limit(stored["limits"], name, text) is None
    ]


def limit(limits: Mapping[str, str], name: str, message: str) -> str | None:
    """Which limit a message about an architecture is of; None if it is not known."""
    line = f"{name}: {message}"
    return next((text for pattern, text in limits.items() if re.search(pattern, line)), None)


def tables(stored: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the page that are made of the results; versions with more models come first."""
    stacks = sorted(stored["stacks"].values(), key=lambda stack: -len(stack["rows"]))
    numbers: dict[str, int] = {}
    messages: dict[str, str] = {}

    def note(name: str, message: str) -> str:
        text = limit(stored["limits"], name, message) or message
        messages.setdefault(text, message)
        return f"[{numbers.setdefault(text, len(numbers) + 1)}](#notes)"

    def cells(name: str, row: Row | None) -> list[str]:
        if row is None:
            return ["", "", ""]
        found = [f"{PARTS[part]} {note(name, text)}" for part, text in failures(row).items()]
        said = "; ".join(found) or "yes"
        if "recomputes" in row and "failed" not in row["single"]:
            said += f" {note(name, row['recomputes']['failed'])}"
        loss = {"": "", "reference": "logits"}.get(row.get("loss", ""), "kernel")
        return [said, row.get("attention", ""), loss]

    yield f"{TABLES} listed | can be built | test 1: load | test 2: train | test 3: ZeRO-3 | " + (
        "test 4: merge | all tests |"
    )
    yield "|" + "---|" * 8
    for stack in stacks:
        rows = stack["rows"].values()
        counts = [
            len(rows),
            sum("failed" not in row.get("made", {}) for row in rows),
            *(sum(part in r and "failed" not in r[part] for r in rows) for part in [*PARTS][1:]),
            sum(not failures(row) for row in rows),
        ]
        named = ", ".join(f"{name} {version}" for name, version in stack["versions"].items())
        yield f"| {' | '.join([named, *map(str, counts)])} |"
    heads = [f"transformers {stack['versions']['transformers']}" for stack in stacks]
    yield "\n## Architectures\n"
    yield f"| model type | class | {' | '.join(f'{head} | attention | loss' for head in heads)} |"
    yield "|" + "---|" * (2 + 3 * len(stacks))
    for name in sorted({name for stack in stacks for name in stack["rows"]}):
        found = [stack["rows"].get(name) for stack in stacks]
        kind = next(row["class"] for row in found if row is not None)
        made = [cell for row in found for cell in cells(name, row)]
        yield f"| {' | '.join([f'`{name}`', kind, *made])} |"
    yield "\n## Notes\n"
    for text, number in numbers.items():
        message = re.sub(r"\s+", " ", messages[text].replace("`", "'")).strip()
        if len(message) > 200:
            message = message[:197].rsplit(" ", 1)[0] + " ..."
        yield f"{number}. {text}" + (f": `{message}`" if messages[text] != text else "")


def main(again: Sequence[str]) -> int:
    """Add to the results, and write the page; 1 if something failed that nobody has explained."""
    stored = json.loads(RESULTS.read_text())
    name = f"transformers {metadata.version('transformers')}"
    here = stored["stacks"].setdefault(name, {"rows": {}})
    here["versions"] = versions()
    for model, row in results(again or [n for n in architectures() if n not in here["rows"]]):
        here["rows"] = dict(sorted({**here["rows"], model: row}.items()))
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
        print(model, failures(row) or "yes", flush=True)
    head = PAGE.read_text().partition(TABLES)[0]
    PAGE.write_text(head + "\n".join(tables(stored)) + "\n")
    left = unexplained(stored)
    print("\n".join(left) or f"every failure has its explanation; {PAGE} is written")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
