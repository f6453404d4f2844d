"""A DeepSpeed engine's trained state, out of its shards and back into them.

Out: DeepSpeed's own functions put a tensor together from the ranks, one tensor at a time. In: each
rank takes its own part of the whole. Written with what DeepSpeed 0.19 has; its function that sets
a whole tensor in stage 3 fails where a tensor's size is not a multiple of the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import HOST_DEVICE, PARAMETER, Counters, TrainedState
from anygauge.strategies.shared.optimizer_state import (
    export_plain,
    import_plain,
    is_packed,
    make_state,
    pack,
    set_updates,
    state_keys,
    to_float32,
    updates_of,
)

Named = Sequence[tuple[str, nn.Parameter]]


class ZeroState:
    """Reads and writes the trained state of one engine.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        named: trained parameters by name.
        writes: whether this rank wants the tensors that all ranks put together.
    """

    def __init__(self, engine: Any, stage: int, named: Named, *, writes: bool) -> None:
        self._optimizer = engine.optimizer
        self._stage = stage
        self._named = named
        self._writes = writes

    @property
    def refusal(self) -> str:
        """Why the state cannot be read and written whole; empty: it can."""
        if self._stage != 0 or self._is_plain:
            return ""
        return (
            "strategy zero, stage 0, in 16 bits: DeepSpeed keeps no float32 masters there; set "
            "strategy.stage: 1, or precision.param_dtype: float32"
        )

    def export(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """(name, key, whole float32 tensor on the host, or None where this rank wants none).

        All ranks must go through it together.
        """
        if self._is_plain:
            for name, key, value in export_plain(
                self._optimizer, self._named, torch.device(HOST_DEVICE)
            ):
                yield name, key, value if self._writes else None
            return
        # DeepSpeed links the state after the first group's update, when others have none yet.
        self._remake_views()
        with self._as_float32(written=False):
            yield from self._export((PARAMETER, *self._keys()))

    def masters(self) -> Iterator[tuple[str, Tensor | None]]:
        """Trained parameters, as `export` gives them."""
        for name, _, value in self._export((PARAMETER,)):
            yield name, value

    def _export(self, keys: Sequence[str]) -> Iterator[tuple[str, str, Tensor | None]]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for named in self._by_flat():
            for name, parameter in named:
                for key in keys:
                    if key == PARAMETER:
                        whole = safe_get_full_fp32_param(parameter)
                    else:
                        whole = safe_get_full_optimizer_state(parameter, key)
                    if whole is None and self._stage == 0:
                        # It keeps no master in float32 and float16, but the weights themselves.
                        whole = parameter
                    assert whole is not None, "DeepSpeed has no float32 master of it"
                    kept = None
                    if self._writes:
                        kept = whole.detach().to(HOST_DEVICE, torch.float32, copy=True)
                    yield name, key, kept

    def load(self, state: TrainedState) -> None:
        """Take this rank's part of every tensor."""
        if self._is_plain:
            import_plain(self._optimizer, self._named, state)
            return
        self._prime()
        with self._as_float32(written=True), torch.no_grad():
            keys = (PARAMETER, *self._keys())
            for named in self._by_flat():
                for name, parameter in named:
                    for key in keys:
                        self._write(parameter, key, state.tensor(name, key))
        for kept in self._states():
            set_updates(kept, state.counters.updates)
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if state.counters.loss_scale is not None and getattr(scaler, "dynamic", False):
            scaler.cur_scale = state.counters.loss_scale
            scaler.cur_iter = state.counters.good_steps
            scaler.last_overflow_iter = -1

    def counters(self) -> Counters:
        """See `Engine.counters`."""
        scaler: Any = getattr(self._optimizer, "loss_scaler", None)
        if not getattr(scaler, "dynamic", False):
            return Counters(updates=updates_of(self._states()))
        return Counters(
            updates=updates_of(self._states()),
            loss_scale=float(scaler.cur_scale),
            good_steps=scaler.cur_iter - scaler.last_overflow_iter - 1,
        )

    @property
    def _is_plain(self) -> bool:
        """Stage 0 in float32 hands torch's own optimizer through."""
        return isinstance(self._optimizer, torch.optim.Optimizer)

    @property
    def _inner(self) -> Any:
        return self._optimizer if self._is_plain else self._optimizer.optimizer

    def _partitions(self) -> list[Tensor]:
        """This rank's flat float32 partitions, each with a state of its own."""
        optimizer = self._optimizer
        if self._stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        # Stage 1 in bfloat16 whose sums are in float32 has an optimizer of DeepSpeed's own for it.
        flats = getattr(optimizer, "fp32_groups_flat_partition", None)
        return list(optimizer.single_partition_of_fp32_groups if flats is None else flats)

    def _states(self) -> list[Any]:
        if self._is_plain:
            return [self._inner.state.get(p, {}) for _, p in self._named]
        return [self._inner.state.get(flat, {}) for flat in self._partitions()]

    def _keys(self) -> list[str]:
        """Keys that the state of every flat partition has."""
        return state_keys(self._states()[0])

    def _by_flat(self) -> Iterator[Named]:
        """Trained parameters; by the flat partition that they are in, where these lie on a disk."""
        optimizer = self._optimizer
        if not getattr(optimizer, "swap_optimizer", False):
            yield self._named
            return
        flat_of = {
            id(p): optimizer.grad_position[optimizer.get_param_id(p)][0] for _, p in self._named
        }
        for index in range(len(self._partitions())):
            with self._in_memory(index):
                yield [each for each in self._named if flat_of[id(each[1])] == index]

    @contextlib.contextmanager
    def _in_memory(self, index: int) -> Iterator[None]:
        """A flat partition that lies on a disk, with its state, in the host's memory meanwhile.

        DeepSpeed's own functions would read all of it from the disk for each tensor.
        """
        optimizer = self._optimizer
        on_disk = getattr(optimizer, "swap_optimizer", False)
        if not (on_disk and optimizer._swappable_optimizer_subgroup(index)):
            yield
            return
        optimizer._optimizer_states_and_gradient_swap_in(index)
        optimizer.swap_optimizer = False
        try:
            yield
        finally:
            optimizer.swap_optimizer = True
        optimizer._optimizer_states_and_gradient_swap_out(index)

    def _write(self, parameter: Any, key: str, whole: Tensor) -> None:
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if self._stage == 3:
            part = own_part(parameter, whole)
            if key == PARAMETER:
                safe_set_local_fp32_param(parameter, part)
            else:
                safe_set_local_optimizer_state(parameter, part, key)
        elif key == PARAMETER:
            safe_set_full_fp32_param(parameter, whole)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)

    def _prime(self) -> None:
        """Have the optimizer make the state of every flat partition."""
        inner = self._inner
        if self._stage != 3:
            make_state(inner, self._partitions(), inner.step)
            self._remake_views()
            return
        # DeepSpeed steps one flat partition at a time, and leaves the groups empty between.
        for index, flat in enumerate(self._partitions()):
            group = inner.param_groups[self._optimizer.sub_group_to_group_id[index]]
            with self._in_memory(index):
                group["params"] = [flat]
                make_state(inner, [flat], inner.step)
                group["params"] = []

    @contextlib.contextmanager
    def _as_float32(self, *, written: bool) -> Iterator[None]:
        """Quantized state as plain float32 while they are read or written, then codes again."""
        packed = []
        for kept in self._states():
            for key in state_keys(kept):
                if is_packed(kept[key]):
                    packed.append((kept, key, kept[key]))
                    kept[key] = to_float32(kept, key)
        if packed:
            self._remake_views()
        try:
            yield
        finally:
            for kept, key, codes in packed:
                value, kept[key] = kept[key], codes
                if written:
                    pack(kept, key, value)
            if packed:
                self._remake_views()

    def _remake_views(self) -> None:
        """All stages but 3 hold views of the state: have them made anew."""
        if self._stage != 3:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The whole shape of a parameter that ZeRO-3 may have sharded."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_part(parameter: Any, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that ZeRO-3 has sharded; the last one is padded with zeros."""
    from deepspeed import comm

    group = parameter.ds_process_group
    size = parameter.partition_numel()
    start = size * comm.get_rank(group=group)
    flat = whole.reshape(-1)[start : start + size]
    part = torch.zeros(size, dtype=torch.float32)
    part[: flat.numel()] = flat
    return part
