"""The example in each hook's docstring is a plugin that works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from anygauge.interface import (
    Backend,
    LaunchProfile,
    LaunchSettings,
    Node,
    Probe,
    TrackerContext,
    plugins,
)
from anygauge.registry import Registry, resolve_environment
from anygauge.registry.registry import read_options
from tests.helpers.jobs import make_job

HOOKS = sorted(name for name in vars(plugins) if name.startswith("anygauge_"))
JOB = make_job(
    name="run", run_directory="/r", run_file="/r/run.yaml", backend="mine", rendezvous="file:///r/m"
)


@pytest.fixture
def example(install, load) -> Callable[[str], Registry]:
    """The registry with one plugin: the example of a hook, installed."""

    def loaded(hook: str) -> Registry:
        text = inspect.cleandoc(getattr(plugins, hook).__doc__).partition("Example::\n")[2]
        install("anygauge-mine", "1.0", {"mine": "anygauge_mine"}, anygauge_mine=text)
        registry = load()
        assert not registry.failures
        return registry

    return loaded


def made_by(provided: Any) -> Any:
    """What the factory of the only spec is."""
    (spec,) = [one.spec for one in provided]
    assert spec.name == "mine"
    module, _, name = spec.factory.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_has_one_that_loads(hook: str, example) -> None:
    assert [plugin.entry_point for plugin in example(hook).plugins] == ["mine"]


def test_the_backend(example) -> None:
    registry = example("anygauge_provide_backends")
    assert issubclass(made_by(registry.backends), Backend)
    (provided,) = registry.backends
    probe = provided.spec.probe()
    assert isinstance(probe, Probe) and not probe.available
    assert "there is no /dev/mine0" in probe.reason
    assert registry.create_backend("mine").name == "mine"


def test_the_kernel(example) -> None:
    torch = pytest.importorskip("torch")
    kernel = made_by(example("anygauge_provide_kernels").kernels)()
    x, weight = torch.randn(3, 8), torch.randn(8)
    wanted = torch.nn.functional.rms_norm(x, (8,), weight, eps=1e-6)
    torch.testing.assert_close(kernel(x, weight, 1e-6), wanted)


def test_the_strategy(example) -> None:
    pytest.importorskip("torch")
    registry = example("anygauge_provide_strategies")
    strategy = made_by(registry.strategies)("its section")
    assert (strategy.description, strategy.section) == ("mine", "its section")
    assert strategy.settings() == ()
    assert registry.find_strategy("mine").spec.world_sizes == (1,)


def test_the_launcher(example) -> None:
    plan = made_by(example("anygauge_provide_launchers").launchers)().render(
        JOB, {}, LaunchProfile()
    )
    assert [file.text for file in plan.files] == [JOB.dump()]
    assert [process.node_rank for process in plan.processes] == [0]


def test_the_tracker(example, tmp_path) -> None:
    registry = example("anygauge_provide_trackers")
    provided = registry.find_tracker("mine")
    options = read_options(provided, {"file": "metrics.txt"})
    context = TrackerContext(run_directory=tmp_path, run_name="run", options=options)
    tracker = made_by(registry.trackers)(context)
    tracker.log(1, {"train/loss": 2.0})
    tracker.close("finished", {"final_loss": 2.0})
    written = (tmp_path / "metrics.txt").read_text()
    assert written == "1 {'train/loss': 2.0}\nfinished {'final_loss': 2.0}\n"


def test_the_environment_of_a_site(example) -> None:
    registry, node = example("anygauge_tune_environment"), Node(hostname="a1")

    class Fake(Backend):
        name, device_type = "fake", "meta"

    two = replace(JOB, launch=LaunchSettings(nodes=2))
    assert resolve_environment(registry, Fake(), JOB, node, 0, {}) == []
    (found,) = resolve_environment(registry, Fake(), two, node, 0, {})
    assert (found.name, found.value, found.origin) == ("HF_HUB_OFFLINE", "1", "site hook")
    assert found.setting.reason == "a1 reaches no other network"
