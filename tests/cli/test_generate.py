"""``anygauge generate``: models that are not there, and answers that are empty."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig

from anygauge.cli import run as command
from anygauge.cli.trained import model_origin
from anygauge.config.schema import ModelSection
from anygauge.data import prompt_ids
from anygauge.interface import FULL, ModelError, UsageError
from anygauge.util.files import write_text
from tests.helpers.tiny_tokenizer import make_tokenizer
from tests.standins.hub import Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has nothing, and a machine without copies."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def refused(model: str) -> str:
    with pytest.raises((ModelError, UsageError)) as error:
        command(["generate", model, "--prompt", "hello"])
    return str(error.value)


def test_a_path_that_is_no_folder_is_answered_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    (tmp_path / "runs/my-run").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert f"looked at {tmp_path}/runs/nope); runs has my-run; give a" in refused("runs/nope")
    assert "; did you mean 'my-run'?" in refused("runs/my-rum")
    assert "./file: a file, not a folder" in refused("./file")
    for path in ("./nope", "/nope/at/all", "~/nope-at-all", "a/b/c"):
        assert f"{path}: no such folder (looked at " in refused(path)
    assert hub.requests == []


def test_a_name_is_asked_of_the_hub_once(hub: Hub) -> None:
    message = refused("nobody/no-such-model")
    assert message.startswith("MODEL: 'nobody/no-such-model' is not a folder here (looked at ")
    assert [request.path for request in hub.requests] == ["/api/models/nobody/no-such-model"]


def test_a_hub_that_does_not_answer_is_given_up_shortly() -> None:
    import huggingface_hub

    from anygauge.models import hub as module
    from anygauge.models.hub import download_requests, fetch

    (want,) = download_requests(ModelSection(name="nobody/no-such-model"))
    limits: list[float] = []

    def model_info(self: Any, name: str, *, timeout: float, **options: Any) -> None:
        limits.append(timeout)
        raise ConnectionError("no route to the hub")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ModelError, match=r"is not a folder here .* no route to the hub"):
            fetch(want)
    assert limits == [module.ANSWER_S] and limits[0] <= 5


def test_a_checkpoint_is_an_adapter_wherever_it_lies(tmp_path: Path) -> None:
    adapter = tmp_path / "step-00000002" / "adapter"
    write_text(adapter / "adapter_config.json", '{"base_model_name_or_path": "owner/name"}')
    origin = model_origin(str(adapter.parent), None, None)
    assert (origin.section.name, origin.adapter) == ("owner/name", adapter)


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

    asked = []

    def says(model: Any, tokenizer: Any, ids: Any, **options: Any) -> str:
        asked.append(ids)
        return answer

    monkeypatch.setattr(anygauge, "open_backend", open_backend)
    monkeypatch.setattr(
        generate,
        "load_for_inference",
        lambda *_, **options: SimpleNamespace(config=PretrainedConfig(vocab_size=512)),
    )
    monkeypatch.setattr(generate, "generate", says)
    tokenizer = make_tokenizer(tmp_path)
    # A file that an editor began with a byte order mark.
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffhello\n"))
    assert command(["generate", str(tmp_path)]) == 0
    assert asked == [prompt_ids(tokenizer, "hello")]
    err = capsys.readouterr().err
    assert ("the model ended it with its first token" in err) == (not answer)
