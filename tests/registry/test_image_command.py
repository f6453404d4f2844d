"""`anygauge image` with backends of third parties: their launch profile is all it needs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from anygauge.cli.image import image, run_command
from anygauge.interface import LaunchProfile, UnsupportedError
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


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(image)
    return made


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, object]]:
    monkeypatch.setenv("ANYGAUGE_BLOCK_PLUGINS", ",".join(SHIPPED))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> dict[str, object]:
        result = CliRunner().invoke(app(), ["--json", *arguments], catch_exceptions=False)
        found = json.loads(result.output)
        assert isinstance(found, dict)
        return found

    return run


def test_image_and_flags_are_the_profiles(
    have: Callable[..., None], command: Callable[..., dict[str, object]]
) -> None:
    have("cards", more=PROFILE)
    found = command("--backend", "cards", "--engine", "podman")
    run = found["run"]
    assert isinstance(run, list)
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


def test_a_table_of_its_own(
    have: Callable[..., None], command: Callable[..., dict[str, object]]
) -> None:
    have("cards", more=TABLE)
    found = command("--backend", "cards")
    assert found == command("--backend", "cards", "--release", "b")
    # It is built elsewhere, in a way of its own.
    assert found["image"] == "registry.example.com/cards/anygauge:3-b" and "build" not in found
    assert found["release"] == {
        "name": "b", "base": "cards/stack:b", "versions": {"torch": "2.9.0"}, "goes_with": {},
        "source": "a page", "note": "",
    }  # fmt: skip
    refused = CliRunner().invoke(app(), ["--backend", "cards", "--release", "a"])
    assert refused.exit_code == 2 and "no image of a (too old); releases" in refused.output


def test_without_one_it_says_so(
    have: Callable[..., None], command: Callable[..., dict[str, object]]
) -> None:
    have("cards")
    with pytest.raises(UnsupportedError, match="the cards backend names no container image"):
        command("--backend", "cards")
