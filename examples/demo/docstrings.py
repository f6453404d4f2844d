"""Instruction rows from the docstrings of the Python installation that runs this: no download.

Source files are read and parsed, never imported or run. Three files come out of it, the same ones
every time on one Python version:

``pretrain.jsonl``  ``{"text": ...}``: documented functions as they stand in their files
``train.jsonl``     ``{"prompt": "json.dumps(obj, ...)", "completion": "Serialize ..."}``
``heldout.jsonl``   rows of the same form whose answers stand nowhere in the other two
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import os
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
"""Tests, other people's packages, generated tables and programs rather than libraries."""

ANSWER_LENGTH = range(20, 241)
LONGEST_SIGNATURE = 60
LONGEST_SNIPPET = 400
HELD_OUT_SHARE = 0.08
FEWEST_ROWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Documented:
    """A function, method or class with a docstring.

    Attributes:
        prompt: its dotted name, with the signature of a function: ``json.dumps(obj, ...)``.
        summary: first paragraph of the docstring on one line.
        snippet: the head, the docstring and the beginning of the body, as in the file.
    """

    prompt: str
    summary: str
    snippet: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DocstringRows:
    """The three sets; `DocstringRows.check` says what must hold between them."""

    pretrain: list[str]
    train: list[Documented]
    held_out: list[Documented]

    def check(self) -> None:
        """Raise ValueError if a held-out answer can be read in the other two sets."""
        seen = _one_line(self.pretrain + [text for row in self.train for text in _texts(row)])
        for row in self.held_out:
            if row.summary in seen:
                raise ValueError(f"the held-out answer of {row.prompt} is in the training text")


def standard_library() -> Path:
    """Folder of the standard library of the Python that runs this."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(root: Path) -> list[Path]:
    """All ``.py`` files below `root` but those of `SKIPPED_FOLDERS`, in a fixed order."""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def documented(root: Path, *, files: int | None = None) -> Iterator[Documented]:
    """Everything with a docstring of a useful length, file by file, in the order of the lines.

    Args:
        root: folder whose files are read; a dotted name starts below it.
        files: read only about so many files, spread evenly over all of them.
    """
    paths = source_files(root)
    every = max(1, len(paths) // files) if files else 1
    for path in paths[::every]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in strings are none of our business
                text = path.read_text(encoding="utf-8")
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        yield from _of_body(tree.body, module, text.splitlines())


def split(found: Iterable[Documented]) -> DocstringRows:
    """Divide what was found; rows with the same answer always fall on the same side.

    The side is decided by a hash of the answer. A held-out row whose answer occurs inside any
    other text (``Return the name.``) is in none of the sets, so that it measures nothing by heart.
    """
    by_answer: dict[str, list[Documented]] = {}
    for item in found:
        by_answer.setdefault(item.summary, []).append(item)
    train = [i for answer, items in by_answer.items() if not _is_held_out(answer) for i in items]
    wanted = [items[0] for answer, items in by_answer.items() if _is_held_out(answer)]
    pretrain = list(dict.fromkeys(item.snippet for item in train))
    seen = _one_line(pretrain + [text for row in train for text in _texts(row)])
    held_out = [row for row in wanted if row.summary not in seen]
    return DocstringRows(pretrain=pretrain, train=train, held_out=held_out)


def write(rows: DocstringRows, folder: Path) -> dict[str, int]:
    """Write the three files to `folder`; returns file name -> number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = {"train.jsonl": rows.train, "heldout.jsonl": rows.held_out}
    values: dict[str, list[dict[str, str]]] = {
        "pretrain.jsonl": [{"text": text} for text in rows.pretrain]
    }
    for name, items in pairs.items():
        values[name] = [{"prompt": item.prompt, "completion": item.summary} for item in items]
    for name, lines in values.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / name).write_text(text, encoding="utf-8")
    return {name: len(lines) for name, lines in values.items()}


def build(folder: Path, *, root: Path | None = None, files: int | None = None) -> dict[str, int]:
    """Make the three files in `folder`; returns file name -> number of rows.

    Raises:
        SystemExit: this Python came without the sources of its library.
    """
    root = root or standard_library()
    rows = split(documented(root, files=files))
    if len(rows.train) < (FEWEST_ROWS if files is None else 1) or not rows.held_out:
        raise SystemExit(
            f"{root} holds only {len(rows.train)} functions with a docstring, which is too few: "
            "this Python came without the sources of its standard library. Use one from "
            "python.org, pyenv, conda or your distribution's full package"
        )
    rows.check()
    return write(rows, folder)


def _of_body(body: list[ast.stmt], name: str, lines: list[str]) -> Iterator[Documented]:
    """What a module or class holds; functions inside functions are left out."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            item = _documented(node, f"{name}.{node.name}", lines)
            if item is not None:
                yield item
        if isinstance(node, ast.ClassDef):
            yield from _of_body(node.body, f"{name}.{node.name}", lines)


def _documented(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str, lines: list[str]
) -> Documented | None:
    docstring = ast.get_docstring(node)
    if not docstring or not docstring.isascii():
        return None
    summary = _one_line([inspect.cleandoc(docstring).split("\n\n")[0]])
    first = summary.split()[0] if summary else ""
    # Old docstrings begin with a signature, some with an example: neither says what it does.
    if len(summary) not in ANSWER_LENGTH or "(" in first or first == ">>>":
        return None
    return Documented(
        prompt=name + ("" if isinstance(node, ast.ClassDef) else _signature(node)),
        summary=summary,
        snippet=_snippet(node, lines),
    )


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Arguments as written, without ``self`` and types; ``(...)`` where they are very long."""
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = ast.unparse(arguments)
    names = text.split(", ")
    if names[0] in ("self", "cls"):
        names = names[1:]
    text = f"({', '.join(names)})"
    return text if len(text) <= LONGEST_SIGNATURE else "(...)"


def _snippet(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The source, cut at a line; of a class no more than its docstring, as its methods follow."""
    end = node.body[0].end_lineno if isinstance(node, ast.ClassDef) else node.end_lineno
    kept, size = [], 0
    for line in lines[node.lineno - 1 : end]:
        size += len(line) + 1
        if size > LONGEST_SNIPPET:
            break
        kept.append(line.rstrip())
    return textwrap.dedent("\n".join(kept))


def _is_held_out(answer: str) -> bool:
    digest = hashlib.sha256(answer.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def _texts(row: Documented) -> tuple[str, str]:
    return row.prompt, row.summary


def _one_line(texts: list[str]) -> str:
    """All texts with every stretch of white space as one space: a line break hides nothing."""
    return " ".join(" ".join(texts).split())


def main() -> None:
    """Command line: write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the three files are written")
    parser.add_argument("--files", type=int, help="read only about so many source files")
    arguments = parser.parse_args()
    for name, count in build(arguments.folder, files=arguments.files).items():
        print(f"{name}: {count:,} rows")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
