"""``anygauge push``: what goes out, under which names, and what is refused before anything does.

That plain libraries load it is in `tests/models/test_result_files.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from anygauge.cli import run as command
from anygauge.interface import ModelError, UsageError
from anygauge.models.hub import HubUnreachableError
from tests.standins.hub import TOKEN, Hub, Repository, use_hub

CARD = """---
{base_model: them/older, base_model_relation: adapter, license: mit}
---
`adapter_config.json` names the base by its folder: put its name on the hub there.
model = AutoPeftModelForCausalLM.from_pretrained(".")
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the owner ``me`` may write to, and is logged in to."""
    public, broken = Repository(files={}), Repository(files={}, access="broken")
    with Hub({"me/public": public, "me/broken": broken}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
    assert hub.strangers == []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with an adapter for a base in a folder, and with what is nobody else's."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    for name in ("job.json", "run.yaml", "logs"):
        (folder / name).write_text("secret")
    fields = {"base_model_name_or_path": "/home/me/base", "r": 4, "revision": "main"}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(fields))
    (folder / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter/README.md").write_text(CARD)
    return folder


def test_the_result_alone_goes_out_by_public_names(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--base", "them/base", "--private", "--message", "First"]
    assert command(["push", "run", "me/new", *options, "--dry-run"]) == 0
    assert hub.requests == []
    dry = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in dry[:-1]] == sorted(p.name for p in run.glob("adapter/*"))
    assert dry[-1].endswith("from run/adapter: would go to me/new")
    assert command(["push", "run", "me/new", *options]) == 0
    assert capsys.readouterr().out.endswith(f"from run/adapter: {hub.address}/me/new\n")
    made = hub.repositories["me/new"]
    assert (made.private, made.messages) == (True, ["First"])
    assert sorted(made.files) == sorted(path.name for path in run.glob("adapter/*"))
    assert made.files["adapter_model.safetensors"] == b"weights"
    config = json.loads(made.files["adapter_config.json"])
    assert config == {"base_model_name_or_path": "them/base", "r": 4, "revision": None}
    _, header, text = made.files["README.md"].decode().split("---\n")
    kept = {"base_model_relation": "adapter", "license": "mit"}
    assert yaml.safe_load(header) == {"base_model": "them/base", **kept}
    assert "its folder" not in text and '.from_pretrained("me/new")' in text


def test_a_base_of_the_hub_needs_no_option(hub: Hub, run: Path) -> None:
    file = run / "adapter/adapter_config.json"
    file.write_text(file.read_text().replace("/home/me/base", "them/base"))
    assert command(["push", "run/adapter", "me/public"]) == 0
    sent = hub.repositories["me/public"].files
    assert json.loads(sent["adapter_config.json"])["revision"] == "main"
    assert b"base_model: them/base" in sent["README.md"]


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("run me/new", ModelError, "is the folder /home/me/base, .*: --base OWNER/NAME"),
        (
            "run new --base them/base",
            UsageError,
            "NAME new: a name of the hub is expected, as owner/name",
        ),
        ("run me/new --base /home/me/base", UsageError, "--base /home/me/base: a name of the hub"),
        ("runn me/new", UsageError, r"runn has no result .*did you mean 'run'\?"),
        ("run me/public --base a/b --private", UsageError, "--private: .*me/public is there"),
        ("run them/new --base a/b", ModelError, "to .*/them/new failed: .*rights.*Check the name"),
        ("run me/broken --base a/b --private", HubUnreachableError, r"failed: .*503.*\. Try again"),
    ],
)
def test_refusals(line: str, kind: type[Exception], words: str, hub: Hub, run: Path) -> None:
    with pytest.raises(kind, match=words) as caught:
        command(["push", *line.split()])
    assert len(str(caught.value).splitlines()) == 1
    assert not any(hub.repositories[name].files for name in hub.repositories)


def test_without_a_login_or_a_network(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["push", "run", "me/new", "--base", "them/base"]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError, match=r"to .* failed: .*refused.*Try again; check"):
        command(line)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match=r"nobody is logged in to the hub: hf auth login, or set"):
        command(line)
