"""Which operators Gaudi's bridge serves, with which types: facts drawn from a checkout of it.

    python -m tests.standins.gaudi_operators CHECKOUT

writes ``tests/standins/gaudi/habana_operators.tsv`` anew. One line is one operator of the card: its
name, the types of each argument for which a list is published (Gaudi2), and the positions of
numbers that become tensors of the card. What is not in the table is not served. Sources, below the
checkout: ``scripts/ops_list/ops_table.csv`` (what is served), ``scripts/hpu_op.yaml`` (the rest).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parent / "gaudi/habana_operators.tsv"
CARD = "Gaudi2"
FRONTENDS = ("CompareScalarToTensor", "LazyBitwiseScalar", "LazyDivScalarInplace", "PowScalar")
"""Of an operator whose second argument, a number, becomes a tensor."""


def served(table: str) -> set[str]:
    """Names of torch's own operators that have a kernel for the card."""
    rows = [[cell.strip() for cell in line.split(";")] for line in table.splitlines()]
    column = rows[0].index("HPU")
    return {
        row[0].removeprefix("aten::")
        for row in rows[1:]
        if len(row) > column and row[column] == "YES" and row[0].startswith("aten::")
    }


def types_of(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """Argument -> types; "" is whichever argument decides the type of the operator.

    As the bridge's generator, adds what is computed by another type: float64 where there is
    float32, and bool where there is int8.
    """
    published = entry.get("dtypes")
    if published is None:
        return {}
    if isinstance(published, Mapping) and CARD in published:
        published = published[CARD]
    by_argument = published if isinstance(published, Mapping) else {"": published}
    found = {}
    for name, listed in by_argument.items():
        types = list(listed[CARD] if isinstance(listed, Mapping) else listed)
        types += ["Double"] if "Float" in types and "Double" not in types else []
        types += ["Bool"] if "Char" in types and "Bool" not in types else []
        found[name] = sorted(types)
    return found


def numbers_of(entry: Mapping[str, Any]) -> list[int]:
    """Positions of arguments that are numbers in torch and tensors on the card."""
    found = set(entry.get("scalar_ids", ()))
    if entry.get("op_frontend") in FRONTENDS:
        found.add(1)
    arguments = [
        each for each in str(entry.get("schema_args", "")).partition(")  ->")[0].split(",")
    ]
    position = 0
    for each in arguments:
        if each.strip(" ()") == "*":
            continue
        if re.match(r"\(?\s*Tensor\?? value", each.strip()):
            found.add(position)
        position += 1
    return sorted(found)


def table(operators: Iterable[str], entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of the file."""
    lines = ["operator\ttypes\tnumbers"]
    for name in sorted(operators):
        entry = entries.get(name) or {}
        types = ";".join(f"{a}={','.join(t)}" for a, t in types_of(entry).items())
        lines.append(f"{name}\t{types}\t{','.join(map(str, numbers_of(entry)))}")
    return "\n".join(lines) + "\n"


def read(checkout: Path) -> str:
    """The table of a checkout."""
    scripts = checkout / "scripts"
    entries = yaml.safe_load((scripts / "hpu_op.yaml").read_text(encoding="utf-8"))
    names = served((scripts / "ops_list/ops_table.csv").read_text(encoding="utf-8"))
    return table(names, entries)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    TABLE.write_text(read(parser.parse_args().checkout), encoding="utf-8")
