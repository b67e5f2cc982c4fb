"""What a checkpoint holds of FSDP2's networks."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from tasuki.models.shape import ROUTER_BIAS
from tasuki.trainer.adamw import ShardedAdamW
from tasuki.trainer.backends.fsdp.lora.adapters import trained_parameters
from tasuki.trainer.backends.fsdp.model import Critic, Policy
from tasuki.trainer.modules.routing import ExpertLoad
from tasuki.trainer.wire import Role


def training_tensors(network: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Trained tensors of a network and their AdamW state, by name."""
    tensors: dict[str, Tensor] = {}
    for name, param in trained_parameters(network):
        tensors[f"model.{name}"] = param.detach()
        # The step count is also a tensor per parameter; all are equal.
        for key, tensor in optimizer.state[param].items():
            tensors[f"optimizer.{key}.{name}"] = tensor
    return tensors


@dataclass(frozen=True, slots=True)
class Trained:
    """A network and its optimizer."""

    network: Policy | Critic
    optimizer: ShardedAdamW
    expert_load: ExpertLoad


def training_state(trained: Mapping[Role, Trained]) -> dict[str, Tensor]:
    """Every tensor of the trained networks and their optimizers, by name."""
    for each in trained.values():
        each.optimizer.settle()
    return {
        f"{role}.{name}": tensor
        for role, each in trained.items()
        for name, tensor in (training_tensors(each.network, each.optimizer.optimizer) | _moved_biases(each)).items()
    }


def _moved_biases(trained: Trained) -> dict[str, Tensor]:
    """Routers' biases, if steps change them."""
    if not trained.expert_load.moves_biases:
        return {}
    return {f"model.{name}": buffer for name, buffer in trained.network.named_buffers() if name.endswith(ROUTER_BIAS)}
