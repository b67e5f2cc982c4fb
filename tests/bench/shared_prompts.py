"""Generation of groups: samples that share their prompt, against the same samples as separate requests.

`python -m tests.bench.shared_prompts --model FOLDER` on a CPU, `... --size qwen2.5-7b` on a GPU with random weights.

A node generates PROMPTS x GROUP samples of new prompts, by turns as one call with GROUP samples of each prompt, and as one that has every
prompt GROUP times. Only the former tells the engine which requests share a prompt, so it computes each of them once. Prints medians and
ranges of the seconds and of the pairs' ratios; writes shared_prompts.json to --out. TMPDIR says where the model lies, such as /dev/shm.
"""

from __future__ import annotations

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
from tasuki.supervisor.node import start_node
from tests.bench.changeover_gpu import GPU, STAGE_LIMIT_S, TINY, Load, make_model
from tests.bench.gpus import at_least_one, require_gpus
from tests.bench.pairs import spread
from tests.bench.plan_gpu import SIZES


async def seconds_of(client: AsyncClient, load: Load, prompts: list[list[int]], *, is_shared: bool) -> float:
    started = time.perf_counter()
    if is_shared:
        samples = await client.generate(prompts, load.sampling(load.new_tokens), num_samples=load.group)
    else:
        every = [prompt for prompt in prompts for _ in range(load.group)]
        samples = await client.generate(every, load.sampling(load.new_tokens), num_samples=1)
    assert len(samples) == load.prompts * load.group
    return time.perf_counter() - started


async def measure(config: NodeConfig, load: Load, *, num_rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    async with AsyncClient(state_dir=config.state_dir, timeout_s=STAGE_LIMIT_S) as client:
        await client.acquire(Phase.ROLLOUT)
        for is_shared in (True, False):  # what a first batch costs
            await seconds_of(client, load, load.questions(random), is_shared=is_shared)
        for turn in range(num_rounds):
            for is_shared in (True, False) if turn % 2 else (False, True):
                seconds[is_shared].append(await seconds_of(client, load, load.questions(random), is_shared=is_shared))
    ratios = [separate / shared for shared, separate in zip(seconds[True], seconds[False], strict=True)]
    num_tokens = load.prompts * load.group * load.new_tokens
    return {
        "shared_s": spread(seconds[True]),
        "separate_s": spread(seconds[False]),
        "separate_to_shared": spread(ratios),
        "shared_tokens_per_s": num_tokens / statistics.median(seconds[True]),
        "separate_tokens_per_s": num_tokens / statistics.median(seconds[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="a model's folder, on a CPU")
    model.add_argument("--size", choices=SIZES, help="a shape, on a GPU")
    parser.add_argument("--prompts", type=at_least_one)
    parser.add_argument("--group", type=at_least_one)
    parser.add_argument("--prompt-tokens", type=at_least_one)
    parser.add_argument("--new-tokens", type=at_least_one)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    load = replace(TINY, prompts=16, group=16, prompt_tokens=64, vocab_size=30_000, context=512)
    if arguments.size is not None:
        require_gpus(1)
        load = replace(GPU, gpus=1)
    given = {name: getattr(arguments, name) for name in ("prompts", "group", "prompt_tokens", "new_tokens")}
    load = replace(load, **{name: value for name, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.size is not None:
            make_model(arguments.size, folder / "model", is_tiny=False)
        (folder / "node.toml").write_text(load.config("needed"))
        given_model = () if arguments.model is None else (f'model.path="{arguments.model.resolve()}"',)
        config = load_config(folder / "node.toml", overrides=given_model)
        node = start_node(config, tell=lambda _: None)
        try:
            result = asyncio.run(measure(config, load, num_rounds=arguments.rounds))
        finally:
            node.stop()
    sizes = {name: getattr(load, name) for name in given}
    (arguments.out / "shared_prompts.json").write_text(json.dumps(sizes | result, indent=1) + "\n")
    shared, separate, ratio = (result[name] for name in ("shared_s", "separate_s", "separate_to_shared"))
    print(f"{load.prompts} prompts of {load.prompt_tokens} tokens, {load.group} samples of {load.new_tokens} each:")
    print(f"  shared   {shared['median']:.2f} s ({shared['least']:.2f} to {shared['greatest']:.2f})")
    print(f"  separate {separate['median']:.2f} s ({separate['least']:.2f} to {separate['greatest']:.2f})")
    print(f"  ratio    {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})")


if __name__ == "__main__":
    main()
