"""The task as a verifiers 0.4 taskset, with a harness that runs in the server's process. `LOOK_UP_TASK` is its folder."""

# type: ignore  # noqa: PGH003 - its packages live in an environment of their own
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf

FOLDER = Path(os.environ["LOOK_UP_TASK"])  # noqa: TID251
NUMBERS = json.loads((FOLDER / "numbers.json").read_text())
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOK_UP = {"name": "look_up", "description": "Finds the number of a name.", "parameters": PARAMETERS}


class LookUpData(vf.TaskData):
    answer: str


class LookUpTask(vf.Task[LookUpData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class LookUpTaskset(vf.Taskset[LookUpTask]):
    def load(self) -> Iterator[LookUpTask]:
        for file in ("eval", "train"):
            for line in (FOLDER / f"{file}.jsonl").read_text().splitlines():
                yield LookUpTask(LookUpData(**json.loads(line)), self.config.task)


class LookUpHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, *_: Any, **__: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        asked = {"model": ctx.model, "messages": messages, "tools": [{"type": "function", "function": LOOK_UP}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {secret}"}, timeout=None, verify=False) as http:
            while True:
                answer = await http.post(f"{endpoint}/chat/completions", json=asked)
                answer.raise_for_status()
                messages.append(message := answer.json()["choices"][0]["message"])
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, message["content"] or "", "")
                for call in message["tool_calls"]:
                    number = NUMBERS.get(json.loads(call["function"]["arguments"]).get("name"), "there is no such name")
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": number})


__all__ = ["LookUpHarness", "LookUpTaskset"]
