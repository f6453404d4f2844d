"""Weights on disk, read one tensor at a time: safetensors, or PyTorch's own files mapped lazily."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.interface import HOST_DEVICE, ModelError

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


class WeightFiles:
    """The tensors of a model folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Find the files; reads only names.

        Raises:
            ModelError: the folder holds no weights that can be read.
        """
        self.folder = folder
        self._open_files: dict[str, Any] = {}
        self._file_of = self._index()

    def _index(self) -> Mapping[str, str]:
        for single in SINGLE_FILES:
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                return dict(json.loads(index.read_text())["weight_map"])
            if (self.folder / single).is_file():
                return dict.fromkeys(self._names_in(single), single)
        raise ModelError(
            f"{self.folder} holds no weights: looked for {', '.join(SINGLE_FILES)} and their "
            ".index.json; found " + (", ".join(sorted(p.name for p in self.folder.iterdir())[:12]))
        )

    def _names_in(self, file: str) -> list[str]:
        handle = self._handle(file)
        return list(handle.keys())

    def _handle(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.folder / file
            try:
                if file.endswith(".safetensors"):
                    from safetensors import safe_open

                    handle: Any = safe_open(path, framework="pt", device=HOST_DEVICE)
                else:
                    handle = torch.load(
                        path, map_location=HOST_DEVICE, mmap=True, weights_only=True
                    )
            except Exception as error:
                raise ModelError(
                    f"{path} cannot be read as weights ({error}); is it whole? Compare its size "
                    "with the original's, or fetch it again"
                ) from error
            self._open_files[file] = handle
        return self._open_files[file]

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, on the host, in the type it has on disk."""
        handle = self._handle(self._file_of[name])
        tensor = handle[name] if isinstance(handle, Mapping) else handle.get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor


def match_names(model: torch.nn.Module, files: WeightFiles) -> dict[str, str]:
    """Parameter name -> tensor name in the files.

    A checkpoint of the bare model lacks the prefix that the model with its output layer has.

    Raises:
        ModelError: a parameter has no tensor; names the architecture's conversion if it needs one.
    """
    there = files.names()
    prefix = getattr(model, "base_model_prefix", "") + "."
    found: dict[str, str] = {}
    missing: list[str] = []
    for name, _ in model.named_parameters():
        for candidate in (name, name.removeprefix(prefix)):
            if candidate in there:
                found[name] = candidate
                break
        else:
            missing.append(name)
    if missing:
        unused = sorted(there - set(found.values()))
        raise ModelError(
            f"{files.folder}: {len(missing)} of the model's {len(found) + len(missing)} parameters "
            f"have no tensor of that name, first {missing[0]!r}; tensors not used: "
            + (", ".join(repr(n) for n in unused[:3]) or "none")
            + ". If config.json is of this model, its weights are stored in another layout, which "
            "anygauge cannot convert yet: load and save it once with transformers' "
            "save_pretrained(..., save_original_format=False)"
        )
    return found
