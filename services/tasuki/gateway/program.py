"""Episodes of `[train.episode] command`: each runs a program, whose requests take turns with the policy."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tasuki.client.policy import Policy
from tasuki.gateway.app import SESSION, Refused, answering, application, key_of, read_reward
from tasuki.gateway.server import serving
from tasuki.wire.errors import InvalidArgument

_BACKLOG = 4096
_KEPT_BYTES = 1 << 16
"""Of the end of a program's output."""
_READ_S = 1.0


async def run_program(policy: Policy, row: Mapping[str, object], command: Sequence[str], folder: str) -> float:
    """Runs the program in the folder, with the row as JSON on its standard input. Returns the reward.

    That is what the program has posted, or else the last line of its output. Raises RuntimeError for another exit code than 0, and
    ValueError without a reward. Its process group is killed in the end.
    """
    programs = _programs()
    await programs.start()
    program = _Program(policy)
    programs.open[program.id] = program
    try:
        code, output, errors = await _ran(command, folder, programs.environment(program), json.dumps(row).encode())
    finally:
        del programs.open[program.id]
    if code:
        raise RuntimeError(f"the program ended with code {code}: {errors or output}")
    if program.reward is not None:
        return program.reward
    try:
        return float(output)
    except ValueError:
        raise ValueError(f"the last line of the program's output is no reward: {output!r}") from None


class _Program:
    """One running program."""

    def __init__(self, policy: Policy) -> None:
        self.id, self.key, self._policy = secrets.token_hex(8), secrets.token_urlsafe(24), policy
        self.reward: float | None = None

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Samples as the run does, but for stop texts and the number of tokens."""
        if "json_schema" in fields["sampling"]:
            raise InvalidArgument("response_format", "has a schema, which would change what is trained; remove it")
        return await self._policy.ask(kind, {name: value for name, value in fields.items() if name != "sampling"})


class _Programs:
    """All programs of a worker, behind one port."""

    model = "policy"
    max_tokens: int | None = None

    def __init__(self) -> None:
        self.open: dict[str, _Program] = {}
        self._port = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        served = application(self, Route(f"{SESSION}/reward", answering(self._reward), methods=["POST"]))
        self._serving = serving(served, self._port)
        self._is_started = False

    async def start(self) -> None:
        """Serves until the worker ends."""
        if not self._is_started:
            self._is_started = True
            await self._serving.__aenter__()

    def environment(self, program: _Program) -> dict[str, str]:
        session = f"http://127.0.0.1:{self._port.getsockname()[1]}/sessions/{program.id}"
        inherited = dict(os.environ)  # noqa: TID251 - a program's environment is the user's
        unproxied = ",".join(filter(None, (inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1")))
        keys = {"OPENAI_API_KEY": program.key, "ANTHROPIC_API_KEY": program.key}
        urls = {"OPENAI_BASE_URL": f"{session}/v1", "ANTHROPIC_BASE_URL": session, "TASUKI_SESSION_URL": session}
        return {**inherited, "NO_PROXY": unproxied, "no_proxy": unproxied, **keys, **urls}

    def session(self, session_id: str | None, key: str) -> _Program:
        program = self.open.get(session_id or "")
        if program is None or not secrets.compare_digest(program.key.encode(), key.encode()):
            raise Refused(401, "the key is not that of a running program at its OPENAI_BASE_URL", kind="authentication_error")
        return program

    async def _reward(self, request: Request) -> Response:
        self.session(request.path_params["session_id"], key_of(request)).reward = await read_reward(request)
        return Response(status_code=204)


@functools.cache
def _programs() -> _Programs:
    return _Programs()


async def _ran(command: Sequence[str], folder: str, environment: Mapping[str, str], given: bytes) -> tuple[int, str, str]:
    """Runs a program. Returns its exit code and the last lines of its output and errors."""
    loop = asyncio.get_running_loop()
    with TemporaryFile() as row:
        row.write(given)
        row.seek(0)
        # asyncio's own processes also wait for what a program has left with its pipes: https://github.com/python/cpython/issues/119710
        process = subprocess.Popen(  # noqa: ASYNC220
            command,
            cwd=folder,
            env=environment,
            stdin=row,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    ended, exit_fd = asyncio.Event(), os.pidfd_open(process.pid)
    loop.add_reader(exit_fd, ended.set)
    pipes, output, errors = (process.stdout, process.stderr), bytearray(), bytearray()
    reading = [
        asyncio.create_task(_read(pipe, end)) for pipe, end in zip(pipes, (output, errors), strict=True) if pipe is not None
    ]
    try:
        await ended.wait()
    finally:
        loop.remove_reader(exit_fd)
        os.close(exit_fd)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        await asyncio.wait(reading, timeout=_READ_S)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return code, _last_line(output), _last_line(errors)


async def _read(pipe: IO[bytes], kept: bytearray) -> None:
    """Reads until no process has the pipe. What a program has left in another group may have it still: the caller then cancels."""
    stream = asyncio.StreamReader()
    connect = asyncio.get_running_loop().connect_read_pipe
    transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    try:
        while chunk := await stream.read(_KEPT_BYTES):
            kept += chunk
            del kept[:-_KEPT_BYTES]
    finally:
        transport.close()


def _last_line(kept: bytearray) -> str:
    lines = kept.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
