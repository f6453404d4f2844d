"""Results on disk: adapters in peft's layout, whole models in that of transformers.

A result's folder is complete and verified, or absent: it is written beside its place and renamed at
the end. One that failed its verification is kept, under a name that says so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.config.schema import ModelSection
from anygauge.interface import ResultError
from anygauge.models.adapter import ADAPTER_NAME
from anygauge.models.factors import relative_to_original_base, scale_factors, with_plain_scale
from anygauge.models.quantization import quantization, write_record
from anygauge.models.result_files import ResultFiles
from anygauge.models.verify import UNVERIFIED, VerificationError
from anygauge.models.warm_start import CONFIG_FILE, TRAINED_AS, WEIGHTS_FILE
from anygauge.util.files import flush, part_of, usual_mode


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write to; on success it takes the place of `folder`, whose parent is there.

    Raises:
        VerificationError: as raised within; what was written is then kept as ``NAME-unverified``.
        OSError: the folder cannot be flushed or renamed.
    """
    temporary = part_of(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            flush(file)
        _take_place(temporary, folder)
    except VerificationError:
        _take_place(temporary, folder.with_name(folder.name + UNVERIFIED))
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_place(temporary: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def adapter_state(
    model: Any, trained: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """The trained tensors under the names that peft stores.

    Args:
        shapes: the whole shape of each trained parameter.

    Raises:
        ResultError: a tensor is missing or has lost its shape, which is how sharded parameters
            show when they are saved wrongly.
    """
    from peft import get_peft_model_state_dict

    check_whole(trained, shapes)
    state = get_peft_model_state_dict(
        model, state_dict=dict(trained), adapter_name=ADAPTER_NAME, save_embedding_layers=False
    )
    if len(state) != len(shapes):
        raise ResultError(
            f"{len(shapes)} tensors were trained, but peft would store {len(state)}; nothing was "
            "written"
        )
    return {name: tensor.contiguous() for name, tensor in state.items()}


def check_whole(trained: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse to save anything but every trained tensor, whole and finite.

    Raises:
        ResultError: names the first tensor that is not.
    """
    if not shapes:
        raise ResultError("no tensor was trained, so nothing was written")
    for name, shape in shapes.items():
        tensor = trained.get(name)
        if tensor is None or tuple(tensor.shape) != shape or not tensor.numel():
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise ResultError(
                f"the trained tensor {name} {found}, expected shape {shape}; nothing was written"
            )
        if not tensor.isfinite().all():
            raise ResultError(
                f"the trained tensor {name} holds values that are not numbers; nothing was written"
            )


def save_adapter(
    model: Any,
    trained: Mapping[str, Tensor],
    folder: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    base: ModelSection,
    files: ResultFiles | None = None,
    dtype: str = "float32",
    first: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``, which is read back, and what
    stands beside them.

    Args:
        trained: parameter name -> whole float32 tensor.
        shapes: the whole shape of each trained parameter.
        base: what the adapter was trained on; its name is stored, for loading by peft alone, and
            in a file of ours how it was quantized.
        files: what stands beside them; None for nothing.
        dtype: of the base's weights in training.
        first: of factors that were taken out of the base's weights, what they were then.

    Raises:
        ResultError: there is nothing to write, or what was read back is not what was written.
    """
    from safetensors.torch import load_file, save_file

    state = adapter_state(model, trained, shapes)
    config = model.peft_config[ADAPTER_NAME]
    if first:
        first = adapter_state(model, first, shapes)
        state, config = relative_to_original_base(state, first, config)
    config, trained_as = with_plain_scale(config)
    metadata = {"format": "pt"}
    if trained_as:
        metadata[TRAINED_AS] = json.dumps(trained_as)
        for name, factor in scale_factors(model, ADAPTER_NAME).items():
            state[name] = state[name] * factor
    folder.mkdir(exist_ok=True)
    path = folder / WEIGHTS_FILE
    save_file(state, path, metadata=metadata)
    path.chmod(usual_mode(folder))
    back = load_file(path)
    if back.keys() != state.keys() or any(
        not torch.equal(back[name], tensor) for name, tensor in state.items()
    ):
        raise ResultError(
            f"{path}: the file holds other values than were written; is the disk full?"
        )
    config.base_model_name_or_path = base.name
    config.revision = base.revision
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        fields = json.loads((Path(temporary) / CONFIG_FILE).read_text(encoding="utf-8"))
    if isinstance(fields["target_modules"], list):
        fields["target_modules"].sort()  # peft holds a set: its order is chance
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    if files is not None:
        files.write(folder)
    asked = quantization(base)
    if asked is not None:
        write_record(folder, asked, dtype)


def save_model(
    state: Mapping[str, Tensor],
    config: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    files: ResultFiles,
) -> None:
    """Write weights, and what stands beside them, to `folder`.

    Args:
        state: tensors as they are to be stored, by name.
        config: of the model, as it was trained or merged.
        dtype: what the configuration calls the type of the weights.

    Raises:
        ResultError: there is nothing to write.
    """
    from huggingface_hub import save_torch_state_dict

    if not state or any(tensor.numel() == 0 for tensor in state.values()):
        raise ResultError(f"{folder}: the model to save is empty; nothing was written")
    folder.mkdir(exist_ok=True)
    save_torch_state_dict(
        {name: tensor.contiguous() for name, tensor in state.items()},
        folder,
        metadata={"format": "pt"},
    )
    mode = usual_mode(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)
    files.write(folder, config, dtype)
