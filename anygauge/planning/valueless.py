"""A device whose tensors have shapes and no values, so that engines can be run that fit nowhere.

torch's fake tensors do the work; here are the answers that they cannot give. What depends on a
value gets zero: a norm, a flag of an overflow, whether a mask is all ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from anygauge.interface import HOST_DEVICE as HOST
from anygauge.interface import UnsupportedError
from anygauge.planning.counting import Counter
from anygauge.planning.live import device_of
from anygauge.planning.quick import (
    VIEW,
    Recipe,
    Results,
    are_plain,
    given_to,
    is_plain,
    is_view,
    key_of,
    shapes_of,
)

DEVICE = "planned"
"""torch's name for the device type; one process can have one such device."""

SUM, EQUAL = torch.ops.aten.sum.default, torch.ops.aten.eq.Scalar

SMALL = 4096
"""Tensors of fewer elements that are made of no other, and what is computed from them alone, have
values: they are numbers of ranks and sizes."""


class _Stream:
    """Work that is done as soon as it is given; as ``torch.cpu.Stream``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Any arguments."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was changed."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


class _DeviceModule:
    """What torch asks of a device type's module."""

    Stream = Event = stream = device = _Stream
    current_stream = default_stream = staticmethod(_Stream)

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_capability = staticmethod(lambda *_: (0, 0))
    set_device = manual_seed = manual_seed_all = synchronize = staticmethod(lambda *_: None)
    get_rng_state = staticmethod(lambda *_: torch.empty(0, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


@functools.cache
def register_device() -> None:
    """Make the device type known to torch, in this process.

    Raises:
        UnsupportedError: this torch cannot have devices made in Python, or has another already.
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError as error:
        raise UnsupportedError(
            f"anygauge plan: torch {torch.__version__} cannot make the device without memory that "
            "a plan is worked out on. Plan with torch 2.13, which needs no real device"
        ) from error
    _setup_privateuseone_for_python_backend(rename=DEVICE, backend_module=_DeviceModule())


@contextlib.contextmanager
def without_values(
    *, padded: bool = False, counter: Counter | None = None, stages: bool = False
) -> Iterator[ValuelessOperations]:
    """Let new tensors of any device have no values; the answers are to run each operation.

    Args:
        counter: gets what attention multiplies, which is not an operation here.
        padded: what asks whether all of a mask is set gets no for an answer.
        stages: there is a pipeline.
    """
    with (
        _real_meshes(),
        _numbers_from_the_host(),
        # Modes belong to a thread.
        torch.autograd.set_multithreading_enabled(False),
        _plain_attention(counter or Counter(DEVICE)),
        _agreed_stages() if stages else contextlib.nullcontext(),
        _quick_mode()(allow_non_fake_inputs=True) as mode,
        _untraced(),
        _replaced_parameters(),
        _arrays(),
    ):
        yield ValuelessOperations(mode, all_set=not padded)


@functools.cache
def _quick_mode() -> Any:
    """torch's mode with a cheaper key for its cache of what operations give out.

    torch's own takes half of a rehearsal's time: it allows for kinds of tensors that no model has.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
            key = key_of(func, args, kwargs, memory=True)
            return super()._cache_key(state, func, args, kwargs) if key is None else key

    return Mode


with_values = _disable_current_modes
"""Within it, tensors have values again."""


def is_valueless(value: Any) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, torch._subclasses.FakeTensor)


def valueless(value: Tensor, device: Any = None) -> Tensor:
    """A tensor of the shape and type of another, without values."""
    return torch.empty(value.shape, dtype=value.dtype, device=device or value.device)


class ValuelessOperations:
    """Runs operations, and says what values would be, where somebody asks.

    Small whole numbers that come from constants keep their values wherever they are moved:
    DeepSpeed compares the lengths of lists with those of other ranks, which are as this one's.

    Args:
        mode: torch's, within which they are run.
        all_set: whether masks that somebody asks about are.
    """

    def __init__(self, mode: Any, *, all_set: bool) -> None:
        self._all_set = all_set
        self._of_all: set[int] = set()
        self._counts: dict[int, int] = {}
        self._known: dict[int, Tensor] = {}
        self._results = Results(mode)

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Recipe | None]:
        """The result of an operation, and how it was made, if that is known."""
        counts = func is SUM and args[0].dtype is torch.bool
        if counts or (args and id(args[0]) in self._counts):
            return self._counted(func, args, kwargs), None
        if is_view(func) and is_plain(args[0], self._known):
            return self._results.view(func, args, kwargs), VIEW if func.is_view else None
        if func.namespace == "c10d" and are_plain(args, self._known):
            return self._results.collective(func, args, kwargs), None
        key = key_of(func, args, kwargs, self._known)
        if key is None:
            return self._run(func, args, kwargs), None
        recipe = self._results.find(key)
        given = given_to(args, kwargs)
        if recipe is not None:
            return self._results.make(recipe, given), recipe
        before = shapes_of(given)
        result = self._run(func, args, kwargs)
        return result, self._results.learn(key, func, given, result, before)

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Answer what needs values, and run what is of ranks and sizes with them."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        if func is torch.ops.aten.nonzero.default:
            # At most: none is zero.
            shape = (args[0].numel(), args[0].dim())
            return torch.empty(shape, dtype=torch.long, device=device_of(args[0]))
        if func is torch.ops.aten._pin_memory.default:
            return valueless(args[0])
        known = self._whole_numbers(func, args, kwargs)
        if torch.device(kwargs.get("device") or HOST).type == DEVICE:
            # torch would bring values along, which this device cannot hold.
            args = tuple(valueless(value) if _has_values(value) else value for value in args)
        elif _stays_real(func, args, kwargs):
            with with_values():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.all:
            self._asks_of_all(result)
        if known is not None:
            self._remember(result, known)
        return result

    def _counted(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """How many of a mask are set, and whether that is as many as there are."""
        result = self._run(func, args, kwargs)
        if func is SUM:
            self._counts[id(result)] = args[0].numel()
            weakref.finalize(result, self._counts.pop, id(result), None)
        elif func is EQUAL and self._counts[id(args[0])] == args[1]:
            self._asks_of_all(result)
        return result

    def _asks_of_all(self, result: Tensor) -> None:
        self._of_all.add(id(result))
        weakref.finalize(result, self._of_all.discard, id(result))

    def _number(self, value: Tensor) -> Any:
        if id(value) in self._of_all:
            return self._all_set
        found = self._value(value)
        if found is not None:
            with with_values():
                return found.item()
        if value.dtype is torch.bool:
            return False
        return 0.0 if value.dtype.is_floating_point else 0

    def _value(self, tensor: Tensor) -> Tensor | None:
        if not is_valueless(tensor):
            return tensor
        constant: Tensor | None = tensor.constant  # type: ignore[attr-defined]
        return self._known.get(id(tensor)) if constant is None else constant

    def _whole_numbers(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What an operation gives out, if its tensors are small whole numbers with values."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        if func.namespace != "aten" or not tensors:
            return None
        if func._schema.is_mutable:
            for tensor in tensors:
                self._known.pop(id(tensor), None)
            return None
        values = [self._value(tensor) for tensor in tensors]
        if any(v is None or v.is_floating_point() or v.numel() >= SMALL for v in values):
            return None
        if not any(map(is_valueless, tensors)) and "device" not in kwargs:
            return None
        turn = iter(values)
        here = {"device": HOST} if "device" in kwargs else {}
        with with_values():
            given = [next(turn) if isinstance(value, Tensor) else value for value in args]
            return func(*given, **{**kwargs, **here})

    def _remember(self, result: Any, values: Any) -> None:
        several = isinstance(result, tuple | list)
        for tensor, value in zip(
            result if several else (result,), values if several else (values,), strict=True
        ):
            if isinstance(tensor, Tensor) and id(tensor) not in self._known:
                weakref.finalize(tensor, self._known.pop, id(tensor), None)
                self._known[id(tensor)] = value


def _has_values(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_meta:
        return False
    return not is_valueless(value) or getattr(value, "constant", None) is not None


def _stays_real(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    if torch.device(kwargs.get("device") or HOST).type != HOST:
        return False
    if func.overloadpacket is torch.ops.aten.arange:
        return all(abs(value) < SMALL for value in args)
    if func.overloadpacket is torch.ops.aten.empty:
        wanted = kwargs.get("dtype")
        whole = wanted is not None and not wanted.is_floating_point
        return whole and wanted is not torch.uint8 and math.prod(args[0]) < SMALL
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not tensors or any(map(is_valueless, tensors)):
        return False
    if kwargs.get("device") is None and all(value.is_meta for value in tensors):
        return True
    return all(
        value.device.type == HOST and not value.is_floating_point() and value.numel() < SMALL
        for value in tensors
    )


@contextlib.contextmanager
def copied_by_the_host() -> Iterator[None]:
    """The host's collectives reduce and scatter a copy of what they get: more of its memory."""
    import torch.distributed as dist

    kept = dist.reduce_scatter_tensor

    def reduce_scatter(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = torch.empty_like(input)
        try:
            return kept(output, input, *args, **kwargs)
        finally:
            del copy

    dist.reduce_scatter_tensor = reduce_scatter
    try:
        yield
    finally:
        dist.reduce_scatter_tensor = kept


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """transformers takes tensors without values for those of a compiler, and makes larger masks."""
    from transformers.utils import import_utils

    kept = getattr(import_utils, "is_fake_tensor", None)
    if kept is None:  # earlier releases do not look
        yield
        return
    import_utils.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = kept


@contextlib.contextmanager
def _replaced_parameters() -> Iterator[None]:
    """``Module.to`` exchanges what is in tensors without values, which torch often refuses.

    Here modules get other parameters; one that several have stays one.
    """
    kept = torch.nn.Module._apply
    made: dict[int, torch.nn.Parameter] = {}

    def apply(self: torch.nn.Module, fn: Callable[..., Tensor], recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                moved = fn(parameter)
            if moved is parameter:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(moved, parameter.requires_grad)
                weakref.finalize(parameter, made.pop, id(parameter))
            self._parameters[name] = made[id(parameter)]
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = kept  # type: ignore[method-assign]


@contextlib.contextmanager
def _numbers_from_the_host() -> Iterator[None]:
    """``torch.tensor(1, device=...)`` makes a tensor on the host, and moves it by an operation."""
    kept = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(kept)


@contextlib.contextmanager
def _arrays() -> Iterator[None]:
    """Earlier releases of DeepSpeed read what they compare with other ranks by ``numpy()``."""
    import numpy

    kind: Any = torch._subclasses.FakeTensor
    kind.numpy = lambda self: numpy.array(self.tolist())
    try:
        yield
    finally:
        del kind.numpy


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Meshes of ranks are of values: torch reads ranks out of them."""
    from torch.distributed import device_mesh

    kept = {
        name: value
        for name, value in vars(device_mesh.DeviceMesh).items()
        if isinstance(value, types.FunctionType | staticmethod)
    }
    for name, value in kept.items():
        wrapped: Any = (
            staticmethod(_outside(value.__func__))
            if isinstance(value, staticmethod)
            else _outside(value)
        )
        setattr(device_mesh.DeviceMesh, name, wrapped)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(device_mesh.DeviceMesh, name, value)


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with with_values():
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def _agreed_stages() -> Iterator[None]:
    """Stages of a pipeline tell each other that their shapes are known, as this one's are."""
    from torch.distributed.pipelining import PipelineStage as Stage

    kept = Stage._warmup_backward_result

    def agreed(*args: Any, **kwargs: Any) -> Tensor:
        kept(*args, **kwargs)
        return torch.tensor([1])

    Stage._warmup_backward_result = agreed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stage._warmup_backward_result = kept  # type: ignore[method-assign]


class _Attention(torch.autograd.Function):
    """Attention that keeps no scores, as the fused kernels of all devices do."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, counter: Counter
    ) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, mask)
        # Kernels pass by what a causal mask hides, and not by what another does.
        ctx.once = query.numel() * key.shape[-2] * (1 if mask is None else 2)
        ctx.counter = counter
        counter.multiply(query.dtype, 2 * ctx.once)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        # Scores again, and a product for the gradient of each: scores, queries, keys, values.
        ctx.counter.multiply(query.dtype, 5 * ctx.once)
        return *(torch.empty_like(one) for one in (query, key, value)), None, None


@contextlib.contextmanager
def _plain_attention(counter: Counter) -> Iterator[None]:
    functional = torch.nn.functional
    kept = functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        if query.device.type == HOST:
            return kept(query, key, value, attn_mask, *more, **named)
        made: Tensor = _Attention.apply(query, key, value, attn_mask, counter)
        return made

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = kept
