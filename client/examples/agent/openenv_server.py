"""The task as an OpenEnv environment, and its agent as a server for `[train.episode] server`: `python openenv_server.py TASK_FOLDER PORT`.

Needs openenv-core and what it brings. The environment has a websocket for each episode at the same port; another one's would be
GenericEnvClient(base_url="http://...").
"""

# type: ignore  # noqa: PGH003 - its packages live in an environment of their own
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.generic_client import GenericEnvClient
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketDisconnect

NUMBERS, PORT = json.loads((Path(sys.argv[1]) / "numbers.json").read_text()), int(sys.argv[2])
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOK_UP = {"name": "look_up", "description": "Finds the number of a name.", "parameters": PARAMETERS}
BUSY_S = 600.0  # all episodes of a step connect at once
OPENAI = AsyncOpenAI(api_key="that of the episode", timeout=BUSY_S)


class Step(Action):
    """Looks a name up, or answers."""

    look_up: str | None = None
    answer: str | None = None


class Told(Observation):
    text: str = ""


class LookUp(Environment[Step, Told, State]):
    """Asks for the number of a name. The reward is 1 if the answer is right."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, *, name: str = "", **_: Any) -> Told:
        self.name = name
        return Told(text=name)

    def step(self, action: Step, timeout_s: float | None = None, **_: Any) -> Told:
        if action.look_up is not None:
            return Told(text=NUMBERS.get(action.look_up, "there is no such name"))
        return Told(done=True, reward=float(action.answer == NUMBERS[self.name]))

    @property
    def state(self) -> State:
        return State()


async def run(request: Request) -> JSONResponse:
    """Plays one episode: the policy's tool calls are steps of the environment, and so is its answer."""
    row = await request.json()
    client = OPENAI.with_options(base_url=row["policy"]["openai_base_url"], api_key=row["policy"]["openai_api_key"])
    async with GenericEnvClient(base_url=f"http://127.0.0.1:{PORT}", connect_timeout_s=BUSY_S, message_timeout_s=BUSY_S) as env:
        told = await env.reset(name=row["prompt"])
        messages: list[Any] = [{"role": "user", "content": told.observation["text"]}]
        while True:
            tools: Any = [{"type": "function", "function": LOOK_UP}]
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message: Any = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return JSONResponse({"reward": (await env.step({"answer": message.content or ""})).reward})
            for call in message.tool_calls:
                told = await env.step({"look_up": str(json.loads(call.function.arguments).get("name"))})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told.observation["text"]})


async def closed(*_: Any) -> None:
    """Ignores that OpenEnv 0.3 closes what its client has closed, with a traceback for each episode."""


app = create_fastapi_app(LookUp, Step, Told, max_concurrent_envs=1024)
app.add_exception_handler(WebSocketDisconnect, closed)
app.add_route("/run", run, methods=["POST"])
uvicorn.run(app, port=PORT, log_level="warning")
