"""Writes a checkpoint to a folder, opens it, and puts it into the model that a run builds.

====================  =============================================================================
``checkpoint.json``   step, counters, what a run that resumes from here must have in common with
                      this one, and the metrics up to here
``state-*``           safetensors: ``KEY/NAME`` -> whole float32 tensor; KEY is ``parameter`` or a
                      key of the optimizer's state
``rng.safetensors``   ``RANK/NAME`` -> state of a random number generator, bytes
``rank-state-*``      ``RANK/NAME`` -> what an engine's ranks have of their own, if they have any
``probe.*``           logits of fixed tokens, where this may become the run's result
``adapter/``          with an adapter: the same weights in peft's format, ready for use
``manifest.json``     size and SHA-256 of every other file; written last
====================  =============================================================================

The folder is written under a name that begins with a dot and renamed when all is on disk.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.interface import (
    HOST_DEVICE,
    PARAMETER,
    AnygaugeError,
    Collectives,
    Counters,
    ModelError,
    ModelFactory,
    PartFunction,
    TrainedState,
)
from anygauge.models.model_files import LazyTensors
from anygauge.training.checkpoints.sound import (
    FORMAT,
    MANIFEST,
    RANK_STATE,
    RECORD,
    RNG,
    STATE,
    digest_of,
    files_of,
    read_record,
)
from anygauge.util.files import flush, part_of, usual_mode
from anygauge.util.text import json_values

ADAPTER = "adapter"
PROBE, LOGITS = "probe.safetensors", "logits"
SHARD_BYTES = 2 * 2**30
"""Host memory that writing takes: tensors are collected up to this size, then written."""

Exported = Iterator[tuple[str, str, Tensor | None]]
Contents = Sequence[Sequence[tuple[str, str, Sequence[int]]]]
"""Of each rank: (name, type, shape) of what it has of its own."""


def write_checkpoint(
    folder: Path,
    exported: Exported,
    record: Mapping[str, Any],
    rng: Sequence[Mapping[str, Tensor]],
    *,
    rank_states: Iterable[tuple[str, Tensor]] = (),
    logits: Tensor | None = None,
    export_adapter: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a checkpoint; returns its size in bytes. For rank 0.

    Args:
        exported: (parameter name, key, whole tensor), read to its end.
        record: goes to ``checkpoint.json``.
        rng: for each rank, name -> state of a generator.
        rank_states: see `gather_all`; read to its end.
        logits: what a result made of it is compared with.
        export_adapter: given a folder and the trained parameters, writes them in peft's format.

    Raises:
        AnygaugeError: it cannot be written; nothing of it remains.
    """
    from safetensors import SafetensorError

    temporary = part_of(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)  # not the run directory: it was there
        temporary.mkdir()
        parameters: dict[str, Tensor] = {}
        named = _named_tensors(exported, None if export_adapter is None else parameters)
        _write_shards(temporary, STATE, named, shard_bytes)
        _write_shards(temporary, RANK_STATE, rank_states, shard_bytes)
        if export_adapter is not None:
            export_adapter(temporary / ADAPTER, parameters)
        if logits is not None:
            _save({LOGITS: logits.contiguous()}, temporary / PROBE)
        states = {f"{rank}/{name}": s for rank, own in enumerate(rng) for name, s in own.items()}
        _save(states, temporary / RNG)
        text = json.dumps(json_values({"format": FORMAT, **record}), indent=2, allow_nan=False)
        (temporary / RECORD).write_text(text + "\n")
        size = _seal(temporary)
        # A run trains a step again only where its checkpoint is not sound.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise AnygaugeError(
            f"the checkpoint {folder} cannot be written: {error}; free space, or give another "
            "folder with --output. Earlier checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


class Checkpoint:
    """A sound checkpoint, opened; implements `TrainedState`. Tensors are read when asked for.

    Raises:
        AnygaugeError: its record or the head of a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = read_record(folder)
        self.step: int = self.record["step"]
        self.counters = Counters(**self.record["counters"])
        self._files = files_of(folder, STATE)
        self._keys: dict[str, list[str]] = {}
        for entry in self._files:
            key, _, name = entry.partition("/")
            self._keys.setdefault(name, []).append(key)

    def names(self) -> list[str]:
        """See `TrainedState.names`."""
        return list(self._keys)

    def tensor(self, name: str, key: str) -> Tensor:
        """See `TrainedState.tensor`."""
        entry = f"{key}/{name}"
        if entry not in self._files:
            raise AnygaugeError(
                f"{self.folder} holds no {key} of {name}; kept there: "
                f"{', '.join(self._keys.get(name, [])) or 'nothing of it'}. Resume with the "
                "optimizer and adapter that the checkpoint was made with"
            )
        with _open(self._files[entry]) as file:
            return file.get_tensor(entry)

    def logits(self) -> Tensor | None:
        """The model's logits of the probe; None where they were not kept."""
        if not (self.folder / PROBE).is_file():
            return None
        with _open(self.folder / PROBE) as file:
            return file.get_tensor(LOGITS)

    def rng(self, rank: int) -> dict[str, Tensor]:
        """Return one rank's generator states; empty where there was no such rank."""
        return _of_rank([self.folder / RNG], rank)

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """What one rank had of its own."""
        return _of_rank(sorted(self.folder.glob(f"{RANK_STATE}-*.safetensors")), rank)


def _of_rank(paths: Iterable[Path], rank: int) -> dict[str, Tensor]:
    prefix = f"{rank}/"
    found = {}
    for path in paths:
        with _open(path) as file:
            names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            found.update({key.removeprefix(prefix): file.get_tensor(key) for key in names})
    return found


class ResumedFactory:
    """A model factory whose trained parameters begin with the values of a state.

    The engine's float32 masters are made from what is built here, in the compute type, and get
    their digits back in `Engine.import_state`.
    """

    def __init__(self, factory: ModelFactory, state: TrainedState) -> None:
        self._factory = factory
        self._state = state
        self._names = frozenset(state.names())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._factory, name)

    def values(
        self, model: nn.Module, unit: str, part: PartFunction | None = None
    ) -> Mapping[str, Tensor]:
        """See `ModelFactory.values`."""
        shapes = {n: tuple(p.shape) for n, p in model.get_submodule(unit).named_parameters()}
        values = self._factory.values(model, unit, part)
        prefix = f"{unit}." if unit else ""

        def value(name: str) -> Tensor:
            if prefix + name not in self._names:
                return values[name]
            kept = self._value(prefix + name, shapes[name])
            piece = (...,) if part is None else part(prefix + name, shapes[name])
            return kept if piece is None else kept[piece]

        return LazyTensors({name: functools.partial(value, name) for name in values})

    def adapt(self, model: nn.Module) -> nn.Module:
        """See `ModelFactory.adapt`."""
        adapted = self._factory.adapt(model)
        if adapted is not model:
            self._fill(adapted)
        return adapted

    def adapted_on_meta(self) -> tuple[nn.Module, Mapping[str, str]]:
        """See `ModelFactory.adapted_on_meta`."""
        adapted, names = self._factory.adapted_on_meta()
        self._fill(adapted)
        return adapted, names

    @torch.no_grad()
    def _fill(self, adapted: nn.Module) -> None:
        for name, parameter in adapted.named_parameters():
            if name in self._names and not parameter.is_meta:
                parameter.copy_(self._value(name, parameter.shape))

    def _value(self, name: str, shape: Sequence[int]) -> Tensor:
        kept = self._state.tensor(name, PARAMETER)
        if tuple(kept.shape) != tuple(shape):
            raise ModelError(
                f"the checkpoint's {name} has shape {tuple(kept.shape)}, this run's "
                f"{tuple(shape)}; resume with the adapter that the checkpoint was made with"
            )
        return kept


def gather_all(
    own: Mapping[str, Tensor], contents: Contents, rank: int, collectives: Collectives
) -> Iterator[tuple[str, Tensor]]:
    """(``RANK/NAME``, tensor on the host) of all ranks, one after another, for rank 0, which writes
    for all: machines need not share files. Every rank goes through it to the end.

    Args:
        own: what this rank has.
        contents: of each rank, the same on all of them.
    """
    import torch.distributed as dist

    for source, entries in enumerate(contents):
        for name, dtype, shape in entries if rank in (0, source) else ():
            if rank == source:
                tensor = own[name].detach().to(HOST_DEVICE).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if source and tensor.numel():
                move = dist.send if rank else dist.recv
                as_bytes = tensor.reshape(-1).view(torch.uint8)
                move(as_bytes, 0 if rank else source, group=collectives.control_group)
            if rank == 0:
                yield f"{source}/{name}", tensor


def _named_tensors(
    exported: Exported, parameters: dict[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """``KEY/NAME`` and the tensor; collects parameters, where they are wanted."""
    for name, key, tensor in exported:
        assert tensor is not None, "rank 0 writes the checkpoint, so it must receive the tensors"
        if parameters is not None and key == PARAMETER:
            parameters[name] = tensor
        yield f"{key}/{name}", tensor


def _write_shards(
    folder: Path, name: str, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> None:
    waiting: dict[str, Tensor] = {}
    size, number = 0, 1
    for key, tensor in tensors:
        if waiting and size + tensor.nbytes > shard_bytes:
            _save(waiting, folder / f"{name}-{number:05}.safetensors")
            waiting, size, number = {}, 0, number + 1
        waiting[key] = tensor.contiguous()
        size += tensor.nbytes
    if waiting:
        _save(waiting, folder / f"{name}-{number:05}.safetensors")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=HOST_DEVICE) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise AnygaugeError(f"{path} cannot be read: {error}") from error


def _seal(folder: Path) -> int:
    """Write the manifest and flush everything to disk; returns the size in bytes."""
    files = {}
    mode = usual_mode(folder)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        path.chmod(mode)
        flush(path)
        files[str(path.relative_to(folder))] = {
            "bytes": path.stat().st_size,
            "sha256": digest_of(path),
        }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n")
    flush(manifest)
    for path in folder.rglob("*"):
        if path.is_dir():
            flush(path)
    flush(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
