"""Access control of the dashboard: holders of the printed URL or, beyond loopback, callers according to [security]."""

from __future__ import annotations

import hmac
import secrets
from http.server import BaseHTTPRequestHandler

from tasuki.config.ports import port_problem
from tasuki.config.schema import NodeConfig
from tasuki.rpc.access import Access
from tasuki.rpc.http_port import HttpCaller
from tasuki.rpc.methods import METHODS
from tasuki.wire.address import is_beyond_loopback
from tasuki.wire.errors import InvalidArgument, Unauthenticated

_METHOD = METHODS["/tasuki.v1.CoordinatorService/GetState"]
"""Every role may read."""
_BEARER = "bearer "
_TOKEN_BYTES = 32


def check_listen(listen: str, config: NodeConfig | None) -> None:
    """Raises InvalidArgument for an address beyond loopback without TLS and authentication."""
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
    if security.cert is None or (security.client_ca is None and not security.tokens.files):
        raise InvalidArgument(
            "listen",
            f"{problem}set security.cert, security.key, and security.client_ca or security.tokens; `tasuki certs` makes them",
        )


def make_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


class Guard:
    """Checks requests before they are answered."""

    def __init__(self, *, token: str | None, access: Access | None) -> None:
        """token: from the URL; None requires none. access: for a port beyond loopback."""
        self._token, self._access = token, access

    def check(self, handler: BaseHTTPRequestHandler) -> None:
        """Raises Unauthenticated and PermissionDenied."""
        if self._access is not None:
            self._access.check(_METHOD, HttpCaller(handler))
        if self._token is not None and not hmac.compare_digest(_given(handler).encode(), self._token.encode()):
            raise Unauthenticated("open the URL that `tasuki dashboard` has printed: it has the token of this page")


def _given(handler: BaseHTTPRequestHandler) -> str:
    header = handler.headers.get("Authorization", "")
    return header[len(_BEARER) :].strip() if header.lower().startswith(_BEARER) else ""
