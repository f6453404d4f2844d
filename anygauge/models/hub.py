"""Models of the hub: the files that a run needs, fetching them once, and the copy on this machine.

Before ranks start, one process on each machine fetches (`anygauge.launch.prepare`). Ranks read the
copy and ask no network. Imports no torch.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anygauge.interface import ModelError
from anygauge.models.files import SINGLE_FILES, weight_map
from anygauge.models.hub_errors import HubUnreachableError, broke_off, readable
from anygauge.util.text import near_file

if TYPE_CHECKING:
    from anygauge.config.schema import ModelSection

CONFIG = "config.json"

CONFIGS = (CONFIG, "generation_config.json", "README.md")

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "bpe.codes", "dict.txt", "normalizer.json"),
    *("*.model", "*.spm", "*.tiktoken", "tekken.json", "emoji.json"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""As tokenizers of the model library name their files, and publishers theirs."""

ANSWER_S = 5.0
"""The hub must say within this time whether it has a model, or it is called unreachable."""

_DOWNLOADS = 8
_TRIES = 5
_TURN_S = 1.0
_COMMIT = re.compile("[0-9a-f]{40}")

Progress = Callable[[int, int], None]
"""Takes the bytes of the files that are here by now, and of all that are fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a run needs of one repository.

    Attributes:
        field: of the run file, for messages.
        weights: the model's own: all of them, their index alone, or none.
        code: Python files, which the repository's configuration may name.
    """

    field: str
    name: str
    revision: str | None
    weights: Literal["all", "index", "none"]
    tokenizer: bool
    code: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What became of a request.

    Attributes:
        folder: the copy.
        new: bytes that were not on this machine before.
        left: bytes of weights whose index alone was asked for.
    """

    folder: Path
    new: int
    left: int


def names_hub(name: str | None) -> bool:
    """Whether a name can only be one of the hub."""
    if name is None or name.startswith((".", "~")):
        return False
    return not (Path(name).is_absolute() or Path(name).exists())


def wanted(section: ModelSection, *, weights: bool = True, model: bool = True) -> list[Wanted]:
    """What a model section needs of the hub; nothing where it names folders.

    Args:
        weights: False for what can be looked at before gigabytes are fetched.
        model: False for the tokenizer alone.
    """
    found = []
    of_model = names_hub(section.name)
    if of_model and (model or section.tokenizer is None):
        assert section.name is not None
        found.append(
            Wanted(
                field="model.name",
                name=section.name,
                revision=section.revision,
                weights="none" if not model else "all" if weights else "index",
                tokenizer=section.tokenizer is None,
                code=section.trust_remote_code,
            )
        )
    if names_hub(section.tokenizer):
        assert section.tokenizer is not None
        found.append(
            Wanted(
                field="model.tokenizer",
                name=section.tokenizer,
                # A revision of the model's repository means nothing in another one.
                revision=None,
                weights="none",
                tokenizer=True,
                code=section.trust_remote_code,
            )
        )
    return found


def wanted_for_plan(section: ModelSection) -> list[Wanted]:
    """What a plan needs of the hub: the configuration; a tokenizer where tokens are added to it."""
    adds = bool(section.new_tokens or section.new_special_tokens)
    return [
        replace(want, weights="none", tokenizer=adds)
        for want in wanted(section, weights=False)
        if adds or want.field == "model.name"
    ]


def copy_of(name: str, revision: str | None) -> Path | None:
    """The folder of a repository's files that were fetched before; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    for file in (CONFIG, "tokenizer_config.json", "tokenizer.json", "tokenizer.model"):
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except ValueError:  # no name that the hub could have
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def needed_copy(field: str, name: str, revision: str | None) -> Path:
    """The same, which must be there.

    Raises:
        ModelError: it is not.
    """
    found = copy_of(name, revision)
    if found is None:
        raise ModelError(
            f"{field}: {name!r} is neither a folder here (looked at {Path(name).absolute()}) nor, "
            f"at revision {revision or 'main'}, among this machine's copies of the hub's models. "
            f"Fetch it: python -m anygauge.models.fetch {name}"
        )
    return found


def is_whole(folder: Path, *, weights: bool) -> bool:
    """Whether a copy has what its configuration and its index name."""
    if not (folder / CONFIG).is_file() or not weights:
        return (folder / CONFIG).is_file()
    try:
        files = weight_files([path.name for path in folder.iterdir()], lambda name: folder / name)
    except ModelError:
        return False
    return all((folder / file).is_file() for file in files)


def weight_files(there: Iterable[str], path_of: Callable[[str], Path]) -> list[str]:
    """The files with a model's weights, their index first: safetensors, or else PyTorch's own.

    Args:
        there: names in the repository.
        path_of: gives an index to be read.

    Raises:
        ModelError: there are none, or the index cannot be read.
    """
    names = set(there)
    for single in SINGLE_FILES:
        index = f"{single}.index.json"
        if index in names:
            return [index, *sorted(set(weight_map(path_of(index)).values()))]
        if single in names:
            return [single]
    kinds = [name for name in sorted(names) if name.endswith((".gguf", ".pth", ".onnx", ".h5"))]
    found = f"; it has {', '.join(kinds[:4])}, which anygauge does not read" if kinds else ""
    if "adapter_config.json" in names:
        found = "; it is an adapter: give its base in model.name, and a folder with the adapter in "
        found += "adapter.start_from"
    files = " or ".join(SINGLE_FILES)
    raise ModelError(f"it has no weights that anygauge reads ({files}, or their index){found}")


def fetch(
    want: Wanted, progress: Progress | None = None, log: Callable[[str], None] | None = None
) -> Fetched:
    """Bring what is needed of a repository to this machine; what is here is not fetched again.

    Args:
        progress: called at most once a second, while bytes arrive.
        log: takes one line when something must be fetched.

    Raises:
        ModelError: it cannot be had: which of the reasons it is, and what to do.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    known = copy_of(want.name, want.revision)
    heavy = want.weights == "all"
    there = known is not None and is_whole(known, weights=heavy)
    pinned = want.revision is not None and _COMMIT.fullmatch(want.revision) is not None
    if constants.HF_HUB_OFFLINE or (pinned and there):
        if known is None or (heavy and not there):
            raise HubUnreachableError(
                f"{want.field}: {_here(want)}, HF_HUB_OFFLINE is set, and this machine has "
                f"{'no copy' if known is None else 'only a part'} of a hub model of that name. "
                "Unset it, or fetch the model while there is a network: python -m "
                f"anygauge.models.fetch {want.name}"
            )
        return Fetched(folder=known, new=0, left=0)
    disable_progress_bars()  # one line for all files is the caller's
    with readable(want.field, want.name, want.revision, here=_here(want), copied=there):
        info = HfApi().model_info(
            want.name, revision=want.revision, files_metadata=True, timeout=ANSWER_S
        )
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}

        def download(file: str, revision: str | None = info.sha, tries: int = _TRIES) -> Path:
            try:
                return Path(hf_hub_download(want.name, file, revision=revision))
            except Exception as error:
                if tries == 1 or not broke_off(error):
                    raise
                return download(file, revision, tries - 1)

        first = CONFIG if CONFIG in sizes else next(iter(_of_tokenizer(sizes)), CONFIG)
        if first not in sizes:
            raise ModelError(f"{_said(want)} has no {CONFIG}, so anygauge cannot train it")
        before = copy_of(want.name, info.sha)
        had = {file for file in sizes if before is not None and (before / file).exists()}
        # By the name that was given, so that the copy is found by it later.
        is_new = known is None or known.name != info.sha or first not in had
        folder = download(first, want.revision).parent if is_new or known is None else known
        if folder.name != info.sha:
            raise ModelError(
                f"{_said(want)} changed while it was being fetched: repeat the command"
            )
        weights = [] if want.weights == "none" else _weights(want, sizes, download)
        files = [first, *(c for c in CONFIGS if c in sizes), *_of_tokenizer(sizes, want.tokenizer)]
        files += [f for f in sizes if f.endswith(".py")] if want.code else []
        index = [file for file in weights if file.endswith(".json")]
        new = dict.fromkeys([*files, *(weights if heavy else index)]).keys() - had
        count = sum(sizes[file] for file in new)
        if new and log is not None:
            number = "1 file" if len(new) == 1 else f"{len(new)} files"
            log(f"fetching {_said(want)}: {number}, {readable_size(count)}")
        missing = [file for file in new if not (folder / file).exists()]
        with _counted(folder, info, missing, progress) as turn:
            _all(missing, download, turn)
        left = 0 if heavy else sum(sizes.get(f, 0) for f in weights if f not in {*index, *had})
    return Fetched(folder=folder, new=count, left=left)


def _weights(want: Wanted, sizes: Mapping[str, int], download: Callable[[str], Path]) -> list[str]:
    """See `weight_files`; all of them are in the repository."""
    try:
        found = weight_files(sizes, download)
    except ModelError as error:
        raise ModelError(f"{_said(want)}: {error}") from None
    lost = [file for file in found if file not in sizes]
    if lost:
        raise ModelError(
            f"{_said(want)}: its index names {lost[0]!r}, but the repository does not have that "
            "file; tell its authors, or name another revision"
        )
    return found


def _of_tokenizer(sizes: Mapping[str, int], asked: bool = True) -> list[str]:
    return [
        name
        for name in sizes
        for pattern in TOKENIZER_FILES
        if asked and fnmatch(name, pattern) and name.count("/") == pattern.count("/")
    ]


def _all(files: list[str], download: Callable[[str], Path], turn: Callable[[], None]) -> None:
    """Download at once what may be; what has begun when one fails is finished, and kept."""
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        waiting: set[Future[Path]] = {pool.submit(download, file) for file in files}
        failed: BaseException | None = None
        while waiting:
            done, waiting = wait(waiting, _TURN_S, return_when=FIRST_COMPLETED)
            turn()
            failed = failed or next((e for f in done if (e := f.exception()) is not None), None)
            if failed is not None:
                waiting = {future for future in waiting if not future.cancel()}
        if failed is not None:
            raise failed


@contextlib.contextmanager
def _counted(
    folder: Path, info: Any, files: list[str], progress: Progress | None
) -> Iterator[Callable[[], None]]:
    """Count bytes in the library's own folder: it has a bar for each file, and none for all."""
    blobs = folder.parents[1] / "blobs"
    asked = [one for one in info.siblings or () if one.rfilename in set(files)]
    parts = {(one.lfs.sha256 if one.lfs else one.blob_id): one.size or 0 for one in asked}
    total, shown, before = sum(parts.values()), 0.0, -1

    def turn() -> None:
        nonlocal shown, before
        if progress is None or not total or time.monotonic() - shown < _TURN_S:
            return
        shown = time.monotonic()
        there = sum(_there(blobs, str(name), size) for name, size in parts.items())
        if there > before:
            progress(there, total)
            before = there

    turn()
    yield turn
    if progress is not None and total:
        progress(total, total)


def _there(blobs: Path, name: str, size: int) -> int:
    """Bytes of a file that are on the disk, whole or not."""
    if (blobs / name).exists():
        return size
    found = 0
    for path in blobs.glob(f"{name}*.incomplete"):
        with contextlib.suppress(OSError):  # it was moved meanwhile
            found = max(found, path.stat().st_blocks * 512)  # some downloads begin with a hole
    return min(found, size)


def readable_size(count: int) -> str:
    """Bytes, as files are sold."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.0f} kB"


def _said(want: Wanted) -> str:
    return want.name if want.revision is None else f"{want.name} at {want.revision}"


def _here(want: Wanted) -> str:
    path = Path(want.name).absolute()
    return f"{want.name!r} is not a folder here (looked at {path}{near_file(path)})"
