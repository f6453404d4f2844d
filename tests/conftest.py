from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = (
    "training/test_objectives.py",
    "docs/test_plugins_page.py",
    "training/test_resume.py",
    "testing/test_kit.py",
    "cli/test_cloud_jobs.py",
    "cli/test_refusals.py",
    "backends/test_hpu_runs.py",
    "backends/test_cuda_runs.py",
    "training/test_restarts.py",
    "training/test_results.py",
    "testing/test_mutations.py",
    "strategies/test_matrix.py",
    "strategies/test_state.py",
    "strategies/test_loading.py",
    "launch/test_startup.py",
    "cli/test_join.py",
    "cli/test_data.py",
    "strategies/test_collectives_count.py",
    "training/test_warm_up.py",
    "launch/test_nodes.py",
    "cli/test_nothing_left.py",
    "cli/test_pipes.py",
    "training/test_parity.py",
    "testing/test_kit_processes.py",
    "benchmarks/test_kernel_timings.py",
    "kernels/test_triton.py",
    "kernels/test_triton_compiles.py",
    "models/test_adapters.py",
    "training/test_non_finite.py",
    "training/test_step_results.py",
    "training/test_phase_memory.py",
)
"""Files that take longest, which several processes begin with: else one is left with them alone."""

# pytest-xdist sets it; commands then wrap what they print to a file, too.
os.environ.pop("COLUMNS", None)

# Triton asks once, when it is imported. Without a GPU, its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes to the home folder, nor finds rows that a test of another day left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYGAUGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    assert all(map(Path.is_file, places)), "a file that has moved would run late"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """What was imported stays; collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
