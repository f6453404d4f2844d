"""Files of a model's folder: weights, read one tensor at a time, and the JSON beside them.

Weights are safetensors, or PyTorch's own files mapped lazily. Whoever made a folder may be a
stranger: what is broken is refused in words of ours. Imports torch only to read weights.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from anygauge.interface import HOST_DEVICE, ModelError
from anygauge.util.files import open_regular, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")

Shapes = dict[str, tuple[int, ...]]
"""Tensor name -> shape."""


class WeightFiles:
    """The tensors of a model folder, by name.

    Attributes:
        index: tensor name -> name of its file in the folder.

    Raises:
        ModelError: the folder holds no weights that can be read; no tensor is read yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open_files: dict[str, Any] = {}
        self.index = _file_of(folder)
        if single := self.index.get(""):
            self.index = dict.fromkeys(self._handle(single).keys(), single)

    def _handle(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.folder / file
            self._open_files[file] = (
                _open(path, "pt") if file.endswith(".safetensors") else _load_pickled(path)
            )
        return self._open_files[file]

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.index)

    def read(self, name: str) -> Tensor:
        """One tensor, on the host, in the type it has on disk."""
        return self.lazy_tensor(name).read((...,))

    def lazy_tensor(self, name: str) -> LazyTensor:
        """One tensor of which parts can be read."""
        file = self.index[name]
        handle = self._handle(file)
        if isinstance(handle, Mapping):
            tensor = handle[name]
            return LazyTensor(tensor, tuple(tensor.shape), tensor.dtype)
        with _explain_errors(self.folder / file):
            part = handle.get_slice(name)
            shape = tuple(part.get_shape())
            return LazyTensor(part, shape, (part[:0] if shape else part[()]).dtype)


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


class LazyTensors(Mapping[str, "Tensor"]):
    """Tensors by name, each made at each look and not kept, so that one at a time is in memory.

    Args:
        makers: name -> what makes its tensor.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, made now."""
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        """Names, in their order."""
        return iter(self._makers)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._makers)


def check_weights(folder: Path) -> Shapes | None:
    """Read which weights a folder lists, and refuse files that cannot be whole.

    Reads headers, and of PyTorch's own files the first and last bytes, without torch.

    Returns:
        None where PyTorch's own files do not tell without being loaded.

    Raises:
        ModelError: there are no weights, the index does not fit, or a file was cut.
    """
    file_of = _file_of(folder)
    files = dict.fromkeys(file_of.values())
    for file in files:
        if not file.endswith(".safetensors"):
            with _explain_errors(folder / file):
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


_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
"""Their decoders differ in the biases and norms of attention alone."""


def surely_fit(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> bool:
    """Whether there are just the tensors that ``config.json`` asks for; False: not known.

    Without torch, whose import would be most of a check's cost: it is known for the plainest
    architectures, and of any other only the model itself tells, built without weights.

    Args:
        shapes: tensor name -> shape; None where they are not known.
    """
    if shapes is None:
        return False
    try:
        fields = read_json(folder / "config.json")
        expected = _expected_shapes(fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return False  # whoever makes the configuration says what is wrong
    return expected == dict(shapes)


def _expected_shapes(fields: Mapping[str, Any]) -> Shapes | None:
    kind = fields["model_type"]
    layers = fields["num_hidden_layers"]
    other = ("attention_bias", "mlp_bias", "quantization_config")
    if kind not in _LLAMA_LIKE or layers > 1000 or any(fields.get(name) for name in other):
        return None
    hidden, inner, heads = (
        fields[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head = fields.get("head_dim") or hidden // heads
    query, key = heads * head, fields["num_key_value_heads"] * head
    layer: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if kind == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": (key,) for name in "kv"}
        layer["self_attn.q_proj.bias"] = (query,)
    if kind == "qwen3":
        layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    table = (fields["vocab_size"], hidden)
    found: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not fields.get("tie_word_embeddings"):
        found["lm_head.weight"] = table
    for number in range(layers):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found


def read_header(path: Path) -> Shapes:
    """Names and shapes in a safetensors file, without torch.

    Raises:
        ModelError: it is not such a file, or was cut.
    """
    with _open(path, "np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


_POINTER = b"version https://git-lfs"
"""How the text begins that Git LFS keeps in a file's place: its specification, "The Pointer"."""
_IS_POINTER = "it is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"


def _open(path: Path, framework: str) -> Any:
    """A safetensors file; the library holds its header against its size."""
    from safetensors import safe_open

    with _explain_errors(path):
        with open_regular(path) as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ValueError(_IS_POINTER)
        return safe_open(path, framework=framework, device=HOST_DEVICE)


def _load_pickled(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file of torch's own."""
    import torch

    with _explain_errors(path):
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
        ValueError: says what it is instead.
    """
    with open_regular(path) as file:
        first = file.read(len(_POINTER))
        if zipfile.is_zipfile(file):
            return
    if first == _POINTER:
        raise ValueError(_IS_POINTER)
    if first.startswith(b"PK"):
        raise ValueError("it was cut, as its end is missing")
    what = "it is not an archive as torch has written it since 1.6"
    if first.startswith(pickle.PROTO):
        what += ", but of an older torch (torch.load and torch.save of a newer one convert it)"
    raise ValueError(f"{what}; get the model's .safetensors")


@contextlib.contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Say of a file that cannot be read what to do.

    Raises:
        ModelError: instead of any error.
    """
    try:
        yield
    except Exception as error:
        if is_pickle_refused(error):
            raise ModelError(f"{path} {NOT_PLAIN}") from None
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"{path} cannot be read as weights ({reason}); is it whole? Compare its size "
            "with the original's, or fetch it again"
        ) from error


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
    return any(isinstance(each, pickle.UnpicklingError) for each in error_chain(error))


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those below it that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
    """Read an index: tensor -> name of its file.

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


def _file_of(folder: Path) -> Mapping[str, str]:
    """Tensor -> name of its file; of a folder with a single file, which is not opened, "" -> it."""
    for single in SINGLE_FILES:
        index = folder / f"{single}.index.json"
        if index.exists():
            files = weight_map(index)
            for file in sorted(set(files.values())):
                if not (folder / file).is_file():
                    raise _not_beside(index, file)
            return files
        if (folder / single).is_file():
            return {"": single}
    raise ModelError(
        f"{folder} holds no weights: looked for {', '.join(SINGLE_FILES)} and their .index.json; "
        "found " + ", ".join(sorted(path.name for path in folder.iterdir())[:12])
    )


def _not_beside(index: Path, file: str) -> ModelError:
    return ModelError(
        f"{index} names {file!r}, but its folder has no such file; fetch the model again"
    )
