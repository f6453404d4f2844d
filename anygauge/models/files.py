"""Weights on disk, read one tensor at a time: safetensors, or PyTorch's own files mapped lazily."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anygauge.interface import HOST_DEVICE, ModelError
from anygauge.util.files import open_regular, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


class WeightFiles:
    """The tensors of a model folder, by name."""

    def __init__(self, folder: Path, *, look_inside: bool = True) -> None:
        """Find the files; reads only names.

        Args:
            look_inside: a single file's tensors are listed; otherwise it stands under "".

        Raises:
            ModelError: the folder holds no weights that can be read.
        """
        self.folder = folder
        self._open_files: dict[str, Any] = {}
        self._look_inside = look_inside
        self._file_of = self._index()

    def _index(self) -> Mapping[str, str]:
        for single in SINGLE_FILES:
            index = self.folder / f"{single}.index.json"
            if index.exists():
                return _files_beside(index)
            if (self.folder / single).is_file():
                if not self._look_inside:
                    return {"": single}
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
                    handle = _pickled(path)
            except ModelError:
                raise
            except Exception as error:
                if is_pickle_refused(error):
                    raise ModelError(f"{path} {NOT_PLAIN}") from None
                raise ModelError(
                    f"{path} cannot be read as weights ({error}); is it whole? Compare its size "
                    "with the original's, or fetch it again"
                ) from error
            self._open_files[file] = handle
        return self._open_files[file]

    @property
    def index(self) -> Mapping[str, str]:
        """Tensor name -> name of its file in the folder."""
        return self._file_of

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, on the host, in the type it has on disk."""
        return self.lazily(name).read((...,))

    def lazily(self, name: str) -> LazyTensor:
        """One tensor of which parts can be read."""
        handle = self._handle(self._file_of[name])
        if isinstance(handle, Mapping):
            tensor = handle[name]
            return LazyTensor(tensor, tuple(tensor.shape), tensor.dtype)
        part = handle.get_slice(name)
        return LazyTensor(
            part, tuple(part.get_shape()), _type_of(part.get_dtype(), self._file_of[name])
        )


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor on disk, in a file that is mapped or of which slices are read."""

    source: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, part: tuple[Any, ...]) -> Tensor:
        """A part of it, on the host, in the type it has on disk; nothing else is read."""
        # A scalar has no part, and safetensors refuses to be asked for one.
        return cast("Tensor", self.source[part] if self.shape else self.source[()])


_TYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
"""What safetensors and torch call a type."""


def _type_of(name: str, file: str) -> torch.dtype:
    import torch

    if name not in _TYPES:
        raise ModelError(
            f"{file}: tensors of type {name} cannot be read; readable types are {', '.join(_TYPES)}"
        )
    return cast("torch.dtype", getattr(torch, _TYPES[name]))


def check_weights(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Read what weights a folder says that it has, and refuse files that cannot be whole.

    Reads headers, and of PyTorch's own files the first and last bytes, without torch.

    Returns:
        Tensor name -> shape; None where PyTorch's own files do not tell without being loaded.

    Raises:
        ModelError: there are no weights, the index does not fit, or a file was cut.
    """
    file_of = WeightFiles(folder, look_inside=False).index
    files = dict.fromkeys(file_of.values())
    for file in files:
        if not file.endswith(".safetensors"):
            _check_archive(folder / file)
    if not all(file.endswith(".safetensors") for file in files):
        return None
    inside = {file: read_header(folder / file) for file in files}
    absent = sorted(name for name, file in file_of.items() if name and name not in inside[file])
    if absent:
        raise ModelError(
            f"{folder}: its index names {len(absent)} tensors that its files do not have, first "
            f"{absent[0]!r} in {file_of[absent[0]]}; fetch the model again"
        )
    return {name: shape for shapes in inside.values() for name, shape in shapes.items()}


_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


_POINTER = b"version https://git-lfs"
"""How the text begins that Git LFS keeps in a file's place: its specification, "The Pointer"."""
_IS_POINTER = "it is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file; its layout is in the library's README, "Format".

    Raises:
        ModelError: it is not such a file, or was cut.
    """
    try:
        with open_regular(path) as file:
            first = file.read(8)
            if first == _POINTER[:8]:
                raise ValueError(_IS_POINTER)
            length = int.from_bytes(first, "little")
            if not 0 < length <= _LONGEST_HEADER:
                raise ValueError(f"its header would have {length:,} bytes")
            fields = dict(json.loads(file.read(length)))
            fields.pop("__metadata__", None)
            shapes = {name: tuple(map(int, one["shape"])) for name, one in fields.items()}
            end = (
                8
                + length
                + max((int(one["data_offsets"][1]) for one in fields.values()), default=0)
            )
            there = path.stat().st_size
            if there != end:
                raise ValueError(f"it has {there:,} bytes, but its header needs {end:,}")
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read as weights ({error}); is it whole? Compare its size "
            "with the original's, or fetch it again"
        ) from None
    return shapes


def check_shape(folder: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a tensor that does not have its parameter's shape.

    Raises:
        ModelError: names both shapes.
    """
    if found != expected:
        raise ModelError(
            f"{folder}: tensor {name} has shape {found}, but config.json needs {expected}"
        )


NOT_PLAIN = (
    "does not hold plain weights only: loading it would run code that is stored in it, which "
    "anygauge never does. Get the model's .safetensors, or ask the file's author to convert it "
    "(transformers' save_pretrained writes safetensors)"
)


def is_pickle_refused(error: BaseException) -> bool:
    """Whether torch refused a pickle for what is in it, however deep a library wrapped that.

    torch's own text must not reach a user: it advises to load the file without the check.
    """
    return any(isinstance(each, pickle.UnpicklingError) for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [one for one in (each.__cause__, each.__context__) if one is not None]


def _pickled(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file of torch's own."""
    import torch

    _check_archive(path)
    handle = torch.load(path, map_location=HOST_DEVICE, mmap=True, weights_only=True)
    if not isinstance(handle, dict):
        raise ModelError(f"{path} holds a {type(handle).__name__}; expected tensors by name")
    for name, value in handle.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ModelError(f"{path} holds a {kind} under {name!r}; expected tensors by name")
    return handle


def _check_archive(path: Path) -> None:
    """Refuse a file of torch's own that is not a whole archive, by its first and last bytes.

    Raises:
        ModelError: says what it is instead.
    """
    try:
        with open_regular(path) as file:
            first = file.read(len(_POINTER))
            if zipfile.is_zipfile(file):
                return
    except OSError as error:
        raise ModelError(f"{path} cannot be read as weights: {error.strerror}") from None
    what = "it is not an archive as torch has written it since 1.6"
    if first == _POINTER:
        what = _IS_POINTER
    elif first.startswith(b"PK"):
        what = "it was cut, as its end is missing"
    elif first.startswith(pickle.PROTO):
        what += ", but of an older torch (torch.load and torch.save of a newer one convert it)"
    raise ModelError(
        f"{path} cannot be read as weights: {what}. Compare its size with the original's, or get "
        "the model's .safetensors"
    )


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor that holds an infinity or what is not a number."""
    # In float32, because torch cannot tell for numbers of 8 bits.
    return next((name for name, t in tensors if not t.float().isfinite().all()), None)


_JSON = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON file in the folder of a model or an adapter.

    Raises:
        ModelError: it cannot be read as JSON, or holds something else than an object.
    """
    try:
        fields = read_json(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"{path} cannot be read as JSON ({reason}); fetch it again, or name another folder"
        ) from None
    if not isinstance(fields, dict):
        raise ModelError(
            f"{path} holds a {type(fields).__name__}, not an object of fields; fetch it again"
        )
    return fields


def check_folder(folder: Path) -> None:
    """Refuse files of a stranger's folder that a library would read for ever, or not survive.

    Raises:
        ModelError: names the file.
    """
    for path in folder.iterdir():
        if path.name in _JSON:
            read_fields(path)
        elif path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} cannot be read: it is not a regular file; remove it")


def weight_map(index: Path) -> Mapping[str, str]:
    """Tensor -> name of its file, as an index tells.

    Raises:
        ModelError: it is not an index, or names something else than files beside it.
    """
    try:
        found = read_json(index)["weight_map"]
        files = {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index} is not an index of weights ({type(error).__name__}: {str(error)[:100]}); "
            "expected a 'weight_map' from tensor names to files: fetch it again"
        ) from None
    for file in set(files.values()):
        if Path(file).name != file:
            raise _not_beside(index, file)
    return files


def _files_beside(index: Path) -> Mapping[str, str]:
    files = weight_map(index)
    for file in sorted(set(files.values())):
        if not (index.parent / file).is_file():
            raise _not_beside(index, file)
    return files


def _not_beside(index: Path, file: str) -> ModelError:
    return ModelError(
        f"{index} names {file!r}, but its folder has no such file; fetch the model again"
    )
