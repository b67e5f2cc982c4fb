"""Run by the launcher: trains one model awake and the same model with a sleep in every step; each rank writes what it saw.

python -m tasuki.trainer.launch --num-ranks N -- tests/integration/trainer_sleep.py OUTPUT_FOLDER MODEL_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from tasuki.trainer.worker import PolicyLossConfig, Worker
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasuki.config.schema import NodeConfig
from tasuki.memory import arena as native
from tasuki.trainer.backends.fsdp.memory import TAGS
from tasuki.trainer.backends.fsdp.mesh import start_mesh
from tasuki.trainer.backends.fsdp.shards import whole_tensors
from tasuki.trainer.data.checks import count_loss_tokens, plan_micro_batches, sample_length
from tasuki.trainer.data.micro_batch import loss_batch, token_batch
from tasuki.trainer.launch import read_launch
from tasuki.transport.imported_weights import ImportedWeights, import_weights
from tasuki.v1.weights_pb2 import PublishedWeights, WeightHandle
from tasuki.wire.errors import OutOfGpuMemory
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE

NUM_STEPS, NUM_CYCLES, NUM_SAMPLES = 4, 300, 11


def make_worker(model: Path, *, mesh: DeviceMesh, engine_dtype: str = "bfloat16", **settings: Any) -> Worker:
    trainer = {"num_ranks": mesh.size(), "compute_dtype": "float32", "learning_rate": 1e-2, **settings}
    node = {"state_dir": model, "model": {"path": model}, "trainer": trainer, "rollout": {"dtype": engine_dtype}}
    return Worker(NodeConfig.model_validate(node), mesh=mesh)


def train_step(worker: Worker) -> list[float]:
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)
    plan = plan_micro_batches([sample_length(sample) for sample in samples], num_ranks=worker.mesh.size(), max_tokens=64)
    mine = [[samples[index] for index in part] for part in plan[dist.get_rank()]]
    num_tokens = count_loss_tokens(samples)
    report = worker.forward_backward(
        [loss_batch(part, policy_version=0, device=worker.device) for part in mine],
        loss=PolicyLossConfig(),
        num_loss_tokens=num_tokens,
        num_gap_tokens=num_tokens,
    )
    step = worker.optim_step(learning_rate=None)
    return [report.loss, report.entropy, step.grad_norm]


def local_tensors(worker: Worker) -> list[Tensor]:
    """Parameters, gradients and moments of this rank."""
    tensors: list[Tensor] = []
    for parameter in worker.policy.parameters():
        state = worker.optimizer.state[parameter]
        assert parameter.grad is not None
        tensors += [parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
    return [cast(DTensor, tensor).to_local() for tensor in tensors]


def resources() -> dict[str, int]:
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "mapped": native.totals().mapped_bytes,
        "host_copies": native.totals().host_copy_bytes,
    }


def sleep(worker: Worker) -> None:
    released = worker.memory.pause(TAGS)
    asleep = [usage.mapped_bytes for usage in worker.memory.usage()]
    assert released > 0
    assert (worker.memory.pause(TAGS), asleep) == (0, [0, 0, 0])
    assert (worker.memory.resume(TAGS), worker.memory.resume(TAGS)) == (released, 0)


def without_room(worker: Worker) -> dict[str, Any]:
    """A resume for which one rank has no room: what every rank says, and what stays mapped."""
    worker.memory.pause(TAGS)
    if dist.get_rank() == 1:
        native.set_host_budget(native.totals().mapped_bytes + 1)
    error: OutOfGpuMemory | None = None
    try:
        worker.memory.resume(TAGS)
    except OutOfGpuMemory as raised:
        error = raised
    assert error is not None
    mapped = sum(usage.mapped_bytes for usage in worker.memory.usage())
    native.set_host_budget(0)
    worker.memory.resume(TAGS)
    return {"metadata": error.metadata, "mapped": mapped}


PUBLISHING = {
    "copy_stays": {"export_stays": True},
    "copy_leaves": {"export_stays": False},
    "parameters_stay": {"engine_dtype": "float32", "export_stays": True},
    "parameters_leave": {"engine_dtype": "float32", "export_stays": False},
    "bfloat16_parameters_stay": {"param_dtype": "bfloat16", "export_stays": True},
    "same_dtype_copied": {"engine_dtype": "float32", "export": "copy", "export_stays": False},
    "planned": {},
}


def publish_rounds(worker: Worker) -> dict[str, Any]:
    """Three rounds of a changeover as one reader sees them, which lets go when it is told to; what each of them was like."""
    reader: ImportedWeights | None = None
    facts: dict[str, list[Any]] = {"is_equal": [], "num_imports": [], "tags": []}
    for _ in range(3):
        version, handles = worker.policy_version, everyone(worker.publish_weights().handle.SerializeToString())
        weights = PublishedWeights(policy_version=version, boot_id="boot", handles=map(WeightHandle.FromString, handles))
        if reader is None or not reader.is_of(weights):
            reader = import_weights(weights, timeout_s=10)
        reader.renew(weights, timeout_s=10)
        reader.check_version(version)
        dtype = getattr(torch, worker.node.rollout.dtype)
        wanted = [shard for name, param in worker.policy.causal_lm.named_parameters() for shard in whole_tensors(name, param)]
        facts["is_equal"].append(all(torch.equal(reader.gathered(shard.name), shard.local.to(dtype)) for shard in wanted))
        reader.let_go()
        dist.barrier()
        worker.memory.pause(TAGS)
        facts["tags"].append({usage.tag: [usage.mapped_bytes, usage.kept_bytes] for usage in worker.memory.usage()})
        facts["num_imports"].append(native.totals().imported_bytes)
        worker.memory.resume(TAGS)
        worker.withdraw_weights()
        train_step(worker)
    assert reader is not None
    reader.close()
    worker.close()
    return facts


def everyone(mine: bytes) -> list[bytes]:
    """What each rank gives, in the order of ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def main(output: Path, model: Path) -> None:
    mesh = start_mesh("cpu", launch=read_launch(os.environ), gpu=0, num_threads=1, timeout_s=60)
    awake, sleeper = make_worker(model, mesh=mesh), make_worker(model, mesh=mesh)
    at_start = [tensor.data_ptr() for tensor in local_tensors(sleeper)]
    losses: dict[str, list[list[float]]] = {"awake": [], "sleeper": []}
    for _ in range(NUM_STEPS):
        losses["awake"].append(train_step(awake))
        losses["sleeper"].append(train_step(sleeper))
        sleep(sleeper)
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)
    batches = [token_batch(samples, device=sleeper.device)]
    scores = [worker.policy_log_probs(batches, temperature=1.0) for worker in (awake, sleeper)]
    reference = sleeper.reference_log_probs(batches, temperature=1.0)
    no_room = without_room(sleeper)
    checkpoint = output / "checkpoint"
    sleeper.save_checkpoint(checkpoint)
    sleeper.load_checkpoint(checkpoint)
    sleep(sleeper)
    before = resources()
    for _ in range(NUM_CYCLES):
        sleep(sleeper)
    facts = {
        "losses": losses,
        "is_equal": all(torch.equal(*pair) for pair in zip(local_tensors(awake), local_tensors(sleeper), strict=True)),
        "is_log_prob_equal": scores[0] == scores[1],
        "is_reference_equal": reference == sleeper.reference_log_probs(batches, temperature=1.0),
        "is_address_kept": at_start == [tensor.data_ptr() for tensor in local_tensors(sleeper)],
        "no_room": no_room,
        "resources": [before, resources()],
        "published": {name: publish_rounds(make_worker(model, mesh=mesh, **settings)) for name, settings in PUBLISHING.items()},
    }
    (output / f"rank-{dist.get_rank()}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
