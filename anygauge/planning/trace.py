"""What a decoder layer, the embedding and the loss keep, take and compute, traced on meta tensors.

The run's own modules run on tensors that have no memory: the first few layers of them. A dispatch
mode sees each operation, and counts the storages that operations make until nobody has them any
more. Parameters and their gradients are not counted: what of them is where is the strategy's to
say, see `MemoryEstimate`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from anygauge.interface import AttentionKernel
from anygauge.interface.estimate import BACKWARD, BEGIN, END, FORWARD, LOSS
from anygauge.kernels.loss import model_loss
from anygauge.planning.forecast import Work
from anygauge.strategies.shared.materialize import decoder_layers

ops = torch.ops.aten
METADATA_OPS = ("_unsafe_view", "resize_", "set_")
"""Operations that say what there is, and touch none of it; so do those that make it empty."""

Moment = tuple[str, int]
"""Of `MOMENTS`, and the number of the layer; 0 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTrace:
    """One decoder layer, for one micro-batch, in bytes.

    Attributes:
        kept: from forward until backward.
        forward, backward, evaluation: the most that is there at once beside what layers before it
            keep; in backward, what it keeps itself is in it.
        recomputed: what is there when backward has recomputed it; 0 where it does not.
        trained: how many of its parameters are.
        work: of forward and backward.
    """

    kept: int
    forward: int
    backward: int
    evaluation: int
    recomputed: int
    trained: int
    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTrace:
    """What is traced of a model, for one micro-batch, in bytes.

    Attributes:
        begin: the most that is there at once until the first layer.
        base: of it what is there from then on: the batch, and what the embedding keeps.
        embedded: of `base`, the hidden states that the first layer is given.
        layers: the first ones.
        loss, loss_evaluation: the most that is there at once of the output layer and the loss,
            beside what layers keep.
        loss_kept: of `loss`, from forward until backward.
        end: the most that is there at once when the embedding's gradient is made.
        work: of all but the layers.
        head: of `work`, that of the output layer and the loss.
    """

    begin: int
    base: int
    embedded: int
    layers: tuple[LayerTrace, ...]
    loss: int
    loss_evaluation: int
    loss_kept: int
    end: int
    work: Work
    head: Work


class _Trace(TorchDispatchMode):
    """Counts live bytes and work of operations, by moment.

    Args:
        model: whose parameters and buffers are not counted; on the meta device.
        all_set: what is answered where somebody asks whether all of a mask is set.
    """

    last: _Trace

    def __init__(self, model: nn.Module, *, all_set: bool) -> None:
        super().__init__()
        _Trace.last = self
        self.moment: Moment = (BEGIN, 0)
        self.live = self.embedded = self.forwarded = 0
        self.before: dict[int, int] = {}
        self.recomputed: dict[int, int] = {}
        self.entered: dict[Moment, int] = {self.moment: 0}
        self.most: dict[Moment, int] = {self.moment: 0}
        self.work: dict[Moment, Work] = {self.moment: Work()}
        self._all_set = all_set
        self._of_all, self._counts = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        kept = [*model.parameters(), *model.buffers()]
        self._seen = {tensor.untyped_storage()._cdata for tensor in kept}

    def enter(self, moment: Moment) -> None:
        """A moment begins."""
        if moment == self.moment:
            return
        self.moment = moment
        self.entered[moment] = self.live
        self.most[moment] = max(self.most.get(moment, 0), self.live)
        self.work.setdefault(moment, Work())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at what it gives out."""
        kwargs = kwargs or {}
        if func is ops.logsumexp.default:
            with self:  # its parts are seen
                return _logsumexp(*args, **kwargs)
        result = self._run(func, args, kwargs)
        self._count(func, args, kwargs, result)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self._track(value.untyped_storage())
        self.most[self.moment] = max(self.most[self.moment], self.live)
        return result

    def _count(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Add the work of an operation that is done."""
        name, work = func.overloadpacket.__name__, self.work[self.moment]
        if func.is_view or func.namespace != "aten" or name in METADATA_OPS or "empty" in name:
            return
        touched: tuple[Any, ...] = (args, kwargs, result)
        if func is ops.embedding.default:  # of its table it reads as much as it writes
            touched = (result, result)
        elif func is ops.copy_.default:  # what was there is not read
            touched = (args[1:], kwargs, result)
        tensors = [one for one in tree_leaves(touched) if is_tensor(one)]
        size = sum(one.numel() * one.element_size() for one in tensors)
        work.operations += 1
        formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if formula is None:
            work.other_bytes += size
            return
        made = result[0] if isinstance(result, tuple | list) else result
        self.multiply(made.dtype, formula(*args, **kwargs, out_val=result))
        work.matrix_bytes += size

    def multiply(self, dtype: torch.dtype, flops: float) -> None:
        """Add matrix products to what is computed at this moment."""
        work, name = self.work[self.moment], str(dtype).removeprefix("torch.")
        work.flops = {**work.flops, name: work.flops.get(name, 0.0) + flops}

    def _track(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._seen:
            return
        self._seen.add(address)
        self.live += size

        def gone() -> None:
            self._seen.discard(address)
            self.live -= size

        weakref.finalize(storage, gone)

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives out; a value that somebody asks for is zero.

        Indices of what is not zero are as many as there can be.
        """
        if func is ops._local_scalar_dense.default:
            if args[0] in self._of_all:
                return self._all_set
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is ops.equal.default:
            return True
        if func is ops.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
        result = func(*args, **kwargs)
        # Releases of transformers ask by all(), or whether as many are set as there are.
        if func is ops.sum.default and args[0].dtype is torch.bool:
            self._counts[result] = True
        elif func.overloadpacket is ops.all or (func is ops.eq.Scalar and args[0] in self._counts):
            self._of_all[result] = True
        return result


def _logsumexp(tensor: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    """As `logsumexp_out_impl` in torch's ReduceOps.cpp, whose copy is as large as its argument."""
    largest = tensor.amax(dims, keepdim=True)
    result = (tensor - largest).exp_().sum(dims, keepdim=keepdim)
    return result.log_().add_(largest if keepdim else largest.squeeze(dims))


def trace_model(
    model: nn.Module,
    batch: Callable[[], Mapping[str, Any]],
    *,
    all_set: bool,
    holds_outputs: bool = True,
) -> ModelTrace:
    """Trace forward and backward of an adapted model of a few layers, and an evaluation.

    Args:
        model: on the meta device; it is used up.
        all_set: whether no token of a micro-batch is padding.
        holds_outputs: whether what the model returns is there until backward is done, as engines
            have it that run one micro-batch after the other.
    """
    model.train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            # From here on it is the strategy's.
            parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    layers = list(decoder_layers(model))
    with _Trace(model, all_set=all_set) as trace, _watch(trace, layers):
        outputs: Any = model(**batch())
        loss = model_loss(outputs)
        outputs = outputs if holds_outputs else None
        trace.forwarded = trace.live
        # Of other threads a mode sees nothing.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        del loss, outputs
    model.eval()
    with _Trace(model, all_set=all_set) as evaluated, _watch(evaluated, layers), torch.no_grad():
        model_loss(model(**batch()))
    trained = [sum(p.requires_grad for p in layer.parameters()) for layer in layers]
    return _of_moments(trace, evaluated, trained)


@contextmanager
def _watch(trace: _Trace, layers: list[nn.Module]) -> Iterator[None]:
    """Tell a trace which layer is at work."""
    last, handles = len(layers) - 1, []

    def watch(index: int, layer: nn.Module) -> None:
        def entering(_: nn.Module, args: Any) -> None:
            # Of an objective with a reference, layers run twice.
            if trace.moment[0] in (BEGIN, FORWARD) or (trace.moment[0] == LOSS and index == 0):
                if index == 0 and args:
                    trace.embedded = args[0].untyped_storage().nbytes()
                trace.enter((FORWARD, index))

        def beginning(*_: Any) -> None:
            if trace.moment[0] == BACKWARD:
                trace.before.setdefault(index, trace.live)

        def done(*_: Any) -> None:
            if trace.moment[0] == BACKWARD:
                trace.recomputed[index] = trace.live - trace.before[index]

        def leaving(_: nn.Module, args: Any, output: Any) -> None:
            if trace.moment[0] != FORWARD:
                return  # it is recomputed
            if index == last:
                trace.enter((LOSS, 0))
            made = output[0] if isinstance(output, tuple) else output
            given = next((one for one in args if isinstance(one, Tensor)), None)
            if made.requires_grad:
                made.register_hook(lambda _: trace.enter((BACKWARD, index)))
            if index == 0 and given is not None and given.requires_grad:
                given.register_hook(lambda _: trace.enter((END, 0)))

        handles.append(layer.register_forward_pre_hook(entering))
        handles.append(layer.register_forward_hook(leaving))
        for part in layer.children():  # the layer itself may be called once
            handles.append(part.register_forward_pre_hook(beginning))
            # Recomputation ends with an exception, as soon as backward has what it needs.
            handles.append(part.register_forward_hook(done, always_call=True))

    for index, layer in enumerate(layers):
        watch(index, layer)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_moments(trace: _Trace, evaluated: _Trace, trained: Sequence[int]) -> ModelTrace:
    layers = len(trained)

    def most(moment: Moment, beside: int) -> int:
        return max(0, trace.most.get(moment, 0) - beside)

    def work(*moments: Moment) -> Work:
        return functools.reduce(Work.add, (trace.work.get(one, Work()) for one in moments), Work())

    starts = [trace.entered[FORWARD, index] for index in range(layers)] + [trace.entered[LOSS, 0]]
    base = starts[0]
    found = tuple(
        LayerTrace(
            kept=starts[index + 1] - starts[index],
            forward=most((FORWARD, index), starts[index]),
            backward=most((BACKWARD, index), starts[index]),
            evaluation=evaluated.most[FORWARD, index] - evaluated.entered[FORWARD, index],
            recomputed=trace.recomputed.get(index, 0),
            trained=trained[index],
            work=work((FORWARD, index), (BACKWARD, index)),
        )
        for index in range(layers)
    )
    return ModelTrace(
        begin=trace.most[BEGIN, 0],
        base=base,
        embedded=trace.embedded,
        layers=found,
        loss=most((LOSS, 0), starts[-1]),
        loss_evaluation=evaluated.most[LOSS, 0] - evaluated.entered[FORWARD, 0],
        loss_kept=trace.forwarded - starts[-1],
        end=trace.most.get((END, 0), 0),
        work=work((BEGIN, 0), (LOSS, 0), (END, 0)),
        head=work((LOSS, 0)),
    )


# -- what stands in for kernels of a device --------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention that keeps no scores, as the fused kernels of all devices do."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, mask)
        # Kernels pass by what a causal mask hides, and not by what another does.
        ctx.once = query.numel() * key.shape[-2] * (1 if mask is None else 2)
        _Trace.last.multiply(query.dtype, 2 * ctx.once)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        # Scores again, and a product for the gradient of each: scores, queries, keys, values.
        _Trace.last.multiply(query.dtype, 5 * ctx.once)
        return *(torch.empty_like(one) for one in (query, key, value)), None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    out = _Attention.apply(query, key, value, attention_mask)
    return out.transpose(1, 2).contiguous(), None


FUSED = AttentionKernel(
    name="fused",
    forward=_attend,
    describe="a plan's: no scores are held",
    mask="sdpa",
    causal=True,
)
"""Stands in for each attention that holds no scores."""
