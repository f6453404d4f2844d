"""What operations take for themselves is seen in a rehearsal."""

from __future__ import annotations

import pytest
import torch
from anygauge.planning.live import LiveBytes
from anygauge.planning.rehearsal import OpenedUp
from torch import Tensor

from anygauge.config.sections import QuantiseSection
from anygauge.models.quantised import Int8Linear, Nf4Linear, QuantisedLinear


@pytest.mark.parametrize("keepdim", [False, True])
def test_logsumexp_shows_the_copy_that_it_makes(keepdim: bool) -> None:
    values = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    expected = torch.logsumexp(values, 1, keepdim=keepdim)
    with LiveBytes("cpu") as live, OpenedUp():
        found = torch.logsumexp(values, 1, keepdim=keepdim)
        peak = live.take_peak("cpu").total
    torch.testing.assert_close(found, expected)
    assert peak >= values.nbytes


SECTIONS = [
    QuantiseSection(type="nf4"),
    QuantiseSection(type="nf4", double_quantisation=True),
    QuantiseSection(type="int8"),
]


@pytest.mark.parametrize("section", SECTIONS, ids=["nf4", "nf4-double", "int8"])
def test_a_product_with_codes_shows_what_it_decodes(section: QuantiseSection) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 512, bias=False)
    kind = Nf4Linear if section.type == "nf4" else Int8Linear
    layer: QuantisedLinear = kind(plain, section, torch.float32)
    layer.weight = torch.nn.Parameter(layer.encode(plain.weight.detach()), requires_grad=False)
    layer.eval()  # int8 decodes for itself while it trains
    values = torch.randn(16, 256)
    expected = layer(values)
    with LiveBytes("cpu") as live, OpenedUp():
        found = layer(values)
        peak = live.take_peak("cpu").total
    torch.testing.assert_close(found, expected)
    decoded = 4 * plain.weight.numel() if section.type == "nf4" else 4 * expected.numel()
    assert peak >= decoded + found.nbytes


def test_an_operation_may_be_opened_into_itself() -> None:
    opened = []

    def in_place(tensor: Tensor) -> Tensor:
        opened.append(tensor)
        return torch.ops.aten.neg.default(tensor) + 1

    with LiveBytes("cpu") as live:
        live.opened = {torch.ops.aten.neg.default: in_place}.get
        assert (-torch.ones(3)).tolist() == [0, 0, 0]
    assert len(opened) == 1
