"""Whether a run can resume from a checkpoint, and if not, what is wrong with it.

Nothing in a checkpoint's folder is trusted: files are read up to a limit, names stay inside the
folder, and every field must have its type. Imports no torch.
"""

from __future__ import annotations

import hashlib
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError

from anygauge.interface import AnygaugeError
from anygauge.util.files import read_json as read_any_json
from anygauge.util.section import Count, Number, Text, first_complaint
from anygauge.util.text import shorten

FORMAT = 1
RECORD = "checkpoint.json"
MANIFEST = "manifest.json"
RNG = "rng.safetensors"
STATE = "state"
RANK_STATE = "rank-state"
"""How names of files with tensors begin: the state of the run, and what its ranks have alone."""
FOLDER = "checkpoints"
RECORD_BYTES = 64 * 2**20
"""More than any record or manifest takes."""

_NAME = re.compile(r"step-([0-9]{1,18})")
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)

RecordT = TypeVar("RecordT", bound=BaseModel)


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


def find_defect(folder: Path, *, contents: bool = True) -> str | None:
    """Find a checkpoint's defect: missing, truncated, altered or foreign files; None if sound.

    Args:
        contents: check the sums of all files and open them; otherwise check names, sizes and the
            record.
    """
    try:
        listed = _read_model(Manifest, _file_inside(folder, MANIFEST)).files
        for name, file in listed.items():
            _check_file(_file_inside(folder, name), file, sums=contents or name == RECORD)
        tensors = [p.name for kind in (STATE, RANK_STATE) for p in folder.glob(f"{kind}-*")]
        for name in (RECORD, RNG, *sorted(tensors)):
            if name not in listed:
                return f"{MANIFEST} does not list {name}"
        record = read_record(folder)
        if contents:
            files_of(folder, STATE)
            keys_of(folder / RNG)
            found, written = len(files_of(folder, RANK_STATE)), record.get("rank_state", 0)
            if found != written:
                return f"{RECORD}: rank_state is {written}, and there are {found} such tensors"
    except AnygaugeError as error:
        return str(error).removeprefix(f"{folder}/")
    except _UNREADABLE as error:  # a name that no file system accepts
        return f"{MANIFEST} cannot be followed ({error})"
    return None


def refusal_of(folder: Path, *, contents: bool = True) -> str | None:
    """Why ``--resume FOLDER`` is refused, with checkpoints near it; None if it is accepted.

    Args:
        contents: see `find_defect`.
    """
    complaint = find_defect(folder, contents=contents)
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
            f"{path}: the format is {_excerpt(record.get('format'))}; this version of anygauge "
            f"reads format {FORMAT}"
        )
    _read_model(CheckpointRecord, path, record)
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
        raise AnygaugeError(f"{path} cannot be read (not a JSON object: {_excerpt(value)})")
    return value


def files_of(folder: Path, kind: str) -> dict[str, Path]:
    """Name of a tensor -> the file that holds it; reads only headers.

    Args:
        kind: how names of the files begin: `STATE` or `RANK_STATE`.

    Raises:
        AnygaugeError: a file is not a safetensors file.
    """
    paths = sorted(folder.glob(f"{kind}-*.safetensors"))
    return {key: path for path in paths for key in keys_of(path)}


def keys_of(path: Path) -> list[str]:
    """Names of the tensors in a safetensors file.

    Raises:
        AnygaugeError: it is not one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (SafetensorError, *_UNREADABLE) as error:
        raise AnygaugeError(f"{path} cannot be read: {error}") from error


def _check_file(path: Path, written: ListedFile, *, sums: bool) -> None:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise AnygaugeError(f"{path}: it is not a regular file")
        if found.st_size != written.bytes:
            raise AnygaugeError(f"{path} has {found.st_size} bytes, {written.bytes} were written")
        if sums and digest_of(path) != written.sha256:
            raise AnygaugeError(f"{path}: its SHA-256 is not that of the manifest")
    except OSError as error:
        raise AnygaugeError(f"{path}: {error.strerror}") from error


def _file_inside(folder: Path, name: str) -> Path:
    """A file of a checkpoint. The folder itself may be a link; nothing in it may."""
    path = folder / name
    if (target := path.resolve()) != folder.resolve() / name:
        raise AnygaugeError(f"{path}: it is a link to {target}")
    return path


def digest_of(path: Path) -> str:
    """A file's SHA-256.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _read_model(kind: type[RecordT], path: Path, value: Any = None) -> RecordT:
    """What a JSON file holds, with all fields as they must be; `value`, where it was read."""
    try:
        return kind.model_validate(read_json(path) if value is None else value)
    except ValidationError as error:
        raise AnygaugeError(f"{path}: {first_complaint(error)}") from None


def _no_way_out(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or name.startswith("/") or ".." in parts:
        raise ValueError("it is outside the checkpoint")
    return name


class ListedFile(BaseModel):
    """One entry of the manifest."""

    bytes: Count
    sha256: Text


class Manifest(BaseModel):
    """``manifest.json``: the files by their names, which stay inside the folder."""

    files: dict[Annotated[str, AfterValidator(_no_way_out)], ListedFile]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RecordedCounters(_Closed):
    """Counters of the optimizer."""

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
    """The place of a packed stream, in addition to the step; nothing else needs more than that."""

    first_step: Count = 0
    epoch: Count = 0
    block: Count = 0


class CheckpointRecord(BaseModel):
    """``checkpoint.json``; a later version may have more fields.

    Attributes:
        rank_state: tensors that ranks had of their own. What they must have in common with those
            that resume is in `world_size` and `settings`.
    """

    step: Count
    steps: Count
    world_size: Annotated[Count, Field(gt=0)]
    loss: Number | None
    counters: RecordedCounters
    identity: dict[str, Any]
    settings: dict[str, Any]
    history: RecordedHistory
    data: RecordedData
    rank_state: Count = 0


def _excerpt(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of too many digits
        text = f"a {type(value).__name__}"
    return shorten(text)
