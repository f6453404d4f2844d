"""What the schema's types cannot say of a value: variables, expressions, sizes of a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from anygauge.config.messages import received
from anygauge.config.origin import Problem, dotted
from anygauge.config.sections import LARGEST

if TYPE_CHECKING:
    from anygauge.config.document import YamlNode

MOST_LAYERS = 1000
"""Decoder layers. Each is made as a skeleton to plan with; deep models have a few hundred."""

LONGEST_EXPRESSION = 10_000
LONGEST_VARIABLE = 100_000
"""Characters of a variable's name and value: Linux starts no process with one of 128 KiB."""

ALL_VARIABLES = 1_000_000
"""Characters of all of them: Linux starts no process with 2 MiB, the rest of its own included."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head", "n_positions", "n_inner", "d_model"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
"""Fields of a model's configuration other than its layers that count something."""

BY_LAYER = ("intermediate_size", "num_key_value_heads")
"""Sizes that some architectures have as a list, one for each layer."""

MAY_BE_ZERO = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
"""0 in models of a family with experts that have none themselves."""

Path = tuple[object, ...]


def value_problems(root: YamlNode) -> list[Problem]:
    """Complaints about values of the right type that no run could use.

    Args:
        root: the merged tree; whatever has a wrong type is left to the schema.
    """
    return [*_of_environment(root), *_of_targets(root), *_of_sizes(root)]


def _of_environment(root: YamlNode) -> Iterator[Problem]:
    node = root.get("environment")
    if node is None or not node.is_mapping:
        return
    total = 0
    for key, value in node.value.items():
        if not isinstance(key, str):
            continue
        # Values may be secrets: none is shown.
        path = dotted(("environment", key[:60]))
        length = len(key.encode()) + len(str(value.value).encode())
        total += length
        if not key or "=" in key or "\0" in key:
            what = f"{key[:60]!r} cannot be the name of a variable"
            text = f"{what}: a name has at least one character, and no '=' or NUL"
            yield Problem(value.origin, path, text)
        elif "\0" in str(value.value):
            yield Problem(value.origin, path, "the value holds a NUL, which no variable can have")
        elif length > LONGEST_VARIABLE:
            text = f"name and value together have {length:,} bytes; at most {LONGEST_VARIABLE:,}"
            hint = "put the value in a file, and give the file's path instead"
            yield Problem(value.origin, path, f"{text} are allowed; {hint}")
    if total > ALL_VARIABLES:
        text = f"all variables together have {total:,} bytes"
        text += f", but no process starts with more than {ALL_VARIABLES:,}"
        yield Problem(node.origin, "environment", text)


def _of_targets(root: YamlNode) -> Iterator[Problem]:
    groups = root.get("adapter", "groups")
    count = len(groups.value) if groups is not None and isinstance(groups.value, tuple) else 0
    places: list[Path] = [("adapter", "groups", number, "targets") for number in range(count)]
    for path in [("adapter", "targets"), *places]:
        node = root.get(*path)
        if node is None or not isinstance(node.value, str) or node.value == "all-linear":
            continue
        complaint = expression_complaint(node.value)
        if complaint:
            text = (
                f"{node.value[:60]!r} {complaint}; valid: all-linear, a list of the last parts of "
                "layer names, or one regular expression over whole names"
            )
            yield Problem(node.origin, dotted(path), text)


def expression_complaint(text: str) -> str:
    """Why a text is not a regular expression; "" if it is one."""
    if len(text) > LONGEST_EXPRESSION:
        return f"has {len(text):,} characters; at most {LONGEST_EXPRESSION:,}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else in a later Python
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression ({error})"
    return ""


def _of_sizes(root: YamlNode, path: Path = ("model", "config")) -> Iterator[Problem]:
    """Sizes of a model that is made from the run file, in parts of it too (`text_config`)."""
    node = root.get(*path)
    if node is None or not node.is_mapping:
        return
    for key, below in node.value.items():
        here = (*path, key)
        if below.is_mapping:
            yield from _of_sizes(root, here)
            continue
        most = MOST_LAYERS if key in LAYERS else LARGEST if key in SIZES else None
        # A size that is left to the architecture is null.
        if most is None or below.value is None:
            continue
        least = 0 if key in MAY_BE_ZERO else 1
        expected = f"a whole number from {least} to {most}"
        counts = [(here, below)]
        if key in BY_LAYER and isinstance(below.value, tuple) and below.value:
            counts = [((*here, number), each) for number, each in enumerate(below.value)]
        elif key in BY_LAYER:
            expected += ", or a list of them, one for each layer"
        for place, each in counts:
            if type(each.value) is not int or not least <= each.value <= most:
                text = f"got {received(each)}, expected {expected}"
                yield Problem(each.origin, dotted(place), text)
    kind = node.get("model_type")
    if path == ("model", "config") and kind is not None and not isinstance(kind.value, str):
        text = f"got {received(kind)}, expected the name of an architecture, such as llama"
        yield Problem(kind.origin, "model.config.model_type", text)
