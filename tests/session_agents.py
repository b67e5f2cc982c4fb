"""Agents of a gateway, in a process that may be killed: `python session_agents.py FOLDER NAME EPISODE...` runs episodes at once.

FOLDER/gateway.json has `url`, `key`, and `num_turns`. An episode is AGENT/NUMBER; without a number the agent begins one after another
until FOLDER/stop exists. What an episode has drawn, and every error, is a line of FOLDER/NAME.jsonl.
"""

import asyncio
import itertools
import json
import secrets
import string
import sys
from pathlib import Path
from typing import Any

import httpx

FOLDER, NAME, EPISODES = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
GATEWAY = json.loads((FOLDER / "gateway.json").read_text())
STOPS = [first + second for first, second in zip(string.ascii_letters[:16], string.ascii_letters[26:], strict=False)]
"""Pairs of letters: a changeover splits some."""
TOLD = (FOLDER / f"{NAME}.jsonl").open("a", buffering=1)


def tell(**fields: Any) -> None:
    TOLD.write(json.dumps(fields) + "\n")


async def run_episode(http: httpx.AsyncClient, agent: int, number: int) -> dict[str, Any]:
    """Takes turns, and returns their tokens, with the session's samples."""
    path = f"/sessions/{agent}-{number}-{secrets.token_hex(4)}"
    messages, turns, ends = [{"role": "user", "content": f"agent {agent}, {number}"}], list[list[int]](), list[str]()
    for turn in range(GATEWAY["num_turns"]):
        seed = (agent * 1000 + number) * 10 + turn
        asked = {"messages": messages, "max_tokens": 30, "seed": seed, "ignore_eos": True, "logprobs": True, "stop": STOPS}
        answered = await http.post(f"{path}/v1/chat/completions", json=asked)
        if answered.status_code != 200:
            raise RuntimeError(f"{answered.status_code}: {answered.text}")
        (choice,) = answered.json()["choices"]
        turns.append([int(one["token"].removeprefix("token_id:")) for one in choice["logprobs"]["content"]])
        ends.append(choice["finish_reason"])
        messages += [choice["message"], {"role": "user", "content": "go on"}]
    given = (await http.get(f"{path}/samples")).json()["samples"]
    (await http.delete(path)).raise_for_status()
    return {"turns": turns, "ends": ends, "samples": given}


async def run_agent(http: httpx.AsyncClient, episode: str) -> None:
    agent, _, only = episode.partition("/")
    for number in [int(only)] if only else itertools.count():
        while True:
            try:
                tell(agent=int(agent), number=number, **await run_episode(http, int(agent), number))
            except Exception as error:  # noqa: BLE001 - the test judges it
                tell(error=f"{type(error).__name__}: {error}", is_lost=isinstance(error, httpx.TransportError))
                await asyncio.sleep(1.0)
                continue
            break
        if (FOLDER / "stop").exists():
            return


async def main() -> None:
    headers, limits = {"authorization": f"Bearer {GATEWAY['key']}"}, httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=GATEWAY["url"], headers=headers, limits=limits, timeout=900.0) as http:
        await asyncio.gather(*(run_agent(http, episode) for episode in EPISODES))


asyncio.run(main())
