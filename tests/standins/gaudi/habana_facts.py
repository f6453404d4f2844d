"""What the bridge's published lists say of an operator: served, handed to the host, or unproven.

The lists are in ``habana_operators.tsv``; ``tests/standins/gaudi_operators.py`` draws them from a
checkout. Types that no list names are asked of a library of the card that is not public: these
operators count as served, but for `UNPROVEN`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SERVED, FALLBACK, UNPROVEN_TYPE = "served", "fallback", "unproven"

UNPROVEN = {
    "tril": {torch.bool},
    "tril_": {torch.bool},
    "tril.out": {torch.bool},
    "triu": {torch.bool},
    "triu_": {torch.bool},
    "triu.out": {torch.bool},
    "eye": {torch.bool},
    "eye.m": {torch.bool},
    "eye.m_out": {torch.bool},
}
"""Operator -> types of which neither a list nor a test of the bridge says that the card has them:
its tests run `eye` with float32 and int32, `tril` with float32 (test_hpu_eye.py,
lazy_tensor_shape_kernel_tests.cpp)."""

_TYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2": torch.float8_e5m2,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}

_DECOMPOSED = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
"""Keys of torch's own kernels that take an operator apart on a device without one for it."""


@dataclass(frozen=True)
class Operator:
    """One line of the table.

    Attributes:
        types: argument -> what it may be; "" is the type that all arguments are promoted to.
        numbers: positions of numbers that are tensors on the card.
    """

    types: dict[str, frozenset[torch.dtype]] = field(default_factory=dict)
    numbers: frozenset[int] = frozenset()


@functools.cache
def operators() -> dict[str, Operator]:
    """Name without "aten::" -> its line."""
    text = Path(__file__).with_name("habana_operators.tsv").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines()[1:]:
        name, types, numbers = line.split("\t")
        found[name] = Operator(
            types={
                argument: frozenset(_TYPES[each] for each in listed.split(","))
                for argument, _, listed in (
                    part.partition("=") for part in types.split(";") if part
                )
            },
            numbers=frozenset(map(int, filter(None, numbers.split(",")))),
        )
    return found


@functools.cache
def name_of(func: Any) -> str:
    """As in the table: ``mul.Tensor``, ``mm``."""
    overload = func._overloadname
    base = func._schema.name.removeprefix("aten::")
    return base if overload == "default" else f"{base}.{overload}"


@functools.cache
def tensor_numbers(func: Any) -> frozenset[str]:
    """Names of arguments that are numbers in torch and tensors on the card."""
    arguments = func._schema.arguments
    found = operators().get(name_of(func), Operator()).numbers
    named = {arguments[at].name for at in found if at < len(arguments)}
    # A number where torch takes a tensor is kept on the card as well.
    return frozenset(named | {a.name for a in arguments if "Tensor" in str(a.type)})


@functools.cache
def _line(func: Any) -> Operator | None:
    """The operator's line, or that of the one by which torch makes it."""
    name = name_of(func)
    for each in (name, f"{name}.out", f"{name}_out", name.partition(".")[0] + ".out"):
        if each in operators():
            return operators()[each]
    return Operator() if _is_taken_apart(func) else None


def _is_taken_apart(func: Any) -> bool:
    whole = func.name()
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(whole, key) for key in _DECOMPOSED)


def verdict(func: Any, tensors: Sequence[tuple[str, torch.dtype]], result: Any) -> str:
    """Whether the card has the operator for these types.

    Args:
        tensors: name of the argument and type of each tensor of the card.
        result: the type of what is made, for operators without arguments on the card.
    """
    line = _line(func)
    if line is None:
        return FALLBACK
    types = [dtype for _, dtype in tensors] or ([result] if result is not None else [])
    if any(each in UNPROVEN.get(name_of(func), ()) for each in types):
        return UNPROVEN_TYPE
    for argument, dtype in tensors:
        if argument in line.types and dtype not in line.types[argument]:
            return FALLBACK
    if "" in line.types and types:
        promoted = functools.reduce(torch.promote_types, types)
        if promoted not in line.types[""]:
            return FALLBACK
    return SERVED
