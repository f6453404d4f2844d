"""Publishes a result: a copy that others can load, and its upload to the hub. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from anygauge.interface import ModelError, UsageError
from anygauge.models import card
from anygauge.models.hub import CONFIG, HubUnreachableError, error_reason, names_hub
from anygauge.models.model_files import error_chain, read_fields
from anygauge.models.warm_start import CONFIG_FILE
from anygauge.util.text import near_file


def result_folder(run: Path) -> Path:
    """The result in a run's directory or a checkpoint's, or the folder itself where it is one.

    Raises:
        UsageError: there is none.
    """
    for folder in (run, run / "adapter", run / "model"):
        if (folder / CONFIG_FILE).is_file() or (folder / CONFIG).is_file():
            return folder
    raise UsageError(
        f"{run} has no result (looked at {run.absolute()}, and for adapter/ and model/ in it)"
        f"{near_file(run.absolute())}; give a run that has finished, an adapter or a model"
    )


@contextlib.contextmanager
def published_copy(result: Path, name: str, base: str | None) -> Iterator[Path]:
    """A folder with a result's files as they go out: links, and what names the base, anew.

    Args:
        name: of the repository.
        base: hub name of the base; None: as the result has it.

    Raises:
        ModelError: an adapter's base has no name that others know; or the card is damaged.
    """
    fields = read_fields(result / CONFIG_FILE) if (result / CONFIG_FILE).is_file() else {}
    named = fields.get("base_model_name_or_path")
    if fields and base is None and not names_hub(named):
        what = f"the folder {named}, which only this machine has" if named else "random weights"
        raise ModelError(
            f"{result}: the base of this adapter is {what}. Give the base's name on the hub: "
            "--base OWNER/NAME. If you trained it too, push it first"
        )
    changed = {card.FILE: card.published_card(result, name, base or named)}
    if fields and base not in (None, named):
        # A revision of the other base means nothing here.
        fields |= {"base_model_name_or_path": base, "revision": None}
        changed[CONFIG_FILE] = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    with tempfile.TemporaryDirectory() as temporary:
        for path in (path.relative_to(result) for path in result.rglob("*") if path.is_file()):
            there = Path(temporary) / path
            there.parent.mkdir(parents=True, exist_ok=True)
            if str(path) in changed:
                there.write_text(changed[str(path)], encoding="utf-8")
            else:
                there.symlink_to((result / path).resolve())
        yield Path(temporary)


def upload(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Upload a folder's files to a repository, which is made if there is none; returns its address.

    Args:
        message: of the commit.

    Raises:
        UsageError: nobody is logged in, or the repository is there and not private.
        ModelError: the hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token

    log_in = "hf auth login, or set HF_TOKEN, with a token that may write"
    if get_token() is None:
        raise UsageError(f"nobody is logged in to the hub: {log_in}; --dry-run needs none")
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=private or None, exist_ok=True))
        is_public = private and not api.model_info(name).private
        if not is_public:
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:  # which class it is depends on the library below the library
        chain = [*error_chain(error)]
        cause = next((one for one in chain if hasattr(one, "response")), chain[-1])
        status = getattr(getattr(cause, "response", None), "status_code", 500)
        kind, remedy = ModelError, f"Check the name, and log in: {log_in}"
        if status >= 500 or status == 429:
            kind = HubUnreachableError
            remedy = "Try again; check the network, HTTPS_PROXY, HF_ENDPOINT and HF_HUB_OFFLINE"
        where = f"{constants.ENDPOINT}/{name}"
        raise kind(f"the upload to {where} failed: {error_reason(cause)}. {remedy}") from None
    if is_public:
        raise UsageError(
            f"--private: {address} is there already, and public. Make it private on its page "
            "(Settings), or name another"
        )
    return address
