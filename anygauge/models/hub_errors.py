"""What the hub's refusals mean, and what to do: one message for each."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from http.client import HTTPException

from anygauge.interface import ModelError


class HubUnreachableError(ModelError):
    """No answer of the hub could be had: it may have the model or not."""

    exit_status = 1


_LOG_IN = "log in (hf auth login, or HF_TOKEN)"
_COPY = "; a copy is on this machine: export HF_HUB_OFFLINE=1 to use it"


@contextlib.contextmanager
def readable(
    field: str, name: str, revision: str | None, *, here: str, copied: bool
) -> Iterator[None]:
    """Turn what the hub's library raises into a `ModelError` with a remedy.

    Args:
        field: of the run file.
        here: that no folder of this name is on this machine, in words.
        copied: a whole copy of some earlier time is on this machine.
    """
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{field}: {error}") from None
    except Exception as error:
        cause = _cause(error)
        said = _meaning(cause, name, revision, here, copied)
        if said is not None:
            raise ModelError(f"{field}: {said}") from None
        raise HubUnreachableError(f"{field}: {_unreachable(cause, name, here, copied)}") from None


def _cause(error: Exception) -> BaseException:
    """The hub's answer below an error that only says that no copy of a file is here."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    found: BaseException = error
    while isinstance(found, LocalEntryNotFoundError) and found.__cause__ is not None:
        found = found.__cause__
    return found


def _meaning(
    error: BaseException, name: str, revision: str | None, here: str, copied: bool
) -> str | None:
    """What is wrong, and what to do; None where it is the network."""
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    endpoint = constants.ENDPOINT
    page = f"{endpoint}/{name}"
    if isinstance(error, hub.GatedRepoError):
        account = "the account of your token" if get_token() else f"an account, and {_LOG_IN}"
        return (
            f"{name!r} is gated: accept its licence at {page} with {account}; if its authors must "
            "approve you, wait for that. A fine-grained token must also be allowed to read gated "
            f"models. The hub says: {_first_line(error)}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return (
            f"{name!r} has no revision {revision or 'main'!r}: model.revision must be a branch, a "
            f"tag or a commit of {page}/commits"
        )
    if isinstance(error, hub.DisabledRepoError):
        return f"the hub has disabled {name!r}; see {page}, and use another model"
    if isinstance(error, hub.RepositoryNotFoundError):
        seen = "the account of your token may see" if get_token() else "is public"
        private = "" if get_token() else f"; for a private one, {_LOG_IN}"
        return (
            f"{here}, nor a model of {endpoint} that {seen}. Give a run directory, a model folder, "
            f"or a name of the hub such as owner/name{private}"
        )
    if isinstance(error, hub.HfHubHTTPError):
        return _refusal(error, name, page, _COPY if copied else "")
    if isinstance(error, hub.EntryNotFoundError):
        return f"a file of {name!r} is gone from {page}: repeat the command"
    if isinstance(error, hub.HFValidationError):
        return (
            f"{here}, nor a valid name on the hub ({_first_line(error)}). Give a run directory, a "
            "model folder, or a name of the hub such as owner/name"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):
        return (
            f"{name!r} cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror}. Make room, "
            "or set HF_HOME to a folder on a larger disk"
        )
    if "Consistency check" in str(error):
        return f"{name!r} arrived incomplete: {_first_line(error)} Repeat the command"
    return None


def _unreachable(error: BaseException, name: str, here: str, copied: bool) -> str:
    from huggingface_hub import constants

    return (
        f"{here}, and the hub ({constants.ENDPOINT}) cannot be reached: "
        f"{_first_line(_root(error))}{_COPY if copied else ''}. Check the network, its proxy "
        "(HTTPS_PROXY) and HF_ENDPOINT; complete files are kept. For machines without a network, "
        "fetch the model on another machine into the same HF_HOME (python -m anygauge.models.fetch "
        f"{name}), and export HF_HUB_OFFLINE=1"
    )


def _refusal(error: BaseException, name: str, page: str, offline: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = _first_line(error)
    if status == 401:
        return (
            f"the hub refuses your token (401: {said}): it may have expired. Create a new one (hf "
            "auth login, or HF_TOKEN); a public model needs none"
        )
    if status == 403:
        return (
            f"the hub forbids {name!r} to the account of your token (403: {said}): ask its authors "
            f"for access at {page}, or use a token that may read it (hf auth login, or HF_TOKEN)"
        )
    if status is not None and (status >= 500 or status == 429):
        return f"the hub cannot answer for {name!r} now ({said}); try again later{offline}"
    return f"the hub refuses {name!r}: {said}"


def broke_off(error: BaseException) -> bool:
    """Whether a connection ended in the middle of a file: the library tries again after some of
    these errors, and which ones changes with its version."""
    return isinstance(_root(error), HTTPException | ConnectionResetError)


def _root(error: BaseException) -> BaseException:
    """What the network said, below what libraries made of it."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def _first_line(error: BaseException) -> str:
    """What the hub said, without addresses and numbers of requests where it said more."""
    said = getattr(error, "server_message", None) or str(error)
    lines = [line.strip() for line in str(said).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
