"""What DeepSpeed needs around it: its accelerator, its log lines, its known defects."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from anygauge.interface import (
    HOST_DEVICE,
    Backend,
    NotAvailableError,
    RunFileError,
    UnsupportedError,
)
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.zero.deepspeed_versions import ENGINE, is_at_least
from anygauge.util.text import did_you_mean, first_line

WAITS_FOR_EACH_SINCE = (0, 19, 8)
"""First version here whose gathering of several weights waits for each of them (#8539)."""


def import_deepspeed(backend: Backend) -> ModuleType:
    """Import DeepSpeed with the accelerator that the backend names, and check that it took it.

    DeepSpeed chooses an accelerator while it is imported, from what it finds on the machine; the
    variable is its documented override. Of a device that DeepSpeed does not know, the backend names
    none: the accelerator is then made from the backend.

    Raises:
        UnsupportedError: DeepSpeed was imported before with another.
    """
    named = next(
        (s.value for s in backend.engine_settings(ENGINE) if s.name == "accelerator"), None
    )
    wanted = backend.device_type if named is None else str(named)
    if ENGINE not in sys.modules:
        os.environ["DS_ACCELERATOR"] = HOST_DEVICE if named is None else wanted
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if named is None and get_accelerator().device_name() in (HOST_DEVICE, wanted):
        from anygauge.strategies.zero.deepspeed_accelerator import accelerator_of

        set_accelerator(accelerator_of(backend))
    actual = get_accelerator().device_name()
    if actual != wanted:
        raise UnsupportedError(
            f"DeepSpeed was imported before anygauge and chose the accelerator {actual!r}, but "
            f"backend {backend.name!r} needs {wanted!r}; import deepspeed after anygauge, or set "
            f"DS_ACCELERATOR={HOST_DEVICE if named is None else wanted}"
        )
    # Only inference uses this operator; building it would need a C++ compiler on every machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def refuse_unserved_type(compute: str) -> None:
    """Raises: UnsupportedError: DeepSpeed's accelerator does not train in this compute type."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    served = [str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes()]
    if compute not in served:
        raise UnsupportedError(
            f"precision.param_dtype: DeepSpeed does not train in {compute} on "
            f"{accelerator.device_name()!r} devices. Use one of {', '.join(served)}, or "
            "strategy.name: single."
        )


def check_fields(zero_optimization: Mapping[str, Any]) -> None:
    """Raises: RunFileError: DeepSpeed refuses a field, which stands in the run file."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**zero_optimization)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        known = [each.alias or name for name, each in DeepSpeedZeroConfig.model_fields.items()]
        raise RunFileError(
            f"strategy.options.{field}: DeepSpeed's zero_optimization refuses it: {first['msg']}"
            f"{did_you_mean(field, known) or '.'} DeepSpeed's reference has its fields"
        ) from error


def folder_on_disk(path: str, needed: int) -> TemporaryDirectory[str]:
    """A folder of this rank's own below `path`, with the operator that DeepSpeed writes there with.

    Ranks of another run may have the same numbers, by which DeepSpeed names its files. On a full
    disk the operator writes a part and does not say so (``do_aio_operation_overlap``).

    Args:
        needed: bytes that this rank writes.

    Raises:
        RunFileError: nothing can be written there, or not so much.
        NotAvailableError: the operator was not built ahead, and cannot be now.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        free = shutil.disk_usage(path).free
        if free < needed:
            raise RunFileError(
                f"strategy.nvme: {path} has {free / 2**30:.2f} GiB free, but each rank writes "
                f"{needed / 2**30:.2f} GiB. Free some, name another disk, or use more ranks"
            )
        folder = TemporaryDirectory(prefix="anygauge-", dir=path)
    except OSError as error:
        raise RunFileError(f"strategy.nvme: {error}. Name a folder on a local disk") from error
    try:
        AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        folder.cleanup()
        raise NotAvailableError(
            f"strategy.nvme: DeepSpeed's operator async_io cannot be built: "
            f"{first_line(error)}. It needs libaio-dev (Debian, Ubuntu) or libaio-devel "
            "(Fedora), ninja and a C++ compiler, or an image that has it (`anygauge image`). Leave "
            "strategy.nvme out to keep the optimizer in the host's memory"
        ) from error
    return folder


def destroy(engine: Any) -> None:
    """Take an engine's hooks off and free its buffers.

    In 0.16.1, ZeRO-3 ends with a ``del`` of a buffer that it made for contiguous gradients alone
    (stage3.py, ``destroy``); later versions look first.
    """
    optimizer = engine.optimizer
    if type(optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        vars(optimizer).setdefault("_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer", None)
    engine.destroy()


@contextlib.contextmanager
def gathered_by_peft(config: Mapping[str, Any]) -> Iterator[None]:
    """Let peft gather a sharded weight that it reads while it adds an adapter, as DoRA's norms do.

    peft asks transformers whether ZeRO-3 is on; transformers knows through an object that must
    stay alive.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    alive = HfDeepSpeedConfig(dict(config))
    one_by_one = (
        contextlib.nullcontext() if is_at_least(WAITS_FOR_EACH_SINCE) else _gathered_one_by_one()
    )
    try:
        with one_by_one:
            yield
    finally:
        unset_hf_deepspeed_config()
        del alive


@contextlib.contextmanager
def _replace(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have DeepSpeed call another function of ours in place of its own."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)


@contextlib.contextmanager
def _gathered_one_by_one() -> Iterator[None]:
    """Gather weights one after another that peft requests together.

    Older versions wait for the last of several gathers alone. Where collectives are not queued on
    the device, the others may not have ended, and a norm would be taken of what was in memory.
    """
    import deepspeed

    together = deepspeed.zero.GatheredParameters

    @contextlib.contextmanager
    def one_by_one(parameters: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        several = [parameters] if torch.is_tensor(parameters) else list(parameters)
        with contextlib.ExitStack() as stack:
            for parameter in several:
                stack.enter_context(together([parameter], *args, **kwargs))
            yield

    with _replace(deepspeed.zero, "GatheredParameters", one_by_one):
        yield


@contextlib.contextmanager
def one_partition_group() -> Iterator[None]:
    """Let the groups of hpZ be made once for a model that is sharded unit by unit.

    DeepSpeed makes them for each part that it shards, and refuses the second time (#4901, #7066).
    """
    from deepspeed.utils import groups

    make = groups._create_zero_param_parallel_group
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None

    def once(size: int) -> None:
        if groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None:
            make(size)

    with _replace(groups, "_create_zero_param_parallel_group", once):
        yield


def gather_by_block(model: Any) -> None:
    """Have ZeRO-3 gather and release each decoder layer as one piece.

    DeepSpeed puts four hooks on every module that it gathers for. An adapter makes five modules of
    one linear layer, so that a layer of Llama costs some fifty times four of them, in every
    forward, recomputation and backward.

    DeepSpeed reduces the gradients of such a piece when the gradient of its input is there; without
    one it would do so before they are computed, and lose them. So the first layer's input, which a
    frozen embedding makes, is given one, and every input is looked at.
    """
    from deepspeed.utils import set_z3_leaf_module

    blocks = list(decoder_layers(model))
    if not blocks:
        return
    model.enable_input_require_grads()
    for block in blocks:
        set_z3_leaf_module(block, True)
        block.register_forward_pre_hook(_differentiable_input_first, with_kwargs=True)


def _differentiable_input_first(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Backward hooks see positional arguments alone: the hidden state must be one of them."""
    if not torch.is_grad_enabled() or any(map(_differentiable, args)):
        return args, kwargs
    name = next((name for name, value in kwargs.items() if _differentiable(value)), None)
    if args or name is None:
        raise UnsupportedError(
            f"strategy zero, stage 3: {type(block).__name__} received no input that requires "
            "grad, so ZeRO-3 would drop its gradients; set strategy.gather: module"
        )
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


def _differentiable(value: Any) -> bool:
    return torch.is_tensor(value) and value.requires_grad


def share_buffers(unit: nn.Module, device: torch.device) -> None:
    """Give all ranks the buffers that rank 0 read with a unit's values."""
    for module in unit.modules():
        for name, buffer in module.named_buffers(recurse=False):
            here = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            dist.broadcast(here, 0)
            module._buffers[name] = here


def synchronize_before_release(
    synchronize: Callable[[], None],
) -> contextlib.AbstractContextManager[None]:
    """Wait for the device each time ZeRO-3 frees a gathered parameter.

    For devices whose work may still read the memory when the host frees it.
    """
    from deepspeed.runtime.zero import partition_parameters

    release = partition_parameters.free_param

    def synchronized(param: Any) -> None:
        synchronize()
        release(param)

    return _replace(partition_parameters, "free_param", synchronized)


def leave_as_a_step_does(model: nn.Module) -> None:
    """After an evaluation, gather and free weights so that the next step finds what any step does.

    DeepSpeed keeps after each layer what its trace of a training step says is needed soon: of the
    last layers, the weights for their recomputation. An evaluation ends there. And where it
    records a trace of its own, as Intel's releases do, it frees the small weights that stay
    gathered in training. The next step would gather other pieces than every other step does, which
    a device that compiles graphs would compile anew.
    """
    parameters: list[Any] = list(model.parameters())
    for each in parameters:
        # What a prefetch has under way, DeepSpeed frees when the next pass begins.
        if each.ds_status.name == "AVAILABLE" and not each.ds_persist:
            each.partition()
    freed = [p for p in parameters if p.ds_persist and p.ds_status.name == "NOT_AVAILABLE"]
    if freed:
        freed[0].all_gather(freed)


def gradients_finite(optimizer: Any) -> bool:
    """Whether all ranks' gradients are, for versions that look at it in float16 alone; waits.

    Args:
        optimizer: DeepSpeed's, after the last backward of a step.
    """
    if hasattr(optimizer, "has_overflow"):
        return not optimizer.has_overflow()
    # Stage 1 in bfloat16: each rank has all gradients, summed.
    gradients, _ = optimizer.get_grads_for_norm()
    return all(bool(gradient.isfinite().all()) for gradient in gradients)
