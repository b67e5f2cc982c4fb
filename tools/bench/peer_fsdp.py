"""One trainer rank of changeover_peers.py: FSDP2 with float32 masters and AdamW, offloaded to the host and back. Answers lines on stdin.

The state moves to pinned memory that is allocated once. This is faster than verl's `model.cpu()` and the optimizer's `.to("cpu")`, which
allocate pageable memory each time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tools.bench.peer_buckets import Buckets
from tools.bench.sync_ranks import answer

LEARNING_RATE = 1e-6


class FsdpRank:
    """A rank with its model and optimizer; every method answers one line with its cost."""

    def __init__(self, *, rank: int, num_ranks: int, model: Path, folder: Path, device: str) -> None:
        self._device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self._device)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/trainers", rank=rank, world_size=num_ranks)
        if device == "cuda":
            monkey_patch_torch_reductions()
        else:
            torch.multiprocessing.set_sharing_strategy("file_system")  # only children inherit descriptors
        self._model = sharded_model(model, self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        self._buckets = Buckets({name: parameter.detach() for name, parameter in self._tensors()})
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, num_samples: str, num_tokens: str) -> dict[str, Any]:
        """Makes one step on random tokens; afterwards the optimizer has its state and no gradient is left."""
        for _ in range(int(num_samples)):
            tokens = torch.randint(3, self._model.config.vocab_size, (1, int(num_tokens)), device=self._device)
            # Logits at a few positions only: those of a long sample would be the largest allocation here.
            self._model(input_ids=tokens, logits_to_keep=64).logits.float().logsumexp(-1).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._wait()
        return {}

    def offload(self) -> dict[str, Any]:
        """Copies parameters and moments to the host; returns torch's cached memory to the driver."""
        return self._timed(self._leave)

    def load(self) -> dict[str, Any]:
        """Copies the state back to the device."""
        return self._timed(self._return)

    def bucket(self, num_bytes: str, index: str) -> dict[str, Any]:
        """Sends the next weights to the engine, in bfloat16."""
        return self._buckets.send(int(num_bytes), int(index))

    def forget_sent(self) -> dict[str, Any]:
        self._buckets.forget_sent()
        return {}

    def _leave(self) -> None:
        self._buckets.forget_sent()
        if not self._on_host:
            is_gpu = self._device.type == "cuda"
            self._on_host = [(each, torch.empty_like(each, device="cpu", pin_memory=is_gpu)) for each in self._state()]
        for on_device, on_host in self._on_host:
            on_host.copy_(on_device, non_blocking=True)
        self._wait()
        for on_device, _ in self._on_host:
            on_device.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _return(self) -> None:
        for on_device, on_host in self._on_host:
            on_device.untyped_storage().resize_(on_host.nbytes)
            on_device.copy_(on_host, non_blocking=True)

    def _state(self) -> Iterator[torch.Tensor]:
        """This rank's tensors of masters and moments."""
        for _, parameter in self._tensors():
            yield parameter.to_local().detach()
        for moments in self._optimizer.state.values():
            for moment in moments.values():
                if isinstance(moment, DTensor):
                    yield moment.to_local()

    def _tensors(self) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter

    def _timed(self, act: Callable[[], None]) -> dict[str, Any]:
        started = time.perf_counter()
        act()
        self._wait()
        return {"ms": 1e3 * (time.perf_counter() - started), "num_bytes": sum(host.nbytes for _, host in self._on_host)}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def sharded_model(folder: Path, device: torch.device) -> torch.nn.Module:
    """Builds random float32 weights; each layer is an FSDP2 group that computes in bfloat16 and reduces in float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config, device=device)
    model.train()
    return model


def main() -> None:
    arguments = json.loads(sys.argv[1])
    # The parent reads stdout, so only answers may go there; libraries print to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank = FsdpRank(**arguments | {name: Path(arguments[name]) for name in ("model", "folder")})
    for line in sys.stdin:
        command, *words = line.split()
        answer(**getattr(rank, command)(*words))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
