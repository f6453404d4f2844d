"""Host memory while values are read: counted, for converted weights and others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.models.model_files import LazyTensor
from anygauge.strategies.shared.materialize import decoder_layers, materialize
from tests.helpers.build import model_factory
from tests.helpers.host_bytes import HostBytes
from tests.models.families import as_fp8_blocks, as_mxfp4, of_family

pytest.importorskip("transformers.core_model_loading", reason="since transformers 5")

WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 64, "intermediate_size": 256}
MANY_EXPERTS: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 16},
    "qwen3_moe": {"num_experts": 32, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 16},
    "deepseek_v3": {"n_routed_experts": 16},
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostBytes]:
    """Counts all that is read from files and made of it."""
    counter = HostBytes()
    usual = LazyTensor.read

    def read(lazy: LazyTensor, part: tuple[Any, ...]) -> torch.Tensor:
        value = usual(lazy, part)
        counter.saw(value)
        return value

    monkeypatch.setattr(LazyTensor, "read", read)
    yield counter


@pytest.mark.parametrize(
    ("family", "as_published"),
    [
        ("mixtral", None),
        ("qwen3_moe", None),
        ("gpt_oss", None),
        ("gpt_oss", as_mxfp4),
        ("deepseek_v3", None),
        ("deepseek_v3", as_fp8_blocks),
    ],
)
def test_at_most_one_layer_is_in_the_hosts_memory(
    family: str, as_published: Any, host: HostBytes, tmp_path: Path
) -> None:
    """Of a model that goes to a device, a layer at a time."""
    of_family(family, **WIDE, **MANY_EXPERTS[family]).save_pretrained(tmp_path)
    if as_published is not None:
        as_published(tmp_path)
    made = model_factory(tmp_path)
    model = made.skeleton()
    layer = max(4 * sum(p.numel() for p in each.parameters()) for each in decoder_layers(model))
    made.weights()
    with host:
        # Nothing of the host's stays: what was read is there until it was moved.
        materialize(model, made, device=torch.device("meta"), dtype=torch.float32)
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert layer < whole / 3
    assert 0.2 * layer < host.peak <= layer, f"{host.peak / layer:.2f} layers"
