"""Finds a model: its folder or hub name, and its configuration. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anygauge.config.schema import ModelSection
from anygauge.interface import Collectives, ModelError
from anygauge.kernels.attention import config_value
from anygauge.models.hub import CONFIG, download_requests, names_hub, needed_copy
from anygauge.models.model_files import check_folder, read_fields

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head", "n_positions", "n_inner", "d_model"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
"""Fields of a configuration other than its layers that count something."""

_MAY_BE_ZERO = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
"""0 in models of a family with experts that have none themselves."""


def local_folder(section: ModelSection) -> Path:
    """The folder of the model's files: `name`, or this machine's copy of the hub's; asks no
    network.

    Raises:
        ModelError: there is no such folder, and no copy; or it is a run's, or an adapter's.
    """
    assert section.name is not None
    folder = Path(section.name)
    if folder.is_dir():
        _refuse_run(folder)
        return folder
    if not names_hub(section.name):
        raise ModelError(f"model.name: no such folder: {folder}")
    return needed_copy("model.name", section.name, section.revision)


def check_one_commit(section: ModelSection, collectives: Collectives) -> None:
    """Refuse machines whose copies of a repository of the hub differ; every rank calls it.

    A branch moves on, and a machine that does not reach the hub takes the copy that it has.

    Raises:
        ModelError: names two ranks with what they have, and what to do.
    """
    mine = [
        f"{each} in {needed_copy(each.field, each.name, each.revision).name}"
        for each in download_requests(section)
    ]
    first, *others = collectives.gather_objects(mine)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise ModelError(
                "model: machines have different copies of what the hub has: rank 0 has "
                f"{', '.join(first)}; rank {rank} has {', '.join(theirs)}. Let each machine reach "
                "the hub, or set model.revision to one commit"
            )


def _refuse_run(folder: Path) -> None:
    """Refuse a run's folder, or an adapter's, in place of a model; name the likely one."""
    if (folder / CONFIG).exists():
        return
    if (folder / "model" / CONFIG).is_file():
        raise ModelError(f"model.name: {folder} is a run's folder; its model is {folder / 'model'}")
    for adapter in (folder, folder / "adapter"):
        if (adapter / "adapter_config.json").is_file():
            raise ModelError(
                f"model.name: {folder} has an adapter, not a model. To train it on, name its base "
                f"here and {adapter} in adapter.start_from; for a whole model: anygauge merge "
                f"{adapter} --output merged"
            )


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
            folder = local_folder(section)
            read_fields(folder / CONFIG)
            check_folder(folder)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
            config._name_or_path = section.name  # not where its copy lies
        config._attn_implementation = None  # of whoever saved it: here, each use chooses its own
    except ModelError:
        raise
    except Exception as error:
        written = _as_written(section)
        check_sizes(SimpleNamespace(**written), field)
        _check_type(written.get("model_type"), field)
        raise ModelError(f"{field}: {_error_reason(error)}") from error
    check_sizes(config, field)
    return config


def _as_written(section: ModelSection) -> dict[str, Any]:
    """The fields of a configuration that the library could not make: it may have computed with a
    size that is none."""
    if section.config is not None:
        return dict(section.config)
    from transformers import PretrainedConfig

    with contextlib.suppress(Exception):
        written, _ = PretrainedConfig.get_config_dict(local_folder(section))
        return dict(written)
    return {}


def _error_reason(error: Exception) -> str:
    """The reason of an error of the library, whose first line may only name its validator."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _check_type(name: Any, where: str) -> None:
    """Raises: ModelError: the library knows no such architecture; names those spelt alike."""
    import difflib

    from transformers import CONFIG_MAPPING, __version__

    known = list(CONFIG_MAPPING)
    if name in known:
        return
    if name is None:
        raise ModelError(
            f"{where}: its {CONFIG} has no model_type, such as llama: it is not a language model's "
            "configuration. Name the folder that has one"
        )
    near = difflib.get_close_matches(str(name).lower(), known, n=3)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ModelError(
        f"{where}: model type `{name}` is not known to transformers {__version__}{meant} A newer "
        "transformers may know it; a model that ships its own code needs model.trust_remote_code: "
        "true"
    )


def check_written(section: ModelSection, config: Any) -> None:
    """Refuse a configuration that leaves the model's size to the library's defaults.

    Args:
        config: that `load_config` made of it.

    Raises:
        ModelError: names the fields.
    """
    written = _as_written(section)
    text = config.get_text_config()
    if section.trust_remote_code or text is not config:
        return  # a configuration inside another one is written without what is usual
    missing = [
        name
        for name in ("hidden_size", LAYERS[0])
        if isinstance(config_value(config, name), int)
        and not isinstance(getattr(type(config), name, None), property)
        and not {name, config.attribute_map.get(name)} & written.keys()
    ]
    if missing:
        one = "model.config" if section.config is not None else f"model.name: {section.name}"
        usual = " and ".join(str(config_value(config, name)) for name in missing)
        raise ModelError(
            f"{one}: does not set {' or '.join(missing)}; transformers would use {usual}, from "
            f"another model. Add {'it' if len(missing) == 1 else 'them'}"
        )


def check_sizes(config: Any, where: str) -> None:
    """Refuse a configuration whose sizes are not counts; the library does not look at all of them.

    Raises:
        ModelError: names field and value.
    """
    for name in (*LAYERS, *_SIZES):
        value = config_value(config, name)
        if value is None or isinstance(value, list | tuple | dict):
            continue  # some architectures count by layer
        if isinstance(getattr(type(config), name, None), property):
            continue  # the architecture answers for it: -1 are positions without end
        least = 0 if name in _MAY_BE_ZERO else 1
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


def quiet_libraries() -> None:
    """Keep the model library's own progress bars and notices, but no errors, off the terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for name in ("torch", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
