"""The model hub's HTTP interface, as its library uses it: strict, on a port of this machine.

Paths, headers and codes are those of the installed huggingface_hub (`hf_api.model_info`,
`file_download.get_hf_file_metadata` and `http_get`, `utils._http.hf_raise_for_status`), and of
`HfFileSystem` as `datasets` uses it. What nobody should ask for is 404 and stands in `strangers`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.standins.files import LocalServer, send

LARGE = (".safetensors", ".bin", ".pth", ".gguf", ".onnx", ".model", ".parquet")
"""Files that the hub keeps beside git, and redirects to."""
TOKEN = "hf_of_somebody"
ASKED_FOR = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""What `datasets` looks for in every data set."""

Headers = Mapping[str, str]


@dataclass(kw_only=True)
class Repository:
    """One model, or a data set: then its key begins with ``datasets/``.

    Attributes:
        access: ``public``, ``gated`` or ``private`` (what a token of `TOKEN` may read, and nobody
            else), ``refused`` and ``forbidden`` (to every token), or ``broken`` (the hub fails).
        private: what is told of it to those who may see it.
        messages: of the commits that were made.
        cut: file -> bytes after which the connection breaks; once each.
    """

    files: Mapping[str, bytes]
    access: str = "public"
    private: bool = False
    messages: list[str] = field(default_factory=list)
    commit: str = "c0ffee" * 6 + "abcd"
    branches: tuple[str, ...] = ("main",)
    cut: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked: ``GET``, ``/path``, the byte from which on, and one behind the last."""

    method: str
    path: str
    start: int = 0
    end: int | None = None


class Hub(LocalServer):
    """Serves repositories.

    Attributes:
        requests: what was asked, in order.
        strangers: of these, what the hub does not have.
        sent: bytes of files that went out.
        large: SHA-256 -> bytes of files that came in.
    """

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        super().__init__("GET", "HEAD", "POST", "PUT")
        self.repositories = dict(repositories)
        self.requests: list[Request] = []
        self.strangers: list[str] = []
        self.sent = 0
        self.large: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        """For HF_ENDPOINT."""
        return self.root

    @property
    def store(self) -> str:
        """Where large files lie: another host, which takes no token."""
        return self.address.replace("127.0.0.1", "localhost")

    def files(self, method: str = "GET") -> list[str]:
        """Names of the files that were asked for, sorted, each as often as that happened."""
        found = []
        for request in self.requests:
            match = re.fullmatch(
                "/(?:datasets/)?(?:[^/]+/){2}resolve/[^/]+/(.+)|/cdn/[0-9a-f]+/(.+)", request.path
            )
            if match and request.method == method:
                found.append(match[1] or match[2])
        return sorted(found)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """See `LocalServer`."""
        _answer(self, handler)


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub, folder: Path) -> None:
    """What HF_ENDPOINT and HF_HOME set, which are read at the libraries' imports."""
    import datasets
    from huggingface_hub import constants, file_download, hf_api

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.address)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "hf" / "datasets")
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


def _answer(hub: Hub, handler: BaseHTTPRequestHandler) -> None:
    url = urlsplit(handler.path)
    path = unquote(url.path)
    if path == "/api/agent-harnesses":  # once a day by the library itself (`_detect_agent.py`)
        return send(handler, 404, {})
    posted = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    span = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or "")
    start = int(span[1]) if span else 0
    end = int(span[2]) + 1 if span and span[2] else None
    hub.requests.append(Request(handler.command, path, start, end))
    if handler.command in ("POST", "PUT") and (written := _write(hub, handler, path, posted)):
        return send(handler, written[0], {}, json.dumps(written[1]).encode())
    of_tree = "/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/(tree|paths-info)/([^/]+)/?(.*)"
    if tree := re.fullmatch(of_tree, path):
        repository = hub.repositories.get(tree[1])
        if refusal := _refusal(repository, handler.headers, tree[1]):
            return send(handler, *refusal)
        assert repository is not None
        if not _has(repository, tree[3]):
            return send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        entries = _tree(repository)
        if tree[2] == "tree":
            recursive = parse_qs(url.query.lower()).get("recursive") == ["true"]
            entries = [e for e in entries if _below(e["path"], tree[4], recursive)]
        else:
            asked = parse_qs(posted.decode()).get("paths") or json.loads(posted)["paths"]
            entries = [e for e in entries if e["path"] in asked]
        if not entries and tree[4]:
            return send(handler, 404, {"X-Error-Code": "EntryNotFound"})
        return send(handler, 200, {}, json.dumps(entries).encode())
    if api := re.fullmatch("/api/(?:models/)?((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?", path):
        repository = hub.repositories.get(api[1])
        # Anybody may know that a gated model exists.
        refusal = _refusal(repository, handler.headers, api[1])
        if refusal and not (repository and repository.access == "gated"):
            return send(handler, *refusal)
        assert repository is not None
        if not _has(repository, api[2] or "main"):
            return send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        blobs = parse_qs(url.query.lower()).get("blobs") == ["true"]
        return send(handler, 200, {}, json.dumps(_info(api[1], repository, blobs)).encode())
    if file := re.fullmatch("/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
        return _file(hub, handler, file[1], file[2], file[3], start, end)
    if stored := re.fullmatch("/cdn/([0-9a-f]{64})/(.+)", path):
        if "Authorization" in handler.headers:
            return send(handler, 400, {})
        for repository in hub.repositories.values():
            body = repository.files.get(stored[2])
            if body is not None and hashlib.sha256(body).hexdigest() == stored[1]:
                return _body(hub, handler, {}, body, start, end, repository.cut.get(stored[2]))
    hub.strangers.append(path)
    return send(handler, 404, {})


def _write(
    hub: Hub, handler: BaseHTTPRequestHandler, path: str, posted: bytes
) -> tuple[int, dict[str, Any]] | None:
    """Status and answer of what makes a repository or a commit; None for other requests.

    As `hf_api.create_repo`, `_commit_api` and `lfs` of huggingface_hub 2.4 have it, without Xet.
    """
    if stored := re.fullmatch("/store/([0-9a-f]{64})", path):
        assert "Authorization" not in handler.headers, "another host, which takes no token"
        assert hashlib.sha256(posted).hexdigest() == stored[1]
        hub.large[stored[1]] = posted
        return 200, {}
    lines = [json.loads(line) for line in posted.splitlines()] if posted[:1] == b"{" else [{}]
    made = re.fullmatch(
        "/api/(repos/create|validate-yaml)|/(?:api/models/)?([^/]+/[^/]+?)"
        "(?:/(preupload|commit)/main|[.]git/info/lfs/objects/batch)",
        path,
    )
    if made is None:
        return None
    if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
        return 401, {"error": "Invalid username or password."}
    if made[1] == "validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if made[1]:
        name = f"{lines[0]['organization']}/{lines[0]['name']}"
        if lines[0]["organization"] != "me":
            return 403, {"error": "You don't have the rights to create a model there"}
        if name in hub.repositories:
            url = f"{hub.address}/{name}"
            return 409, {"error": "You already created this model repo", "url": url}
        private = "private" in (lines[0].get("visibility"), lines[0].get("private") and "private")
        hub.repositories[name] = Repository(files={}, private=private)
        return 200, {"url": f"{hub.address}/{name}", "name": name}
    repository = hub.repositories[made[2]]
    if made[3] == "preupload":
        kinds = {True: "lfs", False: "regular"}
        files = [
            {"path": p, "uploadMode": kinds[p.endswith(LARGE)], "shouldIgnore": False}
            for p in (file["path"] for file in lines[0]["files"])
        ]
        return 200, {"files": files}
    if made[3] == "commit":
        repository.messages.append(lines[0]["value"]["summary"])
        for value in (one["value"] for one in lines[1:]):
            body = hub.large.get(value.get("oid")) or base64.b64decode(value["content"])
            repository.files = {**repository.files, value["path"]: body}
        address = f"{hub.address}/{made[2]}/commit/{repository.commit}"
        return 200, {"commitUrl": address, "commitOid": repository.commit}
    objects = [
        {**one, "actions": {"upload": {"href": f"{hub.store}/store/{one['oid']}"}}}
        for one in lines[0]["objects"]
    ]
    return 200, {"transfer": "basic", "objects": objects}


def _file(
    hub: Hub,
    handler: BaseHTTPRequestHandler,
    name: str,
    revision: str,
    file: str,
    start: int,
    end: int | None,
) -> None:
    repository = hub.repositories.get(name)
    if refusal := _refusal(repository, handler.headers, name):
        return send(handler, *refusal)
    assert repository is not None
    if not _has(repository, revision):
        return send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
    headers = {"X-Repo-Commit": repository.commit}
    if file not in repository.files:
        script = f"{name.rpartition('/')[2]}.py"
        if not (name.startswith("datasets/") and file in (*ASKED_FOR, script)):
            hub.strangers.append(file)
        return send(handler, 404, {**headers, "X-Error-Code": "EntryNotFound"})
    body = repository.files[file]
    if file.endswith(LARGE):
        digest = hashlib.sha256(body).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(body))}
        headers |= {"Location": f"{hub.store}/cdn/{digest}/{file}"}
        return send(handler, 302, headers)
    headers["ETag"] = f'"{_git_id(body)}"'
    return _body(hub, handler, headers, body, start, end, repository.cut.get(file))


def _refusal(
    repository: Repository | None, asked: Any, name: str
) -> tuple[int, dict[str, str]] | None:
    token = (asked.get("Authorization") or "").removeprefix("Bearer ")
    access = "none" if repository is None else repository.access
    if access in ("none", "private") and not (token == TOKEN and access == "private"):
        return (404 if token else 401), {"X-Error-Code": "RepoNotFound"}
    if access == "gated" and token != TOKEN:
        said = f"Access to model {name} is restricted."
        code = 403 if token else 401
        return code, {"X-Error-Code": "GatedRepo", "X-Error-Message": said}
    if access == "refused" and token:
        return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
    if access == "forbidden":
        return 403, {"X-Error-Message": "Your token may not read this"}
    if access == "broken":
        return 503, {}
    return None


def _has(repository: Repository, revision: str) -> bool:
    return revision == repository.commit or revision in repository.branches


def _info(name: str, repository: Repository, blobs: bool) -> dict[str, Any]:
    siblings = []
    for file, body in repository.files.items():
        one: dict[str, Any] = {"rfilename": file}
        if blobs:
            one |= {"size": len(body), "blobId": _git_id(body)}
            if file.endswith(LARGE):
                digest = hashlib.sha256(body).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(body), "pointerSize": 130}
        siblings.append(one)
    name = name.removeprefix("datasets/")
    return {
        **{"id": name, "modelId": name, "sha": repository.commit, "private": repository.private},
        **{"gated": repository.access == "gated", "downloads": 0, "likes": 0, "tags": []},
        "siblings": siblings,
    }


def _tree(repository: Repository) -> list[dict[str, Any]]:
    folders = sorted({str(p) for f in repository.files for p in PurePosixPath(f).parents} - {"."})
    entries: list[dict[str, Any]] = [
        {"type": "directory", "oid": _git_id(one.encode()), "size": 0, "path": one}
        for one in folders
    ]
    for file, body in repository.files.items():
        one: dict[str, Any] = {"type": "file", "oid": _git_id(body), "size": len(body)}
        if file.endswith(LARGE):
            digest = hashlib.sha256(body).hexdigest()
            one["lfs"] = {"oid": digest, "size": len(body), "pointerSize": 130}
        entries.append({**one, "path": file})
    return entries


def _below(path: str, folder: str, recursive: bool) -> bool:
    parent = str(PurePosixPath(path).parent).removeprefix(".")
    return parent == folder or (
        recursive and f"{parent}/".startswith(f"{folder}/" if folder else "")
    )


def _git_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _body(
    hub: Hub,
    handler: BaseHTTPRequestHandler,
    headers: Headers,
    body: bytes,
    start: int,
    end: int | None,
    cut: list[int] | None,
) -> None:
    part = body[start:end]
    status = 206 if start or end is not None else 200
    if status == 206:
        last = start + len(part) - 1
        headers = {**headers, "Content-Range": f"bytes {start}-{last}/{len(body)}"}
    if handler.command == "GET":
        hub.sent += len(part)
    send(
        handler, status, headers, part, cut=cut.pop(0) if cut and handler.command == "GET" else None
    )
