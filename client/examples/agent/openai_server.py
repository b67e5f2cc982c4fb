"""The agent on OpenAI's SDK, as a server for `[train.episode] server`: `python openai_server.py TASK_FOLDER PORT`.

Needs openai, starlette and uvicorn, and nothing of tasuki.
"""

import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openai import AsyncOpenAI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router

NUMBERS = json.loads((Path(sys.argv[1]) / "numbers.json").read_text())
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOK_UP = {"name": "look_up", "description": "Finds the number of a name.", "parameters": PARAMETERS}
OPENAI = AsyncOpenAI(api_key="that of the episode", timeout=600.0)  # all episodes of a step connect at once


async def run(request: Request) -> JSONResponse:
    """Asks for the number of a name. The reward is 1 if the last answer is right."""
    row = await request.json()
    client = OPENAI.with_options(base_url=row["policy"]["openai_base_url"], api_key=row["policy"]["openai_api_key"])
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    while True:
        tools: Any = [{"type": "function", "function": LOOK_UP}]
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message: Any = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return JSONResponse({"reward": float(message.content == row["answer"])})
        for call in message.tool_calls:
            number = NUMBERS.get(json.loads(call.function.arguments).get("name"), "there is no such name")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": number})


uvicorn.run(Router([Route("/run", run, methods=["POST"])]), port=int(sys.argv[2]), log_level="warning")
