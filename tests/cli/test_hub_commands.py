"""Models of the hub on the command line: fetched once, before ranks, which ask no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from anygauge.util.text import format_bytes
from tests.helpers.runs import run_file, save_tiny
from tests.standins.hub import Hub, Repository

NAME = "somebody/model"
NEEDED = [
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
]
PATIENCE_S = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """A model as it is published, with what no run needs."""
    folder = save_tiny(tmp_path_factory.mktemp("published"))
    (folder / "README.md").write_text("# A model")
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in NEEDED}
    assert sorted(found) == NEEDED
    return {**found, "pytorch_model.bin": b"0" * 100}


@pytest.fixture
def hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    with Hub({NAME: Repository(files=files)}) as hub:
        yield hub
    assert hub.strangers == []


def run(folder: Path, endpoint: str, *arguments: object, **more: str) -> tuple[int, str, str]:
    """The command, in a process that has its own copies of the hub's files."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {
        **without,
        **{"OMP_NUM_THREADS": "1", "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hub")},
        **more,
    }
    done = subprocess.run(
        [*map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
        env=environment,
        cwd=folder,
    )
    return done.returncode, done.stdout, done.stderr


ANYGAUGE = (sys.executable, "-m", "anygauge.cli")


@pytest.mark.slow
def test_two_ranks_train_on_one_download(
    tmp_path: Path, hub: Hub, files: Mapping[str, bytes]
) -> None:
    weights = format_bytes(len(files["model.safetensors"]))
    path = run_file(tmp_path, model={"name": NAME}, strategy={"name": "ddp"})
    status, out, err = run(tmp_path, hub.address, *ANYGAUGE, "train", path, "--dry-run")
    assert status == 0, err
    assert f"the weights were not checked: a run would first fetch them, {weights}" in out
    assert hub.files() == [name for name in NEEDED if name != "model.safetensors"]
    hub.requests.clear()
    status, out, err = run(tmp_path, hub.address, *ANYGAUGE, "train", path, "--devices", "2")
    assert status == 0, err
    lines = err.splitlines()
    assert lines[0] == f"fetching {NAME}: 1 file, {weights}" and len(lines) == 2
    paths = [request.path for request in hub.requests]
    assert hub.files() == ["model.safetensors"]
    assert len([path for path in paths if path.startswith("/api/")]) == 1, "ranks asked nobody"
    config = (tmp_path / "out/tiny/adapter/adapter_config.json").read_text()
    assert f'"base_model_name_or_path": "{NAME}"' in config
    hub.requests.clear()
    home = tmp_path / "out/tiny"
    answer = (*ANYGAUGE, "generate", home, "--prompt", "hello", "--max-new-tokens", "2")
    assert run(tmp_path, hub.address, *answer)[0] == 0
    assert hub.files() == []
    switched_off = run(tmp_path, "http://127.0.0.1:9", *answer, HF_HUB_OFFLINE="1")
    assert switched_off[0] == 0, switched_off[2]


@pytest.mark.parametrize(
    ("access", "more"), [("gated", ["--devices", "2"]), ("private", ["--dry-run"])]
)
def test_a_refusal_is_one_message_and_leaves_nothing(
    access: str, more: list[str], tmp_path: Path, hub: Hub, files: Mapping[str, bytes]
) -> None:
    hub.repositories[NAME] = Repository(files=files, access=access)
    path = run_file(tmp_path, model={"name": NAME})
    status, out, err = run(tmp_path, hub.address, *ANYGAUGE, "train", path, *more)
    said = "is gated: accept its licence at" if access == "gated" else "is not a folder here"
    assert (status, out) == (2, "")
    assert err.startswith(f"error: model.name: '{NAME}' {said}") and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_copy_that_was_cut_is_refused_with_its_remedy(tmp_path: Path, hub: Hub) -> None:
    path = run_file(tmp_path, model={"name": NAME})
    fetch = (sys.executable, "-m", "anygauge.models.fetch", NAME)
    status, out, err = run(tmp_path, hub.address, *fetch)
    assert (status, out) == (0, "") and "6 files" in err
    (weights,) = tmp_path.glob("hub/hub/models--*/snapshots/*/model.safetensors")
    os.truncate(weights, 1000)
    status, _, err = run(tmp_path, hub.address, *ANYGAUGE, "train", path)
    assert status == 2 and "cannot be read as weights" in err
    copy = weights.parents[2]
    assert f"machine's copy of {NAME}: remove {copy}, and repeat the command" in err
    assert not (tmp_path / "out").exists()
    hub.requests.clear()
    shutil.rmtree(copy)
    assert run(tmp_path, hub.address, *fetch)[0] == 0
    assert hub.files() == NEEDED


@pytest.mark.slow
@pytest.mark.parametrize("access", ["public", "gated"])
def test_ranks_of_torchrun_fetch_once(
    access: str, tmp_path: Path, hub: Hub, files: Mapping[str, bytes]
) -> None:
    hub.repositories[NAME] = Repository(files=files, access=access)
    path = run_file(tmp_path, model={"name": NAME}, strategy={"name": "ddp"})
    torchrun = Path(sys.executable).with_name("torchrun")
    command = (torchrun, "--standalone", "--nproc-per-node=2", "-m", "anygauge", "train", path)
    status, out, err = run(tmp_path, hub.address, *command)
    if access == "public":
        assert status == 0, err
        assert hub.files() == NEEDED
        assert err.count(f"fetching {NAME}: 6 files") == 1
        assert "final loss" in out
    else:
        assert status == 1
        assert err.count(f"error: model.name: '{NAME}' is gated: accept its licence at") == 1
        assert "training:" not in out and hub.files() == []
