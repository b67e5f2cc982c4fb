"""A sync against SGLang loading the exported checkpoint from disk: every parameter, bit for bit, after poisoning.

`make test` runs at TP 2 every cut once, and families whose tensors are fused, split or padded in ways of their own; the long tests run
every family, `make chaos` each of them at TP 1 and TP 2.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasuki.config.paths import base_socket_path
from tasuki.models.known import read_model_shape
from tasuki.planner.rollout_bytes import _tower_tensors
from tasuki.rollout.rollout import RankCalls
from tasuki.rollout.sync import WeightSync
from tasuki.v1 import memory_pb2, types_pb2
from tasuki.weights.imported_weights import import_weights
from tasuki.weights.shared_base import SharedBase, find_base
from tasuki.wire.errors import OutOfGpuMemory, WeightsCorrupt
from tasuki.wire.stages import MemoryTag
from tests.base_copies import shared_by
from tests.extent import IS_WHOLE, repeated
from tests.integration.engine_rank import EngineRanks, check_outcomes, engine_ranks, pieces_of
from tests.integration.published import Published
from tests.integration.trainer_process import connect, serving_trainer
from tests.integration.trainer_samples import make_samples
from tests.models import CONFIGS, TELLING, VOCAB_SIZE, make_model, save_checkpoint
from tests.received import check_received
from tests.slices import Cut, by_boxes, by_columns, by_rows, by_rows_and_columns


@pytest.fixture(scope="module")
def ranks() -> Iterator[EngineRanks]:
    with engine_ranks() as ranks:
        yield ranks


# --- memory of both ranks, as their front moves it


@pytest.fixture
async def memory(ranks: EngineRanks, tmp_path: Path) -> AsyncIterator[RankCalls]:
    """Memory of two ranks that hold a model, awake."""
    with ExitStack() as stack:
        published = Published("qwen2", tmp_path, stack)
        ranks.receive(published.folder, published.message, tp_size=2)
        ranks.serve(tmp_path)
        calls = RankCalls(2, socket_dir=tmp_path)
        stack.callback(calls.close)
        yield calls


async def asleep(memory: RankCalls) -> list[tuple[int, bool, bool]]:
    """For each rank, whether its weights sleep and whether they are unmapped."""
    usage = await memory.usage(memory_pb2.GetUsageRequest(), timeout_s=10)
    return [(tag.rank, tag.is_paused, tag.mapped_bytes == 0) for tag in usage.tags if tag.tag == types_pb2.MEMORY_TAG_WEIGHTS]


async def test_a_rank_without_room_keeps_every_rank_asleep_and_usable(memory: RankCalls, ranks: EngineRanks) -> None:
    weights = [MemoryTag.WEIGHTS]
    assert await memory.pause(weights, timeout_s=10) > 0
    ranks.limit_memory(4096, tp_rank=1)
    with pytest.raises(OutOfGpuMemory, match="engine rank 1") as caught:
        await memory.resume(weights, timeout_s=10)
    assert int(caught.value.metadata["needed_bytes"]) > int(caught.value.metadata["free_bytes"])
    assert (caught.value.metadata["rank"], caught.value.metadata["tag"]) == ("1", "weights")
    assert await asleep(memory) == [(0, True, True), (1, True, True)]
    assert memory.resident_tags == [MemoryTag.KV_CACHE]
    ranks.limit_memory(0, tp_rank=1)
    assert await memory.resume(weights, timeout_s=10) > 0
    assert await asleep(memory) == [(0, False, False), (1, False, False)]


# --- weights


async def test_adapters_arrive_merged_as_the_exported_folder_has_them(ranks: EngineRanks, tmp_path: Path) -> None:
    model = save_checkpoint(make_model("qwen3", seed=1), tmp_path / "start")
    # So small that the second trainer rank holds nothing of any A.
    settings = "[trainer.lora]\nrank = 1\nalpha = 4\n"
    with serving_trainer(tmp_path / "node", model, num_ranks=2, settings=settings) as trainer:
        async with connect(trainer) as client:
            await client.look()
            await client.forward_backward(make_samples(8, vocab_size=VOCAB_SIZE))
            await client.optim_step(learning_rate=0.05)
            await client.export(tmp_path / "model")
            outcomes = ranks.receive(tmp_path / "model", (await client.publish()).weights, tp_size=2)
    adapter = load_file(tmp_path / "model" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}, "masters, whatever forward computes in"
    assert [outcome.different for outcome in outcomes] == [[], []]
    assert all(outcome.fallback_names == () for outcome in outcomes)


async def test_shared_keys_that_are_values_arrive_as_the_exported_folder_has_them(ranks: EngineRanks, tmp_path: Path) -> None:
    # In published models of Gemma 4 some have the one, others the other.
    both = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    model = save_checkpoint(make_model("gemma4", seed=1, **both), tmp_path / "start")
    with serving_trainer(tmp_path / "node", model, num_ranks=2) as trainer:
        async with connect(trainer) as client:
            await client.look()
            await client.forward_backward(make_samples(8, vocab_size=VOCAB_SIZE))
            await client.optim_step(learning_rate=0.05)
            await client.export(tmp_path / "model")
            published = (await client.publish()).weights
            check_outcomes(ranks.receive(tmp_path / "model", published, tp_size=2), "gemma4")


# --- a base read by trainer and engine

MIXTURES = (
    "qwen3_moe",
    "mixtral",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_5_moe",
    "qwen3_next",
)
# SGLang has no model file for Phi 3, and computes Gemma 2's norms while loading them.
SHARED = [
    kind
    for kind in CONFIGS
    if kind not in (*MIXTURES, "gemma2", "phi3", "qwen3_5", "qwen2_5_vl", "qwen3_vl", "gemma3_vision", "gemma4", "gemma4_dense")
]


# Fused layers can be shared only with one rank per service.
SHARED_AT_2 = [kind for kind in SHARED if kind != "glm4"]
WHOLE_VOCABULARY = 128


def bases_of(state_dir: Path, service: str, *, num_ranks: int) -> list[SharedBase]:
    found = [find_base(base_socket_path(state_dir, service, rank), device=torch.device("cpu")) for rank in range(num_ranks)]
    bases = [base for base in found if base is not None]
    assert [(base.manifest.rank, base.manifest.num_ranks) for base in bases] == [(rank, num_ranks) for rank in range(num_ranks)]
    return bases


def differ_from(stored: dict[str, torch.Tensor], base: SharedBase) -> list[str]:
    """Tensors of the base that differ from their slice of the stored ones."""
    tensors = base.tensors()
    assert tensors.keys() == stored.keys()
    return [
        name
        for name, (entry, tensor) in tensors.items()
        if not torch.equal(tensor, stored[name][tuple(map(slice, entry.offsets, entry.box.ends))])
    ]


@pytest.mark.parametrize(
    ("kind", "tp_size"),
    [
        *((kind, 1) for kind in (SHARED if IS_WHOLE else ["glm4"])),
        *((kind, 2) for kind in (SHARED_AT_2 if IS_WHOLE else ["gemma3"])),
    ],
)
def test_a_shared_base_is_what_sglang_loads_and_what_the_checkpoint_has(
    ranks: EngineRanks, kind: str, tp_size: int, tmp_path: Path
) -> None:
    sizes = {"vocab_size": WHOLE_VOCABULARY} if tp_size > 1 else {}
    folder = save_checkpoint(make_model(kind, seed=1, **sizes), tmp_path / "model")
    outcomes = ranks.share_base(folder, tmp_path / "node", tp_size=tp_size)
    assert [outcome.different for outcome in outcomes] == [[]] * tp_size
    stored = load_file(folder / "model.safetensors")
    assert [differ_from(stored, base) for base in bases_of(tmp_path / "node", "rollout", num_ranks=tp_size)] == [[]] * tp_size


@pytest.mark.parametrize("kind", SHARED_AT_2 if IS_WHOLE else ["qwen2_tied"])
async def test_a_trainer_learns_beside_weights_that_are_the_engines(ranks: EngineRanks, kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model(kind, seed=1, vocab_size=WHOLE_VOCABULARY), tmp_path / "model")
    state_dir = tmp_path / "node"
    ranks.share_base(folder, state_dir, tp_size=2)
    settings = '[trainer.lora]\nrank = 3\n[rollout]\nlora = "adapter"\ntp_size = 2'
    with serving_trainer(state_dir, folder, num_ranks=2, settings=settings, choices={"shares_base": True}) as trainer:
        bases = bases_of(state_dir, "trainer", num_ranks=2)
        for pid, base in zip(trainer.rank_pids(), bases, strict=True):
            assert len(shared_by(pid, os.getpid())) == len(base.manifest.chunk_bytes)
        stored = load_file(folder / "model.safetensors")
        async with connect(trainer) as client:
            await client.look()
            sizes = {tag.tag: tag.total_bytes for tag in (await client.usage()).tags}
            assert sizes[types_pb2.MEMORY_TAG_WEIGHTS] < sum(tensor.nbytes for tensor in stored.values()) / 2
            await client.export(tmp_path / "start")
            start = load_file(tmp_path / "start" / "model.safetensors")
            assert start.keys() == stored.keys()
            assert [name for name, tensor in start.items() if not torch.equal(tensor, stored[name])] == []
            await client.forward_backward(make_samples(8, vocab_size=WHOLE_VOCABULARY))
            await client.optim_step(learning_rate=0.05)
            await client.export(tmp_path / "end")
            published = import_weights((await client.publish()).weights, timeout_s=5)
            assert all(".lora_" in name for name in published.layout())
        end = load_file(tmp_path / "end" / "model.safetensors")
        changed = {name for name, tensor in end.items() if not torch.equal(tensor, stored[name])}
        assert changed == {name for name in stored if name.endswith("_proj.weight")}
        assert [differ_from(stored, base) for base in bases] == [[]] * 2, "nobody writes to it"


def test_a_model_that_sglang_computes_with_while_it_loads_is_not_shared(ranks: EngineRanks, tmp_path: Path) -> None:
    folder = save_checkpoint(make_model("gemma2", seed=1), tmp_path / "model")
    with pytest.raises(AssertionError, match=r"rollout.lora: the engine computes with model\.layers\.0\.\w+norm"):
        ranks.share_base(folder, tmp_path / "node", tp_size=1)


# Fewer trainer ranks than engine ranks, as many, and more, with rows that do not divide evenly.
LAYOUTS = [
    *((2, kind, by_rows) for kind in CONFIGS),
    *((num_ranks, kind, by_rows) for num_ranks in (1, 3) for kind in ("qwen2_tied", "qwen3_moe")),
    (3, "qwen2_tied", by_columns),
    (2, "qwen3_moe", by_columns),
    (3, "qwen3", by_rows_and_columns),
    (4, "qwen3_moe", by_boxes),
]
# All of TP 2 first: afterwards the first rank forms a group by itself.
SYNCS = [(tp_size, *layout) for tp_size in (2, 1) for layout in LAYOUTS]
if not IS_WHOLE:
    ONLY_AT_TP_1 = [
        (1, "qwen3_moe", by_rows),
        (3, "qwen2_tied", by_rows),
        (3, "qwen2_tied", by_columns),
        (2, "qwen3_moe", by_columns),
    ]
    SYNCS = [sync for sync in SYNCS if (sync[0] == 1) is (sync[1:] in ONLY_AT_TP_1)]


async def test_later_syncs_are_compared_as_the_first(ranks: EngineRanks, tmp_path: Path) -> None:
    with ExitStack() as stack:
        published = Published("qwen2", tmp_path, stack)
        ranks.receive(published.folder, published.message, tp_size=2)
        ranks.serve(tmp_path)
        calls = RankCalls(2, socket_dir=tmp_path)
        stack.callback(calls.close)
        sync = WeightSync(calls, socket_dir=tmp_path)
        stack.callback(sync.close)
        reports = []
        for version in (3, 4, 5):
            published.publish(version)
            reports.append(await sync.run(published.message, await sync.prepare(published.message), timeout_s=30))
        assert [report.policy_version for report in reports] == [3, 4, 5]
        assert len({report.copied_bytes for report in reports}) == 1 and reports[0].copied_bytes > 0
        published.exports[1]._arena.tensors[0].view(torch.int16).flatten()[0] ^= 1
        with pytest.raises(WeightsCorrupt, match=r"1 of \d+ tensors.*trainer rank 1 changed after it was published"):
            await sync.run(published.message, await sync.prepare(published.message), timeout_s=30)


@pytest.mark.parametrize(
    ("tp_size", "num_ranks", "kind", "cut"),
    repeated(SYNCS, is_repeat=lambda _, num_ranks, kind, cut: (num_ranks, cut) == (2, by_rows) and kind not in TELLING),
)
def test_sync_equals_loading_the_checkpoint_from_disk(
    ranks: EngineRanks, tp_size: int, num_ranks: int, kind: str, cut: Cut, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        published = Published(kind, tmp_path, stack, devices=["cpu"] * num_ranks, cut=cut)
        outcomes = ranks.receive(published.folder, published.message, tp_size=tp_size)
        check_outcomes(outcomes, kind)
        # The orphan and the rotary table.
        assert all(outcome.num_others >= 2 for outcome in outcomes)
        planned = sum(_tower_tensors(read_model_shape(published.folder).tower_parameters(), tp_size))
        assert [outcome.tower_numel for outcome in outcomes] == [planned] * tp_size
        check_received(pieces_of(outcomes), import_weights(published.message, timeout_s=5))
