"""Whether a run can resume from a checkpoint, and if not, what is wrong with it.

Nothing in a checkpoint's folder is trusted: files are read up to a limit, names stay inside the
folder, and every field must have its type. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from anygauge.interface import AnygaugeError
from anygauge.util.files import read_json as read_any_json
from anygauge.util.schema import Count, Number, Text, first_complaint
from anygauge.util.text import short

FORMAT = 1
RECORD = "checkpoint.json"
MANIFEST = "manifest.json"
RNG = "rng.safetensors"
FOLDER = "checkpoints"
RECORD_BYTES = 64 * 2**20
"""More than any record or manifest takes."""

_NAME = re.compile(r"step-([0-9]{1,18})")
_HIDDEN = re.compile(r"\.step-[0-9]{1,18}\.(part|old)")
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it has another name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints_in(run_directory: Path) -> list[Path]:
    """A run's checkpoints, newest first; none of them is opened."""
    found = [
        (step, path)
        for path in (run_directory / FOLDER).glob("step-*")
        if path.is_dir() and (step := step_of(path)) is not None
    ]
    return [path for _, path in sorted(found, reverse=True)]


def set_aside(run_directory: Path) -> list[Path]:
    """Checkpoints that a killed process had hidden to replace them, the only ones of their step."""
    return [
        path
        for path in hidden_in(run_directory)
        if path.suffix == ".old"
        and path.is_dir()
        and not path.is_symlink()
        and not shown(path).exists()
    ]


def shown(path: Path) -> Path:
    """The usual name of a hidden checkpoint."""
    return path.with_name(path.name.removeprefix(".").removesuffix(".old"))


def hidden_in(run_directory: Path) -> list[Path]:
    """Everything that a killed process leaves behind when it writes or removes checkpoints."""
    names = (run_directory / FOLDER).glob(".step-*")
    return sorted(path for path in names if _HIDDEN.fullmatch(path.name))


def complaint_about(folder: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint: missing, truncated, altered, foreign files; None if sound.

    Args:
        contents: check the sums of all files and open them; otherwise check names, sizes and the
            record.
    """
    try:
        listed = _manifest(folder)
        for name, file in listed.items():
            digest = file.sha256 if contents or name == RECORD else None
            _check_file(folder, name, file.bytes, digest)
        for name in (RECORD, RNG):
            if name not in listed:
                return f"{MANIFEST} does not list {name}"
        for path in sorted(folder.glob("state-*")):
            if path.name not in listed:
                return f"{MANIFEST} does not list {path.name}"
        read_record(folder)
        if contents:
            state_files(folder)
            keys_of(folder / RNG)
    except AnygaugeError as error:
        return str(error).removeprefix(f"{folder}/")
    except _UNREADABLE as error:  # a name that no file system accepts
        return f"{MANIFEST} cannot be followed ({error})"
    return None


def refusal_of(folder: Path, *, contents: bool = True) -> str | None:
    """Why ``--resume FOLDER`` is refused, with checkpoints near it; None if it is accepted.

    Args:
        contents: see `complaint_about`.
    """
    complaint = complaint_about(folder, contents=contents)
    if complaint is None:
        return None
    near = checkpoints_in(folder) or checkpoints_in(folder.parent)
    hint = f"; checkpoints near it: {', '.join(map(str, near))}" if near else ""
    return f"--resume {folder} is not a sound checkpoint: {complaint}{hint}"


def read_record(folder: Path) -> dict[str, Any]:
    """``checkpoint.json``, every field checked for its type; no tensor is read.

    Raises:
        AnygaugeError: it cannot be read, is of another format, or a field is not what it must be.
    """
    path = folder / RECORD
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise AnygaugeError(
            f"{path}: the format is {_short(record.get('format'))}; this version of anygauge "
            f"reads format {FORMAT}"
        )
    try:
        CheckpointRecord.model_validate(record)
    except ValidationError as error:
        raise AnygaugeError(f"{path}: {first_complaint(error)}") from None
    named = step_of(folder)
    if named is not None and named != record["step"]:
        raise AnygaugeError(f"{path}: step is {record['step']}, and its folder is {folder.name}")
    return record


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; numbers in it are finite.

    Raises:
        AnygaugeError: it cannot be read, or holds something else.
    """
    try:
        value = read_any_json(path, RECORD_BYTES, parse_constant=_refuse_constant)
    except OSError as error:
        raise AnygaugeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise AnygaugeError(f"{path} cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise AnygaugeError(f"{path} cannot be read (not a JSON object: {_short(value)})")
    return value


def state_files(folder: Path) -> dict[str, Path]:
    """``KEY/NAME`` -> the file that holds this tensor; reads only headers.

    Raises:
        AnygaugeError: a file is not a safetensors file.
    """
    return {
        key: path for path in sorted(folder.glob("state-*.safetensors")) for key in keys_of(path)
    }


def keys_of(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file.

    Raises:
        AnygaugeError: it is not one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise AnygaugeError(f"{path}: it is not a regular file")
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, *_UNREADABLE) as error:
        raise AnygaugeError(f"{path} cannot be read: {error}") from error


class _File(BaseModel):
    """One entry of the manifest."""

    bytes: Count
    sha256: Text


def _manifest(folder: Path) -> dict[str, _File]:
    """The files by their names, which stay inside the folder."""
    path = folder / MANIFEST
    _refuse_link(folder, MANIFEST)
    files = read_json(path).get("files")
    if not isinstance(files, dict):
        raise AnygaugeError(f"{path} cannot be read (files is {_short(files)})")
    listed = {}
    for name, entry in files.items():
        parts = PurePosixPath(name).parts
        if not parts or "\0" in name or PurePosixPath(name).is_absolute() or ".." in parts:
            raise AnygaugeError(f"{path} names {_short(name)}, which is outside the checkpoint")
        try:
            listed[name] = _File.model_validate(entry)
        except ValidationError:
            raise AnygaugeError(
                f"{path} cannot be read ({_short(name)}: {_short(entry)})"
            ) from None
    return listed


def _check_file(folder: Path, name: str, size: int, digest: str | None) -> None:
    path = folder / name
    _refuse_link(folder, name)
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise AnygaugeError(f"{path}: it is not a regular file")
        if found.st_size != size:
            raise AnygaugeError(f"{path} has {found.st_size} bytes, {size} were written")
        if digest is not None and digest_of(path) != digest:
            raise AnygaugeError(f"{path}: its SHA-256 is not that of the manifest")
    except OSError as error:
        raise AnygaugeError(f"{path}: {error.strerror}") from error


def _refuse_link(folder: Path, name: str) -> None:
    """The folder itself may be a link; nothing in it may."""
    path = folder
    for part in PurePosixPath(name).parts:
        path = path / part
        try:
            if path.is_symlink():
                raise AnygaugeError(f"{path}: it is a link to {os.readlink(path)}")  # noqa: PTH115
        except OSError as error:
            raise AnygaugeError(f"{path}: {error.strerror}") from error


def digest_of(path: Path) -> str:
    """A file's SHA-256.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RecordedCounters(_Closed):
    """Of the optimizer."""

    updates: Count
    loss_scale: Number | None
    good_steps: Annotated[int, Strict()]


class RecordedEvaluation(BaseModel):
    """One evaluation of the run."""

    step: Count
    name: Text
    eval_loss: Number | None = None


class RecordedHistory(_Closed):
    """What the run has done."""

    step: Count
    first_loss: Number | None
    last_loss: Number | None
    tokens: Count
    seconds: Number
    evaluations: list[RecordedEvaluation]
    timed_steps: Count
    timed_tokens: Count
    timed_seconds: Number


class RecordedData(_Closed):
    """Where a packed stream is, in addition to the step; nothing else needs more than that."""

    first_step: Count = 0
    epoch: Count = 0
    block: Count = 0


class CheckpointRecord(BaseModel):
    """``checkpoint.json``; a later version may have more fields."""

    step: Count
    steps: Count
    world_size: Annotated[Count, Field(gt=0)]
    loss: Number | None
    counters: RecordedCounters
    identity: dict[str, Any]
    settings: dict[str, Any]
    history: RecordedHistory
    data: RecordedData


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of too many digits
        text = f"a {type(value).__name__}"
    return short(text)
