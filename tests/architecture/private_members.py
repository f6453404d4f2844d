"""Finds private members of libraries in the sources of the product.

A private member is a name that begins with an underscore: one that a file imports, one that it
reads or sets of what is not its own, one that it names in a string for `getattr` and the like, or
as a module. What a file defines itself is its own; of `self`, what other files of ours define, too.

    python -m tests.architecture.private_members      # all of them: FILE MEMBER, one a line
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.architecture.repository import ROOT, packages

OURS = re.compile(r"anygauge(_\w+)?(\.|$)")
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace"} | {
    "_dump_snapshot",
    "_record_memory_history",
}
"""Public all the same: of `os`, of named tuples, and of torch's page *Understanding CUDA Memory
Usage*."""
BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "object", "setattr"}
"""Functions, and `mock.patch.object`, that take the name of a member."""
MODULE = re.compile(r"[a-z]\w*(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")
"""The full name of a private module or of what is in one."""


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is private."""
    return any(
        part.startswith("_") and part.strip("_") and not part.endswith("__")
        for part in name.split(".")
        if part not in DOCUMENTED
    )


def sources() -> dict[str, ast.Module]:
    """Path from the root -> its source, of the product."""
    files = [path for package in packages() for path in sorted(package.rglob("*.py"))]
    return {str(path.relative_to(ROOT)): _parsed(path) for path in files}


def private_members(trees: Mapping[str, ast.Module]) -> list[tuple[str, str]]:
    """(File, member), sorted, each once."""
    own = {path: set(_defined(tree)) for path, tree in trees.items()}
    ours = set().union(*own.values())
    found = {
        (path, name)
        for path, tree in trees.items()
        for name in (*_imported(tree), *_named(tree), *_used(tree, own[path], ours))
        if is_private(name)
    }
    return sorted(found)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield name


def library_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(Name in the file, full name) of what it imports from libraries."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for each in names:
                    whole = each.name if each.asname else each.name.partition(".")[0]
                    yield each.asname or whole, whole
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for each in names:
                    yield each.asname or each.name, f"{module}.{each.name}"


def _imported(tree: ast.Module) -> Iterator[str]:
    yield from (name for _, name in library_names(tree) if not OURS.match(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if not OURS.match(each.name))


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=arguments):
                if called in BY_NAME:
                    for each in arguments:
                        if isinstance(each, ast.Constant) and isinstance(each.value, str):
                            yield each.value
            case ast.Constant(value=str(text)) if MODULE.fullmatch(text) and not OURS.match(text):
                yield text


def _used(tree: ast.Module, own: set[str], ours: set[str]) -> Iterator[str]:
    libraries = {name: whole for name, whole in library_names(tree) if not OURS.match(whole)}
    inner: set[int] = set()
    for node in ast.walk(tree):  # the whole of a chain comes before its parts
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        names, below = [node.attr], node.value
        chain = [node]
        while isinstance(below, ast.Attribute):
            names.append(below.attr)
            chain.append(below)
            below = below.value
        root = below.id if isinstance(below, ast.Name) else ""
        if root in libraries:
            inner.update(map(id, chain))
            while names and not is_private(names[0]):
                del names[0]
            if names:
                yield ".".join([libraries[root], *reversed(names)])
        elif node.attr not in (ours if root in ("self", "cls") and len(names) == 1 else own):
            yield node.attr


if __name__ == "__main__":
    for file, member in private_members(sources()):
        print(file, member)
