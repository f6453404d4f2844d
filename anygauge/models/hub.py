"""Models of the hub: which files a run needs, how they are fetched, and the copy on this machine.

Before ranks start, one process on each machine fetches (`anygauge.launch.prepare`), by the hub's
own `snapshot_download`. Ranks read the copy and ask no network. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anygauge.interface import ModelError
from anygauge.models.model_files import SINGLE_FILES, error_chain, weight_map
from anygauge.util.text import first_line, format_bytes, near_file

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

_TRIES = 5
_TURN_S = 1.0
_COMMIT = re.compile("[0-9a-f]{40}")

Progress = Callable[[int, int], None]
"""Takes the bytes of the files that are here by now, and of all that are fetched."""


class HubUnreachableError(ModelError):
    """The hub did not answer: it may have the model or not.

    Attributes:
        why: the same without what to do.
    """

    exit_status = 1
    why = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadRequest:
    """What a run needs of one repository.

    Attributes:
        field: of the run file, for messages.
        weights: the model's own: all of them, their index alone, or none.
        code: Python files, which the repository's configuration may name.
    """

    field: str
    name: str
    revision: str | None = None
    weights: Literal["all", "index", "none"] = "none"
    tokenizer: bool = True
    code: bool = False

    def __str__(self) -> str:
        """Name the request, for messages."""
        return self.name if self.revision is None else f"{self.name} at {self.revision}"

    def needs(self, file: str) -> bool:
        """Whether a file is needed that is not one of weights."""
        return (
            file in CONFIGS
            or (self.code and file.endswith(".py"))
            or (self.tokenizer and _of_tokenizer(file))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchResult:
    """The result of a request.

    Attributes:
        folder: the copy.
        new: bytes that were not on this machine before.
        left: bytes of weights whose index alone was asked for.
    """

    folder: Path
    new: int = 0
    left: int = 0


def names_hub(name: str | None) -> bool:
    """Whether a name can only be one of the hub."""
    if name is None or name.startswith((".", "~")):
        return False
    return not (Path(name).is_absolute() or Path(name).exists())


def download_requests(
    section: ModelSection, *, weights: bool = True, model: bool = True
) -> list[DownloadRequest]:
    """What a model section needs of the hub; nothing where it names folders.

    Args:
        weights: False for what can be looked at before gigabytes are fetched.
        model: False for the tokenizer alone.
    """
    found = []
    name, tokenizer, code = section.name, section.tokenizer, section.trust_remote_code
    if name is not None and names_hub(name) and (model or tokenizer is None):
        found.append(
            DownloadRequest(
                field="model.name",
                name=name,
                revision=section.revision,
                weights="none" if not model else "all" if weights else "index",
                tokenizer=tokenizer is None,
                code=code,
            )
        )
    if tokenizer is not None and names_hub(tokenizer):
        # A revision of the model's repository means nothing in another one.
        found.append(DownloadRequest(field="model.tokenizer", name=tokenizer, code=code))
    return found


def requests_for_plan(section: ModelSection) -> list[DownloadRequest]:
    """What a plan needs of the hub: the configuration; a tokenizer where tokens are added to it."""
    adds = bool(section.new_tokens or section.new_special_tokens)
    return [
        replace(request, weights="none", tokenizer=adds)
        for request in download_requests(section)
        if adds or request.field == "model.name"
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
    """Return the same copy, or refuse where it is missing.

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


def missing_files(folder: Path, *, weights: bool = True) -> list[str]:
    """What a copy lacks of what its configuration and its index name."""
    files = [CONFIG]
    if weights:
        try:
            files += weight_files([path.name for path in folder.iterdir()], folder)
        except ModelError:
            files.append("its weights")
    return [file for file in files if not (folder / file).is_file()]


def weight_files(names: Collection[str], folder: Path) -> list[str]:
    """The files with a model's weights, their index first: safetensors, or else PyTorch's own.

    Args:
        names: of the files of the repository.
        folder: has the index, if there is one.

    Raises:
        ModelError: there are none, or the index cannot be read.
    """
    first = _first_of_weights(names)
    if first is not None:
        shards = weight_map(folder / first).values() if first.endswith(".json") else ()
        return [first, *sorted(set(shards))]
    kinds = [name for name in sorted(names) if name.endswith((".gguf", ".pth", ".onnx", ".h5"))]
    found = f"; it has {', '.join(kinds[:4])}, which anygauge does not read" if kinds else ""
    if "adapter_config.json" in names:
        found = "; it is an adapter: give its base in model.name, and a folder with the adapter in "
        found += "adapter.start_from"
    files = " or ".join(SINGLE_FILES)
    raise ModelError(f"it has no weights that anygauge reads ({files}, or their index){found}")


def _first_of_weights(names: Collection[str]) -> str | None:
    """The index of a repository's weights, or the one file that has them all."""
    every = [file for single in SINGLE_FILES for file in (f"{single}.index.json", single)]
    return next((file for file in every if file in names), None)


def _of_tokenizer(name: str) -> bool:
    return any(fnmatch(name, p) and name.count("/") == p.count("/") for p in TOKENIZER_FILES)


def fetch(
    request: DownloadRequest,
    progress: Progress | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> FetchResult:
    """Bring what is needed of a repository to this machine; what is here is not fetched again.

    Where the hub does not answer, a whole copy of an earlier time serves; `log` is told.

    Args:
        progress: called at most once a second, while bytes arrive.
        log: takes one line when something must be fetched.

    Raises:
        ModelError: it cannot be had: which of the reasons it is, and what to do.
    """
    from huggingface_hub import constants

    known = copy_of(request.name, request.revision)
    heavy = request.weights == "all"
    lacks = [] if known is None else missing_files(known, weights=heavy)
    if known is not None and not lacks and _COMMIT.fullmatch(request.revision or ""):
        there = [path.name for path in known.iterdir()]
        if not request.tokenizer or any(map(_of_tokenizer, there)):
            return FetchResult(folder=known)
    try:
        with _explain_errors(request):
            return _fetch(request, known, progress, log)
    except HubUnreachableError as error:
        if known is None or (heavy and lacks):
            here = "no copy of it" if known is None else f"a part of it, without {_names(lacks)}"
            raise HubUnreachableError(f"{error}. This machine has {here}") from None
        if copy_of(request.name, request.revision) != known:
            raise  # a part of a newer commit has arrived, which the name finds from now on
        if not constants.HF_HUB_OFFLINE:
            log(f"{error.why}: using the copy of {request} on this machine, {known}, as it is")
        return FetchResult(folder=known)


def _fetch(
    request: DownloadRequest,
    known: Path | None,
    progress: Progress | None,
    log: Callable[[str], None],
) -> FetchResult:
    """See `fetch`; `known` is the copy that the name finds so far."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # one line for all files is the caller's
    api = HfApi()
    info = api.model_info(
        request.name, revision=request.revision, files_metadata=True, timeout=ANSWER_S
    )
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    before = copy_of(request.name, info.sha)
    had = {file for file in sizes if before is not None and (before / file).exists()}
    files = [file for file in sizes if request.needs(file)]
    first = _first_of_weights(sizes)
    if first is not None and first.endswith(".json") and request.weights != "none":
        files.append(first)
    if CONFIG not in sizes and (request.weights != "none" or not files):
        raise ModelError(f"{request} has no {CONFIG}, so anygauge cannot train it")
    folder = known
    if folder is None or folder.name != info.sha or not had.issuperset(files):
        # By the name that was given, so that the copy is found by it later.
        folder = _download(request, request.revision, files)
    weights = []
    if request.weights != "none":
        try:
            weights = weight_files(sizes, folder)
        except ModelError as error:
            raise ModelError(f"{request}: {error}") from None
    if lost := [file for file in weights if file not in sizes]:
        raise ModelError(
            f"{request}: its index names {_names(lost)}, but the repository does not have that; "
            "tell its authors, or name another revision"
        )
    weights = [file for file in weights if file not in {*had, *files}]
    left = 0
    if request.weights == "index":
        left, weights = sum(sizes[file] for file in weights), []
    new = [sizes[file] for file in [*files, *weights] if file not in had]
    if new:
        number = "1 file" if len(new) == 1 else f"{len(new)} files"
        log(f"fetching {request}: {number}, {format_bytes(sum(new))}")
    if weights:
        total = sum(sizes[file] for file in weights)
        _download_weights(request, folder, weights, total, progress or (lambda *_: None))
    return FetchResult(folder=folder, new=sum(new), left=left)


def _download(request: DownloadRequest, revision: str | None, files: list[str]) -> Path:
    """Have these files in the copy; returns its folder."""
    from huggingface_hub import snapshot_download

    names = [glob.escape(file) for file in files]
    for turn in range(_TRIES):
        try:
            folder = Path(snapshot_download(request.name, revision=revision, allow_patterns=names))
            break
        except Exception as error:
            # The library tries again after some of these errors; which ones depends on its version.
            broke_off = isinstance([*error_chain(error)][-1], HTTPException | ConnectionResetError)
            if not broke_off or turn == _TRIES - 1:
                raise
    if lacks := [file for file in files if not (folder / file).exists()]:
        raise ModelError(
            f"{request}: {_names(lacks)} did not arrive in {folder}: the repository changed, or "
            "the hub no longer answered. Repeat the command"
        )
    return folder


def _download_weights(
    request: DownloadRequest, folder: Path, files: list[str], total: int, progress: Progress
) -> None:
    """Download weights, and report the bytes on the disk: the older library counts only files."""
    blobs, shown = folder.parents[1] / "blobs", 0
    before = _bytes_in(blobs)
    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(_download, request, folder.name, files)
        while not wait((download,), _TURN_S).done:
            there = min(_bytes_in(blobs) - before, total)
            if there > shown:
                progress(there, total)
                shown = there
        download.result()
    progress(total, total)


def _bytes_in(blobs: Path) -> int:
    found = 0
    for path in blobs.glob("*"):
        with contextlib.suppress(OSError):  # it was moved meanwhile
            found += path.stat().st_blocks * 512  # some downloads begin with a hole
    return found


def _names(files: list[str]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(map(repr, files[:3])) + more


def _absence(request: DownloadRequest) -> str:
    path = Path(request.name).absolute()
    return f"{request.name!r} is not a folder here (looked at {path}{near_file(path)})"


# -- what the hub's refusals mean, and what to do --------------------------------------------------


@contextlib.contextmanager
def _explain_errors(request: DownloadRequest) -> Iterator[None]:
    """Turn what the hub's library raises into a `ModelError` with a remedy."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except ModelError as error:
        raise ModelError(f"{request.field}: {error}") from None
    except Exception as error:
        cause: BaseException = error
        # It says only that no copy is here; below it stands why none could be fetched.
        while isinstance(cause, LocalEntryNotFoundError) and cause.__cause__ is not None:
            cause = cause.__cause__
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if refused := _refusal(cause, status, request):
            raise ModelError(f"{request.field}: {refused}") from None
        raise _no_answer(cause, status, request) from None


def _refusal(error: BaseException, status: int | None, request: DownloadRequest) -> str | None:
    """Explain what is wrong with the request; None where the hub did not answer it."""
    from huggingface_hub import constants, errors, get_token

    name, text, page = request.name, error_reason(error), f"{constants.ENDPOINT}/{request.name}"
    log_in = "log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        account = "the account of your token" if get_token() else f"an account, and {log_in}"
        return (
            f"{name!r} is gated: accept its licence at {page} with {account}; if its authors must "
            "approve you, wait for that. A fine-grained token must also be allowed to read gated "
            f"models. The hub says: {text}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{name!r} has no revision {request.revision or 'main'!r}: model.revision must be a "
            f"branch, a tag or a commit of {page}/commits"
        )
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        known = "the account of your token may see" if get_token() else "is public"
        private = "" if get_token() else f"; for a private one, {log_in}"
        return (
            f"{_absence(request)}, nor a model of {constants.ENDPOINT} that {known} ({text}). Give "
            f"a run directory, a model folder, or a name of the hub such as owner/name{private}"
        )
    if status is not None and status < 500 and status != 429:
        remedies = {
            401: f"your token may have expired: {log_in} again; a public model needs none",
            403: f"ask its authors for access at {page}, or use another token: {log_in}",
        }
        remedy = remedies.get(status, f"see {page}, or repeat the command")
        return f"the hub refuses {name!r} ({status}: {text}): {remedy}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
        return (
            f"{name!r} cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror}. Make room, "
            "or set HF_HOME to a folder on a larger disk"
        )
    if "Consistency check" in str(error):
        return f"{name!r} arrived incomplete: {text} Repeat the command"
    return None


def _no_answer(
    error: BaseException, status: int | None, request: DownloadRequest
) -> HubUnreachableError:
    from huggingface_hub import constants

    by_hand = f"python -m anygauge.models.fetch {request.name}"
    hub, absent = f"the hub ({constants.ENDPOINT})", f"{_absence(request)}, and "
    if status is not None:
        absent, advice = "", "Try again later"
        why = f"{hub} cannot answer now: {error_reason(error)}"
    elif constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
        advice = f"Unset it, or fetch the model while there is a network: {by_hand}"
    else:
        why = f"{hub} cannot be reached: {first_line([*error_chain(error)][-1])}"
        advice = (
            "Check the network, its proxy (HTTPS_PROXY) and HF_ENDPOINT; complete files are kept. "
            "For machines without a network, fetch the model on another machine into the same "
            f"HF_HOME ({by_hand}), and export HF_HUB_OFFLINE=1"
        )
    found = HubUnreachableError(f"{request.field}: {absent}{why}. {advice}")
    found.why = why
    return found


def error_reason(error: BaseException) -> str:
    """Return the hub's message; else a line without addresses and numbers of requests."""
    return first_line(getattr(error, "server_message", None) or error)
