"""An engine rank's model in memory that a trainer also reads, without an engine: loaded by SGLang, and found again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig


def share_base(
    model: Any, load: Callable[[Any], Any], *, state_dir: Path, folder: Path, rank: int, num_ranks: int
) -> list[str]:
    """Lists the parameters that differ from those of `model`, which SGLang has loaded without a shared base.

    Covers the model that creates the base, and one that finds it through a trainer and serves it from then on. load: loads a model with a
    given loader.
    """
    import torch
    from sglang.srt.model_executor.model_runner_components import load_model_utils

    from tasuki.config.paths import base_socket_path
    from tasuki.rollout.sglang.memory import EngineBase
    from tasuki.weights.shared_base import find_base
    from tests.base_copies import chunk_at, chunks_of

    config = NodeConfig.model_validate(
        {
            "state_dir": state_dir,
            "model": {"path": folder},
            "trainer": {"num_ranks": num_ranks, "lora": {}},
            "rollout": {"lora": "adapter", "tp_size": num_ranks},
        }
    )
    device = torch.device("cpu")
    trainer = None
    found: list[dict[str, Any]] = []
    chunks: list[dict[str, int]] = []
    for _ in range(2):
        engine_base = EngineBase(config, rank=rank, device=device)
        engine_base.install()
        parameters = dict(load(load_model_utils.get_model_loader).named_parameters())
        found.append(parameters)
        chunks.append({name: chunk_at(parameter.data_ptr()) for name, parameter in parameters.items()})
        if len(found) == 1:
            trainer = find_base(base_socket_path(state_dir, "rollout", rank), device=device)
            assert trainer is not None and engine_base.base is not None
            trainer.hand_out(base_socket_path(state_dir, "trainer", rank))
            engine_base.base.close()
    assert trainer is not None
    trainer.close()
    assert chunks[0] == chunks[1], "the second finds what the first has made"
    inodes = set(chunks[0].values())
    assert 0 not in inodes and not inodes & chunks_of(os.getpid()).written
    expected = dict(model.named_parameters())
    assert found[0].keys() == found[1].keys() == expected.keys()
    return [
        name
        for name, parameter in expected.items()
        if any(not torch.equal(parameter.view(torch.int16), one[name].view(torch.int16)) for one in found)
    ]
