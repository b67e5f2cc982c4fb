"""Our side of `make bench`: GRPO on a running node, with the loop of `tasuki train`.

Writes one JSON object: seconds of each step, its mean reward, and a breakdown of the time. A step is everything between two reports of the
loop: both changeovers, generation, rewards, advantages, forward, backward, optimizer. Start-up and the warm-up steps are left out.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.estimation import EstimatorState
from tasuki.client.rewards import RewardPool
from tasuki.client.rl_loop import RlLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.load import load_config
from tasuki.config.paths import node_targets
from tasuki.node.start import running_node
from tasuki.runs.rl_training import named_rewards
from tasuki.runs.tokenizer import ModelTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="with a [train] table")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    args = parser.parse_args()
    config = load_config(args.config)
    train = config.train
    assert train is not None
    steps: list[Step] = []
    ends: list[float] = []

    def report(step: Step) -> None:
        ends.append(time.perf_counter())
        steps.append(step)

    reward = train.reward
    with (
        RewardPool(
            named_rewards(reward),
            folders=(args.config.parent,),
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            on_error=reward.on_error,
        ) as rewards,
        running_node(config),
        Client(node_targets(config)["coordinator"]) as client,
    ):
        dataset = Dataset(read_jsonl(train.dataset), seed=config.seed)
        client.begin_run()
        state = EstimatorState.of({})
        RlLoop(client, dataset, [], ModelTokenizer(config.model.path), rewards, train, state).run(report)
    # The last report belongs to the closing evaluation, which learns nothing.
    timed = slice(args.warmup_steps, train.num_steps)
    seconds = [end - start for start, end in itertools.pairwise(ends)]
    args.output.write_text(
        json.dumps(
            {
                "seconds": seconds[args.warmup_steps - 1 : train.num_steps - 1],
                "mean_rewards": [step.mean_reward for step in steps[timed]],
                "equal_groups": [step.num_equal_groups for step in steps[timed]],
                "parts": [{**step.seconds, **step.stage_seconds} for step in steps[timed]],
            }
        )
    )


if __name__ == "__main__":
    main()
