"""A stand-in of the Hugging Face hub: the endpoints from which huggingface_hub and datasets read, over files in memory."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
Files = Mapping[str, bytes]


class Hub(ThreadingHTTPServer):
    """repos: files of "models/org/name" and "datasets/org/name"; a gated one is in `gated`."""

    def __init__(self, repos: Mapping[str, Files], gated: frozenset[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.gated = repos, gated
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self.posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self._serve()

    def _serve(self) -> None:
        hub = self.server
        assert isinstance(hub, Hub)
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        repo, rest = f"{kind}/{'/'.join(parts[:2])}", parts[2:]
        files = hub.repos.get(repo, {})
        match rest:
            case _ if repo in hub.gated:
                self._fail(403, "GatedRepo")
            case _ if repo not in hub.repos:
                self._fail(404 if is_api else 401, "RepoNotFound")
            case [_, revision, *_] if revision not in ("main", COMMIT):
                self._fail(404, "RevisionNotFound")
            case [] | ["revision", _]:
                siblings = [{"rfilename": name} for name in files]
                self._json({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
            case ["tree", _, *folder]:
                self._json(_tree(files, "/".join(folder)))
            case ["paths-info", _]:
                names = self.posted["paths"]
                self._json([_entry(name, files[name]) for name in names if name in files])
            case ["resolve", _, *name] if "/".join(name) in files:
                self._send(files["/".join(name)])
            case _:
                self._fail(404, "EntryNotFound")

    def _fail(self, status: int, code: str) -> None:
        self._send(b"{}", status=status, headers={"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _send(self, content: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        for name, value in {
            "X-Repo-Commit": COMMIT,
            "ETag": etag,
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _tree(files: Files, folder: str) -> list[dict[str, object]]:
    inside = [name for name in files if not folder or name.startswith(f"{folder}/")]
    folders = {name.rpartition("/")[0] for name in inside if "/" in name} - {folder}
    listed: list[dict[str, object]] = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
    return listed + [_entry(name, files[name]) for name in inside]


@contextmanager
def serving(repos: Mapping[str, Files], *, gated: frozenset[str] = frozenset()) -> Iterator[Hub]:
    with Hub(repos, gated) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
