"""`tasuki gateway`: serves the policy of a running node to agents."""

import asyncio
import gc
import resource
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from tasuki.config.paths import client_target
from tasuki.config.schema import NodeConfig
from tasuki.gateway.app import SESSION, answering, application, key_of, read_reward
from tasuki.gateway.rollout import Rollout
from tasuki.gateway.sessions import Session, Sessions
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.address import is_beyond_loopback, split_host_port
from tasuki.wire.credentials import read_tokens
from tasuki.wire.errors import InvalidArgument

_KEEP_ALIVE_S = 600
"""For longer than clients keep an idle connection: one that both use and close at once resets the request."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to the process."""
        yield


@asynccontextmanager
async def serving(
    served: Router, port: socket.socket, *, cert: Path | None = None, key: Path | None = None
) -> AsyncIterator[None]:
    """Serves as many connections as the hard limit of open files allows. cert, key: of TLS."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = uvicorn.Config(
        served,
        log_level="warning",
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve([port]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def run(config: NodeConfig, *, listen: str, key_file: Path | None, acquires: bool) -> int:
    """Serves until Ctrl-C. Prints the address, and a new key unless a file has one. Raises InvalidArgument, NodeDown.

    acquires: see `Rollout`.
    """
    (cert, tls_key), tokenizer = _tls_files(config, listen), ModelTokenizer(config.model.path)
    key = secrets.token_urlsafe(24) if key_file is None else read_tokens("--key-file", key_file)[0]

    async def serve() -> None:
        with bound(listen) as port:
            async with Rollout(client_target(config), decode=tokenizer.decode_whole, acquires=acquires) as rollout:
                sessions = Sessions(rollout, tokenizer, model=config.model.path.name, key=key)
                async with serving(gateway(sessions), port, cert=cert, key=tls_key):
                    sys.stdout.write(f"OPENAI_BASE_URL=http{'s' if cert else ''}://{listen}/v1\n")
                    sys.stdout.write(f"OPENAI_API_KEY={key}\n" if key_file is None else "")
                    sys.stdout.flush()
                    await asyncio.Event().wait()

    gc.freeze()  # what is imported never goes: a collection would search it again and again
    asyncio.run(serve())
    return 0


def _tls_files(config: NodeConfig, listen: str) -> tuple[Path, Path] | tuple[None, None]:
    """Raises InvalidArgument for an address beyond loopback without a certificate."""
    try:
        split_host_port(listen)
    except ValueError as error:
        raise InvalidArgument("--listen", str(error)) from error
    if not is_beyond_loopback(listen):
        return None, None
    if config.security.cert is None or config.security.key is None:
        problem = f"{listen} is not loopback: set security.cert and security.key (`tasuki certs` makes them)"
        raise InvalidArgument("--listen", problem)
    return config.security.cert, config.security.key


def bound(listen: str) -> socket.socket:
    host, port = split_host_port(listen)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidArgument("--listen", f"{listen}: {error.strerror}; give another address") from error


def gateway(sessions: Sessions) -> Router:
    """The routes of agents, and those of the sessions themselves."""

    def known(request: Request) -> Session:
        return sessions.known(request.path_params["session_id"], key_of(request))

    async def create(request: Request) -> Response:
        session = sessions.create(key_of(request))
        return JSONResponse({"session_id": session.id, "api_key": session.key}, 201)

    async def samples(request: Request) -> Response:
        return JSONResponse(known(request).samples())

    async def reward(request: Request) -> Response:
        known(request).episode.reward = await read_reward(request)
        return Response(status_code=204)

    async def end(request: Request) -> Response:
        sessions.end(known(request))
        return Response(status_code=204)

    return application(
        sessions,
        Route("/sessions", answering(create), methods=["POST"]),
        Route(f"{SESSION}/samples", answering(samples), methods=["GET"]),
        Route(f"{SESSION}/reward", answering(reward), methods=["POST"]),
        Route(SESSION, answering(end), methods=["DELETE"]),
    )
