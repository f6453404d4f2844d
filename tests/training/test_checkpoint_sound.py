"""Whatever is wrong with one checkpoint makes it passed over by name; leftovers of kills go."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import AnygaugeError
from anygauge.training.checkpoints.checkpoint_files import Checkpoint, write_checkpoint
from anygauge.training.checkpoints.manager import find_checkpoint, losses_in, remove_leftovers
from anygauge.training.checkpoints.sound import find_defect
from tests.helpers.checkpoints import ALONE, RECORD, exported, reseal, write

FILES = ("checkpoint.json", "manifest.json", "rng.safetensors", "state-00001.safetensors")
PATIENCE_S = 30


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A file that never ends ends the test."""

    def end(*_: object) -> None:
        raise TimeoutError("a hostile file was read on and on")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def two(run: Path) -> tuple[Path, Path]:
    """An older checkpoint and the newest."""
    folder = run / "checkpoints"
    return write(folder / "step-00000003"), write(folder / "step-00000004")


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def replaced(path: Path, make: Callable[[], None]) -> None:
    path.unlink()
    make()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"cut to {n}": (lambda p, n=n: cut(p, n), " bytes, ") for n in (0, 7, -2)},
    **{f"flipped at {n}": (lambda p, n=n: flipped(p, n), ": its SHA-256 is not") for n in (0, -1)},
    "missing": (Path.unlink, ": No such file or directory"),
    "a link": (lambda p: p.symlink_to(p.rename(p.parents[2] / "elsewhere")), ""),
    "a device": (lambda p: replaced(p, lambda: p.symlink_to("/dev/zero")), ""),
    "a pipe": (lambda p: replaced(p, lambda: os.mkfifo(p)), ""),
    "a folder": (lambda p: replaced(p, p.mkdir), ""),
    "huge": (huge, ""),
}
"""How a file is damaged, and what is said of it beside its name, but for the manifest."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("which", ["older", "newest"])
def test_a_damaged_file_is_named_and_the_other_checkpoint_taken(
    name: str, damage: str, which: str, tmp_path: Path
) -> None:
    older, newest = two(tmp_path)
    torn, sound = (older, newest) if which == "older" else (newest, older)
    make, said = DAMAGE[damage]
    make(torn / name)
    found = find_checkpoint("auto", tmp_path, 0, ALONE)
    assert found.checkpoint is not None and found.checkpoint.folder == sound
    # A list of losses looks at records alone.
    listed = {3, 4} if "flipped" in damage and name in FILES[2:] else {found.checkpoint.step}
    assert {step for step, _ in losses_in(tmp_path)} == listed
    complaint = str(find_defect(torn))
    assert complaint.startswith(name) and (said in complaint or name == "manifest.json")
    if which == "newest":
        assert found.skipped == (f"checkpoints/{torn.name} is skipped: {complaint}",)
    with pytest.raises(AnygaugeError, match="is not a sound checkpoint"):
        find_checkpoint(str(torn), tmp_path, 0, ALONE)


def passed_over(run: Path, said: str) -> None:
    """The newest checkpoint is, with these words; the older one is taken."""
    found = find_checkpoint("auto", run, 0, ALONE)
    assert found.checkpoint is not None and found.checkpoint.step == 3
    (skipped,) = found.skipped
    assert skipped.startswith("checkpoints/step-00000004 is skipped: ") and said in skipped
    assert skipped.encode() and len(skipped) < 400


def test_a_folder_of_it_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    _, newest = two(tmp_path)
    inner = newest / "adapter"
    inner.mkdir()
    reseal(newest, "adapter/adapter_config.json", b"{}")
    inner.symlink_to(inner.rename(tmp_path / "elsewhere"))
    passed_over(tmp_path, f"adapter/adapter_config.json: it is a link to {tmp_path}")


HOSTILE = [
    *("[]", "7", '"x"', "null", "", "{", "{}", "[" * 200_000, '{"a":' * 200_000, "1" * 5000),
    *('{"files": {}}', '{"files": {"a": 1}}', '{"format": 1, "step": Infinity}'),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("name", ["checkpoint.json", "manifest.json"])
def test_json_that_is_none(name: str, text: str, tmp_path: Path) -> None:
    _, newest = two(tmp_path)
    if name == "manifest.json":
        (newest / name).write_text(text)
    else:
        reseal(newest, name, text.encode())
    passed_over(tmp_path, name)
    assert losses_in(tmp_path) == [[3, 0.5]]


MISSING = object()
BAD: list[Any] = [None, "3", 1.5, -1, True, [], {}, 1e999, 2**70]
NUMBERS = (
    *("step", "steps", "world_size"),
    *("counters.updates", "history.step", "history.timed_tokens"),
)


@pytest.mark.parametrize("field", dict.fromkeys([*NUMBERS, *RECORD, "format"]))
def test_a_field_that_is_missing_or_of_a_wrong_type(field: str, tmp_path: Path) -> None:
    _, newest = two(tmp_path)
    text = (newest / "checkpoint.json").read_text()
    *above, last = field.split(".")
    for value in (MISSING, *(BAD if field in NUMBERS else ["text"])):
        record = json.loads(text)
        inner = record[above[0]] if above else record
        inner[last] = value
        said = (
            f"checkpoint.json: '{field}': Input should" if field in NUMBERS else "checkpoint.json"
        )
        if value is MISSING:
            del inner[last]
            said = f"'{field}' is missing" if field != "format" else "the format is None"
        changed = json.dumps(record).replace("Infinity", "1e999")  # JSON, and yet infinite
        reseal(newest, "checkpoint.json", changed.encode())
        passed_over(tmp_path, said)
        assert losses_in(tmp_path) == [[3, 0.5]]
        with pytest.raises(AnygaugeError):
            Checkpoint(newest)


@pytest.mark.parametrize(
    "name",
    [
        *("/dev/zero", "/etc/hostname", "../step-00000003/rng.safetensors", "a/../../x"),
        *("", "\0", "\ud800"),
    ],
)
def test_a_manifest_that_leads_out(name: str, tmp_path: Path) -> None:
    _, newest = two(tmp_path)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": "0" * 64}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    passed_over(tmp_path, "manifest.json")


def test_files_that_are_not_what_the_manifest_says_of_them(tmp_path: Path) -> None:
    _, newest = two(tmp_path)
    (newest / "state-00002.safetensors").write_bytes((newest / FILES[3]).read_bytes())
    passed_over(tmp_path, "manifest.json does not list state-00002.safetensors")
    (newest / "state-00002.safetensors").unlink()
    reseal(newest, "state-00001.safetensors", b"\xff" * 100)
    passed_over(tmp_path, "state-00001.safetensors")
    with pytest.raises(AnygaugeError, match=r"state-00001\.safetensors cannot be read"):
        Checkpoint(newest)
    moved = write(tmp_path / "step-00000005").rename(tmp_path / "step-00000009")
    assert "step is 5, and its folder is step-00000009" in str(find_defect(moved))


def test_a_loss_that_is_no_number_is_kept_as_null(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step-00000003"
    history = {**RECORD["history"], "last_loss": float("nan")}
    record = {**RECORD, "loss": float("inf"), "history": history}
    write_checkpoint(folder, exported(), record, [])
    assert find_defect(folder) is None
    assert losses_in(tmp_path) == [[3, None]]
    assert Checkpoint(folder).record["history"]["last_loss"] is None


def hidden(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_kills_leave_is_removed_and_nothing_else(tmp_path: Path) -> None:
    older, newest = two(tmp_path)
    folder = newest.parent
    (folder / ".step-00000004.part").mkdir()
    (folder / ".step-00000004.part/rng.safetensors").touch()
    (folder / ".step-00000001.part").symlink_to(older)
    (folder / ".notes").touch()
    before = hidden(tmp_path)
    found = find_checkpoint("auto", tmp_path, 0, ALONE)
    assert found.checkpoint is not None and found.checkpoint.step == 4
    assert hidden(tmp_path) == before, "looking changes nothing"
    remove_leftovers(tmp_path)
    assert hidden(tmp_path) == [".notes", older.name, newest.name]
    assert find_defect(newest) is None and find_defect(older) is None


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_all_files_have_the_mode_that_files_get(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        folder = write(tmp_path / "step-00000003")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
