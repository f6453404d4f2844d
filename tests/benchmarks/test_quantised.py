"""What the benchmarks of quantised bases count and compare."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anygauge.config.schema import ModelSection
from benchmarks.quantised import BASES, CONFIG, LENGTH, evaluated, halves, loaded, loss_of, spread
from benchmarks.quantised_memory import measured
from benchmarks.texts import Text


@pytest.mark.slow
def test_peaks_fall_with_the_base(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = {**CONFIG, "hidden_size": 512, "num_hidden_layers": 2, **heads}
    loaded(ModelSection(config=config, tokenizer="none"), None).save_pretrained(tmp_path)
    bfloat16, nf4 = (
        measured(ModelSection(name=str(tmp_path), quantise=BASES[name]))
        for name in ("bfloat16", "nf4")
    )
    layers = 2 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert bfloat16[0] - nf4[0] == pytest.approx(layers * (2 - 0.5 - 1 / 16), rel=1e-3)
    largest, adapter = 2 * CONFIG["vocab_size"] * 512, 2 * 2 * 8 * (4 * 1024 + 3 * 1536)
    for frozen, loading, step in (bfloat16, nf4):
        assert frozen < loading <= frozen + adapter + largest
        assert step > frozen + adapter
    assert bfloat16[2] - nf4[2] > 0.8 * (bfloat16[0] - nf4[0])


def test_losses_of_rows_are_those_that_are_trained_on() -> None:
    model = loaded(ModelSection(config={**CONFIG, "num_hidden_layers": 1}, tokenizer="none"), None)
    rows = torch.randint(CONFIG["vocab_size"], (3, LENGTH))
    with torch.no_grad():
        expected = [float(loss_of(model, row[None])) / (LENGTH - 1) for row in rows]
    assert evaluated(model, rows).tolist() == pytest.approx(expected, rel=1e-2)


def test_every_tenth_text_is_not_trained_on() -> None:
    trained, unseen = halves([Text(f"{i}:", "x") for i in range(20)])
    assert unseen == ["0:x", "10:x"]
    assert len(trained) == 18 and not set(trained) & set(unseen)


def test_a_gap_has_the_error_of_its_mean() -> None:
    assert spread([0.01, 0.02, 0.03]) == "+0.0200 ± 0.0058"
