"""What a rank imports, in processes of their own: nothing that the run does not call."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import subprocess
import sys
import textwrap
from importlib import util
from typing import Any

import pytest

from anygauge.util.imports import quick_imports, uncollected, unused

COMPILER = "torch._inductor.compile_fx"


def modules(script: str) -> set[str]:
    """Of a new process that ran a script."""
    script = textwrap.dedent(script) + "\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_libraries_do_not_import_what_a_run_does_not_use() -> None:
    found = modules(
        """
        from anygauge.util.imports import quick_imports, uncollected, unused
        with quick_imports(unused(few_bits=False, trackers=[])), uncollected():
            import peft, transformers.modeling_utils
        """
    )
    assert "peft.tuners.lora.model" in found
    assert not {"bitsandbytes", "peft.tuners.lora.bnb", COMPILER} & found


@pytest.mark.skipif(not util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
def test_what_was_hidden_can_be_imported_afterwards() -> None:
    found = modules(
        """
        from anygauge.util.imports import quick_imports, unused
        with quick_imports(unused(few_bits=False, trackers=[])):
            import peft
        import bitsandbytes
        """
    )
    assert "bitsandbytes.functional" in found


@pytest.mark.skipif(not util.find_spec("deepspeed"), reason="needs DeepSpeed")
def test_deepspeed_comes_without_a_compiler() -> None:
    found = modules(
        """
        from anygauge.registry import Registry
        from anygauge.strategies.zero_runtime import import_deepspeed
        from anygauge.util.imports import quick_imports, uncompiled, unused
        with quick_imports(unused(few_bits=False, trackers=[])):
            import_deepspeed(Registry.load().create_backend("cpu"))
            with uncompiled():
                import deepspeed.runtime.engine
        import torch
        assert torch.compile.__module__ == "torch"
        """
    )
    assert "deepspeed.runtime.engine" in found
    assert not {"mlflow", COMPILER} & found


@pytest.mark.parametrize(
    ("asked", "hidden"),
    [
        ({"few_bits": True, "trackers": ["mlflow"]}, []),
        ({"few_bits": True, "trackers": []}, ["mlflow"]),
        ({"few_bits": False, "trackers": ["mine"]}, ["bitsandbytes"]),
        ({"few_bits": False, "trackers": []}, ["bitsandbytes", "mlflow"]),
    ],
)
def test_what_a_run_uses_is_not_hidden(asked: dict[str, Any], hidden: list[str]) -> None:
    assert unused(**asked) == hidden


def test_everything_is_as_it_was_afterwards() -> None:
    before = functools.lru_cache, inspect.getmodule, inspect.getframeinfo, gc.isenabled()
    with pytest.raises(ImportError), quick_imports(["no_such_package"]), uncollected():
        assert not gc.isenabled()
        import no_such_package  # noqa: F401
    assert "no_such_package" not in sys.modules
    after = functools.lru_cache, inspect.getmodule, inspect.getframeinfo, gc.isenabled()
    assert after == before


def test_nothing_is_left_out_when_python_ends() -> None:
    # Otherwise what libraries of C++ still hold then is reported as leaked, on standard error.
    script = """
    import atexit, gc
    from anygauge.util.imports import uncollected
    atexit.register(lambda: print(gc.get_freeze_count()))
    with uncollected():
        import json.tool
    assert gc.get_freeze_count()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


def test_caches_keep_their_bound() -> None:
    with quick_imports():

        @functools.lru_cache(maxsize=2)
        def bounded(number: int) -> int:
            return number

        @functools.lru_cache
        def usual(number: int) -> int:
            return number

    assert bounded.cache_info().maxsize == 2
    assert usual.cache_info().maxsize == 128
