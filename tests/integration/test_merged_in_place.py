"""Adapters merged in the base's own memory, beside the same training with a merged copy. FSDP2 ranks on a CPU."""

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.backends.fsdp.lora.adapters import base_parameters
from tasuki.trainer.backends.fsdp.shards import local_shards
from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.resident_tags import TAGS
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.v1.weights_pb2 import PublishedWeights, WeightHandle
from tasuki.weights.export import Place
from tasuki.weights.imported_weights import import_weights
from tasuki.wire.errors import OutOfGpuMemory, VersionOrder
from tests.integration.launched import run_ranks
from tests.integration.learning import fsdp, learn, start_learner, trained, whole_parameters
from tests.integration.trainer_samples import make_samples
from tests.models import VOCAB_SIZE, make_model, save_checkpoint

DENSE = ["q_proj", "o_proj", "down_proj"]
EXPERTS = {"rank": 8, "target_modules": DENSE[:2], "experts": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("qwen2_tied", 2, {"lora": {"rank": 23, "init": "gaussian", "target_modules": DENSE}}),
    "bfloat16": ("qwen2_tied", 1, {"lora": {"rank": 8, "target_modules": DENSE}, "compute_dtype": "bfloat16"}),
    "dora": ("qwen2_tied", 2, {"lora": {"rank": 32, "use_dora": True}, "compute_dtype": "bfloat16"}),
    "pissa": ("qwen2_tied", 1, {"lora": {"rank": 8, "init": "pissa"}}),
    "critic": ("qwen2_tied", 2, {"lora": {"rank": 32}, "critic": {"learning_rate": 1e-2, "lora_rank": 4}}),
    # Of five experts a layer the last of two ranks has two.
    "experts": ("qwen3_moe", 2, {"lora": EXPERTS, "compute_dtype": "bfloat16"}),
    "fused experts": ("qwen3_5_moe", 1, {"lora": EXPERTS}),
}


def step_of(learner: Learner) -> list[float]:
    samples = decode_samples(make_samples(8, vocab_size=VOCAB_SIZE))
    report = learn(learner, Role.POLICY, samples, config=LossConfig(), max_tokens=64)
    return [report.loss, learner.optim_step(Role.POLICY).grad_norm]


def scores_of(learner: Learner) -> list[list[float]]:
    batch = token_batch(decode_samples(make_samples(4, vocab_size=VOCAB_SIZE)), device=learner.backend.device)
    return [learner.score(role, [batch])[0].tolist() for role in (Role.POLICY, Role.REFERENCE)]


def published_by(learner: Learner) -> PublishedWeights:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, learner.publish().handle.SerializeToString())
    handles = map(WeightHandle.FromString, gathered)
    return PublishedWeights(policy_version=learner.policy_version, boot_id="boot", handles=handles)


def read(learner: Learner) -> dict[str, Tensor]:
    """What a reader of all ranks sees, and the headers' checksums."""
    reader = import_weights(published_by(learner), timeout_s=10)
    reader.check_version(learner.policy_version)
    tensors = {name: reader.gathered(name).clone() for name in sorted(reader.entries)}
    tensors["checksums"] = torch.tensor([value % 2**63 for value in reader.checksums_by_name()])
    reader.close()
    dist.barrier()
    return tensors


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def base_of(learner: Learner) -> dict[str, Tensor]:
    """This rank's shards as they are in memory."""
    return {shard.name: shard.local.clone() for shard in local_shards(fsdp(learner)._policy.causal_lm)}


@contextmanager
def no_room_for_pinning() -> Iterator[None]:
    """Host memory of this process ends below what a pause pins at a time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def does(call: Callable[[], object], *, has_room: bool) -> bool:
    """Whether the host's memory is enough for the call."""
    with nullcontext() if has_room else no_room_for_pinning():
        try:
            call()
        except OutOfGpuMemory:
            return False
    return True


def fails_half_way(learner: Learner) -> None:
    """Publishes, but loses a rank before the end."""
    backend = fsdp(learner)
    merged = backend._merged
    assert merged is not None

    class Broken:
        names = merged.names

        def fill(self, places: Mapping[str, Place]) -> Mapping[str, int]:
            merged.fill(places)
            raise ConnectionError

    backend._merged = cast(Any, Broken())
    with pytest.raises(ConnectionError):
        learner.publish()
    backend._merged = merged


def sleep(learner: Learner) -> None:
    fsdp(learner).memory.pause_tags(TAGS)
    fsdp(learner).memory.resume_tags(TAGS)


def train_both_ways(mesh: DeviceMesh, output: Path, model: Path, settings: dict[str, Any]) -> None:
    dtype = settings.get("compute_dtype", "float32")

    def start(name: str, **choices: object) -> Learner:
        folder = output / name
        given = {"rollout": {"dtype": dtype}, "learning_rate": 3e-2, "export_stays": False, **settings}
        return start_learner(model, mesh=mesh, state_dir=folder, choices=choices, **given)

    copying, merging = start("copy"), start("place", merges_in_place=True)
    base, facts = base_of(merging), dict[str, Any]()
    facts["refuses_without_host_memory"] = not does(lambda: merging.publish(), has_room=dist.get_rank() > 0)
    for learner in (copying, merging):
        fsdp(learner).publication.rehearse()
    facts["is_base_after_rehearsal"] = is_equal(base_of(merging), base)
    for number in range(3):
        facts[f"steps {number}"] = [step_of(copying), step_of(merging)]
        wanted = read(copying)
        facts[f"published {number}"] = is_equal(read(merging), wanted)
        if number == 0:
            facts["differs_while_merged"] = not is_equal(base_of(merging), base)
            # The optimizer's copy is the first that a pause pins.
            facts["pauses_fail"] = not does(lambda: fsdp(merging).memory.pause_tags(TAGS), has_room=False)
            facts["published after a failed pause"] = is_equal(read(merging), wanted)
        if number == 1:
            facts["published again"] = is_equal(read(merging), wanted)
            facts["scores"] = [scores_of(copying), scores_of(merging)]
            facts["published after scores"] = is_equal(read(merging), wanted)
            weights = published_by(merging)
            for each, name in ((copying, "copy"), (merging, "place")):
                each.backend.export_model(output / f"model-{name}")
            try:
                import_weights(weights, timeout_s=10).check_version(merging.policy_version)
            except VersionOrder:
                facts["is_withdrawn"] = True
            exported = [load_file(output / f"model-{name}" / "model.safetensors") for name in ("copy", "place")]
            facts["exported"] = is_equal(*exported)
            dist.barrier()
            facts["published after an export"] = is_equal(read(merging), wanted)
            fails_half_way(merging)
            facts["is_base_after_half_a_merge"] = scores_of(merging) == facts["scores"][0] and is_equal(base_of(merging), base)
            read(merging)
            # A reversed changeover: withdrawn, and never offloaded.
            merging.backend.publication.withdraw()
            facts["is_base_after_withdrawal"] = is_equal(base_of(merging), base)
        else:
            for learner in (copying, merging):
                sleep(learner)
        facts[f"is_base {number}"] = is_equal(base_of(merging), base)
    facts["steps 3"] = [step_of(copying), step_of(merging)]
    read(merging)
    fsdp(merging).memory.resume_tags(TAGS)
    facts["is_base_after_a_resume_without_pause"] = is_equal(base_of(merging), base)
    read(merging)
    merging.save_checkpoint(output / "checkpoint")
    merging.load_checkpoint(output / "checkpoint")
    facts["is_base_after_a_checkpoint"] = is_equal(base_of(merging), base)
    facts["parameters"] = is_equal(*(whole_parameters(learner, Role.POLICY) for learner in (copying, merging)))
    in_arena = {block[0] for block in fsdp(merging).memory._allocator.blocks("weights")}
    causal_lm = trained(merging, Role.POLICY).network.causal_lm
    large = [cast(DTensor, param.detach()).to_local() for _, param in base_parameters(causal_lm)]
    facts["in_arena"] = sum(each.data_ptr() in in_arena for each in large)
    for learner in (copying, merging):
        learner.backend.close()
    (output / f"rank-{dist.get_rank()}.json").write_text(json.dumps(facts))


_FEW = ("dense", "dora", "experts")


@pytest.mark.parametrize("case", [case if case in _FEW else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_merging_in_place_changes_no_bit(tmp_path: Path, case: str) -> None:
    kind, num_ranks, settings = CASES[case]
    save_checkpoint(make_model(kind, seed=3), tmp_path / "model")
    run_ranks(train_both_ways, tmp_path, tmp_path / "model", settings, num_ranks=num_ranks)
    for rank in range(num_ranks):
        facts = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for name in [name for name in facts if name.startswith(("steps", "scores"))]:
            copying, merging = facts.pop(name)
            assert copying == merging, name
        assert {name for name, value in facts.items() if not value} == set()
