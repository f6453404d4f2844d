"""Kernels beside torch, Liger and peft: time and memory, forward and backward.

    python -m benchmarks.kernels softmax --rounds 7
    python -m benchmarks.kernels loss --classes 32000,131072

Each round runs every contender once, beginning one further on than the round before; ratios are to
the first contender. Memory is the most that tensors held at once beyond those that were given.
`make gpu` times the same on a card. See --help for the settings.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from anygauge.util.files import write_text
from benchmarks.kernel_timing import Kernel, Timing, chosen_device, chosen_kernel
from benchmarks.table import TableRow, table

COLUMNS = (128, 1024, 4096, 16384, 65536, 131072, 262144)
SCALE = 0.3
LORA_SIZES = ((512, (512,)), (512, (1376,)), (2048, (2048,)), (2048, (2048, 512, 512)))
"""(in, out of each layer of this input)."""

Cases = Iterator[list[TableRow]]
"""The rows of one case after another, each timed when it is asked for."""


def softmax(
    timing: Timing, kernel: Kernel, *, columns: Sequence[int], elements: int, copy: float = 0.0
) -> Cases:
    """Rows of each length, plain and with scale and additive mask; so many elements in all.

    Beside a copy stands what must be read and written: input and output forward; output, gradient
    and result backward; and a mask.

    Args:
        copy: bytes per second that a copy reads and writes; 0: nothing is compared with it.
    """
    for count in columns:
        shape = max(1, elements // count), count
        drawn = _drawn(timing.device)
        x = torch.randn(shape, **drawn).to(timing.dtype).requires_grad_()
        upstream = torch.randn(shape, **drawn).to(timing.dtype)
        hidden = torch.rand(shape, **drawn) < 0.3
        mask = torch.zeros_like(upstream).masked_fill_(hidden, torch.finfo(timing.dtype).min)
        for masked in (False, True):
            torch.compiler.reset()  # sizes are compiled for one by one
            ways = _softmaxes(kernel, timing.device, masked=masked)
            moved = (x.nbytes * (3 if masked else 2), x.nbytes * 3)
            yield timing.compare(
                f"{count:,} columns" + (", scaled and masked" if masked else ""),
                {name: functools.partial(way, x, mask) for name, way in ways.items()},
                [x],
                upstream,
                (moved[0] / copy, moved[1] / copy) if copy else None,
            )


def _drawn(device: torch.device) -> dict[str, Any]:
    # On the device: one thread of a host takes seconds for half a billion numbers.
    return {"generator": torch.Generator(device).manual_seed(0), "device": device}


def _softmaxes(kernel: Kernel, device: torch.device, *, masked: bool) -> dict[str, Kernel]:
    """Ours first; each takes scores and an additive mask."""

    def scaled(x: Tensor, mask: Tensor) -> Tensor:
        # As a model library's plain attention has it: scale and mask in the scores' type.
        return torch.softmax(x * SCALE + mask, -1, dtype=torch.float32).to(x.dtype)

    def wide(x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x.float() * SCALE + mask, -1).to(x.dtype)

    found: dict[str, Kernel] = {
        "anygauge": lambda x, _: kernel(x),
        "torch": lambda x, _: torch.softmax(x, -1),
        "torch, to float32": lambda x, _: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype),
    }
    if masked:
        ours: Kernel = lambda x, mask: kernel(x, mask=mask, scale=SCALE)  # noqa: E731
        found = {"anygauge": ours, "torch": scaled, "torch, in float32": wide}
    found["torch.compile"] = torch.compile(found["torch"], dynamic=False)
    if device.type == "cuda" and not masked and find_spec("liger_kernel") is not None:
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        found["liger"] = lambda x, _: LigerSoftmaxFunction.apply(x)
    return found


def loss(
    timing: Timing, kernels: Mapping[str, Kernel], *, classes: Sequence[int], tokens: int,
    width: int, cases: Sequence[tuple[bool, float]] = ((False, 0.0), (False, 0.5), (True, 0.0)),
) -> Cases:  # fmt: skip
    """The loss of an output layer.

    Args:
        kernels: of ours, by name.
        cases: (whether the layer is trained, share of tokens without a loss).
    """
    for count in classes:
        for trained, ignored in cases:
            drawn = _drawn(timing.device)
            hidden = torch.randn(tokens, width, **drawn).to(timing.dtype).requires_grad_()
            weight = torch.randn(count, width, **drawn).mul_(0.02).to(timing.dtype)
            weight.requires_grad_(trained)
            targets = torch.randint(0, count, (tokens,), **drawn)
            targets[torch.rand(tokens, **drawn) < ignored] = -100
            torch.compiler.reset()
            ways = _losses(kernels, timing.device)
            kind = "trained" if trained else "frozen"
            yield timing.compare(
                f"{count:,} classes, {kind}, {ignored:.0%} ignored",
                {n: functools.partial(way, hidden, weight, targets) for n, way in ways.items()},
                [hidden, weight],
            )


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits, and the loss from them, in float32 at least, as model libraries have it."""
    logits = linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(wide), targets, reduction="sum")


def _losses(kernels: Mapping[str, Kernel], device: torch.device) -> dict[str, Kernel]:
    """Ours first, as a run has it where shapes may change."""
    found: dict[str, Kernel] = {
        f"anygauge, {name}": functools.partial(kernel, skip_ignored=True)
        for name, kernel in kernels.items()
    }
    found["torch"] = plain_loss
    found["torch.compile"] = torch.compile(plain_loss, dynamic=False)
    if device.type == "cuda" and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger"] = functools.partial(liger_fused_linear_cross_entropy, reduction="sum")
    return found


def attention(
    timing: Timing, *, lengths: Sequence[int], rows: int = 2, heads: int = 16, groups: int = 4,
    width: int = 64,
) -> Cases:  # fmt: skip
    """Padded rows, and rows of eight documents; `groups` heads of keys and values.

    The contenders are the model library's, each with masks of the form that it takes, and the
    kernels that run on the device.
    """
    from anygauge.models.masks import MaskPlan

    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        q, k, v, upstream = (
            torch.randn(rows, h, length, width, generator=generator).to(timing.device, timing.dtype)
            for h in (heads, groups, groups, heads)
        )
        given = [each.requires_grad_() for each in (q, k, v)]
        module = nn.Module().train()
        module.num_key_value_groups = heads // groups  # type: ignore[assignment]

        def run(forward: Callable[..., Any], mask: Any, module: Any, given: Any) -> Tensor:
            output = forward(module, *given, mask, scaling=width**-0.5, dropout=0.0)[0]
            return output.transpose(1, 2)

        for documents in (1, 8):
            segments = (torch.arange(length) * documents // length + 1).expand(rows, -1).clone()
            if documents == 1:
                segments[1::2, -length // 4 :] = 0  # every second row is padded
            segments = segments.to(timing.device)
            ways = {
                name: functools.partial(
                    run, forward, MaskPlan(form).masks(segments, timing.dtype), module, given
                )
                for name, (forward, form) in _attentions(timing.device).items()
            }
            kind = "padded" if documents == 1 else f"{documents} documents"
            yield timing.compare(f"{length:,} tokens, {kind}", ways, given, upstream)


def _attentions(device: torch.device) -> Mapping[str, tuple[Callable[..., Any], str]]:
    """Name -> attention and the form of its masks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    from anygauge_kernels.attention import with_softmax
    from anygauge_kernels.blocks import compiled

    found: dict[str, tuple[Callable[..., Any], str]] = {
        "sdpa": (sdpa_attention_forward, "boolean"),
        "eager": (eager_attention_forward, "additive"),
        "softmax": (with_softmax(chosen_kernel("softmax", device)[1]).forward, "boolean"),
    }
    if device.type == "cuda":
        found["blocks"] = (compiled().forward, "blocks")
    return found


class Side(nn.ModuleList):
    """Layers side by side, as those of queries, keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, in) -> (tokens, all outs)."""
        return torch.cat([each(x) for each in self], dim=-1)


def lora(
    timing: Timing, kernel: Any, *, tokens: int,
    sizes: Sequence[tuple[int, Sequence[int]]] = LORA_SIZES,
) -> Cases:  # fmt: skip
    """Frozen linear layers of one input with factors of rank 16: as peft computes them, with fused
    products, and without their factors."""
    from peft import LoraConfig, get_peft_model

    from anygauge.kernels.install import fuse_lora, plain_lora

    place = (timing.device, timing.dtype)

    def layers(width: int, outs: Sequence[int], dropout: float) -> Any:
        torch.manual_seed(0)
        names = [str(index) for index in range(len(outs))]
        made: Any = get_peft_model(
            Side([nn.Linear(width, out, bias=False) for out in outs]),  # type: ignore[arg-type]
            LoraConfig(r=16, lora_dropout=dropout, target_modules=names, init_lora_weights=False),
            autocast_adapter_dtype=False,
        )
        return made.to(*place).train()

    for width, outs in sizes:
        for dropout in (0.0, 0.1):
            fused, plain = (layers(width, outs, dropout) for _ in range(2))
            assert len(plain_lora(fused)[0]) == len(outs)
            fuse_lora(fused, kernel)
            base = Side([each.base_layer for each in plain.base_model.model])
            x = torch.randn(tokens, width).to(*place).requires_grad_()
            trained = [p for m in (fused, plain) for p in m.parameters() if p.requires_grad]
            ways = {"anygauge": fused, "peft": plain, "frozen layer alone": base}
            shown = ", ".join(f"{out:,}" for out in outs)
            yield timing.compare(
                f"{str(timing.dtype)[6:]}, {width:,} to {shown}, dropout {dropout:g}",
                {name: functools.partial(way, x) for name, way in ways.items()},
                [x, *trained],
                torch.randn(tokens, sum(outs)).to(*place),
            )


def main(
    operation: Annotated[Literal["softmax", "loss", "attention", "lora"], typer.Argument()],
    device: Annotated[str, typer.Option(help="A torch device, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, on the host.")] = 2,
    columns: Annotated[str, typer.Option(help="softmax: sizes.")] = ",".join(map(str, COLUMNS)),
    elements: Annotated[
        int, typer.Option(min=0, help="softmax: of every size; 0: 16 Mi, 256 Mi on a card.")
    ] = 0,
    classes: Annotated[str, typer.Option(help="loss: sizes.")] = "32000,131072",
    tokens: Annotated[
        int, typer.Option(min=0, help="loss, lora; 0: 1024 and 2048, 16384 on a card.")
    ] = 0,
    width: Annotated[int, typer.Option(min=0, help="loss; 0: 512, 4096 on a card.")] = 0,
    lengths: Annotated[str, typer.Option(help="attention: sizes.")] = "512,2048",
    output: Annotated[Path, typer.Option(help="A JSON file.")] = Path("runs/kernels.json"),
) -> None:
    """Measure an operation on this device."""
    torch.set_num_threads(threads)
    where = chosen_device(device)
    host = where.type == "cpu"
    timing = Timing(where, getattr(torch, dtype), rounds)

    def numbers(listed: str) -> list[int]:
        return [int(each) for each in listed.split(",")]

    name, kernel, given = "sdpa", [], {}
    if operation == "softmax":
        name, ours = chosen_kernel("softmax", where)
        count = elements or (2**24 if host else 2**28)
        copy = timing.copy_bandwidth(count)
        kernel, given = [ours], {"columns": numbers(columns), "elements": count, "copy": copy}
    elif operation == "loss":
        name, ours = chosen_kernel("linear_cross_entropy", where)
        kernel, given = [{name: ours}], {"classes": numbers(classes)}
        given |= {"tokens": tokens or (1024 if host else 16384)}
        given |= {"width": width or (512 if host else 4096)}
    elif operation == "attention":
        given = {"lengths": numbers(lengths)}
    else:
        name, ours = chosen_kernel("lora_linear", where, "addmm")
        kernel, given = [ours], {"tokens": tokens or (2048 if host else 16384)}
    rows = [row for case in globals()[operation](timing, *kernel, **given) for row in case]
    print(f"{where}: kernel {name}, {dtype}, {rounds} rounds; {given}")
    if "copy" in given:
        print(f"A copy of as many elements: {given['copy'] / 1e9:,.1f} GB/s")
    print("\n".join(["", *table(rows)]))
    record = {
        "command": sys.argv,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "settings": {"device": str(where), "dtype": dtype, "rounds": rounds, "kernel": name}
        | given,
        "rows": [asdict(row) for row in rows],
    }
    write_text(output, json.dumps(record, indent=2))
    print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
