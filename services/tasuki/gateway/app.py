"""The routes, their limits, and errors."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route, Router

from tasuki.client.reward_worker import checked_reward
from tasuki.gateway import messages, responses
from tasuki.gateway.chat_completions import Answer, Choices, chunks, completion, generated, read_chat, read_generate
from tasuki.wire.errors import InvalidArgument, TasukiError

MAX_BYTES, MAX_REQUESTS = 1 << 23, 1024
_WAIT_S = 3600.0
"""Time limit of a request, changeovers included."""
_RETRY_AFTER_S = 10
_EVENTS = "text/event-stream"
SESSION = "/sessions/{session_id}"


class Refused(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        self.status, self.kind, self.param, self.code = status, kind, param, code
        super().__init__(message)


def busy(message: str) -> Refused:
    return Refused(503, message, kind="server_error", code="overloaded")


class Asker(Protocol):
    """An episode that HTTP requests take turns for."""

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As `tasuki.client.policy.Policy.ask`. May also raise ValueError for what was asked."""
        ...


class Host(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def max_tokens(self) -> int | None:
        """Of a prompt and its answer."""
        ...

    def session(self, session_id: str | None, key: str) -> Asker:
        """Of a path or a key. Raises Refused."""
        ...


Handler = Callable[[Request], Awaitable[Response]]


class App:
    """The requests of one host."""

    def __init__(self, host: Host) -> None:
        self._host, self._num_open = host, 0

    def routes(self) -> list[BaseRoute]:
        """At the root, where the key tells the session, and below a session's path."""
        routes: list[BaseRoute] = []
        for root in ("", SESSION):
            routes += [
                Route(f"{root}/v1/models", answering(self._models), methods=["GET"]),
                Route(f"{root}/v1/chat/completions", answering(self._chat), methods=["POST"]),
                Route(f"{root}/v1/responses", answering(self._respond), methods=["POST"]),
                Route(f"{root}/v1/messages", answering(self._message), methods=["POST"]),
                Route(f"{root}/inference/v1/generate", answering(self._generate), methods=["POST"]),
            ]
        return routes

    async def _models(self, request: Request) -> Response:
        self._session(request)
        one = {"id": self._host.model, "object": "model", "created": 0, "owned_by": "tasuki"}
        return JSONResponse({"object": "list", "data": [{**one, "max_model_len": self._host.max_tokens}]})

    async def _chat(self, request: Request) -> Response:
        asked = await read_json(request)
        answers = await self._answers(request, read_chat(asked))
        answer = completion(answers, model=self._host.model, has_log_probs=bool(asked.get("logprobs")))
        if not asked.get("stream"):
            return JSONResponse(answer)
        options = asked.get("stream_options")
        has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return StreamingResponse(chunks(answer, has_usage=has_usage), media_type=_EVENTS)

    async def _respond(self, request: Request) -> Response:
        return await self._converted(request, responses.as_chat_request, responses.as_response, responses.events)

    async def _message(self, request: Request) -> Response:
        return await self._converted(request, messages.as_chat_request, messages.as_message, messages.events)

    async def _converted(
        self,
        request: Request,
        as_chat_request: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        as_answer: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        events: Callable[[Mapping[str, Any]], Iterator[str]],
    ) -> Response:
        asked = await read_json(request)
        answers = await self._answers(request, read_chat(as_chat_request(asked)))
        answer = as_answer(completion(answers, model=self._host.model, has_log_probs=False))
        return StreamingResponse(events(answer), media_type=_EVENTS) if asked.get("stream") else JSONResponse(answer)

    async def _generate(self, request: Request) -> Response:
        answers = await self._answers(request, read_generate(await read_json(request)))
        return Response(generated(answers), media_type="application/json")

    def _session(self, request: Request) -> Asker:
        return self._host.session(request.path_params.get("session_id"), key_of(request))

    async def _answers(self, request: Request, choices: Choices) -> list[Answer]:
        """Frees the turns of a client who leaves."""
        session = self._session(request)
        if self._num_open >= MAX_REQUESTS:
            raise busy(f"{MAX_REQUESTS} requests are open")
        self._num_open += 1
        tasks = [asyncio.ensure_future(session.ask(choices.kind, fields)) for fields in choices.turns]
        asking = asyncio.gather(*tasks)
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({asking, leaving}, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            if asking.cancelled():
                raise busy("the episode has ended")
            if asking.done():
                return list(asking.result())
            raise Refused(499, "the client has left") if leaving.done() else busy(f"no answer within {_WAIT_S:g} s")
        finally:
            self._num_open -= 1
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.wait({*tasks, leaving})
            await asyncio.gather(asking, return_exceptions=True)


def application(host: Host, *further: BaseRoute) -> Router:
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Router([*App(host).routes(), *further, Route("/{path:path}", answering(_unknown), methods=methods)])


async def _unknown(request: Request) -> Response:
    raise Refused(404, f"there is no {request.method} {request.url.path}")


def answering(answer: Handler) -> Handler:
    """Gives errors the form that both OpenAI's and Anthropic's clients read."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except InvalidArgument as error:
            refused = Refused(400, error.message, param=error.metadata.get("field"))
        except TasukiError as error:
            refused = busy(error.message)
        except (ValueError, RecursionError) as error:
            refused = Refused(400, str(error))
        except Refused as error:
            refused = error
        body = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}
        headers = {"retry-after": str(_RETRY_AFTER_S)} if refused.status == 503 else None
        told = json.dumps({"type": "error", "error": body})  # in ASCII: what was asked may have lone surrogates
        return Response(told, refused.status, headers, "application/json")

    return answered


async def read_reward(request: Request) -> float:
    """The `reward` of a request. Raises InvalidArgument."""
    given = (await read_json(request)).get("reward")
    value, problem = checked_reward(given)
    if problem or isinstance(given, bool):
        raise InvalidArgument("reward", f"is {json.dumps(given)}; give a number up to 1e15")
    return value


def key_of(request: Request) -> str:
    """The secret of a request, as OpenAI's clients send it, or Anthropic's."""
    return request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")


async def read_json(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in _chunks(request):
        body += chunk
        if len(body) > MAX_BYTES:
            raise Refused(413, f"the request has over {MAX_BYTES} bytes")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refused(400, "the request is not a JSON object")
    return asked


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise Refused(499, "the client has left") from None


async def _left(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
