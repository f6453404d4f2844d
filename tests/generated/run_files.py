"""Run files that nobody would write, and some that somebody might: a function of a seed alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import yaml

from anygauge.config.describe import field_kind, sections
from tests.helpers.runs import TINY

Fields = dict[str, Any]

PATHS = tuple(
    (*path, name)
    for path, section in sections()
    for name, field in section.model_fields.items()
    if (not field_kind(field).sections and path[:1] != ("adapter",)) or path == ("adapter",)
)
"""Every field of a run file, sections left out."""

NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, -1, -4, 512, 10**5, 10**6, 10**9, 2**31, 2**53, 2**63, 2**64, 2**70),
    *(0.0, -0.0, 1e-300, 1e-30, 0.5, 1.5, 1e5, 1e6, 1e7, 1e30, 1e300, -1e300),
    *(float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *("", " ", "auto", "none", "null", "true", "~", "$HOME", "$NOWHERE", "${", "../..", "/", "."),
    *(
        "/dev/zero",
        "/dev/null",
        "a/b",
        "-",
        "--help",
        "a\nb",
        "a\tb",
        "\x1b[31mred",
        "\0",
        "'",
        '"',
    ),
    *("é", "東京", "\u202eabc", "\u2028", "\ufeff", "🙂" * 20, "a" * 300, "a" * 5000, "%s", "{0}"),
    *("$(touch pwned)", "`touch pwned`", "; touch pwned", "{{ 7*7 }}", "!!python/name:os.system"),
)
EXPRESSIONS = (
    *("((", "[", "*", "a{99999999999}", "(.*.*.*.*.*.*.*)*x", "(a+)+$", ".*", r".*\.q_proj"),
    *(
        "(?P<a>.)(?P<a>.)",
        "\\",
        "(?:" * 200,
        "x" * 20_000,
        "(x+x+)+y",
        "^(([a-z])+.)+[A-Z]([a-z])+$",
    ),
)


def junk(source: Random, depth: int = 0) -> Any:
    """Any value at all."""
    kind = source.randrange(8 if depth < 4 else 6)
    if kind < 2:
        return source.choice(NUMBERS)
    if kind < 4:
        return source.choice(TEXTS)
    if kind == 4:
        return source.choice((None, True, False))
    if kind == 5:
        return source.choice(([], {}, [[]], {"": None}, ["a"] * 50))
    count = source.randrange(4)
    if kind == 6:
        return [junk(source, depth + 1) for _ in range(count)]
    return {
        source.choice((*TEXTS[:20], "x", "name")): junk(source, depth + 1) for _ in range(count)
    }


def put(fields: Fields, path: tuple[str, ...], value: Any) -> None:
    """Set a field, whatever stood on the way to it."""
    for name in path[:-1]:
        below = fields.get(name)
        fields[name] = below if isinstance(below, dict) else {}
        fields = fields[name]
    fields[path[-1]] = value


def usual(source: Random, fields: Fields) -> None:
    """Values that a run may have."""
    choices: Mapping[tuple[str, ...], tuple[Any, ...]] = {
        ("adapter", "r"): (1, 2, 8, 64, 200),
        ("adapter", "alpha"): (0.5, 1, 32, 1e4),
        ("adapter", "dropout"): (0.0, 0.1, 0.9),
        ("adapter", "rslora"): (True, False),
        ("adapter", "targets"): ("all-linear", ["q_proj", "v_proj"], r".*\.mlp\..*", ["lm_head"]),
        ("data", "max_length"): (32, 96, 200),
        ("data", "packing"): (True, False),
        ("data", "loss_on"): ("answer", "all"),
        ("data", "eval_fraction"): (0.0, 0.1),
        ("data", "train", "limit"): (4, 50, None),
        ("data", "train", "weight"): (0.5, 1, 3.25),
        ("train", "optimizer", "name"): ("adamw", "lion", "sgd", "adafactor"),
        ("train", "optimizer", "lr"): (1e-8, 1e-4, 0.1),
        ("train", "optimizer", "weight_decay"): (0.0, 0.1),
        ("train", "schedule", "name"): ("constant", "linear", "cosine"),
        ("train", "schedule", "warmup_ratio"): (0.0, 0.3, 1.0),
        ("train", "max_grad_norm"): (0, 0.1, 1e5),
        ("train", "seed"): (0, 1, 2**31, 2**63 - 1),
        ("train", "steps"): (1, 2, 10**9),
        ("train", "global_batch_size"): (4, 8, 64),
        ("train", "eval_every"): (0, 1, 10**9),
        ("checkpoint", "every"): (0, 1, 10**9),
        ("precision", "param_dtype"): ("auto", "float32", "bfloat16"),
        ("strategy",): ({"name": "single"}, *({"name": "zero", "stage": n} for n in range(4))),
        ("environment", "A_1"): ("", "x y", "é=1", "a\nb", "\x1b[31m"),
        ("name",): ("tiny", "a.b-c_d", "x" * 100),
        ("model", "config", "num_hidden_layers"): (1, 2, 5),
        ("model", "config", "tie_word_embeddings"): (True, False),
        ("launch", "collective_timeout_s"): (30, 600.0, 1e6),
        ("kernels", "linear_cross_entropy"): ("chunked",),
    }
    for path in source.sample(list(choices), source.randrange(1, 8)):
        put(fields, path, source.choice(choices[path]))


def wrong_value(source: Random, fields: Fields) -> None:
    """One to three fields of another type or range."""
    for _ in range(source.randrange(1, 4)):
        put(fields, source.choice(PATHS), source.choice((*NUMBERS, *TEXTS)))


def wrong_shape(source: Random, fields: Fields) -> None:
    """A field or a section that is something else altogether."""
    path = source.choice(PATHS)
    put(fields, path[: source.randrange(1, len(path) + 1)], junk(source))


def unknown(source: Random, fields: Fields) -> None:
    """Fields that are not there, some near to some that are."""
    for _ in range(source.randrange(1, 30)):
        *section, name = source.choice(PATHS)
        odd = source.choice((name + "s", name[:-1], name.upper(), *TEXTS, 5, None, True, 1.5))
        put(fields, (*section, odd), junk(source))


def model(source: Random, fields: Fields) -> None:
    """Sizes that no model has, and some that one may have."""
    config = dict(TINY)
    for _ in range(source.randrange(1, 4)):
        key = source.choice([*TINY, "head_dim", "rope_theta", "tie_word_embeddings", "x"])
        config[key] = source.choice((*NUMBERS, *TEXTS[:8], None, [], {}))
    put(fields, ("model", "config"), config)


def expressions(source: Random, fields: Fields) -> None:
    """Expressions that cannot be read, or take for ever."""
    put(fields, ("adapter", "targets"), source.choice(EXPRESSIONS))
    if source.random() < 0.3:
        groups = [{"targets": source.choice(EXPRESSIONS)} for _ in range(3)]
        put(fields, ("adapter", "groups"), groups)


def variables(source: Random, fields: Fields) -> None:
    """The environment of ranks."""
    names = (*TEXTS, "A=B", "=", "PATH", "RANK", "LD_PRELOAD_", "OMP_NUM_THREADS", "A" * 1000)
    values = (*TEXTS, 1, None, "x" * 200_000)
    chosen = {source.choice(names): source.choice(values) for _ in range(source.randrange(1, 6))}
    put(fields, ("environment",), chosen)


def many(source: Random, fields: Fields) -> None:
    """Very much of one thing."""
    count = source.choice((100, 3000, 30_000))
    path, value = source.choice(
        (
            (("environment",), {f"A{n}": "x" for n in range(count)}),
            (("train",), {f"k{n}": n for n in range(count)}),
            (("backend_options",), {"a": list(range(count))}),
            (("data", "train"), [{"path": "rows.jsonl"} for _ in range(min(count, 200))]),
            (("adapter", "targets"), [f"t{n}" for n in range(count)]),
            (("model", "config", "num_hidden_layers"), count),
        )
    )
    put(fields, path, value)


def bomb(source: Random, text: str) -> str:
    """Aliases of aliases, depth, length."""
    width, levels = source.choice(((10, 12), (2, 40), (100, 5)))
    kind = source.randrange(6)
    if kind == 0:
        lines = ["  a0: &a0 [1]"]
        lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
        return text + "backend_options:\n" + "\n".join(lines) + "\n"
    if kind == 1:
        lines = ["  a0: &a0 {x: 1}"]
        lines += [
            f"  a{n}: &a{n}\n    k: *a{n - 1}\n    <<: [{', '.join([f'*a{n - 1}'] * width)}]"
            for n in range(1, levels)
        ]
        return text + "backend_options:\n" + "\n".join(lines) + "\n"
    if kind == 2:
        return text + "backend_options: " + source.choice("[{") * source.choice((90, 2000)) + "\n"
    if kind == 3:
        return text + "backend_options: &a {a: *a}\n"
    if kind == 4:
        return text + "# " + "x" * source.choice((10**5, 2 * 10**6)) + "\n"
    return text + "train: {seed: 0x" + "f" * source.choice((10, 16, 10**5)) + "}\n"


def features(source: Random, text: str) -> str:
    """What YAML can and nobody needs."""
    return text + source.choice(
        (
            "train: !!python/object/apply:os.system ['touch pwned']\n",
            "environment: !!set {a, b}\n",
            "environment: {A: !!binary aGVsbG8=}\n",
            "trackers: !!omap [a: 1]\n",
            "--- \na: 1\n",
            "...\n%YAML 1.2\n---\na: 1\n",
            "? [a, b]\n: 1\n",
            "? |\n  long\n: 1\n",
            "train: &t {steps: 2}\ntrain: *t\n",
            "kernels: {<<: [1, 2]}\n",
            "<<: {name: merged}\n",
            "environment: {yes: no, 1: 2, 1.5: x, ~: y}\n",
            "environment: {A: 2001-12-14t21:59:43.10-05:00, B: 12:30:45, C: 0o17, D: .inf}\n",
            "extends: run.yaml\n",
            "extends: [base.yaml, base.yaml]\n",
            "extends: /dev/zero\n",
            "extends: {a: 1}\n",
            'environment: {"\\ud800": "\\udfff"}\n',
            "environment: {A: *nothing}\n",
            "\tname: tabs\n",
            "@reserved\n",
        )
    )


def bytes_(source: Random, text: str) -> bytes:
    """Text that was damaged."""
    data = bytearray(text.encode())
    for _ in range(source.randrange(1, 20)):
        place = source.randrange(len(data))
        choice = source.randrange(4)
        if choice == 0:
            data[place] = source.randrange(256)
        elif choice == 1:
            del data[place : place + source.randrange(1, 20)]
        elif choice == 2:
            data[place:place] = source.choice((b"\xff", b"\0", b": ", b"- ", b"[", b"\xed\xa0\x80"))
        else:
            data = data[: max(place, 10)] + data[place : place + 30] + data[place:]
    return bytes(data)


BY_FIELD: tuple[Callable[[Random, Fields], None], ...] = (
    *(wrong_value, wrong_value, wrong_value, wrong_shape, unknown),
    *(model, expressions, variables, many),
)
BY_TEXT: tuple[Callable[[Random, str], str], ...] = (bomb, features)


def run_file(source: Random, base: Fields, *, broken: bool = False) -> tuple[str, bytes]:
    """A run file's kind and its bytes.

    Args:
        base: a run that is sound.
        broken: leave out those that are probably sound too.
    """
    fields = copy.deepcopy(base)
    kinds: list[Any] = [*BY_FIELD, *BY_TEXT, bytes_, *([] if broken else [usual] * 6)]
    kind = source.choice(kinds)
    if kind not in (*BY_TEXT, bytes_):
        kind(source, fields)
    text = yaml.safe_dump(fields, allow_unicode=source.random() < 0.5)
    if kind in (*BY_TEXT, bytes_):
        made = kind(source, text)
        return kind.__name__, made if isinstance(made, bytes) else made.encode()
    return kind.__name__, text.encode("utf-8", "surrogatepass")
