"""Compile every Triton kernel for a GPU, without one: prints a line of JSON for each.

Run as a script, without TRITON_INTERPRET: ``compile_triton.py CAPABILITY WHICH`` with 80 to 120,
and ``all`` or ``largest``: of each kernel only what takes most registers.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anygauge_kernels import triton_loss, triton_softmax

INTEGERS = {
    "count", "columns", "B", "C", "sa", "sb", "sc", "sd", "offset", "classes", "ignore_index",
    "parts", "span",
}  # fmt: skip
NUMBERS = {"scale", "softcap"}


def cases() -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Kernel, constants and warps, as they are launched."""
    for columns in (128, 1024, 4096, triton_softmax.ONE_PASS):
        rows, block, warps = triton_softmax._tile(columns)
        for mask in (0, 1, 2):
            flags = {"MASK": mask, "CAUSAL": mask == 1, "ROWS": rows, "BLOCK": block}
            yield triton_softmax._forward_rows, flags, warps
        if columns <= triton_softmax.ONE_PASS // 2:
            yield triton_softmax._backward_rows, {"ROWS": rows, "BLOCK": block}, warps
    half = triton_softmax._tile(triton_softmax.ONE_PASS // 2)
    yield triton_softmax._backward_rows, {"ROWS": half[0], "BLOCK": half[1]}, half[2]
    for phase in (triton_softmax.WHOLE, triton_softmax.SUM, triton_softmax.WRITE):
        long = {"BLOCK": triton_softmax.STEP, "PARTS": 32 if phase else 1, "PHASE": phase}
        for mask in (0, 1, 2):
            yield triton_softmax._forward_long, {**long, "MASK": mask, "CAUSAL": mask == 1}, 16
        yield triton_softmax._backward_long, long, 16
    for capped in (False, True):
        for gradient in (False, True):
            flags = {"CAPPED": capped, "GRADIENT": gradient, "BLOCK": triton_loss.BLOCK}
            yield triton_loss._rows, flags, 8


def signature(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    """Types of the arguments: bfloat16 tensors, but for those that are not."""
    known = {"losses": "*fp32", "found": "*fp32", "targets": "*i64"}
    if constants.get("MASK") == 1:
        known["mask"] = "*u8"
    found = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            found[name] = "constexpr"
        elif name in INTEGERS:
            found[name] = "i32"
        else:
            found[name] = "fp32" if name in NUMBERS else known.get(name, "*bf16")
    return found


def spilled(ptx: str, capability: int) -> int:
    """Bytes that the assembler moves from registers to memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        done = subprocess.run(
            [get_ptxas(capability).path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(file.name).parent,
        )
    line = next(line for line in done.stderr.splitlines() if "spill stores" in line)
    return int(line.partition("bytes stack frame, ")[2].split()[0])


def largest() -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Of each kernel the last case: the longest rows, with all that is done to them."""
    yield from {kernel: (kernel, constants, warps) for kernel, constants, warps in cases()}.values()


def main(capability: int, which: str) -> None:
    target = GPUTarget("cuda", capability, 32)
    for kernel, constants, warps in cases() if which == "all" else largest():
        source = ASTSource(fn=kernel, signature=signature(kernel, constants), constexprs=constants)
        compiled = triton.compile(source, target=target, options={"num_warps": warps})
        print(
            json.dumps(
                {
                    "kernel": kernel.fn.__name__,
                    "constants": constants,
                    "warps": warps,
                    "spilled": spilled(compiled.asm["ptx"], capability),
                    "shared": compiled.metadata.shared,
                }
            )
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
