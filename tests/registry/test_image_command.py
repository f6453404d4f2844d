"""`anygauge image` with backends of third parties: their launch profile is all it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from anygauge.cli.image import run_command
from anygauge.interface import LaunchProfile
from tests.helpers.runs import called
from tests.registry.conftest import SHIPPED

PROFILE = """
Fake.launch = LaunchProfile(
    image="registry.example.com/cards/anygauge:3", container_flags=("--device=/dev/card0",)
)
"""
TABLE = """
Fake.launch = LaunchProfile(
    image="registry.example.com/cards/anygauge:3-b",
    releases=(
        ImageRelease(name="a", base="cards/stack:a", built=False, note="too old"),
        ImageRelease(
            name="b", base="cards/stack:b", versions={"torch": "2.9.0"}, source="a page",
            image="registry.example.com/cards/anygauge:3-b",
        ),
    ),
)
"""


def command(*arguments: str) -> CompletedProcess[str]:
    """The command without the plugins that anygauge ships."""
    alone = {"ANYGAUGE_BLOCK_PLUGINS": ",".join(SHIPPED)}
    return called(["image", "--json", "--backend", "cards", *arguments], environment=alone)


def test_image_and_flags_are_the_profiles(have: Callable[..., None]) -> None:
    have("cards", more=PROFILE)
    found = json.loads(command("--engine", "podman").stdout)
    run = found["run"]
    assert found["image"] == "registry.example.com/cards/anygauge:3" and "build" not in found
    assert run[:4] == ["podman", "run", "--rm", "--device=/dev/card0"] and found["image"] in run


@pytest.mark.parametrize(("engine", "user", "kept"), [("podman", 1000, True), ("podman", 0, False),
                                                       ("docker", 1000, False)])  # fmt: skip
def test_podman_keeps_the_user_where_it_is_not_root(
    monkeypatch: pytest.MonkeyPatch, engine: str, user: int, kept: bool
) -> None:
    monkeypatch.setattr("os.getuid", lambda: user)
    found = run_command(engine, LaunchProfile(), "an/image", ["doctor"])
    assert ("--userns=keep-id" in found) is kept
    assert any(flag.startswith(f"--user={user}:") for flag in found)


def test_a_table_of_its_own(have: Callable[..., None]) -> None:
    have("cards", more=TABLE)
    assert command().stdout == command("--release", "b").stdout
    found = json.loads(command().stdout)
    # It is built elsewhere, in a way of its own.
    assert found["image"] == "registry.example.com/cards/anygauge:3-b" and "build" not in found
    assert found["release"] == {
        "name": "b", "base": "cards/stack:b", "versions": {"torch": "2.9.0"}, "goes_with": {},
        "source": "a page", "note": "",
    }  # fmt: skip
    refused = command("--release", "a")
    assert refused.returncode == 2 and "no image of a (too old); releases" in refused.stderr


def test_without_one_it_says_so(have: Callable[..., None]) -> None:
    have("cards")
    assert "the cards backend names no container image" in command().stderr
