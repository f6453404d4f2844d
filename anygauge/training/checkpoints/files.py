"""One checkpoint on disk: a folder that is whole, or is found not to be.

====================  =============================================================================
``checkpoint.json``   step, counters, what the run must have in common with one that goes on from
                      here, and what the metrics had come to
``state-*``           safetensors: ``KEY/NAME`` -> whole float32 tensor; KEY is ``parameter`` or a
                      key of the optimizer's state
``rng.safetensors``   ``RANK/NAME`` -> state of a random number generator, bytes
``adapter/``          with an adapter: the same weights in peft's form, ready to be used
``manifest.json``     size and SHA-256 of every other file; written last
====================  =============================================================================

The folder is written under a name that begins with a dot and renamed when all is on disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from anygauge.interface import HOST_DEVICE, AnygaugeError
from anygauge.interface.strategy import PARAMETER, Counters
from anygauge.training.checkpoints.sound import (
    FORMAT,
    MANIFEST,
    RECORD,
    RNG,
    digest_of,
    read_record,
    state_files,
)
from anygauge.util.files import flush, usual_mode

ADAPTER = "adapter"
SHARD_BYTES = 2 * 2**30
"""Host memory that writing takes: tensors are collected up to this size, then written."""

Exported = Iterator[tuple[str, str, Tensor | None]]


def write_checkpoint(
    folder: Path,
    exported: Exported,
    record: Mapping[str, Any],
    rng: Sequence[Mapping[str, Tensor]],
    *,
    export_adapter: Callable[[Path, Mapping[str, Tensor]], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a checkpoint; returns its size in bytes. For rank 0.

    Args:
        exported: (parameter name, key, whole tensor), read to its end.
        record: goes to ``checkpoint.json``.
        rng: for each rank, name -> state of a generator.
        export_adapter: given a folder and the trained parameters, writes them in peft's form.

    Raises:
        AnygaugeError: it cannot be written; nothing of it is left behind.
    """
    from safetensors import SafetensorError

    temporary = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        parameters = _write_tensors(temporary, exported, shard_bytes, export_adapter is not None)
        if export_adapter is not None:
            export_adapter(temporary / ADAPTER, parameters)
        states = {f"{rank}/{name}": s for rank, own in enumerate(rng) for name, s in own.items()}
        _save(states, temporary / RNG)
        text = json.dumps(finite({"format": FORMAT, **record}), indent=2, allow_nan=False)
        (temporary / RECORD).write_text(text + "\n")
        size = _seal(temporary)
        _put_in_place(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise AnygaugeError(
            f"the checkpoint {folder} cannot be written: {error}; make room, or give another "
            "folder with --output. Earlier checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give a written checkpoint its name; one that had it is removed after that, not before."""
    replaced = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    try:
        temporary.rename(folder)
    except BaseException:
        if replaced.exists():
            replaced.rename(folder)
        raise
    flush(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def finite(value: Any) -> Any:
    """Values as JSON has them: inf and nan become null."""
    if isinstance(value, Mapping):
        return {name: finite(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        self._files = state_files(folder)
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

    def rng(self, rank: int) -> dict[str, Tensor]:
        """One rank's generator states; empty where there was no such rank."""
        prefix = f"{rank}/"
        with _open(self.folder / RNG) as file:
            return {
                key.removeprefix(prefix): file.get_tensor(key)
                for key in file.keys()  # noqa: SIM118 - no mapping
                if key.startswith(prefix)
            }


def _write_tensors(
    folder: Path, exported: Exported, shard_bytes: int, collect: bool
) -> dict[str, Tensor]:
    """Write all tensors in shards; returns the parameters among them if they are to be kept."""
    waiting: dict[str, Tensor] = {}
    parameters: dict[str, Tensor] = {}
    size = number = 0
    for name, key, tensor in exported:
        assert tensor is not None, "rank 0 writes the checkpoint, so it must get the tensors"
        if waiting and size + tensor.nbytes > shard_bytes:
            number += 1
            _save(waiting, folder / f"state-{number:05}.safetensors")
            waiting, size = {}, 0
        waiting[f"{key}/{name}"] = tensor.contiguous()
        size += tensor.nbytes
        if collect and key == PARAMETER:
            parameters[name] = tensor
    _save(waiting, folder / f"state-{number + 1:05}.safetensors")
    return parameters


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
    """Write the manifest, and see to it that everything is on disk; returns the bytes."""
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
