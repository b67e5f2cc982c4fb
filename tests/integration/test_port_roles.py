"""Every method of every service, called by every role and without one: a port enforces exactly the table of roles."""

from pathlib import Path

import grpc
import pytest

from tasuki.config.schema import CallerRole
from tasuki.rpc.methods import METHODS, Method, standard_methods
from tasuki.wire.channel import CLIENT_OPTIONS, open_channel
from tests.integration.port_node import ROLES, SERVICES, PortNode, make_certs, make_tokens, mtls, port_config, port_node, tokens
from tests.integration.raw_calls import code_of

ALL = {**METHODS, **standard_methods()}
DENIED, UNAVAILABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


def service_of(path: str) -> str:
    """Returns a service of the node that has the method."""
    for name in ("Coordinator", "Rollout"):
        if f".{name}Service/" in path:
            return name.lower()
    return "trainer"


async def denied(node: PortNode, role: str) -> set[str]:
    """Returns the methods refused to the role; every other one must have reached its servicer."""
    refused = set()
    for service in SERVICES:
        async with open_channel(node.port_of(service), credentials=node.credentials(role)) as channel:
            for path in ALL:
                if service_of(path) == service:
                    code = await code_of(channel, path)
                    assert code is not grpc.StatusCode.UNAUTHENTICATED
                    refused |= {path} if code is DENIED else set()
    return refused


def above(role: str) -> set[str]:
    has = CallerRole.named(role)

    def needs_more(method: Method) -> bool:
        return method.role is None or has is None or method.role > has

    return {path for path, method in ALL.items() if needs_more(method)}


@pytest.mark.parametrize("kind", ["certificates", "tokens"])
@pytest.mark.parametrize("role", ROLES)
async def test_role_may_call_its_methods_and_no_other(tmp_path: Path, kind: str, role: str) -> None:
    folder = make_tokens(make_certs(tmp_path / "certs"))
    security = mtls(folder) if kind == "certificates" else [*mtls(folder)[:2], *tokens(folder)]
    async with port_node(port_config(tmp_path, *security), folder) as node:
        assert await denied(node, role) == above(role)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer",
        "Bearer ",
        "Basic YTpi",
        "Bearer " + "a" * 64,
        "Bearer " + "~" * 9000,
        "Token {token}",
        "{token}",
        "Bearer {token}x",
    ],
)
async def test_nobody_may_call_anything_without_a_good_token(tmp_path: Path, header: str | None) -> None:
    folder = make_tokens(tmp_path / "tokens")
    async with port_node(port_config(tmp_path, *tokens(folder)), folder) as node:
        token = (folder / "peer.token").read_text().strip()
        metadata = [] if header is None else [("authorization", header.format(token=token))]
        for service in SERVICES:
            async with grpc.aio.insecure_channel(node.port_of(service), options=CLIENT_OPTIONS) as channel:
                for path in (path for path in ALL if service_of(path) == service):
                    assert await code_of(channel, path, metadata=metadata) is grpc.StatusCode.UNAUTHENTICATED, path
