"""A run whose models optimum-habana has adapted, on the stand-in for Gaudi's software."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.gaudi_stack import needs_optimum_habana
from tests.helpers.gaudi import calls, standin_environment, standin_site
from tests.helpers.runs import Run, run_file, train

pytestmark = needs_optimum_habana

RANKS = 2
FIELDS = {
    "backend": "hpu",
    "backend_options": {"optimum_habana": True},
    "launch": {"devices": RANKS},
    "adapter": {"r": 4, "dropout": 0.0},
    "precision": {"param_dtype": "bfloat16"},
    "train": {"steps": 2, "global_batch_size": 2 * RANKS, "micro_batch_size": 1},
}


def adapted(folder: Path, *, with_torchvision: bool) -> tuple[Run, Path]:
    """Train; the record of what was called.

    optimum-habana imports torchvision for the tokenizer of another model. No build of it on the
    package index goes with a torch without GPU, so that an empty package takes its place here.
    """
    site, record = standin_site(folder), folder / "record"
    if with_torchvision:
        (site / "torchvision").mkdir()
        for name in ("__init__.py", "transforms.py"):
            (site / "torchvision" / name).touch()
    path = run_file(folder, **FIELDS)
    return train(path, environment=standin_environment(site, record)), record


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_what_it_lacks_is_said(tmp_path: Path) -> None:
    run, _ = adapted(tmp_path, with_torchvision=False)
    assert run.status != 0 and "Traceback" not in run.err
    assert "backend_options.optimum_habana: it cannot be imported" in run.err
    assert "torchvision" in run.err


def test_its_models_train(tmp_path: Path) -> None:
    run, record = adapted(tmp_path, with_torchvision=True)
    assert run.status == 0, run.out + run.err
    assert len(run.steps("loss")) == 2
    assert "norms fused" not in run.out, "none is anygauge's"
    for rank in range(RANKS):
        names = [call[0] for call in calls(record, rank)]
        assert names.count("FusedRMSNorm") > 0, "its norms call the library by themselves"
        assert "refused" not in names
        # Not even here is the model library's predicate asked, which replaces functions of torch.
        assert [call[1] for call in calls(record, rank) if call[0] == "patched"] == [[]]
