"""Episodes of `[train.episode]` by command or server: programs whose requests take turns with the policy."""

import asyncio
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import urlsplit

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
    async with _programs().running(policy) as program:
        code, output, errors = await _ran(command, folder, _environment(program), json.dumps(row).encode())
    if code:
        raise RuntimeError(f"the program ended with code {code}: {errors or output}")
    if program.reward is not None:
        return program.reward
    try:
        return float(output)
    except ValueError:
        raise ValueError(f"the last line of the program's output is no reward: {output!r}") from None


async def run_on_server(policy: Policy, row: Mapping[str, object], command: Sequence[str], folder: str) -> float:
    """Posts the row, with the policy's addresses as `policy`, to a server, whose URL is the command. Returns the reward.

    That is what was posted for the session, or else `reward` of the answer. Raises RuntimeError for another status than 200, and
    ValueError without a reward.
    """
    (url,) = command
    async with _programs().running(policy) as program:
        place, addresses = urlsplit(url), {name.lower(): value for name, value in program.addresses().items()}
        body = json.dumps({**row, "policy": addresses}).encode()
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        try:
            writer.write(f"POST {place.path or '/'} HTTP/1.0\r\nhost: {place.netloc}\r\n".encode())
            writer.write(f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    if head.split()[1:2] != [b"200"]:
        status = head.partition(b"\r")[0].decode(errors="replace")
        raise RuntimeError(f"{url} answered {status!r}: {_last_line(answer)}")
    told = json.loads(answer)
    return program.reward if program.reward is not None else float(told["reward"])


class _Program:
    """One running program."""

    def __init__(self, policy: Policy, *, port: int) -> None:
        self.id, self.key, self._policy = secrets.token_hex(8), secrets.token_urlsafe(24), policy
        self._url = f"http://127.0.0.1:{port}/sessions/{self.id}"
        self.reward: float | None = None

    def addresses(self) -> dict[str, str]:
        urls = {"OPENAI_BASE_URL": f"{self._url}/v1", "ANTHROPIC_BASE_URL": self._url, "TASUKI_SESSION_URL": self._url}
        return {**urls, "OPENAI_API_KEY": self.key, "ANTHROPIC_API_KEY": self.key}

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
        self._open: dict[str, _Program] = {}
        self._port = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        served = application(self, Route(f"{SESSION}/reward", answering(self._reward), methods=["POST"]))
        self._serving = serving(served, self._port)
        self._is_started = False

    @asynccontextmanager
    async def running(self, policy: Policy) -> AsyncIterator[_Program]:
        """Serves the policy to a program; the port is open until the worker ends."""
        if not self._is_started:
            self._is_started = True
            await self._serving.__aenter__()
        program = _Program(policy, port=self._port.getsockname()[1])
        self._open[program.id] = program
        try:
            yield program
        finally:
            del self._open[program.id]

    def session(self, session_id: str | None, key: str) -> _Program:
        program = self._open.get(session_id or "")
        if program is None or not secrets.compare_digest(program.key.encode(), key.encode()):
            raise Refused(401, "the key is not that of a running program at its OPENAI_BASE_URL", kind="authentication_error")
        return program

    async def _reward(self, request: Request) -> Response:
        self.session(request.path_params["session_id"], key_of(request)).reward = await read_reward(request)
        return Response(status_code=204)


def _environment(program: _Program) -> dict[str, str]:
    inherited = dict(os.environ)  # noqa: TID251 - a program's environment is the user's
    unproxied = ",".join(filter(None, (inherited.get("NO_PROXY") or inherited.get("no_proxy"), "127.0.0.1")))
    return {**inherited, "NO_PROXY": unproxied, "no_proxy": unproxied, **program.addresses()}


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


def _last_line(kept: bytes | bytearray) -> str:
    lines = kept.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
