"""A fleet's samples, split into messages."""

from __future__ import annotations

from tasuki.rpc.calls import chunks
from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.channel import MAX_CHUNK_BYTES


def test_chunks_fit_a_message_and_keep_the_order() -> None:
    samples = [TrainingSample(prompt_token_ids=[1], completion_token_ids=[70000] * 60_000) for _ in range(20)]
    cut = list(chunks(samples))
    assert [one for chunk in cut for one in chunk] == samples
    assert len(cut) > 1 and all(sum(one.ByteSize() for one in chunk) <= MAX_CHUNK_BYTES for chunk in cut)
    assert list(chunks([])) == []
