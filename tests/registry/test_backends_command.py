"""`anygauge backends` shows every backend, the choice with its reasons, and broken plugins."""

from __future__ import annotations

import json

import pytest

from tests.helpers.runs import called
from tests.registry.conftest import SHIPPED


def command(*arguments, block=(), width=80):
    """What it prints with all plugins that anygauge ships, and those named, blocked."""
    blocked = ",".join((*SHIPPED, *block))
    variables = {"ANYGAUGE_BLOCK_PLUGINS": blocked, "COLUMNS": str(width)}
    done = called(["backends", *arguments], environment=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def machine(install, have):
    """A host backend, one without its device, a broken plugin, a doubled name, one to block."""
    have("host", priority=0, devices="not_needed")
    have("fast", devices="no")
    have("shut")
    install("gone-dist", "3.1", {"gone": "fake_gone"}, fake_gone="import no_such_module")
    have("twin", plugin="one", devices="no")
    have("twin", plugin="two", version="2.0", devices="no")


def test_json_holds_everything(machine):
    report = json.loads(command("--json", block=["shut", "nobody"]))
    assert [b["name"] for b in report["backends"]] == ["fast", "host"]
    fast = report["backends"][0]
    assert (fast["distribution"], fast["version"], fast["priority"]) == ("fast-dist", "1.0", 10)
    assert (fast["available"], fast["reason"]) == (False, "device: card no")
    assert fast["findings"]["device"] == {
        "presence": "no",
        "detail": "card no",
        "looked_at": ["/fake/card"],
    }
    assert set(fast["findings"]) == {"device", "driver", "software"}
    assert report["auto"]["chosen"] == "host"
    assert {r["name"] for r in report["auto"]["rejected"]} >= {"fast", "twin", "gone", "shut"}
    assert [f["distribution"] for f in report["failed"]] == ["gone-dist"]
    assert "shut" in [b["entry_point"] for b in report["blocked"]]
    assert report["unmatched_blocks"] == ["nobody"]
    assert [d["name"] for d in report["duplicates"]] == ["twin"]


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_and_tells(machine, width):
    output = command(block=["shut"], width=width)
    assert max(len(line) for line in output.splitlines()) <= width
    flat = " ".join(output.split())
    for text in (
        "fast-dist 1.0",
        "What fast looked at",
        "/fake/card",
        "--backend auto would choose host",
        "not fast: device: card no",
        "gone (gone-dist 3.1): ModuleNotFoundError",
        "one-dist 1.0 (plugin 'one') and two-dist 2.0 (plugin 'two')",
        "shut (shut-dist 1.0)",
    ):
        assert text in flat


def test_refusal_of_auto_is_shown_and_not_raised(have):
    have("fast", software="no")
    assert json.loads(command("--json"))["auto"]["chosen"] is None
    output = command()
    assert "--backend auto would be refused" in output
    assert "software: library no" in output


def test_text_of_plugins_is_no_markup(have):
    probe = "return Probe(devices=Finding.no('[bold]x[/bold]'), "
    probe += "driver=Finding.not_needed(), software=Finding.not_needed())"
    have("odd", probe=probe)
    assert "[bold]x[/bold]" in command(width=120)


def test_a_description_of_hardware_that_cannot_be_read_is_shown(have):
    have("fast", priority="10, hardware='fake_fast:cards.toml'")
    report = json.loads(command("--json"))
    (failure,) = report["failed_hardware"]
    assert failure["entry_point"] == "fake_fast:cards.toml" and not report["failed"]
    output = command(width=120)
    assert "Descriptions of hardware that cannot be read" in output
    assert "fake_fast:cards.toml (fast-dist 1.0): " in output


def test_nothing_installed():
    assert "No backend is installed." in command()
