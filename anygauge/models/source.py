"""Where a model comes from: its folder or hub name, and its configuration. Imports no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anygauge.config.checks import LAYERS, MAY_BE_ZERO, SIZES
from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.kernels.attention import setting

FILE_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.py", "*.model"]

HUB_ANSWER_S = 5.0
"""The hub must say within this time whether it has a model, or it is called unreachable."""


def local_folder(section: ModelSection) -> Path:
    """The folder of the model's files; fetches them from the hub where `name` is no folder.

    Raises:
        ModelError: there is no such folder or hub model.
    """
    assert section.name is not None
    folder = Path(section.name)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or section.name.startswith("."):
        raise ModelError(f"model.name: no such folder: {folder}")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(section.name, revision=section.revision, allow_patterns=FILE_PATTERNS)
        )
    except Exception as error:
        raise ModelError(
            f"model.name: {section.name!r} is neither a folder here nor a model that the hub "
            f"would give: {str(error).splitlines()[0]}. Check the name, your network and, for a "
            "gated model, HF_TOKEN"
        ) from error


def cached_file(name: str, revision: str | None, *files: str) -> Path | None:
    """The first of a hub repository's files that was fetched before; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    for file in files:
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except ValueError:  # no name that the hub could have
            return None
        if isinstance(found, str):
            return Path(found)
    return None


def ask_hub(name: str, revision: str | None = None) -> None:
    """Ask the hub for a model once, before libraries do who wait minutes for a silent network.

    Does nothing where the hub is switched off (HF_HUB_OFFLINE).

    Raises:
        ModelError: the hub has none of that name, or neither it nor a copy can be reached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    known = cached_file(name, revision, "config.json")
    if constants.HF_HUB_OFFLINE and known is not None:
        return
    here = f"{name!r} is not a folder here (looked at {Path(name).absolute()})"
    valid = "Give a run directory, a model folder, or a name of the hub such as owner/name"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{here}, and HF_HUB_OFFLINE is set, with no copy of a hub model of that name on this "
            f"machine. {valid}"
        )
    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_ANSWER_S)
    except RepositoryNotFoundError:
        raise ModelError(
            f"{here}, nor a model of the hub that can be seen from here. {valid}; for a private "
            "one, log in first (hf auth login)"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(
            f"the hub refuses {name!r}: {str(error).strip().splitlines()[0]}"
        ) from None
    except ValueError as error:
        raise ModelError(f"{here}, nor a name that the hub could have ({error}). {valid}") from None
    except Exception as error:  # which class it is depends on the library below the library
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        copy = "; a copy is on this machine: export HF_HUB_OFFLINE=1 to use it" if known else ""
        raise ModelError(f"{here}, and the hub cannot be reached: {said}{copy}. {valid}") from None


def load_config(section: ModelSection) -> Any:
    """The architecture's configuration, as transformers has it.

    Raises:
        ModelError: the configuration cannot be read or made, or counts something below 1.
    """
    from transformers import AutoConfig

    field = "model.config" if section.config is not None else f"model.name: {section.name}"
    try:
        if section.config is not None:
            fields = dict(section.config)
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            assert section.name is not None
            here = Path(section.name)
            if here.is_absolute() and not here.is_dir():
                raise ModelError(f"model.name: no such folder: {here}")
            config = AutoConfig.from_pretrained(
                section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
            )
    except ModelError:
        raise
    except Exception as error:
        check_sizes(SimpleNamespace(**_as_written(section)), field)
        raise ModelError(f"{field}: {_said(error)}") from error
    check_sizes(config, field)
    return config


def _as_written(section: ModelSection) -> dict[str, Any]:
    """The fields of a configuration that the library could not make: it may have computed with a
    size that is none."""
    if section.config is not None:
        return dict(section.config)
    from transformers import PretrainedConfig

    with contextlib.suppress(Exception):
        written, _ = PretrainedConfig.get_config_dict(section.name, revision=section.revision)
        return dict(written)
    return {}


def _said(error: Exception) -> str:
    """The reason of an error of the library, whose first line may only name its validator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def check_sizes(config: Any, where: str) -> None:
    """Refuse a configuration whose sizes are no counts; the library does not look at all of them.

    Raises:
        ModelError: names field and value.
    """
    for name in (*LAYERS, *SIZES):
        value = setting(config, name)
        if value is None or isinstance(value, list | tuple | dict):
            continue  # some architectures count by layer
        if isinstance(getattr(type(config), name, None), property):
            continue  # the architecture answers for it: -1 are positions without end
        least = 0 if name in MAY_BE_ZERO else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(
                f"{where}: {name} is {value!r}; it must be a whole number from {least}"
            )


def check_positions(config: Any, max_length: int) -> None:
    """Refuse rows longer than the positions that the model was made for.

    Raises:
        ModelError: names both.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions and 0 < positions < max_length:
        raise ModelError(
            f"data.max_length is {max_length}, but the model was made for {positions} "
            f"positions; set it to at most {positions}"
        )
