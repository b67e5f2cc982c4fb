"""`tasuki dashboard`: an HTTP server, GET only, with JSON."""

import hmac
import ipaddress
import json
import math
import os
import secrets
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tasuki.config.checks import port_problem
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.dashboard.feed import Feed
from tasuki.dashboard.logs import read_logs
from tasuki.dashboard.places import MALFORMED, RunPlace, place_of, place_of_node
from tasuki.dashboard.samples import compare, list_steps, read_picture, read_step
from tasuki.rpc.methods import METHODS
from tasuki.rpc.port import HttpCaller, HttpHandler, HttpPort, read_certificate
from tasuki.wire.address import is_beyond_loopback, is_loopback, reachable, split_host_port
from tasuki.wire.errors import InvalidArgument, PathNotFound, PermissionDenied, TasukiError, Unauthenticated

_METHOD = METHODS["/tasuki.v1.CoordinatorService/GetState"]
"""Every role may read."""
_BEARER = "bearer "
_TOKEN_BYTES = 32
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_QUICK = ("/api/changes", "/api/run", "/api/node")
_MAX_NUMBER = 2**53
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
_STATUS: Mapping[type[TasukiError], HTTPStatus] = {
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    PermissionDenied: HTTPStatus.FORBIDDEN,
    PathNotFound: HTTPStatus.NOT_FOUND,
    InvalidArgument: HTTPStatus.BAD_REQUEST,
}

Query = Mapping[str, str]


class DashboardServer(HttpPort):
    """Serves one feed. Loopback uses plain HTTP with a token; other addresses use the TLS and roles of [security]."""

    url: str

    def __init__(self, feed: Feed, listen: str, *, token: str | None, guard_config: NodeConfig | None) -> None:
        """token: None lets every user of the machine read. guard_config: for an address beyond loopback.

        Raises OSError if the address is unavailable, InvalidArgument naming a key of [security] with an unusable file.
        """
        self.feed, self._token, self.answering = feed, token, threading.Lock()
        """Held for an answer from much data, so that many at once do not need the memory of all."""
        self.files = _static_files()
        super().__init__(listen, _Handler, guard=guard_config)

    def check(self, handler: BaseHTTPRequestHandler) -> None:
        """Checks a request before it is answered. Raises Unauthenticated and PermissionDenied."""
        if self.access is not None:
            self.access.check(_METHOD, HttpCaller(handler))
        header = handler.headers.get("Authorization", "")
        given = header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else ""
        if self._token is not None and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Unauthenticated("open the URL that `tasuki dashboard` has printed: it has the token of this page")


def _static_files() -> dict[str, tuple[str, bytes]]:
    """Path -> type and content; requests can name nothing else."""
    folder = resources.files("tasuki.dashboard") / "static"
    found: dict[str, tuple[str, bytes]] = {}
    for file in folder.iterdir():
        kind = _TYPES.get(f".{file.name.rpartition('.')[2]}")
        if kind is not None:
            found[f"/{file.name}"] = (f"{kind}; charset=utf-8", file.read_bytes())
    return {**found, "/": found["/index.html"]}


class _Handler(HttpHandler):
    headers_of_all = _HEADERS

    def reply(self) -> None:
        server = self.server
        assert isinstance(server, DashboardServer)
        try:
            url = urlsplit(self.path)
        except ValueError:  # an absolute target whose host is malformed, such as "http://["
            url = urlsplit("")
        if url.path in server.files:
            content_type, content = server.files[url.path]
            self.answer(HTTPStatus.OK, content, content_type)
            return
        query, status = {name: values[-1] for name, values in parse_qs(url.query).items()}, HTTPStatus.OK
        try:
            server.check(self)
            with nullcontext() if url.path in _QUICK else server.answering:
                found = figures(server.feed, url.path, query)
        except TasukiError as error:
            status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), HTTPStatus.INTERNAL_SERVER_ERROR)
            found = {"error": error.message, "reason": error.reason}
        except (OSError, *MALFORMED) as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            found = {"error": f"the run has a file that cannot be read: {type(error).__name__}: {error}", "reason": "INTERNAL"}
        kind, content = found if isinstance(found, tuple) else ("application/json; charset=utf-8", json_of(found))
        self.answer(status, content, kind)


def json_of(value: object) -> bytes:
    """JSON of an answer, with null for numbers that are not finite."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value)).encode()


def _finite(value: Any) -> Any:
    """The same with None for numbers that are not finite, for which JSON has no notation."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figures(feed: Feed, path: str, query: Query) -> object:
    """Answers a path below /api; a pair is a content type and bytes. Raises PathNotFound and InvalidArgument."""
    place = feed.place
    routes: Mapping[str, Callable[[], object]] = {
        "/api/changes": feed.changes,
        "/api/run": feed.run,
        "/api/node": feed.node,
        "/api/curves": lambda: feed.curves(
            first=_number(query, "first", 0),
            last=_number(query, "last", _MAX_NUMBER),
            points=_number(query, "points", 200, least=10, most=2000),
        ),
        "/api/settings": feed.settings,
        "/api/log": lambda: read_logs(place.archive, only_warnings=query.get("warnings") == "1"),
        "/api/memory": lambda: feed.memory(changeovers=_number(query, "changeovers", 10, least=1)),
        "/api/changeovers": lambda: feed.changeovers(
            before=_number(query, "before", 0) if "before" in query else None,
            limit=_number(query, "limit", 50, least=1, most=200),
            only_failed=query.get("failed") == "1",
        ),
        "/api/samples": lambda: {"steps": list_steps(place.samples), "evaluations": list_steps(place.evaluations)},
        "/api/samples/step": lambda: read_step(place.samples, _number(query, "step"), contains=query.get("contains", "")),
        "/api/evaluations": lambda: compare(place.evaluations, _number(query, "before"), _number(query, "after")),
        "/api/samples/one": lambda: feed.sample(_number(query, "step"), _number(query, "index")),
        "/api/samples/image": lambda: read_picture(
            place.samples, *(_number(query, name) for name in ("step", "index", "place"))
        ),
    }
    if path not in routes:
        raise PathNotFound("there is no such page")
    return routes[path]()


def _number(query: Query, name: str, default: int | None = None, *, least: int = 0, most: int = _MAX_NUMBER) -> int:
    text = query.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 17) or not least <= int(text) <= most:
        raise InvalidArgument(name, f"must be a whole number from {least} to {most}")
    return int(text)


def check_listen(listen: str, config: NodeConfig | None) -> None:
    """Raises InvalidArgument for no address, and for one beyond loopback without TLS and authentication."""
    try:
        split_host_port(listen)
    except ValueError as error:
        raise InvalidArgument("listen", str(error)) from error
    if not is_beyond_loopback(listen):
        return
    problem = f"{listen} is not loopback: "
    if config is None:
        raise InvalidArgument(
            "listen", f"{problem}give --config of a node with [security], or forward a port of 127.0.0.1 by ssh"
        )
    if (found := port_problem(config)) is not None:
        raise InvalidArgument(found[0], found[1])
    security = config.security
    if security.cert is None or (security.client_ca is None and security.callers is None):
        raise InvalidArgument(
            "listen",
            f"{problem}set security.cert, security.key, and security.client_ca or security.callers; `tasuki certs` makes them",
        )


_NICE = 10
"""Lower priority than the services, which may need the processors."""


def run(folder: Path | None, *, config_path: Path | None, others: Sequence[Path], listen: str) -> int:
    """Serves the run of `folder`, or the node of `config_path`. others: runs to compare with. Raises PathNotFound, InvalidArgument."""
    config = None if config_path is None else load_config(config_path)
    check_listen(listen, config)
    server = make_server(folder, config=config, others=others, listen=listen)
    os.nice(_NICE)
    server.feed.start()
    try:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        server.serve_forever()
    finally:
        server.feed.close()
        server.server_close()
    return 0


def make_server(folder: Path | None, *, config: NodeConfig | None, listen: str, others: Sequence[Path] = ()) -> DashboardServer:
    """A server for a run's folder or a node, not yet started. Raises as `run`."""

    def place() -> RunPlace:
        if folder is not None:
            return place_of(folder)
        assert config is not None, "the command asks for one of both"
        return place_of_node(config.state_dir)

    is_beyond = is_beyond_loopback(listen)
    is_open = is_beyond or (config is not None and config.security.insecure)
    token = None if is_open else secrets.token_urlsafe(_TOKEN_BYTES)
    feed = Feed(place, others=[_output_dir(other) for other in others])
    try:
        server = DashboardServer(feed, listen, token=token, guard_config=config if is_beyond else None)
    except OSError as error:
        raise InvalidArgument("listen", f"{listen}: {error.strerror}; give another address by --listen") from error
    origin = f"http://{listen}"
    if is_beyond and config is not None:
        cert, key = config.security.cert, config.security.key
        assert cert is not None and key is not None, "check_listen asks for them"
        origin = f"https://{open_address(listen, cert=cert, key=key)}"
    # The fragment after # is never sent or logged.
    server.url = f"{origin}/{'' if token is None else f'#token={token}'}"
    return server


def _output_dir(other: Path) -> Path:
    """Of a run to compare with, which may be given by its node. Raises PathNotFound, InvalidArgument."""
    config = load_config(other) if other.is_file() else None
    run = None if config is None else config.train or config.sft
    folder = other if config is None else config.state_dir if run is None else run.output_dir
    if (output_dir := place_of(folder).output_dir) is None:
        raise PathNotFound(f"{other} has no run to compare with; give the output folder of a run", path=other)
    return output_dir


def open_address(listen: str, *, cert: Path, key: Path) -> str:
    """HOST:PORT of a page beyond loopback. A wildcard becomes a host that the certificate names; without one it stays.

    This machine's name, else another that other machines can use, else the first.
    """
    try:
        shown = read_certificate(cert, key).get("subjectAltName", ())
    except ssl.SSLError:  # it has expired
        return listen
    names = [(str(kind), str(name)) for kind, name in shown if "*" not in str(name)]
    addresses = [ipaddress.ip_address(name.strip()) for kind, name in names if kind == "IP Address"]
    hosts = [name for kind, name in names if kind == "DNS"]
    hosts += [f"[{address}]" if address.version == 6 else str(address) for address in addresses]
    hosts.sort(key=lambda host: (host != socket.gethostname(), is_loopback(host.strip("[]"))))
    return reachable(listen, seen_from=f"{hosts[0]}:0") if hosts else listen
