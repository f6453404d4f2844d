"""The examples that stand in a hook's docstring and in docs/trackers.md are plugins that work."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module

from anygauge.interface import Backend, LaunchSettings, Node, TrackerContext, plugins
from anygauge.registry import resolve_environment
from anygauge.registry.specs import read_options
from tests.docs.pages import ROOT, blocks
from tests.helpers.jobs import make_job

JOB = make_job(
    name="run", run_directory="/r", run_file="/r/run.yaml", backend="mine", rendezvous="file:///r/m"
)


def test_the_tracker(install, load, tmp_path, capsys) -> None:
    (text,) = (
        block.text
        for block in blocks()
        if block.page == ROOT / "docs/trackers.md" and "anygauge_provide_trackers" in block.text
    )
    install("my-board", "1.0", {"board": "my_board"}, my_board=text)
    provided = load().find_tracker("board")
    options = read_options(provided, {"channel": "here"})
    module, _, name = provided.spec.factory.partition(":")
    context = TrackerContext(run_directory=tmp_path, run_name="run", options=options)
    tracker = getattr(import_module(module), name)(context)
    tracker.log(1, {"train/loss": 2.0})
    tracker.close("finished", {"final_loss": 2.0})
    printed = capsys.readouterr().out.split("\n")
    assert printed[-3:] == ["here 1 {'train/loss': 2.0}", "here finished {'final_loss': 2.0}", ""]


def test_the_environment_of_a_site(install, load) -> None:
    hook = plugins.anygauge_tune_environment
    text = inspect.cleandoc(hook.__doc__ or "").partition("Example::\n")[2]
    install("anygauge-mine", "1.0", {"mine": "anygauge_mine"}, anygauge_mine=text)
    registry, node = load(), Node(hostname="a1")
    assert not registry.failures

    class Fake(Backend):
        name, device_type = "fake", "meta"

    two = replace(JOB, launch=LaunchSettings(nodes=2))
    assert resolve_environment(registry, Fake(), JOB, node, 0, {}) == []
    (found,) = resolve_environment(registry, Fake(), two, node, 0, {})
    assert (found.name, found.value, found.origin) == ("HF_HUB_OFFLINE", "1", "site hook")
    assert found.setting.reason == "a1 reaches no other network"
