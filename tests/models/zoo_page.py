"""The page of what became of every architecture: docs/models.md, made from the results."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
PARTS = {
    "made": "cannot be built",
    "loads": "does not load",
    "single": "does not train",
    "zero": "not under ZeRO-3",
    "merges": "does not merge",
}
"""The parts of a row -> what a failed one means."""

REASONS: tuple[tuple[str, str], ...] = (
    (
        r"does not support it\. Set it to false",
        "transformers cannot recompute its layers; it trains with `gradient_checkpointing: false`",
    ),
    (
        r"requires the (timm|pytorch-quantization) library",
        "transformers needs a package for it that anygauge does not install",
    ),
    (
        r"Unrecognized configuration class|but Transformers does not recognize",
        "transformers saves only the configuration of the model's text part, and lists no class "
        "for that configuration",
    ),
    (
        r"Musicgen\w*Config' object|Config has to be initialized with text_encoder",
        "transformers builds it from the decoder's configuration, not from the listed one",
    ),
    (
        r"Config' object has no attribute 'vocab_size'",
        "transformers lists the class under the whole model's configuration, but the class takes "
        "only that of the text part",
    ),
    (
        r"losses differ from one rank's by [1-9]\.\de-05",
        "sums over two ranks round differently from one rank's; on some processors this "
        "architecture lets the difference grow to more than 1e-05 in five steps",
    ),
    (
        r"layer types producing a cache",
        "it is a drafter: all of its layers read the keys and values of another model",
    ),
    (
        r"Found missing adapter keys",
        "peft drops some of the adapter's tensors when it loads them, because it renames tensors "
        "by transformers' conversions, or because layers share a block; anygauge keeps the adapter "
        "as not verified",
    ),
    (
        r"merging .* went wrong",
        "layers share a block, and peft merges the block's adapter once for each of these layers",
    ),
    (
        r"contained shared tensors",
        "transformers cannot save it, because it does not declare that layers share a block",
    ),
    (
        r"^doge: adapter, loaded again",
        "with a mask, its `sdpa` attention does not compute the same as its `eager` attention",
    ),
    (
        r"^(deepseek_v3|ernie4_5_moe): losses differ",
        "losses are equal for the first steps; then rounding leads to another expert or another "
        "step of AdamW, and losses differ by less than 1e-4",
    ),
    (
        r"CheckpointError",
        "transformers keeps a state between forwards, which breaks recomputation",
    ),
    (
        r"Speech2Text2Sinusoidal|TransfoXL.*use_cache|'Tensor' object is not callable"
        r"|'NoneType' object has no attribute 'image_token_id'",
        "its own code fails in the installed transformers",
    ),
    (
        r"'dict' object has no attribute '_in_forward'",
        "its first forward with short rows replaces modules that DeepSpeed has already prepared",
    ),
    (
        r"'NoneType' object has no attribute 'numel'",
        "DeepSpeed reduces a layer's gradients only once, but this architecture calls its layers "
        "several times",
    ),
    (
        r"unknown parameter type",
        "its layers return lists; torch's backward hooks, on which ZeRO-3 relies, cannot see into "
        "lists",
    ),
    (
        r"least common multiple chunk_length",
        "transformers trains it only on lengths that are a multiple of its chunk length",
    ),
)
"""(Pattern in a message, which limit of which library it is)."""

HEAD = """# Models

Look up here whether anygauge loads, trains and merges your model's architecture. The page covers
every causal architecture that the installed transformers lists (`MODEL_FOR_CAUSAL_LM_MAPPING`).
Each was tested as a tiny model with random weights, built from its configuration class.
[`tests/models/zoo.py`](../tests/models/zoo.py) generates the page, and a test checks that it names
every architecture of the installed version:

```sh
.venv/bin/python -m tests.models.zoo --out docs/models.md
```

An architecture's result is "yes" if all of these tests pass, in float32 on the CPU:

1. transformers saves the model (`save_pretrained`, in the layout that publishers use), and anygauge
   loads that folder with logits equal to those of `from_pretrained`, bit for bit.
2. `anygauge train` fine-tunes it on one rank (strategy `single`) for five steps, with LoRA on all
   linear layers. The saved adapter, loaded again, gives the logits of the trained model.
3. ZeRO-3 on two ranks gives the same five losses, within a relative error of 1e-5.
4. `anygauge merge` merges the adapter. Loaded by plain transformers, the result gives the same
   logits as a merge by plain peft, within 1e-5 of their norm.

The other columns:

- `attention` is what the run uses on the CPU: `sdpa` if the architecture supports it, otherwise
  `eager` ([kernels](kernels.md#attention)).
- `loss` is "kernel" if a kernel computes the loss without holding all logits in memory, otherwise
  "logits" ([why](kernels.md#the-loss)).

Cells are empty if that version of transformers does not list the architecture, or if an earlier
test failed. Recomputation (`train.gradient_checkpointing`) is on, as it is by default, unless a
note says otherwise. A tiny model tests the code, not memory or speed, and these tests use only
text, no images or sound.

"""


def page(stored: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        stored: stack -> its ``versions`` and ``rows``; newest first on the page.
    """
    stacks = sorted(stored, key=lambda name: -len(stored[name]["rows"]))
    notes = Notes()
    names = sorted({name for stack in stacks for name in stored[stack]["rows"]})
    lines = list(_table(names, [stored[stack]["rows"] for stack in stacks], stacks, notes))
    return (
        HEAD
        + "\n".join(_summary(stored, stacks))
        + "\n\n## Architectures\n\n"
        + "\n".join(lines)
        + "\n\n## Notes\n\n"
        + "\n".join(notes.lines())
        + "\n"
    )


def counts(rows: Mapping[str, Row]) -> dict[str, int]:
    """How many architectures there are, and how many of them come through each part."""
    return {
        "listed": len(rows),
        "made": sum("parameters" in row for row in rows.values()),
        **{
            part: sum(succeeded(row, part) for row in rows.values())
            for part in PARTS
            if part != "made"
        },
        "all": sum(not failures(row) for row in rows.values()),
    }


def succeeded(row: Row, part: str) -> bool:
    """Whether a part was reached, and went well."""
    found = row.get(part)
    return found is not None and "failed" not in found


def failures(row: Row) -> dict[str, str]:
    """Part -> message, of the parts that failed; what a failure of training brings along is one."""
    found = {part: row[part]["failed"] for part in PARTS if "failed" in row.get(part, {})}
    if "single" in found:
        found.pop("zero", None)
    if "loads" in found:
        found = {"loads": found["loads"]}
    return found


def reason(name: str, message: str) -> str | None:
    """Which limit a message about an architecture is of; None if it is not known."""
    failure = f"{name}: {message}"
    return next((text for pattern, text in REASONS if re.search(pattern, failure)), None)


class Notes:
    """Reasons, numbered in the order in which the table needs them."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._messages: dict[str, str] = {}

    def mark(self, name: str, message: str) -> str:
        """The mark of a message's reason."""
        text = reason(name, message) or message
        number = self._number.setdefault(text, len(self._number) + 1)
        self._messages.setdefault(text, message)
        return f"[{number}](#notes)"

    def lines(self) -> Iterator[str]:
        """The notes, each with one of its messages."""
        for text, number in self._number.items():
            message = _short(self._messages[text])
            yield f"{number}. {text}" + (f": `{message}`" if message != text else "")


def _short(message: str) -> str:
    words = re.sub(r"\s+", " ", message.replace("`", "'")).strip()
    return words if len(words) <= 200 else words[:197].rsplit(" ", 1)[0] + " ..."


def _summary(stored: Mapping[str, Any], stacks: list[str]) -> Iterator[str]:
    heads = (
        *("versions", "listed", "can be built", "test 1: load", "test 2: train"),
        *("test 3: ZeRO-3", "test 4: merge", "all tests"),
    )
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for stack in stacks:
        here = stored[stack]
        number = counts(here["rows"])
        columns = ("listed", "made", "loads", "single", "zero", "merges", "all")
        versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
        yield f"| {versions} | {' | '.join(str(number[name]) for name in columns)} |"


def _table(
    names: list[str], every: list[Mapping[str, Row]], stacks: list[str], notes: Notes
) -> Iterator[str]:
    heads = ["model type", "class"]
    for stack in stacks:
        heads += [stack, "attention", "loss"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for name in names:
        kind = next(row["class"] for rows in every if (row := rows.get(name)) is not None)
        cells = [f"`{name}`", kind]
        for rows in every:
            cells += _cells(name, rows.get(name), notes)
        yield f"| {' | '.join(cells)} |"


def _cells(name: str, row: Row | None, notes: Notes) -> list[str]:
    if row is None:
        return ["", "", ""]
    found = failures(row)
    said = (
        "; ".join(f"{PARTS[part]} {notes.mark(name, text)}" for part, text in found.items())
        or "yes"
    )
    if "recomputes" in row and "single" not in found:
        said += f" {notes.mark(name, row['recomputes']['failed'])}"
    attention = row.get("attention", "")
    loss = row.get("loss", "")
    return [said, attention, {"": "", "reference": "logits"}.get(loss, "kernel")]


def grouped(rows: Mapping[str, Row]) -> dict[tuple[str, str], list[str]]:
    """(Part, message) -> model types, of all failures; to find what to fix."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, row in rows.items():
        for part, text in failures(row).items():
            found[part, text].append(name)
    return dict(found)
