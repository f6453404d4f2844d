"""Models of the hub: the files that are asked for, broken downloads, a message for each refusal.

The hub is a stand-in of its HTTP interface (`tests/standins/hub.py`).
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.hub import (
    FetchResult,
    HubUnreachableError,
    copy_of,
    download_requests,
    fetch,
    missing_files,
    requests_for_plan,
)
from tests.standins.hub import Hub, Repository, use_hub

NAME = "somebody/model"

SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "special_tokens_map.json": b'{"bos_token": "<s>"}',
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"---\nlicense: mit\n---\n",  # for the card of what is trained
}
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
SHARDS = {
    "model.safetensors.index.json": INDEX.encode(),
    "model-1.safetensors": b"1" * 300,
    "model-2.safetensors": b"2" * 200,
}
BIN_INDEX = json.dumps({"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}})
BINS = {
    "pytorch_model.bin.index.json": BIN_INDEX.encode(),
    "pytorch_model-1.bin": b"1" * 100,
    "pytorch_model-2.bin": b"2" * 100,
}
USELESS = {
    ".gitattributes": b"",
    "original/consolidated.00.pth": b"0" * 100,
    "original/tokenizer.model": b"pieces",
    "consolidated.safetensors": b"0" * 100,
    "model-3.safetensors": b"of no index",
    "onnx/model.onnx": b"0" * 100,
    "onnx/config.json": b"{}",
    "model.gguf": b"0" * 100,
    "picture.png": b"0" * 100,
    "training_args.bin": b"0" * 100,
    "tf_model.h5": b"0" * 100,
    "model_code.py": b"raise SystemExit",
    "preprocessor_config.json": b"{}",
}
"""What no run reads."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without a model, and a machine that has no copies and no token."""
    with Hub({}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        yield hub
    assert hub.strangers == []


def want(hub: Hub, *parts: Mapping[str, bytes], **changes: Any) -> FetchResult:
    """Put a model there, if parts of one are given, and fetch what a run needs of it."""
    if parts:
        hub.repositories[NAME] = Repository(files={k: v for p in parts for k, v in p.items()})
    weights, log = changes.pop("weights", True), changes.pop("log", list[str]().append)
    found = None
    for one in download_requests(ModelSection(**{"name": NAME, **changes}), weights=weights):
        found = fetch(one, log=log)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (SHARDS, SHARDS),
        ({"model.safetensors": b"0" * 100}, ["model.safetensors"]),
        (BINS, BINS),
        ({"pytorch_model.bin": b"0" * 100}, ["pytorch_model.bin"]),
        ({**SHARDS, **BINS}, SHARDS),
        ({"model.safetensors": b"0", "pytorch_model.bin": b"0"}, ["model.safetensors"]),
        ({"model.safetensors": b"0", **BINS}, ["model.safetensors"]),
    ],
    ids=["shards", "one file", "bins", "one bin", "both in shards", "both", "one and shards"],
)
def test_only_what_is_needed_is_fetched_and_once(
    hub: Hub, weights: Mapping[str, bytes], expected: Mapping[str, bytes]
) -> None:
    found = want(hub, SMALL, USELESS, weights)
    needed = sorted([*SMALL, *expected])
    assert hub.files("GET") == needed and sorted(hub.files("HEAD")) == needed
    there = {str(p.relative_to(found.folder)) for p in found.folder.rglob("*") if p.is_file()}
    assert there == set(needed)
    for name in needed:
        assert (found.folder / name).read_bytes() == {**SMALL, **weights}[name]
    assert found.new == sum(len({**SMALL, **weights}[name]) for name in needed)
    hub.requests.clear()
    again = want(hub)
    assert [request.path for request in hub.requests] == [f"/api/models/{NAME}"], "and no file"
    assert (again.folder, again.new) == (found.folder, 0)


def test_a_dry_run_fetches_no_weights(hub: Hub) -> None:
    found = want(hub, SMALL, SHARDS, USELESS, weights=False)
    assert hub.files() == sorted([*SMALL, "model.safetensors.index.json"])
    assert (found.new, found.left) == (sum(map(len, SMALL.values())) + len(INDEX), 500)
    assert missing_files(found.folder) == ["model-1.safetensors", "model-2.safetensors"]
    assert missing_files(found.folder, weights=False) == []
    hub.requests.clear()
    assert want(hub).new == 500
    assert hub.files() == ["model-1.safetensors", "model-2.safetensors"]
    assert missing_files(found.folder) == []


CONFIGS = ["README.md", "config.json", "generation_config.json"]


def test_what_is_fetched_follows_the_run(hub: Hub) -> None:
    """Code where it may run, and a tokenizer of another repository."""
    code = {"deep/more_code.py": b"pass"}
    hub.repositories["other/words"] = Repository(files={**SMALL, **USELESS, **SHARDS})
    of_run = {"tokenizer": "other/words", "revision": "main", "trust_remote_code": True}
    want(hub, SMALL, SHARDS, USELESS, code, **of_run)
    by_repository = {r.path.split("/resolve/")[0] for r in hub.requests if "/resolve/" in r.path}
    assert by_repository == {f"/{NAME}", "/other/words"}
    of_model = [*CONFIGS, *SHARDS, *code, "model_code.py"]
    assert hub.files() == sorted([*of_model, *SMALL, "model_code.py"])


def test_a_plan_fetches_the_configuration_alone(hub: Hub) -> None:
    hub.repositories[NAME] = Repository(files={**SMALL, **SHARDS, **USELESS})
    (only,) = requests_for_plan(ModelSection(name=NAME, tokenizer="some/tokenizer"))
    fetch(only)
    assert hub.files() == CONFIGS
    tokens = ModelSection(name=NAME, tokenizer="some/tokenizer", new_tokens=["<a>"])
    assert [r.tokenizer for r in requests_for_plan(tokens)] == [True, True], "they are counted"


def test_folders_are_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    tokenizer = str(tmp_path / "tokenizer.json")
    nothing = str(tmp_path / "nothing")
    for section in (
        ModelSection(name=str(tmp_path)),
        ModelSection(name=nothing, tokenizer=tokenizer),
        ModelSection(config={"model_type": "llama"}, tokenizer=tokenizer),
    ):
        assert download_requests(section) == []
    (one,) = download_requests(ModelSection(name=NAME, tokenizer=tokenizer))
    assert (one.name, one.tokenizer, one.weights) == (NAME, False, "all")


def test_a_branch_is_found_by_its_name_and_fetched_anew_where_it_moved(hub: Hub) -> None:
    before = want(hub, SMALL, SHARDS)
    assert copy_of(NAME, None) == copy_of(NAME, "main") == before.folder
    assert copy_of(NAME, "other") is None
    commit = hub.repositories[NAME].commit
    hub.requests.clear()
    assert want(hub, revision=commit).folder == before.folder
    assert hub.requests == [], "a commit asks nobody"
    moved = {**SMALL, **SHARDS, "model-2.safetensors": b"3" * 200}
    hub.repositories[NAME] = Repository(files=moved, commit="f00d" * 10)
    after = want(hub)
    assert after.folder != before.folder and copy_of(NAME, None) == after.folder
    assert (after.folder / "model-2.safetensors").read_bytes() == b"3" * 200
    assert hub.files() == ["model-2.safetensors"], "what has not changed is not fetched again"


def test_a_download_that_breaks_goes_on_where_it_was(hub: Hub) -> None:
    body = bytes(range(256)) * 100_000  # more than two of the library's pieces of 10 MiB
    files = {**SMALL, "model.safetensors": body}
    hub.repositories[NAME] = Repository(files=files, cut={"model.safetensors": [24_000_000]})
    found = want(hub)
    assert (found.folder / "model.safetensors").read_bytes() == body
    starts = [r.start for r in hub.requests if r.method == "GET" and "model.safetensors" in r.path]
    assert starts == [0, 20 * 2**20]


def test_what_arrived_whole_before_a_failure_is_kept(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    want(hub, SMALL, SHARDS)
    files = {**SMALL, **SHARDS, "model-1.safetensors": b"4" * 300, "model-2.safetensors": b"5" * 9}
    hub.repositories[NAME] = Repository(
        files=files, commit="f00d" * 10, cut={"model-1.safetensors": [0] * 20}
    )
    with pytest.raises(ModelError, match=r"^model\.name: .*complete files are kept"):
        want(hub)
    hub.repositories[NAME].cut.clear()
    hub.requests.clear()
    found = want(hub)
    assert hub.files() == ["model-1.safetensors"]
    assert (found.folder / "model-1.safetensors").read_bytes() == b"4" * 300
    assert (found.folder / "model-2.safetensors").read_bytes() == b"5" * 9


def test_progress_is_told_in_bytes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from anygauge.models import hub as module

    monkeypatch.setattr(module, "_TURN_S", 0.0)
    hub.repositories[NAME] = Repository(files={**SMALL, **SHARDS})
    (one,) = download_requests(ModelSection(name=NAME))
    told: list[tuple[int, int]] = []
    said: list[str] = []
    found = fetch(one, lambda done, total: told.append((done, total)), said.append)
    assert told[-1][0] == told[-1][1] and {total for _, total in told} == {told[-1][1]}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(said) == 1 and said[0].startswith(f"fetching {NAME}: ")
    assert found.new >= told[-1][1]


REFUSALS: dict[str, tuple[str, str | None, str]] = {
    "gated, nobody": ("gated", None, r"is gated: accept its licence at .*/somebody/model with an"),
    "gated, another": ("gated", "hf_x", r"is gated: accept its licence .* the account of your tok"),
    "private, nobody": ("private", None, r"nor a model of .*for a private one, log in \(hf auth l"),
    "private, another": ("private", "hf_x", r"nor a model of .* that the account of your token ma"),
    "a wrong token": (
        "refused",
        "hf_x",
        r"refuses 'somebody/model' \(401: Invalid cred.* expired: log in",
    ),
    "forbidden": (
        "forbidden",
        "hf_x",
        r"refuses 'somebody/model' \(403: Your token may not.* ask its",
    ),
    "broken": ("broken", None, r"the hub \(.*\) cannot answer now: .*503.*Try again later"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_each_refusal_has_its_own_message(
    case: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, token, expected = REFUSALS[case]
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.repositories[NAME] = Repository(files={**SMALL, **SHARDS}, access=access)
    with pytest.raises(ModelError, match=expected) as caught:
        want(hub)
    assert "\n" not in str(caught.value) and "Request ID" not in str(caught.value)
    assert str(caught.value).startswith("model.name: ")
    assert isinstance(caught.value, HubUnreachableError) == (access == "broken")


def test_names_and_revisions_that_are_not_there(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"'somebody/model' is not a folder here .*owner/name"):
        want(hub)
    hub.repositories[NAME] = Repository(files=SMALL)
    with pytest.raises(ModelError, match=r"has no revision 'v9'.*a branch, a tag or a commit"):
        want(hub, revision="v9")
    with pytest.raises(ModelError, match=r"nor a model of .* \(Cannot have -- or"):
        want(hub, name="a/b--c")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors": b"0"}, "has no config.json, so anygauge cannot train it"),
        (
            {**SMALL, "model-q4.gguf": b"0"},
            r"no weights that anygauge reads \(model\.safetensors or .*model-q4\.gguf",
        ),
        ({**SMALL, "adapter_config.json": b"{}"}, r"it is an adapter: give its base in model\.na"),
        ({**SMALL, **SHARDS, "model.safetensors.index.json": b"["}, "is not an index of weights"),
        (
            {**SMALL, **SHARDS, "model.safetensors.index.json": BIN_INDEX.encode()},
            r"names 'pytorch_model-1\.bin', .*, but the repository does not have",
        ),
    ],
)
def test_repositories_that_are_no_model(
    hub: Hub, files: Mapping[str, bytes], expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        want(hub, files)
    assert not {"model-1.safetensors", "model-q4.gguf"} & {*hub.files()}, "gigabytes for nothing"


def test_a_hub_that_is_not_there_or_switched_off(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    there_is_none = SimpleNamespace(address=nobody)
    use_hub(monkeypatch, there_is_none, tmp_path)
    with pytest.raises(HubUnreachableError, match=r"cannot be reached: .*HTTPS_PROXY") as caught:
        want(hub)
    assert nobody in str(caught.value)
    assert "reached: [Errno 111] Connection refused. Check" in str(caught.value)
    use_hub(monkeypatch, hub, tmp_path)
    found = want(hub, SMALL, SHARDS)
    use_hub(monkeypatch, there_is_none, tmp_path)
    logged: list[str] = []
    assert want(hub, log=logged.append) == FetchResult(folder=found.folder)
    (line,) = logged
    assert line.startswith(f"the hub ({nobody}) cannot be reached: [Errno 111] Connection refused:")
    assert f"using the copy of {NAME} on this machine, {found.folder}" in line
    (found.folder / "model-2.safetensors").unlink()
    with pytest.raises(HubUnreachableError, match="cannot be reached"):
        want(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match=r"HF_HUB_OFFLINE is set.* without 'model-2\.s"):
        want(hub)
    (found.folder / "model-2.safetensors").touch()
    assert want(hub).folder == found.folder
    with pytest.raises(HubUnreachableError, match=r"HF_HUB_OFFLINE is set.* no copy of"):
        want(hub, name="other/model")


def test_a_disk_that_is_full(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(ModelError, match=r"cannot be stored in .*/hub: No space left .* Make room"):
        want(hub, SMALL, SHARDS)
