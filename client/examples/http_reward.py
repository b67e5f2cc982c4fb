"""A reward model behind HTTP. Copy the file next to your configuration and name it: `function = "http_reward:reward"`.

Posts {"prompt": ..., "completion": ...} and reads {"reward": number}. The URL is the row's `reward_url` or else the environment's
TASUKI_REWARD_URL. Needs only the standard library.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request

NUM_ATTEMPTS = 3
# All attempts with their pauses take at most 6.3 s: less than the 10 s after which RewardPool kills the worker.
TIMEOUT_S = 2.0
FIRST_WAIT_S = 0.1
# Ignores proxies from the environment: the reward model is assumed to be local.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def reward(*, prompt: object, completion: str, reward_url: str | None = None) -> float:
    """Raises ValueError for errors that a retry cannot fix, ConnectionError after the last failed attempt."""
    url = reward_url or os.environ.get("TASUKI_REWARD_URL", "")  # noqa: TID251  a worker has no other way to be told
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"set TASUKI_REWARD_URL, or `reward_url` in the row, to an http(s) URL; it is {url!r}")
    body = json.dumps({"prompt": prompt, "completion": completion}).encode()
    problem = ""
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            return reward_of(post(url, body))
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise ValueError(f"{url} answered {error.code} {error.reason}") from error
            problem = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
    raise ConnectionError(f"{url} gave no reward in {NUM_ATTEMPTS} attempts; the last: {problem}")


def post(url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with OPENER.open(request, timeout=TIMEOUT_S) as response:
        return response.read()


def reward_of(answer: bytes) -> float:
    """Raises ValueError if the answer has no reward."""
    try:
        return float(json.loads(answer)["reward"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'expected {{"reward": number}}, got {answer[:80]!r}') from error
