"""A stand-in for the Hugging Face Hub: real HTTP on loopback, enough of its API for the real client to push and pull.

It keeps repositories, their commits and large-file objects in memory, writes down every request, and fails on demand.
No published package offers this; the endpoints and their answers follow huggingface_hub's own client code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils.sha import git_hash

TOKEN = "hf_test_token_of_alice"
READ_TOKEN = "hf_test_token_that_reads"
State = tuple[str, dict[str, bytes]]  # commit, files


@dataclass
class Repo:
    name: str
    private: bool = False
    gated: bool = False
    commits: list[tuple[str, dict[str, bytes], str]] = field(default_factory=list)
    large: set[str] = field(default_factory=set)  # paths kept as large files

    def commit(self, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(repr((len(self.commits), sorted(files), message)).encode()).hexdigest()
        self.commits.append((oid, files, message))
        return oid

    def at(self, revision: str) -> State | None:
        if revision == "main":
            return self.commits[-1][:2]
        return next(((oid, files) for oid, files, _ in self.commits if oid == revision), None)


@dataclass
class Fault:
    """The next ``times`` requests whose "METHOD /path" matches ``pattern`` fail: with a status, or cut off."""

    pattern: str
    status: int | None = None  # None: the connection is dropped
    times: int = 1
    after_bytes: int = 0  # of the request's body, before the connection is dropped


class HubStandIn:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "METHOD /path"
        # With a folder here large files go through the xet client, which is sent to a storage on disk instead of a
        # server. That storage is its own; so the contents that a commit refers to are given in ``known`` (digest ->
        # bytes), and taken over once something has arrived.
        self.xet: Path | None = None
        self.known: dict[str, bytes] = {}
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[HubStandIn]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def add(self, repo_id: str, files: dict[str, bytes], **kwargs: Any) -> Repo:
        repo = self.repos[repo_id] = Repo(repo_id, **kwargs)
        repo.large = {path for path in files if path.endswith((".safetensors", ".png", ".gguf"))}
        repo.commit(dict(files), "initial commit")
        return repo

    def seen(self, pattern: str, since: int = 0) -> list[str]:
        return [request for request in self.requests[since:] if re.search(pattern, request)]


def point_client_at(server: HubStandIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub in this process talk to the stand-in, as ``TOKEN``'s owner, with a cache of its own."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Waiting between two attempts is not what is tested.
    monkeypatch.setattr("time.sleep", lambda seconds: None)


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms for an acknowledgement

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        with self.hub.lock:
            due = (fault for fault in self.hub.faults if fault.times > 0 and re.search(fault.pattern, request))
            fault = next(due, None)
            if fault is not None:
                fault.times -= 1
        try:
            if fault is not None and fault.status is None:  # no answer at all
                self._read_body(limit=fault.after_bytes)
                self.close_connection = True
                self.connection.close()
                return
            body = self._read_body()
            with self.hub.lock:
                self.hub.requests.append(request)
                if fault is not None:
                    self._answer(fault.status or 500, {"error": "on demand"})
                else:
                    self._route(request, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self, limit: int | None = None) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        length = int(self.headers.get("content-length") or 0)
        return self.rfile.read(length if limit is None else min(length, limit))

    def _answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self._answer(status, {"error": message or code}, {"X-Error-Code": code, "X-Error-Message": message or code})

    @property
    def _user(self) -> str | None:
        return "alice" if self.headers.get("authorization") in (f"Bearer {TOKEN}", f"Bearer {READ_TOKEN}") else None

    def _route(self, request: str, body: bytes) -> None:
        if self.headers.get("authorization") and self._user is None:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        for pattern, method in _ROUTES:
            match = re.fullmatch(pattern, request)
            if not match:
                continue
            found: dict[str, Any] = match.groupdict()
            revision = found.pop("revision", "main")
            if "repo" in found:
                # As on the Hub: everybody sees a gated repository's page and listing, its files need access.
                repo = found["repo"] = self._repo(found["repo"], contents=method in ("auth_check", "resolve"))
                if repo is None:
                    return None
                if method in ("info", "tree", "resolve"):
                    found["state"] = repo.at(revision)
                    if found["state"] is None:
                        return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return getattr(self, method)(body, **found)
        return self._refuse(404, "EntryNotFound", f"no such endpoint: {request}")

    def _repo(self, repo: str, contents: bool = False) -> Repo | None:
        found = self.hub.repos.get(repo)
        if found is None or (found.private and self._user is None):
            self._refuse(404 if self._user else 401, "RepoNotFound", "Repository not found")
            return None
        if contents and found.gated:
            self._refuse(403 if self._user else 401, "GatedRepo", "Access to this model is restricted")
            return None
        return found

    # One method per endpoint.

    def whoami(self, body: bytes) -> None:
        if self._user is None:
            return self._refuse(401, "", "Invalid username or password.")
        role = "read" if self.headers["authorization"].endswith(READ_TOKEN) else "write"
        orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
        return self._answer(200, {"name": self._user, "orgs": orgs, "auth": auth})

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or self._user}/{wanted['name']}"
        if self._user is None:
            return self._refuse(401, "", "Invalid username or password.")
        if repo_id.split("/")[0] not in (self._user, "team"):
            return self._refuse(403, "", f"no rights under {repo_id.split('/')[0]}")
        url = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return self._answer(409, {"error": "You already created this model repo", **url})
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repos[repo_id] = Repo(repo_id, private=private)
        self.hub.repos[repo_id].commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return self._answer(200, url)

    def auth_check(self, body: bytes, repo: Repo) -> None:
        self._answer(200)

    def auth_check_write(self, body: bytes, repo: Repo) -> None:
        if self._user is None or repo.name.split("/")[0] not in (self._user, "team"):
            return self._refuse(403, "", "You don't have write access")
        return self._answer(200)

    def info(self, body: bytes, repo: Repo, state: State) -> None:
        siblings = [{"rfilename": path} for path in sorted(state[1])]
        content = {"id": repo.name, "modelId": repo.name, "sha": state[0], "private": repo.private, "gated": repo.gated}
        self._answer(200, {**content, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, repo: Repo, state: State) -> None:
        entries = []
        for path, content in sorted(state[1].items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            if path in repo.large:
                entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        self._answer(200, entries)

    def validate_yaml(self, body: bytes) -> None:
        errors = [] if json.loads(body)["content"].startswith("---\n") else [{"message": "no metadata"}]
        self._answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, repo: Repo) -> None:
        present, answer = repo.commits[-1][1], []
        for file in json.loads(body)["files"]:
            path, content = file["path"], present.get(file["path"])
            large = path.endswith((".safetensors", ".png", ".gguf")) or file["size"] > 1_000_000
            oid = None if content is None else _sha256(content) if large else git_hash(content)
            mode = "lfs" if large else "regular"
            answer.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": answer})

    def lfs_batch(self, body: bytes, repo: Repo) -> None:
        objects = json.loads(body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.hub.objects:
                wanted["actions"] = {"upload": {"href": f"{self.hub.url}/storage/{wanted['oid']}"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if _sha256(body) != oid:
            return self._answer(400, {"error": "content does not match its digest"})
        self.hub.objects[oid] = body
        return self._answer(200)

    def xet_token(self, body: bytes, repo: Repo) -> None:
        if self.hub.xet is None:
            return self._refuse(404, "", "no such endpoint")
        place, expires = f"local://{self.hub.xet}", int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": place, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)}
        return self._answer(200, {"casUrl": place, "accessToken": "xet", "exp": expires}, headers)

    def commit(self, body: bytes, repo: Repo) -> None:
        if self.hub.xet is not None and any(self.hub.xet.rglob("*.mdb")):
            self.hub.objects |= self.hub.known
        if self._user is None:
            return self._refuse(403, "", "You don't have write access")
        files = dict(repo.commits[-1][1])
        message = ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self._answer(400, {"error": f"no object {value['oid']}"})
                files[value["path"]] = self.hub.objects[value["oid"]]
                repo.large.add(value["path"])
            elif item["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = repo.commit(files, message)
        return self._answer(200, {"commitUrl": f"{self.hub.url}/{repo.name}/commit/{oid}", "commitOid": oid})

    def resolve(self, body: bytes, repo: Repo, state: State, path: str) -> None:
        oid, files = state
        if path not in files:
            return self._refuse(404, "EntryNotFound", f"{path} does not exist")
        etag = _sha256(files[path]) if path in repo.large else git_hash(files[path])
        headers = {"X-Repo-Commit": oid, "ETag": f'"{etag}"', "Accept-Ranges": "none"}
        asked = re.fullmatch(r"bytes=0-(\d+)", self.headers.get("range") or "")
        if asked and self.command == "GET":
            return self._answer(206, files[path][: int(asked[1]) + 1], headers)
        return self._answer(200, files[path], headers)


_REPO = r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)"
_REVISION = r"(?P<revision>[\w.-]+)"
_ROUTES = [
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate_yaml"),
    (rf"GET /api/models/{_REPO}/auth-check", "auth_check"),
    (rf"GET /api/models/{_REPO}/auth-check/write", "auth_check_write"),
    (rf"GET /api/models/{_REPO}/revision/{_REVISION}", "info"),
    (rf"GET /api/models/{_REPO}/tree/{_REVISION}", "tree"),
    (rf"GET /api/models/{_REPO}", "info"),
    (rf"POST /api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    (rf"GET /api/models/{_REPO}/xet-write-token/{_REVISION}", "xet_token"),
    (rf"POST /api/models/{_REPO}/commit/{_REVISION}", "commit"),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    (r"PUT /storage/(?P<oid>\w+)", "store"),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
