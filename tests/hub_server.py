"""A small Hub on 127.0.0.1, so that tests run the real upload and download code of huggingface_hub.

    with HubServer(token="hf_test") as hub:
        hub.redirect_client(monkeypatch)
        HfApi().upload_folder(repo_id="user/name", folder_path=folder)
        assert hub.repos["user/name"].files["config.json"] == (folder / "config.json").read_bytes()

Unlike the real Hub it has one user, model repos only, one branch, no pull requests, no multipart uploads, no
.gitignore rules, new repos are empty (no .gitattributes), and a tree listing is always recursive.

Xet cannot be refused from here: a client that has hf_xet never asks the LFS batch endpoint, it goes straight
to the xet service. So the client must be told not to (HF_HUB_DISABLE_XET), which both helpers below do.

Retries: the client's `http_backoff` (preupload, LFS batch, LFS PUT, verify) repeats 5 times on network errors
and on 408, 429 and 5xx, sleeping 1 + 2 + 4 + 8 + 8 = 23 s. No environment variable and no argument of
`upload_folder` changes that; only its keyword defaults do, hence `redirect_client(max_retries=...)`.
Never repeated (without xet): whoami, create_repo, validate-yaml, repo_info and commit.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".onnx", ".msgpack", ".h5")
LFS_MIN_SIZE = 10 * 1024 * 1024

_REPO, _REVISION, _PATH = "(?P<repo>[^/]+/[^/]+)", "(?P<revision>[^/]+)", "(?P<path>.+)"
# name: (methods, path, whether a token is needed). The client sends no token with an LFS PUT.
ROUTES = {
    "whoami": ("GET", "/api/whoami-v2", True),
    "create_repo": ("POST", "/api/repos/create", True),
    "validate_yaml": ("POST", "/api/validate-yaml", False),
    "preupload": ("POST", f"/api/models/{_REPO}/preupload/{_REVISION}", True),
    "lfs_batch": ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", True),
    "lfs_put": ("PUT", f"/lfs-storage/{_REPO}/(?P<oid>[0-9a-f]+)", False),
    "lfs_verify": ("POST", rf"/{_REPO}\.git/info/lfs/objects/verify", True),
    "commit": ("POST", f"/api/models/{_REPO}/commit/{_REVISION}", True),
    "repo_info": ("GET", f"/api/models/{_REPO}(?:/revision/{_REVISION})?", False),
    "tree": ("GET", f"/api/models/{_REPO}/tree/{_REVISION}(?:/{_PATH})?", False),
    "resolve": ("GET HEAD", f"/{_REPO}/resolve/{_REVISION}/{_PATH}", False),
}


class Reply(NamedTuple):
    content: Any  # bytes are sent as they are, anything else as JSON
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


class HubError(Exception):
    """The client picks its exception by the status and X-Error-Code, and shows X-Error-Message."""

    def __init__(self, status: int, message: str, code: str = "", **body: Any) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message.encode("ascii", "replace").decode().replace("\n", " ")}
        if code:
            headers["X-Error-Code"] = code
        self.reply = Reply({"error": message, **body}, status, headers)


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]  # the whole tree after this commit


@dataclass
class Repo:
    id: str
    private: bool
    commits: list[Commit] = field(default_factory=list)
    lfs_objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def head(self) -> Commit:
        return self.commits[-1] if self.commits else Commit("0" * 40, "", {})

    @property
    def files(self) -> dict[str, bytes]:
        return self.head.files

    def at(self, revision: str | None) -> Commit:
        for commit in [*self.commits, self.head]:
            if revision == commit.oid:
                return commit
        if revision in (None, "main"):
            return self.head
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def is_lfs(path: str, size: int) -> bool:
    # The client sends empty files as regular ones whatever it is told.
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size >= LFS_MIN_SIZE)


def file_oid(path: str, content: bytes) -> str:
    """sha256 of an LFS file, git's sha1 of another; the client leaves out files whose oid is unchanged."""
    if is_lfs(path, len(content)):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def find_route(method: str, path: str) -> tuple[str, dict[str, Any]]:
    for name, (methods, pattern, _) in ROUTES.items():
        if method in methods.split() and (match := re.fullmatch(pattern, path)):
            return name, {key: value and unquote(value) for key, value in match.groupdict().items()}
    return f"{method} {path}", {}


DropRule = str | Callable[[str, str], bool] | None


class HubServer:
    """Serves inside its `with` block; `repos` are kept in memory, `requests` are the route names called."""

    def __init__(self, token: str = "hf_test", user: str = "user") -> None:
        self.token, self.user = token, user
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.drop_connection_on(None)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # The default poll of 0.5 s would be paid at each stop.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def drop_connection_on(self, rule: DropRule, times: int | None = None) -> None:
        """Cut requests to that route, or those with rule(method, path), mid-body; `times` None is always."""
        if isinstance(rule, str) and rule not in ROUTES:
            raise ValueError(f"No route {rule!r} to drop. Known: {', '.join(ROUTES)}. Or pass a predicate.")
        self._drop_rule, self._drops_left = rule, times

    def client_env(self) -> dict[str, str]:
        """Environment for a subprocess; huggingface_hub reads most of it at import only."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def redirect_client(self, monkeypatch: Any, max_retries: int = 0) -> None:
        """Point this process's huggingface_hub and transformers here, until monkeypatch undoes it."""
        import huggingface_hub
        from huggingface_hub import constants, hf_api
        from huggingface_hub.utils import http_backoff

        for name, value in self.client_env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        # Made from ENDPOINT at import: left alone, downloads would go to the real Hub.
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # The user agent of the first request would fetch a registry from ENDPOINT.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        # The HfApi behind huggingface_hub.upload_folder and friends, and the one behind push_to_hub.
        monkeypatch.setattr(hf_api.api, "endpoint", self.url)
        if "transformers.utils.hub" in sys.modules:
            monkeypatch.setattr(sys.modules["transformers.utils.hub"], "_hf_api", None, raising=False)
        monkeypatch.setitem(http_backoff.__kwdefaults__, "max_retries", max_retries)
        monkeypatch.setitem(http_backoff.__kwdefaults__, "base_wait_time", 0)
        huggingface_hub.close_session()  # a session opened earlier may hold a proxy

    def should_drop(self, name: str, method: str, path: str) -> bool:
        with self._lock:
            self.requests.append(name)
            rule = self._drop_rule
            hit = rule(method, path) if callable(rule) else rule == name
            if hit and self._drops_left:
                self._drops_left -= 1
                return True
            return hit and self._drops_left is None

    def answer(self, name: str, params: dict[str, Any], authorization: str | None, body: bytes) -> Reply:
        try:
            with self._lock:  # one request at a time: a commit is seen whole or not at all
                if name not in ROUTES:
                    raise HubError(404, f"This test server has no route {name}")
                if authorization not in (None, f"Bearer {self.token}"):
                    raise HubError(401, "Invalid credentials in Authorization header")
                if ROUTES[name][2] and not authorization:
                    raise HubError(401, "Invalid username or password.")
                if "repo" in params:
                    params["repo"] = self._find_repo(params["repo"], bool(authorization) or name == "lfs_put")
                return getattr(self, f"_on_{name}")(body, **params)
        except HubError as error:
            return error.reply
        except Exception as error:  # the client does not retry a 400, so the test fails at once and says why
            return HubError(400, f"Malformed request, or a defect of the test server: {error!r}").reply

    def _find_repo(self, repo_id: str, may_see_private: bool) -> Repo:
        repo = self.repos.get(repo_id)
        if repo is None or (repo.private and not may_see_private):
            # As on the real Hub, who is not logged in does not learn whether a private repo exists.
            raise HubError(404 if may_see_private else 401, "Repository not found", "RepoNotFound")
        return repo

    def _on_whoami(self, body: bytes) -> Reply:
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return Reply({"type": "user", "name": self.user, "orgs": [], "auth": auth})

    def _on_create_repo(self, body: bytes) -> Reply:
        payload = json.loads(body)
        namespace = payload.get("organization") or self.user
        repo_id = f"{namespace}/{payload['name']}"
        if namespace != self.user:
            raise HubError(403, f"You don't have the rights to create a model under {namespace}")
        if repo_id in self.repos:
            raise HubError(409, "You already created this model repo", url=f"{self.url}/{repo_id}")
        private = payload.get("visibility") == "private" or bool(payload.get("private"))
        self.repos[repo_id] = Repo(repo_id, private)
        return Reply({"url": f"{self.url}/{repo_id}", "name": repo_id, "id": repo_id})

    def _on_validate_yaml(self, body: bytes) -> Reply:
        front = re.match(r"---\r?\n(.*?)\r?\n---", json.loads(body)["content"], re.DOTALL)
        try:
            metadata = yaml.safe_load(front[1]) if front else None
        except yaml.YAMLError as error:
            return Reply({"errors": [{"message": f"YAML metadata error: {error}"}], "warnings": []}, 400)
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return Reply({"errors": [], "warnings": warnings})

    def _on_preupload(self, body: bytes, repo: Repo, revision: str) -> Reply:
        present = repo.at(revision).files
        answers = []
        for asked in json.loads(body)["files"]:
            path, mode = asked["path"], "lfs" if is_lfs(asked["path"], asked["size"]) else "regular"
            oid = file_oid(path, present[path]) if path in present else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return Reply({"files": answers})

    def _on_lfs_batch(self, body: bytes, repo: Repo) -> Reply:
        verify = {"href": f"{self.url}/{repo.id}.git/info/lfs/objects/verify"}
        objects = json.loads(body)["objects"]
        for item in objects:
            if item["oid"] not in repo.lfs_objects:  # no actions means: already here
                upload = {"href": f"{self.url}/lfs-storage/{repo.id}/{item['oid']}"}
                item["actions"] = {"upload": upload, "verify": verify}
        return Reply({"transfer": "basic", "objects": objects})

    def _on_lfs_put(self, body: bytes, repo: Repo, oid: str) -> Reply:
        if hashlib.sha256(body).hexdigest() != oid:
            raise HubError(400, f"The uploaded content does not have the sha256 {oid}")
        repo.lfs_objects[oid] = body
        return Reply(b"")

    def _on_lfs_verify(self, body: bytes, repo: Repo) -> Reply:
        item = json.loads(body)
        if len(repo.lfs_objects.get(item["oid"], b"")) != item["size"]:
            raise HubError(404, f"LFS object {item['oid']} of {item['size']} bytes was not uploaded")
        return Reply({})

    def _on_commit(self, body: bytes, repo: Repo, revision: str) -> Reply:
        if revision != "main":
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit", repo.head.oid) != repo.head.oid:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.files)
        for operation in operations:
            _apply(repo, files, operation["key"], operation["value"])
        oid = hashlib.sha1(repo.head.oid.encode() + body).hexdigest()
        repo.commits.append(Commit(oid, header["value"]["summary"], files))
        return Reply({"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo.id}/commit/{oid}"})

    def _on_repo_info(self, body: bytes, repo: Repo, revision: str | None) -> Reply:
        commit = repo.at(revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return Reply({"id": repo.id, "sha": commit.oid, "private": repo.private, "siblings": siblings})

    def _on_tree(self, body: bytes, repo: Repo, revision: str, path: str | None) -> Reply:
        files = sorted(repo.at(revision).files.items())
        entries = [_tree_entry(*file) for file in files if not path or file[0].startswith(f"{path}/")]
        if path and not entries:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        return Reply(entries)

    def _on_resolve(self, body: bytes, repo: Repo, revision: str, path: str) -> Reply:
        commit = repo.at(revision)
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        content = commit.files[path]
        return Reply(content, 200, {"X-Repo-Commit": commit.oid, "ETag": f'"{file_oid(path, content)}"'})


def _apply(repo: Repo, files: dict[str, bytes], key: str, value: dict[str, str]) -> None:
    path = value["path"]
    if key == "file":
        files[path] = base64.b64decode(value["content"])
    elif key == "lfsFile" and value["oid"] in repo.lfs_objects:
        files[path] = repo.lfs_objects[value["oid"]]
    elif key == "lfsFile":
        raise HubError(400, f"An LFS pointer pointed to a file that does not exist. Offending file: {path}")
    elif key == "deletedFile" and path in files:
        del files[path]
    else:
        raise HubError(400, f"Cannot apply operation {key} to {path}")


def _tree_entry(path: str, content: bytes) -> dict[str, Any]:
    size, oid = len(content), file_oid(path, content)
    lfs = {"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if is_lfs(path, size) else {}
    return {"type": "file", "path": path, "size": size, "oid": oid, **lfs}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds: a client that stops sending cannot hold a thread

    def _serve(self) -> None:
        self.close_connection = True  # else idle connections would outlive the server
        path = urlsplit(self.path).path
        name, params = find_route(self.command, path)
        length = int(self.headers.get("Content-Length") or 0)
        if self.hub.should_drop(name, self.command, path):
            return self._cut(length)
        # Read the body even to refuse it: closing on unread data resets the connection and hides the answer.
        body = self.rfile.read(length)
        if len(body) == length:
            self._send(self.hub.answer(name, params, self.headers.get("Authorization"), body))

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _cut(self, length: int) -> None:
        self.rfile.read(length // 2)
        # Linger 0 makes close() send a reset, as a broken network would, not an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _send(self, reply: Reply) -> None:
        is_bytes = isinstance(reply.content, bytes)
        content = reply.content if is_bytes else json.dumps(reply.content).encode()
        kind = "application/octet-stream" if is_bytes else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Connection": "close"}
        self.send_response(reply.status)
        for name, value in {**headers, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a test that needs to know asks `HubServer.requests`."""
