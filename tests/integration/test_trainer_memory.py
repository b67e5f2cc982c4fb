"""Sleeping does not change training. Two FSDP2 ranks on a CPU, with shards of unequal size."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.memory import arena as native
from tasuki.trainer.backends.fsdp.shards import whole_tensors
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.weights_pb2 import PublishedWeights, WeightHandle
from tasuki.weights.imported_weights import ImportedWeights, import_weights
from tasuki.wire.errors import OutOfGpuMemory
from tasuki.wire.stages import MemoryTag
from tests.extent import IS_WHOLE
from tests.integration.launched import run_ranks
from tests.integration.learning import fsdp, learn, metric, start_learner, trained
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

NUM_STEPS, NUM_SAMPLES = 4, 11
NUM_CYCLES = 300 if IS_WHOLE else 30


def make_learner(model: Path, *, mesh: DeviceMesh, engine_dtype: str = "bfloat16", **settings: Any) -> Learner:
    return start_learner(model, mesh=mesh, rollout={"dtype": engine_dtype}, learning_rate=1e-2, **settings)


def train_step(learner: Learner) -> list[float]:
    """Makes a step of the policy, and of the critic if there is one."""
    samples = decode_samples(make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE))
    report = learn(learner, Role.POLICY, samples, config=LossConfig(), max_tokens=64)
    figures = [report.loss, metric(report, "entropy"), learner.optim_step(Role.POLICY).grad_norm]
    if Role.CRITIC in learner.roles:
        targets = replace(samples, columns={**samples.columns, "returns": samples.columns["advantages"]})
        report = learn(learner, Role.CRITIC, targets, config=LossConfig(loss=ValueLoss(clip=None)), max_tokens=64)
        figures += [report.loss, metric(report, "value"), learner.optim_step(Role.CRITIC).grad_norm]
    return figures


def local_tensors(learner: Learner) -> list[Tensor]:
    """Parameters, gradients and moments of this rank."""
    tensors: list[Tensor] = []
    for role in learner.roles:
        network, state = trained(learner, role).network, trained(learner, role).optimizer.optimizer.state
        for parameter in network.parameters():
            assert parameter.grad is not None
            moments = [state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
            tensors += [parameter.detach(), parameter.grad, *moments]
    return [cast(DTensor, tensor).to_local() for tensor in tensors]


def resources() -> dict[str, int]:
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "mapped": native.totals().mapped_bytes,
        "host_copies": native.totals().host_copy_bytes,
    }


def sleep(learner: Learner) -> None:
    released = fsdp(learner).memory.pause_tags(TAGS)
    asleep = [usage.mapped_bytes for usage in fsdp(learner).memory.usage()]
    assert released > 0
    assert (fsdp(learner).memory.pause_tags(TAGS), asleep) == (0, [0, 0, 0])
    assert [fsdp(learner).memory.resume_tags(TAGS) for _ in range(2)] == [released, 0]


def without_room(learner: Learner) -> dict[str, Any]:
    """Resumes without room on one rank; returns the error of this rank and the bytes still mapped."""
    fsdp(learner).memory.pause_tags(TAGS)
    if dist.get_rank() == 1:
        native.set_host_budget(native.totals().mapped_bytes + 1)
    error: OutOfGpuMemory | None = None
    try:
        fsdp(learner).memory.resume_tags(TAGS)
    except OutOfGpuMemory as raised:
        error = raised
    assert error is not None
    mapped = sum(usage.mapped_bytes for usage in fsdp(learner).memory.usage())
    native.set_host_budget(0)
    fsdp(learner).memory.resume_tags(TAGS)
    return {"metadata": error.metadata, "mapped": mapped}


PUBLISHING = {
    "copy_stays": {"export_stays": True},
    "copy_leaves": {"export_stays": False},
    "parameters_stay": {"engine_dtype": "float32", "export_stays": True},
    "parameters_leave": {"engine_dtype": "float32", "export_stays": False},
    "bfloat16_parameters_stay": {"param_dtype": "bfloat16", "export_stays": True},
    "planned": {},
}


def publish_rounds(learner: Learner, *, engine_dtype: str = "bfloat16") -> dict[str, Any]:
    """Facts of three changeovers as seen by one reader, which releases its import on request."""
    reader: ImportedWeights | None = None
    facts: dict[str, list[Any]] = {"is_equal": [], "num_imports": [], "tags": []}
    fsdp(learner).publication.rehearse()
    facts["rehearsed"] = [usage.mapped_bytes for usage in fsdp(learner).memory.usage() if MemoryTag.of(usage.tag) == "export"]
    for _ in range(3):
        version, handles = learner.policy_version, everyone(learner.publish().handle.SerializeToString())
        weights = PublishedWeights(policy_version=version, boot_id="boot", handles=map(WeightHandle.FromString, handles))
        if reader is None or not reader.is_of(weights):
            reader = import_weights(weights, timeout_s=10)
        reader.renew(weights, timeout_s=10)
        reader.check_version(version)
        causal_lm, dtype = trained(learner, Role.POLICY).network.causal_lm, getattr(torch, engine_dtype)
        parameters = causal_lm.named_parameters()
        wanted = [shard for name, param in parameters for shard in whole_tensors(causal_lm, name, param)]
        facts["is_equal"].append(all(torch.equal(reader.gathered(shard.name), shard.local.to(dtype)) for shard in wanted))
        reader.release()
        dist.barrier()
        fsdp(learner).memory.pause_tags(TAGS)
        facts["tags"].append(
            {MemoryTag.of(usage.tag): [usage.mapped_bytes, usage.kept_bytes] for usage in fsdp(learner).memory.usage()}
        )
        facts["num_imports"].append(native.totals().imported_bytes)
        fsdp(learner).memory.resume_tags(TAGS)
        learner.backend.publication.withdraw()
        train_step(learner)
    assert reader is not None
    reader.close()
    learner.backend.close()
    return facts


def learner_scores(learner: Learner, role: Role) -> list[float]:
    """Scores of all samples, the same on every rank."""
    samples = decode_samples(make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE))
    return learner.score(role, [token_batch(samples, device=learner.backend.device)])[0].tolist()


def everyone(mine: bytes) -> list[bytes]:
    """Gathers a value from each rank, in the order of ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def train_with_sleeps(mesh: DeviceMesh, output: Path, model: Path) -> None:
    """Trains one model awake and the same model with a sleep in every step; each rank writes its results."""
    awake, sleeper = (make_learner(model, mesh=mesh, critic={"learning_rate": 1e-2}, reference_on_host=False) for _ in range(2))
    at_start = [tensor.data_ptr() for tensor in local_tensors(sleeper)]
    losses: dict[str, list[list[float]]] = {"awake": [], "sleeper": []}
    for _ in range(NUM_STEPS):
        losses["awake"].append(train_step(awake))
        losses["sleeper"].append(train_step(sleeper))
        sleep(sleeper)
    scores = {role: [learner_scores(learner, role) for learner in (awake, sleeper)] for role in (Role.POLICY, Role.CRITIC)}
    reference = learner_scores(sleeper, Role.REFERENCE)
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
        "is_log_prob_equal": scores[Role.POLICY][0] == scores[Role.POLICY][1],
        "is_value_equal": scores[Role.CRITIC][0] == scores[Role.CRITIC][1],
        "is_reference_equal": reference == learner_scores(sleeper, Role.REFERENCE),
        "is_address_kept": at_start == [tensor.data_ptr() for tensor in local_tensors(sleeper)],
        "no_room": no_room,
        "resources": [before, resources()],
        "published": {
            name: publish_rounds(
                make_learner(model, mesh=mesh, **settings), engine_dtype=str(settings.get("engine_dtype", "bfloat16"))
            )
            for name, settings in PUBLISHING.items()
        },
    }
    (output / f"rank-{dist.get_rank()}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of each rank."""
    folder = tmp_path_factory.mktemp("sleep")
    save_checkpoint(make_model("qwen2_tied", seed=3), folder / "model")
    run_ranks(train_with_sleeps, folder, folder / "model", num_ranks=2)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_a_sleep_in_every_step_changes_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["losses"]["awake"]) == NUM_STEPS
        assert rank["losses"]["sleeper"] == rank["losses"]["awake"]
        assert rank["losses"]["awake"][0] != rank["losses"]["awake"][-1]
        assert [rank[f"is_{what}_equal"] for what in ("log_prob", "value", "reference")] == [True, True, True]
        assert rank["is_equal"]


def test_addresses_are_kept_over_sleeps_and_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert [rank["is_address_kept"] for rank in ranks] == [True, True]


def test_one_rank_without_room_leaves_all_asleep_and_says_how_much_is_missing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        metadata = rank["no_room"]["metadata"]
        assert (metadata["rank"], rank["no_room"]["mapped"]) == ("1", 0)
        assert int(metadata["needed_bytes"]) > int(metadata["free_bytes"]) >= 0


def test_sleeps_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, after = rank["resources"]
        # Python's own heap may have grown by a mapping; one leaked per sleep would be 30 or more.
        assert abs(after.pop("mappings") - before.pop("mappings")) < 10
        assert after == before


@pytest.mark.parametrize("how", list(PUBLISHING))
def test_what_is_published_is_the_policy_in_every_round_whatever_it_lies_in(ranks: list[dict[str, Any]], how: str) -> None:
    assert [rank["published"][how]["is_equal"] for rank in ranks] == [[True, True, True]] * 2


def test_a_rehearsal_leaves_memory_only_where_copies_stay(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rehearsed = {how: sum(rank["published"][how]["rehearsed"]) for how in PUBLISHING}
        assert rehearsed["copy_leaves"] == 0 < rehearsed["copy_stays"]


def test_published_parameters_keep_their_chunks_or_leave_as_others_do(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kept = {how: [tags["weights"] for tags in rank["published"][how]["tags"]] for how in PUBLISHING}
        for how in ("parameters_stay", "bfloat16_parameters_stay"):
            assert all(mapped == 0 and kept_bytes > 0 for mapped, kept_bytes in kept[how])
        for how in ("parameters_leave", "copy_stays", "copy_leaves"):
            assert kept[how] == [[0, 0]] * 3
