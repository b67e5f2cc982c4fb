"""Python SDK of tasuki: drive a node from a training loop. Needs grpcio, protobuf and numpy; no torch."""

from tasuki.client.advantages import group_advantages, has_signal
from tasuki.client.async_client import AsyncClient
from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.rewards import RewardPool
from tasuki.client.sync_client import Client
from tasuki.client.types import FinishReason, LossConfig, Phase, PolicyKind, Sample, SamplingParams, Stage, TrainingSample

__all__ = [
    "AsyncClient",
    "Client",
    "Dataset",
    "FinishReason",
    "LossConfig",
    "Phase",
    "PolicyKind",
    "RewardPool",
    "Sample",
    "SamplingParams",
    "Stage",
    "TrainingSample",
    "group_advantages",
    "has_signal",
    "read_jsonl",
]
