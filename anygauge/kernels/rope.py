"""Rotary position embeddings by a kernel, in place of the function that a model's attention calls.

The model library has that function once in each architecture's module, and the module is the whole
process's. So an attention is given a forward of its own: the same code, in which the function's
name means the kernel.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.kernels.loss import replace_forward

RopeKernel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(query (B, H, T, D), key (B, G, T, D), cos, sin (B or 1, T, D)) -> both, rotated."""

FUNCTION = "apply_rotary_pos_emb"
"""The model library's name for it."""


def plain_rotations(model: nn.Module) -> tuple[list[nn.Module], int]:
    """Modules whose rotations a kernel can compute, and how many call the function in all.

    A module counts if it calls the function with query, key, cos and sin alone, and what the
    function computes is x * cos + rotate_half(x) * sin.
    """
    served: dict[type[nn.Module], bool | None] = {}
    found, total = [], 0
    for module in model.modules():
        kind = type(module)
        if kind not in served:
            served[kind] = _rotates_plainly(kind)
        if served[kind] is None:
            continue
        total += 1
        if served[kind] and "forward" not in vars(module):
            found.append(module)
    return found, total


def replace_rotations(model: nn.Module, kernel: RopeKernel) -> None:
    """Let a kernel compute each plain rotation of a model."""
    forwards: dict[type[nn.Module], Any] = {}
    for module in plain_rotations(model)[0]:
        kind = type(module)
        if kind not in forwards:
            forwards[kind] = _with_kernel(kind.forward, kernel)
        replace_forward(module, forwards[kind])


def _with_kernel(forward: Any, kernel: RopeKernel) -> types.FunctionType:
    """Copy a function; in the copy `FUNCTION` is the kernel, and decorators stay around it."""
    inner = getattr(forward, "__wrapped__", None)
    cells, names = forward.__closure__, forward.__globals__
    if inner is None:
        names = {**names, FUNCTION: kernel}
    else:
        replaced = types.CellType(_with_kernel(inner, kernel))
        cells = tuple(replaced if each.cell_contents is inner else each for each in cells)
    made = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, cells
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _rotates_plainly(kind: type[nn.Module]) -> bool | None:
    """Whether a class's rotations are plain; None: it calls no such function."""
    forward: Any = kind.forward
    if not isinstance(forward, types.FunctionType):
        return None
    around = []  # decorators, such as the one that takes an argument's earlier name
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        around.append(_calls_by_closure(forward, inner))
        forward = inner
    if FUNCTION not in forward.__code__.co_names:
        return None
    return all(around) and _called_plainly(forward) and _is_plain(forward.__globals__.get(FUNCTION))


def _calls_by_closure(wrapper: Any, inner: Any) -> bool:
    """Whether a decorator's function has the one that it wraps as a variable of its closure."""
    cells = getattr(wrapper, "__closure__", None) or ()
    return isinstance(inner, types.FunctionType) and any(c.cell_contents is inner for c in cells)


def _called_plainly(forward: types.FunctionType) -> bool:
    """Whether each call has four arguments by position."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return False
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == FUNCTION
    ]
    plain = [call for call in calls if len(call.args) == 4 and not call.keywords]
    return bool(plain) and len(plain) == len(calls)


def _is_plain(function: Any) -> bool:
    """Whether a function rotates halves, tried on the host."""
    if function is None:
        return False
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    angles = torch.randn(2, 3, 8, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    try:
        found = function(query, key, cos, sin)
    except Exception:  # another signature or other shapes: it is another function
        return False
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(
            one.shape == x.shape and torch.allclose(one, apply_rotation(x, cos, sin), atol=1e-5)
            for one, x in zip(found, (query, key), strict=True)
        )
    )


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain formula: x (B, H, T, D), cos and sin (B or 1, T, D) -> (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
