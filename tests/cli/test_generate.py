"""``anygauge generate``: models that are not there, and answers that are empty."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.interface import FULL, ModelError, UsageError
from tests.helpers.tokenizer import make_tokenizer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the hub was asked for; it has nothing."""
    import huggingface_hub

    calls: list[Any] = []

    def model_info(self: Any, name: str, **options: Any) -> None:
        calls.append((name, options))
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return calls


def refused(model: str) -> str:
    with pytest.raises((ModelError, UsageError)) as error:
        command(["generate", model, "--prompt", "hello"])
    return str(error.value)


def test_a_path_that_is_no_folder_is_answered_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    (tmp_path / "runs/my-run").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert f"looked at {tmp_path}/runs/nope); runs has my-run; give a" in refused("runs/nope")
    assert "did you mean runs/my-run?" in refused("runs/my-rum")
    assert "./file: a file, not a folder" in refused("./file")
    for path in ("./nope", "/nope/at/all", "~/nope-at-all", "a/b/c"):
        assert f"{path}: no such folder (looked at " in refused(path)
    assert asked == []


def test_a_name_is_asked_of_the_hub_once_and_shortly(asked: list[Any]) -> None:
    message = refused("nobody/no-such-model")
    assert "is not a folder here" in message and "no route to the hub" in message
    ((name, options),) = asked
    assert name == "nobody/no-such-model" and options["timeout"] <= 5


def test_a_hub_that_is_switched_off_is_not_asked(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, with no copy" in refused("nobody/no-such-model")
    assert asked == []


@pytest.mark.parametrize("answer", ["", "yes"])
def test_an_empty_answer_is_told(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import anygauge
    from anygauge.models import generate

    @contextlib.contextmanager
    def open_backend(name: str) -> Iterator[Any]:
        placement = SimpleNamespace(
            seed=lambda seed: None, dtypes=frozenset({"float32"}), device="host"
        )
        yield SimpleNamespace(placement=placement, support=lambda name: FULL, attention="eager")

    def says(*_: Any, show: Any, **options: Any) -> str:
        show(answer)
        return answer

    monkeypatch.setattr(anygauge, "open_backend", open_backend)
    monkeypatch.setattr(
        generate,
        "load_for_inference",
        lambda *_, **options: SimpleNamespace(config=SimpleNamespace(vocab_size=512)),
    )
    monkeypatch.setattr(generate, "generate", says)
    make_tokenizer(tmp_path)
    assert command(["generate", str(tmp_path), "--prompt", "hello"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{answer}\n"
    assert ("the model ended at once" in err) == (not answer)
