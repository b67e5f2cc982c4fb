"""A single copy of a frozen model on a real GPU: two processes read it, neither can write to it, and it outlives its creator.

Needs `make native`, a CUDA GPU and no network.
"""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from tasuki.weights.manifest import Entry
from tasuki.weights.shared_base import SharedBase, WritableBase, find_base

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GPU = torch.device("cuda:0")
MIB = 1 << 20
# 2 GiB: several chunks.
ROWS, COLUMNS = 1 << 18, 1 << 12


def entry(name: str, *, first: int, rows: int) -> Entry:
    return Entry(name, "bfloat16", (rows, COLUMNS), (0, 0), (rows, COLUMNS), 2 * COLUMNS * first)


def make_base() -> SharedBase:
    writable = WritableBase([entry("qkv", first=0, rows=ROWS)], device=GPU)
    tensor = writable.tensors()[0]
    tensor.copy_(torch.arange(ROWS, device=GPU).unsqueeze(1) % 251)
    base = writable.publish([entry("q", first=0, rows=ROWS - 3), entry("kv", first=ROWS - 3, rows=3)], rank=0, num_ranks=1)
    writable.close()
    return base


def hand_out(path: Path, is_there: Any, may_end: Any) -> None:
    base = make_base()
    base.hand_out(path)
    is_there.set()
    may_end.wait(120)


def write(path: Path) -> None:
    base = find_base(path, device=GPU)
    assert base is not None
    base.tensors()["q"][1].zero_()
    torch.cuda.synchronize()


def assert_whole(base: SharedBase) -> None:
    expected = torch.arange(ROWS, device=GPU) % 251
    tensors = base.tensors()
    assert torch.equal(tensors["q"][1][:, 7].float(), expected[:-3].float())
    assert torch.equal(tensors["kv"][1][:, 9].float(), expected[-3:].float())


def test_two_processes_share_a_read_only_copy_that_outlives_its_creator(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    is_there, may_end = context.Event(), context.Event()
    path = tmp_path / "base.sock"
    torch.zeros(1, device=GPU)
    maker = context.Process(target=hand_out, args=(path, is_there, may_end), daemon=True)
    maker.start()
    assert is_there.wait(120)
    before = torch.cuda.mem_get_info(GPU)[0]
    base = find_base(path, device=GPU)
    assert base is not None
    assert before - torch.cuda.mem_get_info(GPU)[0] < 64 * MIB < base.num_bytes, "mapped, not copied"
    assert_whole(base)
    writer = context.Process(target=write, args=(path,))
    writer.start()
    writer.join(120)
    assert writer.exitcode not in (None, 0)
    assert_whole(base)
    maker.kill()
    maker.join()
    assert_whole(base)
