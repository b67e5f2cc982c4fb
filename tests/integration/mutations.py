"""Nearly valid messages: valid ones with flipped bits, and with bytes cut, doubled and inserted."""

import random
from collections.abc import Callable, Iterator

from google.protobuf.message import Message

from tasuki.rpc.methods import METHODS
from tasuki.v1 import coordinator_pb2, loss_pb2, memory_pb2, rollout_pb2, trainer_pb2, types_pb2, weights_pb2

_COMMAND = types_pb2.CommandId(epoch=1, sequence=7, request_id="request")
_SAMPLE = types_pb2.TrainingSample(
    prompt_token_ids=[5, 6], completion_token_ids=[7, 8], rollout_log_probs=[-1.0, -2.0], advantages=[1.0], policy_version=0
)
_LOSS = loss_pb2.LossConfig(name="ppo", settings={"clip_high": 0.28})
_HANDLE = weights_pb2.WeightHandle(rank=0, socket_path="/tmp/x.sock", manifest_digest="ab", kind=1, generation=1)
VALID: dict[str, list[Message]] = {
    "AcquireRequest": [coordinator_pb2.AcquireRequest(phase=types_pb2.PHASE_TRAIN, request_id="a")],
    "RunStageRequest": [coordinator_pb2.RunStageRequest(stage=types_pb2.STAGE_SYNC, request_id="b")],
    "ListChangeoversRequest": [coordinator_pb2.ListChangeoversRequest(page_size=5, page_token="7")],
    "PlanRequest": [coordinator_pb2.PlanRequest(gpu_bytes=1 << 36, host_bytes=1 << 36)],
    "PauseRequest": [
        memory_pb2.PauseRequest(command=_COMMAND, stage=types_pb2.STAGE_OFFLOAD, tags=[types_pb2.MEMORY_TAG_WEIGHTS])
    ],
    "ResumeRequest": [memory_pb2.ResumeRequest(command=_COMMAND, stage=types_pb2.STAGE_RESUME_KV)],
    "WatchUsageRequest": [memory_pb2.WatchUsageRequest(interval_ms=20)],
    "GenerateRequest": [
        rollout_pb2.GenerateRequest(
            request_id="g",
            prompts=[rollout_pb2.Prompt(token_ids=[5, 6])],
            num_samples=1,
            sampling_params=types_pb2.SamplingParams(max_new_tokens=2, temperature=1.0, stop_token_ids=[3]),
        )
    ],
    "ReceiveWeightsRequest": [
        rollout_pb2.ReceiveWeightsRequest(
            command=_COMMAND, weights=weights_pb2.PublishedWeights(policy_version=1, handles=[_HANDLE])
        )
    ],
    "DrainRequest": [rollout_pb2.DrainRequest(command=_COMMAND, grace_ms=5)],
    "GetTrainerStateRequest": [trainer_pb2.GetTrainerStateRequest(epoch=1)],
    "GetRolloutStateRequest": [rollout_pb2.GetRolloutStateRequest(epoch=1)],
    "BeginRunRequest": [trainer_pb2.BeginRunRequest(command=_COMMAND, keep_optimizer=True)],
    "ForwardBackwardRequest": [
        trainer_pb2.ForwardBackwardRequest(
            header=trainer_pb2.ForwardBackwardHeader(command=_COMMAND, role=types_pb2.ROLE_POLICY, loss=_LOSS)
        ),
        trainer_pb2.ForwardBackwardRequest(samples=trainer_pb2.TrainingSamples(samples=[_SAMPLE])),
    ],
    "OptimStepRequest": [trainer_pb2.OptimStepRequest(command=_COMMAND, role=types_pb2.ROLE_POLICY, learning_rate=1e-6)],
    "DiscardGradientsRequest": [trainer_pb2.DiscardGradientsRequest(command=_COMMAND, role=types_pb2.ROLE_POLICY)],
    "ComputeLogProbsRequest": [
        trainer_pb2.ComputeLogProbsRequest(header=trainer_pb2.ComputeLogProbsHeader(role=types_pb2.ROLE_POLICY)),
        trainer_pb2.ComputeLogProbsRequest(samples=trainer_pb2.TrainingSamples(samples=[_SAMPLE])),
    ],
    "ComputeValuesRequest": [trainer_pb2.ComputeValuesRequest(samples=trainer_pb2.TrainingSamples(samples=[_SAMPLE]))],
    "PublishWeightsRequest": [trainer_pb2.PublishWeightsRequest(command=_COMMAND)],
    "WithdrawWeightsRequest": [trainer_pb2.WithdrawWeightsRequest(command=_COMMAND)],
    "SaveCheckpointRequest": [trainer_pb2.SaveCheckpointRequest(command=_COMMAND, path="/tmp/a/b")],
    "LoadCheckpointRequest": [trainer_pb2.LoadCheckpointRequest(command=_COMMAND, path="/tmp/a/b")],
    "ExportModelRequest": [trainer_pb2.ExportModelRequest(command=_COMMAND, path="/tmp/a/b")],
}
"""Messages of a call by the name of its request; methods missing here take an empty message."""


def mutated_calls(seed: int, services: frozenset[str]) -> Iterator[tuple[str, list[bytes]]]:
    """Yields calls endlessly: the path of a method of one of `services`, and its messages."""
    randomness = random.Random(seed)
    methods = [path for path, method in METHODS.items() if method.service.rpartition(".")[2] in services]
    while True:
        path = randomness.choice(methods)
        messages = [message.SerializeToString() for message in VALID.get(f"{path.rpartition('/')[2]}Request", [])] or [b""]
        victim = randomness.randrange(len(messages))
        messages[victim] = mutated(randomness, messages[victim])
        yield path, messages


def mutated(randomness: random.Random, message: bytes) -> bytes:
    for _ in range(randomness.choice((1, 1, 2, 4, 16))):
        message = randomness.choice(_MUTATIONS)(randomness, message)
    return message


def _turn_bit(randomness: random.Random, message: bytes) -> bytes:
    if not message:
        return message
    at = randomness.randrange(len(message))
    return message[:at] + bytes([message[at] ^ 1 << randomness.randrange(8)]) + message[at + 1 :]


def _cut(randomness: random.Random, message: bytes) -> bytes:
    return message[: randomness.randrange(len(message) + 1)]


def _double(randomness: random.Random, message: bytes) -> bytes:
    at = randomness.randrange(len(message) + 1)
    return message[:at] + message[: randomness.randrange(len(message) + 1)] + message[at:]


def _put_in(randomness: random.Random, message: bytes) -> bytes:
    at = randomness.randrange(len(message) + 1)
    return message[:at] + randomness.randbytes(randomness.choice((1, 2, 8, 64))) + message[at:]


def _huge_number(randomness: random.Random, message: bytes) -> bytes:
    at = randomness.randrange(len(message) + 1)
    return message[:at] + b"\xff" * randomness.choice((4, 9, 10)) + b"\x01" + message[at:]


def _nested(randomness: random.Random, message: bytes) -> bytes:
    for _ in range(randomness.choice((5, 100, 300))):
        length = len(message)
        message = b"\x0a" + (bytes([length]) if length < 128 else bytes([length % 128 | 128, length // 128 % 128])) + message
    return message


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _turn_bit,
    _turn_bit,
    _cut,
    _double,
    _put_in,
    _huge_number,
    _nested,
)
