"""Python SDK of tasuki: drive a node from a training loop. Needs grpcio, protobuf and numpy; no torch."""

from tasuki.algorithms.loss_types import Aggregation, Correction, KlEstimator, LossConfig, OldPolicy
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.dppo import DppoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss
from tasuki.client.async_client import AsyncClient
from tasuki.client.dataset import Dataset, read_jsonl
from tasuki.client.rewards import RewardPool
from tasuki.client.sync_client import Client
from tasuki.client.types import (
    Changeover,
    FinishReason,
    ForwardBackwardResult,
    NodeState,
    OptimStepResult,
    Phase,
    Role,
    RolloutState,
    Sample,
    SamplingParams,
    SaveResult,
    Stage,
    StageEvent,
    StageStatus,
    TrainerState,
    TrainingSample,
    Watched,
)
from tasuki.wire.credentials import Credentials

__all__ = [
    "Aggregation",
    "AsyncClient",
    "Changeover",
    "CispoLoss",
    "Client",
    "Correction",
    "Credentials",
    "Dataset",
    "DppoLoss",
    "FinishReason",
    "ForwardBackwardResult",
    "GspoLoss",
    "KlEstimator",
    "LossConfig",
    "NodeState",
    "OldPolicy",
    "OptimStepResult",
    "Phase",
    "PolicyGradientLoss",
    "PpoLoss",
    "RewardPool",
    "Role",
    "RolloutState",
    "Sample",
    "SamplingParams",
    "SapoLoss",
    "SaveResult",
    "SftLoss",
    "Stage",
    "StageEvent",
    "StageStatus",
    "TrainerState",
    "TrainingSample",
    "ValueLoss",
    "Watched",
    "read_jsonl",
]
