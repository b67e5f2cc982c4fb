"""Python SDK of tasuki: drive a node from a training loop. Needs grpcio, protobuf and numpy; no torch."""

from tasuki.algorithms.loss_types import (
    Aggregation,
    CispoLoss,
    Correction,
    GspoLoss,
    KlEstimator,
    LossConfig,
    OldPolicy,
    PolicyGradientLoss,
    PpoLoss,
    SapoLoss,
    SftLoss,
    ValueLoss,
)
from tasuki.client.async_client import AsyncClient
from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.rewards import RewardPool
from tasuki.client.sync_client import Client
from tasuki.client.types import FinishReason, Phase, Role, Sample, SamplingParams, Stage, TrainingSample
from tasuki.wire.credentials import Credentials

__all__ = [
    "Aggregation",
    "AsyncClient",
    "CispoLoss",
    "Client",
    "Correction",
    "Credentials",
    "Dataset",
    "FinishReason",
    "GspoLoss",
    "KlEstimator",
    "LossConfig",
    "OldPolicy",
    "Phase",
    "PolicyGradientLoss",
    "PpoLoss",
    "RewardPool",
    "Role",
    "Sample",
    "SamplingParams",
    "SapoLoss",
    "SftLoss",
    "Stage",
    "TrainingSample",
    "ValueLoss",
    "read_jsonl",
]
