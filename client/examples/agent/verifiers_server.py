"""Episodes of a verifiers 0.4 environment, as a server for `[train.episode] server`.

In an environment with verifiers alone: `python verifiers_server.py TASKSET > tasks.jsonl` writes a dataset of its tasks, and
`python verifiers_server.py TASKSET PORT` serves them.
"""

# type: ignore  # noqa: PGH003 - its packages live in an environment of their own
import functools
import json
import os
import ssl
import sys
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
import verifiers.v1 as vf
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from verifiers.v1.utils.loaders import load_environment

ssl.create_default_context = functools.cache(ssl.create_default_context)  # each episode's client would read all certificates
RUNTIME = {"type": "subprocess"}
CONFIG = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": sys.argv[1]}, "agent": {"runtime": RUNTIME}})
ENV = load_environment(CONFIG)
TASKS = {task.data.idx: task for task in ENV.taskset}


async def run(request: Request) -> JSONResponse:
    """Runs one episode of the task that the dataset line names; every request of its agent goes to the policy."""
    row = await request.json()
    policy, variable = row["policy"], f"TASKSET_KEY_{row['policy']['openai_api_key']}"
    os.environ[variable] = policy["openai_api_key"]  # noqa: TID251 - clients of verifiers take their key by the variable's name
    try:
        busy = {"connect": 600.0}  # all episodes of a step connect at once
        client = vf.EvalClientConfig(base_url=policy["openai_base_url"], api_key_var=variable, timeout=busy)
        (slot,) = ENV.slots(TASKS[row["task"]])
        episode = await ENV.run_slot(slot, vf.ModelContext(model="policy", client=client))
    finally:
        del os.environ[variable]  # noqa: TID251
        for server in ENV._interception.servers:  # it keeps the client of each address, with its connection
            if (unused := server.clients.pop(client.model_dump_json(), None)) is not None:
                await unused.close()
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return JSONResponse({"error": "; ".join(f"{one.type}: {one.message}" for one in errors)}, 500)
    return JSONResponse({"reward": sum(trace.reward for trace in episode.traces)})


@asynccontextmanager
async def serving(_: Any) -> Any:
    async with ENV.serving():
        yield


if sys.argv[2:]:
    uvicorn.run(Router([Route("/run", run, methods=["POST"])], lifespan=serving), port=int(sys.argv[2]), log_level="warning")
else:
    for task in TASKS.values():
        sys.stdout.write(json.dumps({"prompt": task.data.prompt_text, "task": task.data.idx}) + "\n")
