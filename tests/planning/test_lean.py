"""What a plan does not do: figures that can be counted, unlike its seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import transformers

from anygauge.planning.lean import LATER

NOT_IMPORTED = (
    "bitsandbytes",
    "functorch",
    "mlflow",
    "networkx",
    "sklearn",
    "torch._dynamo.eval_frame",
    "torch._dynamo.symbolic_convert",
    "torch._dynamo.trace_rules",
    "torch._dynamo.utils",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch._numpy",
    "torch.distributed.pipelining",
    "triton",
)
"""Each takes long, or brings many others."""

SCRIPT = """
    import gc, json, sys
    from anygauge.planning.lean import import_usual, leave_out

    leave_out(["bitsandbytes"])
    import_usual()
    frozen = gc.get_freeze_count()
    import torch
    from anygauge.config.resolved import parse_run
    from anygauge.planning import lean, quick, run
    from anygauge.registry import Registry

    made, asked = [], []
    rehearse = run.rehearse

    def counted(strategy, factory, *args, **kwargs):
        before = len(quick._RECIPES)
        found = rehearse(strategy, factory, *args, **kwargs)
        made.append((factory.config.num_hidden_layers, found.steps))
        asked.append(len(quick._RECIPES) - before)
        return found

    run.rehearse = counted
    run.can_be_aside = lambda: False  # all in this process, where they are counted
    hashes = [hash(torch.nn.Parameter(torch.zeros(1))) for _ in range(3)]
    registry = Registry.load()
    asked_for = parse_run(sys.argv[1])
    run.rehearse_run(asked_for, registry, registry.create_backend("cpu"), 2, 0)
    imported = [name for name, module in sys.modules.items() if module is not None]
    later = [name for name in lean.LATER if type(sys.modules[name]) is lean.Later]
    found = {"imported": imported, "made": made, "asked": asked, "frozen": frozen}
    print(json.dumps({**found, "hashes": hashes, "later": later}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A rehearsal of a deep model with the engine that imports most."""
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    run = {
        "model": {"config": config, "tokenizer": "none"},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 32},
        "adapter": {"r": 4},
        "strategy": {"name": "zero"},
        "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(run)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(
    int(transformers.__version__.partition(".")[0]) < 5,
    reason="earlier ones import more by themselves",
)
def test_nothing_is_imported_that_no_rehearsal_uses(found: dict[str, Any]) -> None:
    assert "deepspeed" in found["imported"]
    assert not set(found["imported"]) & set(NOT_IMPORTED)
    assert found["later"] == list(LATER)
    assert found["frozen"] > 100_000


def test_what_stands_for_a_module_gives_way_to_it() -> None:
    script = """
        import sys
        from anygauge.planning.lean import import_usual, leave_out

        leave_out()
        import_usual()
        import sympy as before
        from torch.fx.experimental.symbolic_shapes import guard_or_false, is_symbolic
        stood = type(sys.modules["sympy"]).__name__
        plain = before.Basic, guard_or_false(True), guard_or_false(False)
        assert not is_symbolic(3)  # has torch's own imported, and sympy for it
        import sympy
        from torch.fx.experimental import symbolic_shapes
        print(stood, plain[1:], plain[0] is sympy.Basic)
        print(isinstance(sympy.Symbol("x"), before.Basic))
        print(symbolic_shapes.guard_or_false is guard_or_false)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines() == ["Later (True, False) False", "True", "False"]


def test_sets_of_tensors_do_not_depend_on_addresses(found: dict[str, Any]) -> None:
    first, second, third = found["hashes"]
    assert first - second == second - third == 1


def test_a_deep_model_takes_few_steps_of_few_layers(found: dict[str, Any]) -> None:
    layers, steps = zip(*found["made"], strict=True)
    assert len(steps) <= 4
    assert steps == (3, *[2] * (len(steps) - 1))
    assert max(layers) <= 8


def test_what_one_depth_learned_serves_the_next(found: dict[str, Any]) -> None:
    first, *others = found["asked"]
    assert first > 200
    assert max(others) < first / 4
