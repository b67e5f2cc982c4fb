"""Generation of groups: samples that share their prompt, against the same samples as separate requests.

`python -m tools.bench.shared_prompts --model FOLDER` on a CPU, `... --size qwen2.5-7b` on a GPU with random weights.

A node generates PROMPTS x GROUP samples of new prompts in turns: one call with GROUP samples per prompt, or one call that repeats every
prompt GROUP times. Only the former tells the engine which requests share a prompt, so it computes each prompt once. Prints medians and
ranges of the seconds and of the pairs' ratios; writes shared_prompts.json to --out. TMPDIR is the folder for the model, such as /dev/shm.
On a GPU the trainer has adapters, so that it takes little memory.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tasuki.client import AsyncClient, Phase
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.node.start import start_node
from tools.bench.changeover_gpu import STAGE_LIMIT_S
from tools.bench.gpus import at_least_one, require_gpus
from tools.bench.node_load import GPU, TINY, Load, make_model
from tools.bench.pairs import spread
from tools.bench.plan_gpu import SIZES

SIZE_NAMES = ("prompts", "group", "prompt_tokens", "new_tokens")


async def seconds_of(client: AsyncClient, load: Load, prompts: list[list[int]], *, is_shared: bool) -> float:
    started = time.perf_counter()
    if is_shared:
        samples = await client.generate(prompts, load.sampling(load.new_tokens), num_samples=load.group)
    else:
        every = [prompt for prompt in prompts for _ in range(load.group)]
        samples = await client.generate(every, load.sampling(load.new_tokens), num_samples=1)
    assert len(samples) == load.prompts * load.group
    return time.perf_counter() - started


async def measure(config: NodeConfig, loads: list[Load], *, num_rounds: int) -> list[dict[str, Any]]:
    async with AsyncClient(state_dir=config.state_dir, timeout_s=STAGE_LIMIT_S) as client:
        await client.acquire(Phase.ROLLOUT)
        results = list[dict[str, Any]]()
        for load in loads:
            results.append(await compare(client, load, num_rounds=num_rounds))
            tell(results[-1])
    return results


async def compare(client: AsyncClient, load: Load, *, num_rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for is_shared in (True, False):  # warm-up: costs of the first batch
        await seconds_of(client, load, load.questions(random), is_shared=is_shared)
    for turn in range(num_rounds):
        for is_shared in (True, False) if turn % 2 else (False, True):
            seconds[is_shared].append(await seconds_of(client, load, load.questions(random), is_shared=is_shared))
    ratios = [separate / shared for shared, separate in zip(seconds[True], seconds[False], strict=True)]
    num_tokens = load.prompts * load.group * load.new_tokens
    return {name: getattr(load, name) for name in SIZE_NAMES} | {
        "shared_s": spread(seconds[True]),
        "separate_s": spread(seconds[False]),
        "separate_to_shared": spread(ratios),
        "shared_tokens_per_s": num_tokens / statistics.median(seconds[True]),
        "separate_tokens_per_s": num_tokens / statistics.median(seconds[False]),
    }


def tell(result: dict[str, Any]) -> None:
    print(
        f"{result['prompts']} prompts of {result['prompt_tokens']} tokens, {result['group']} samples of {result['new_tokens']} each:"
    )
    for name, key, unit in (
        ("shared", "shared_s", " s"),
        ("separate", "separate_s", " s"),
        ("ratio", "separate_to_shared", ""),
    ):
        found = result[key]
        print(f"  {name:8} {found['median']:.2f}{unit} ({found['least']:.2f} to {found['greatest']:.2f})", flush=True)


def tokens(text: str) -> tuple[int, int]:
    prompt, _, new = text.partition(":")
    return at_least_one(prompt), at_least_one(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="a model's folder, on a CPU")
    model.add_argument("--size", choices=SIZES, help="a shape, on a GPU")
    parser.add_argument("--prompts", type=at_least_one)
    parser.add_argument("--group", type=at_least_one)
    parser.add_argument("--tokens", type=tokens, nargs="+", metavar="PROMPT:NEW", help="lengths, measured one after the other")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    load, overrides = replace(TINY, prompts=16, group=16, prompt_tokens=64, vocab_size=30_000, context=512), list[str]()
    if arguments.model is not None:
        overrides.append(f'model.path="{arguments.model.resolve()}"')
    else:
        require_gpus(1)
        load = replace(GPU, gpus=1)
        overrides.append("trainer.lora.rank=32")
    load = replace(load, prompts=arguments.prompts or load.prompts, group=arguments.group or load.group)
    lengths = arguments.tokens or [(load.prompt_tokens, load.new_tokens)]
    loads = [replace(load, prompt_tokens=prompt, new_tokens=new) for prompt, new in lengths]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.size is not None:
            make_model(arguments.size, folder / "model", is_tiny=False)
        longest = max(loads, key=lambda load: load.prompt_tokens + load.new_tokens)
        (folder / "node.toml").write_text(longest.config("needed"))
        config = load_config(folder / "node.toml", overrides=overrides)
        node = start_node(config, tell=lambda _: None)
        try:
            results = asyncio.run(measure(config, loads, num_rounds=arguments.rounds))
        finally:
            node.stop()
    (arguments.out / "shared_prompts.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
