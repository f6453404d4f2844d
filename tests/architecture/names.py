"""Finds names of devices, vendors and their libraries in the strings and identifiers of a source,
and what is DeepSpeed's own.

Docstrings and comments may name a vendor as an example; a string that the program uses may not,
since behaviour is asked for by property. Words are letters in one case: ``CUDA_VISIBLE_DEVICES``,
``cuda:0`` and ``CudaError`` each have the word ``cuda``, ``inputs`` has no ``npu``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FORBIDDEN = frozenset(
    [
        *("cuda", "hpu", "nccl", "hccl", "gloo", "habana", "gaudi", "nvidia"),
        *("xpu", "mps", "npu", "rocm", "mlu", "neuron", "tpu"),
    ]
)
HOST = "cpu"
"""Allowed in identifiers, where it means the host: ``os.cpu_count``, ``tensor.cpu()``."""
ENGINE = "zero"
"""How the modules of `anygauge/strategies` begin that may speak of DeepSpeed."""

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A forbidden word, and where it stands."""

    path: Path
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r} in {self.text!r}"


def words(text: str) -> set[str]:
    """The words of a text, in lower case."""
    return {word.lower() for word in WORD.findall(text)}


def find_names(path: Path) -> list[Found]:
    """Every forbidden word of a source file, in the order of its lines."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    found = [
        Found(path=path, line=line, word=word, text=text)
        for line, text, forbidden in (*_strings(tree), *_identifiers(tree))
        for word in sorted(words(text) & forbidden)
    ]
    return sorted(found, key=lambda one: (one.line, one.word))


def engine_names(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and text of each attribute and string of DeepSpeed's."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [
        *((node.lineno, node.attr) for node in attributes if node.attr.startswith("ds_")),
        *(
            (line, text)
            for line, text, _ in _strings(tree)
            if text.startswith("ds_") or text == ENGINE or "deepspeed" in text.lower()
        ),
    ]


def _strings(tree: ast.AST) -> Iterator[tuple[int, str, frozenset[str]]]:
    # A string that is a statement by itself documents what stands before it.
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value, FORBIDDEN | {HOST}
        elif isinstance(node.value, bytes):
            yield node.lineno, node.value.decode("latin-1"), FORBIDDEN | {HOST}


def _identifiers(tree: ast.AST) -> Iterator[tuple[int, str, frozenset[str]]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name, FORBIDDEN
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name, FORBIDDEN
            case ast.keyword(arg=str(name)):
                yield node.lineno, name, FORBIDDEN
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, f"{alias.name} {alias.asname or ''}", FORBIDDEN
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    text = f"{module or ''} {alias.name} {alias.asname or ''}"
                    yield node.lineno, text, FORBIDDEN
