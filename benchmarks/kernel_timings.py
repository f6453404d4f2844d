"""Kernels beside torch, Liger and peft: time and memory, forward and backward.

    python -m benchmarks.kernel_timings softmax --rounds 7
    python -m benchmarks.kernel_timings loss --classes 32000,131072

Each round runs every contender once, beginning one further on than the round before; ratios are to
the first contender. Memory is the most that tensors held at once beyond those that were given.
`make gpu` times the same on a card. See --help for the settings.
"""

from __future__ import annotations

import functools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anygauge.interface import Backend
from anygauge.kernels.choose import choose_kernels, load_kernel, why_unfit
from anygauge.registry import Registry
from anygauge.util.files import write_text
from benchmarks.measure import TableRow, paired, rotated, table
from benchmarks.session import conditions

Kernel = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Timing:
    """Where operations are timed, in which type, and in how many rounds."""

    device: torch.device
    dtype: torch.dtype
    rounds: int

    def compare(
        self,
        case: str,
        contenders: Mapping[str, Callable[[], Tensor]],
        given: Sequence[Tensor],
        upstream: Tensor | None = None,
        copied: tuple[float, float] | None = None,
    ) -> list[TableRow]:
        """Time forward and backward of all contenders, round by round; a row for each.

        The figures: medians of the times; bytes of all tensors that lived at once, beyond those
        that were given; the median over rounds of the first contender's time to this one's (below
        1, the first is faster); and, with `copied`, shares of a copy's speed.

        Args:
            contenders: the first is ours. A call computes the result from `given`.
            given: leaves whose gradients are cleared before each call.
            upstream: the gradient to go back with; None: ones.
            copied: seconds that a copy of all that forward and backward must move would take.
        """
        problems: dict[str, str] = {}
        peaks: dict[str, int] = {}
        for name, operation in contenders.items():
            try:
                with peak_bytes(self.device) as peak:
                    self._once(operation, upstream)
                peaks[name] = peak[0]
            except Exception as error:
                problems[name] = first_line(error)
            _clear(given)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in peaks}
        for round_ in range(self.rounds + 1):
            for name in rotated(list(peaks), round_):
                times[name].append(self._once(contenders[name], upstream))
                _clear(given)
        # The first round is a warm-up.
        whole = {name: [sum(pair) for pair in each[1:]] for name, each in times.items()}
        first = next(iter(contenders))
        rows = []
        for name in contenders:
            if name in problems:
                rows.append(TableRow(case=case, name=name, note=problems[name]))
                continue
            forward, backward = (median(part) for part in zip(*times[name][1:], strict=True))
            figures: dict[str, Any] = {
                "forward, ms": forward * 1e3,
                "backward, ms": backward * 1e3,
                "forward + backward, ms": (forward + backward) * 1e3,
                "memory, MiB": peaks[name] / 2**20,
                "first / its time": paired(whole.get(first, whole[name]), whole[name]).median,
            }
            if copied is not None:
                figures["of copy, forward"] = copied[0] / forward
                figures["of copy, backward"] = copied[1] / backward
            rows.append(TableRow(case=case, name=name, figures=figures))
        return rows

    def _once(self, call: Callable[[], Tensor], upstream: Tensor | None) -> tuple[float, float]:
        began = self._now()
        result = call()
        between = self._now()
        gradient = torch.ones_like(result) if upstream is None else upstream
        ready = self._now()
        result.backward(gradient)
        return between - began, self._now() - ready

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def copy_bandwidth(self, elements: int) -> float:
        """Bytes read and written per second by a copy of that many elements."""
        source = torch.randn(elements, device=self.device).to(self.dtype)
        target = torch.empty_like(source)
        times = []
        for _ in range(self.rounds + 2):
            began = self._now()
            target.copy_(source)
            times.append(self._now() - began)
        return 2 * source.nbytes / median(times[2:])


def first_line(error: Exception) -> str:
    """What an error says, for a table."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _clear(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[list[int]]:
    """Most bytes that tensors made inside held at once; in the list at the end."""
    found = [0]
    if device.type != "cpu":
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        yield found
        torch.accelerator.synchronize()
        found[0] = torch.accelerator.max_memory_allocated() - before
        return
    with _Living() as living:
        yield found
    found[0] = living.most


class _Living(TorchDispatchMode):
    """Bytes of storages that operations made and that still live; the host counts none itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see([args, kwargs], made=False)
        result = call(*args, **(kwargs or {}))
        self._see(result, made=True)
        return result

    def _see(self, values: Any, *, made: bool) -> None:
        for tensor in (each for each in tree_leaves(values) if isinstance(each, Tensor)):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._known:
                # A meta tensor has a size, and no memory.
                size = storage.nbytes() if made and not tensor.is_meta else 0
                self._known.add(key)
                weakref.finalize(storage, self._gone, key, size)
                self.now += size
                self.most = max(self.most, self.now)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def chosen_kernel(operation: str, device: torch.device, name: str = "") -> tuple[str, Kernel]:
    """Name and kernel of an operation that a run on this device would have.

    Args:
        name: of a kernel that the run file asks for; empty for what is chosen otherwise.
    """
    registry = Registry.load()
    asked = {operation: name} if name else {}
    choices = choose_kernels(registry, _backend(registry, device), asked)
    return choices[operation].name, load_kernel(choices, operation)


def fitting_kernels(operation: str, device: torch.device) -> dict[str, Kernel]:
    """Kernels of an operation that can run on this device here, by name."""
    registry = Registry.load()
    backend = _backend(registry, device)
    specs = [each.spec for each in registry.kernels if each.spec.operation == operation]
    names = [spec.name for spec in specs if why_unfit(spec, backend) is None]
    return {name: chosen_kernel(operation, device, name)[1] for name in names}


def _backend(registry: Registry, device: torch.device) -> Backend:
    backends = (registry.create_backend(each.spec.name) for each in registry.backends)
    return next(each for each in backends if each.device_type == device.type)


COLUMNS = (128, 1024, 4096, 16384, 65536, 131072, 262144)
SCALE = 0.3
LORA_SIZES = ((512, (512,)), (512, (1376,)), (2048, (2048,)), (2048, (2048, 512, 512)))
"""(in, out of each layer of this input)."""

Cases = Iterator[list[TableRow]]
"""The rows of one case after another, each timed when it is asked for."""


def softmax(
    timing: Timing, kernel: Kernel, *, columns: Sequence[int], elements: int, copy: float
) -> Cases:
    """Rows of each length, plain and with scale and additive mask; so many elements in all.

    Beside a copy stands what must be read and written: input and output forward; output, gradient
    and result backward; and a mask.

    Args:
        copy: bytes per second that a copy reads and writes.
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
                (moved[0] / copy, moved[1] / copy),
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


def attention(timing: Timing, *, lengths: Sequence[int]) -> Cases:
    """Padded rows, and rows of eight documents; `groups` heads of keys and values.

    The contenders are the model library's, each with masks of the form that it takes, and the
    kernels that run on the device.
    """
    from anygauge.models.inputs import MaskPlan

    rows, heads, groups, width = 2, 16, 4, 64
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

    from anygauge_kernels.blocks import compiled_attention
    from anygauge_kernels.softmax_attention import with_softmax

    found: dict[str, tuple[Callable[..., Any], str]] = {
        "sdpa": (sdpa_attention_forward, "boolean"),
        "eager": (eager_attention_forward, "additive"),
        "softmax": (with_softmax(chosen_kernel("softmax", device)[1]).forward, "boolean"),
    }
    if device.type == "cuda":
        found["blocks"] = (compiled_attention().forward, "blocks")
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

    from anygauge.kernels.install_kernels import fuse_lora, plain_lora

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
    if device == "auto":
        device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    where = torch.device(device)
    host = where.type == "cpu"
    timing = Timing(where, getattr(torch, dtype), rounds)

    def numbers(listed: str) -> list[int]:
        return [int(each) for each in listed.split(",")]

    given: dict[str, Any] = {
        "softmax": {"columns": numbers(columns), "elements": elements or 2 ** (24 if host else 28)},
        "loss": {
            "classes": numbers(classes),
            "tokens": tokens or (1024 if host else 16384),
            "width": width or (512 if host else 4096),
        },
        "attention": {"lengths": numbers(lengths)},
        "lora": {"tokens": tokens or (2048 if host else 16384)},
    }[operation]
    name, kernel = "sdpa", []
    if operation == "softmax":
        name, ours = chosen_kernel("softmax", where)
        kernel, given["copy"] = [ours], timing.copy_bandwidth(given["elements"])
    elif operation == "loss":
        name, ours = chosen_kernel("linear_cross_entropy", where)
        kernel = [{name: ours}]
    elif operation == "lora":
        name, *kernel = chosen_kernel("lora_linear", where, "addmm")
    rows = [row for case in globals()[operation](timing, *kernel, **given) for row in case]
    print(f"{where}: kernel {name}, {dtype}, {rounds} rounds; {given}")
    if "copy" in given:
        print(f"A copy of as many elements: {given['copy'] / 1e9:,.1f} GB/s")
    print("\n".join(["", *table(rows)]))
    settings = {"device": str(where), "dtype": dtype, "rounds": rounds, "kernel": name, **given}
    record = {**conditions(settings), "rows": [asdict(row) for row in rows]}
    write_text(output, json.dumps(record, indent=2))
    print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
