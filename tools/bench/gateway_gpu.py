"""What the gateway costs: `python -m tools.bench.gateway_gpu [--out FOLDER] [--size qwen2.5-1.5b] [--sessions 256] [--rounds 3] [--tiny]`.

A node with random weights on one GPU, and `tasuki gateway` in a process of its own. In turns, the same prompts of 256 tokens are completed
by 512 tokens: by one Generate of the SDK, by one Generate for each prompt at once, and by a session of the gateway for each, over HTTP.
Prints the generated tokens a second of each, medians and ranges, and writes gateway_gpu.json. --tiny: a small model on a CPU.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tasuki.client import AsyncClient, Phase, SamplingParams
from tasuki.config.load import load_config
from tasuki.node.start import start_node
from tests.models import char_tokenizer
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.node_load import GPU, TINY, Load, make_model

KEY = "0123456789abcdef" * 2
Prompts = Sequence[Sequence[int]]


async def ask(base: str, session: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """Returns what a session was answered; a client's own parsing is none of the gateway's cost."""
    sampling = {"max_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps({"token_ids": list(prompt), "sampling_params": sampling}).encode()
    host, port = base.removeprefix("http://").split("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    head = f"POST /sessions/{session}/inference/v1/generate HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


def num_tokens_of(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    return len(json.loads(body)["choices"][0]["token_ids"])


async def measure(client: AsyncClient, base: str, load: Load, *, rounds: int) -> dict[str, list[float]]:
    """Returns generated tokens a second by way. The first round warms up, and does not count."""
    random, sampling = np.random.default_rng(0), SamplingParams(max_new_tokens=load.new_tokens, ignore_eos=True)
    await client.acquire(Phase.ROLLOUT)

    async def together(prompts: Prompts, _: int) -> Callable[[], int]:
        samples = await client.generate(prompts, sampling)
        return lambda: sum(len(one.token_ids) for one in samples)

    async def apart(prompts: Prompts, _: int) -> Callable[[], int]:
        answers = await asyncio.gather(*(client.generate([prompt], sampling) for prompt in prompts))
        return lambda: sum(len(one.token_ids) for answer in answers for one in answer)

    async def sessions(prompts: Prompts, turn: int) -> Callable[[], int]:
        asked = (ask(base, f"{turn}-{index}", prompt, load.new_tokens) for index, prompt in enumerate(prompts))
        answers = await asyncio.gather(*asked)
        return lambda: sum(map(num_tokens_of, answers))

    ways: dict[str, Callable[[Prompts, int], Awaitable[Callable[[], int]]]] = {
        "one call": together,
        "calls": apart,
        "gateway": sessions,
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            prompts = load.questions(random)
            started = time.monotonic()
            count = await way(prompts, turn)
            seconds, num_tokens = time.monotonic() - started, count()
            assert num_tokens == load.prompts * load.new_tokens
            rates[name] += [num_tokens / seconds] if turn else []
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--size", default="qwen2.5-1.5b")
    parser.add_argument("--sessions", type=at_least_one, default=256)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    load = replace(TINY if arguments.tiny else GPU, gpus=1, prompts=arguments.sessions)
    if not arguments.tiny:
        require_gpus()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        make_model(arguments.size, folder / "model", is_tiny=arguments.tiny)
        char_tokenizer().save_pretrained(folder / "model")
        file, key_file = folder / "node.toml", folder / "key"
        file.write_text(replace(load, prompts=-(-load.prompts // load.group)).config("needed"))
        with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as keys:
            keys.write(KEY)
        config = load_config(file)
        node = start_node(config, tell=print)
        try:
            command = [
                sys.executable,
                "-m",
                "tasuki.cli",
                "gateway",
                config.state_dir,
                "--listen",
                "127.0.0.1:8017",
                "--key-file",
                key_file,
            ]
            served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert served.stdout is not None
            base = served.stdout.readline().strip().partition("=")[2]

            async def measured() -> dict[str, list[float]]:
                async with AsyncClient(state_dir=config.state_dir) as client:
                    return await measure(client, base, load, rounds=arguments.rounds)

            try:
                rates = asyncio.run(measured())
            finally:
                served.terminate()
                served.wait()
        finally:
            node.stop()
    (arguments.out / "gateway_gpu.json").write_text(json.dumps(rates))
    for way, figures in rates.items():
        share = statistics.median(figures) / statistics.median(rates["one call"])
        print(
            f"{way:10s} {statistics.median(figures):9.0f} ({min(figures):.0f} to {max(figures):.0f}) tokens/s, {share:.3f} of one call"
        )


if __name__ == "__main__":
    main()
