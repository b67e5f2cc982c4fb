"""Log-probs and gradients with images on a GPU, against transformers' vision model in float32 on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tasuki.models.known import read_model
from tasuki.trainer.data.micro_batch import token_batch
from tests.models import make_model, with_tower
from tests.unit.test_packed_attention import policy_of
from tests.vision import image_samples, plain_image_log_probs

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative to the exact values."""
    return float((found.float().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=str)
def test_packed_images_score_and_train_as_transformers_does(dtype: torch.dtype, most: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the tower's first layer is a convolution
    text = make_model("qwen3_vl", seed=5)
    tower = read_model({**text.config.to_dict(), "architectures": [type(text).__name__]}).shape.tower
    assert tower is not None
    samples, whole = image_samples(tower), with_tower(text)
    policy = policy_of(text).to(DEVICE, dtype)
    exact_N = plain_image_log_probs(whole, samples)
    found_N, _ = policy(token_batch(samples, device=DEVICE))
    assert distance(found_N.detach(), exact_N.detach()) < most
    found_N.sum().backward()
    exact_N.sum().backward()
    exact = {name.replace("language_model.", ""): param.grad for name, param in whole.named_parameters()}
    trained = [(name, param.grad) for name, param in policy.causal_lm.named_parameters() if param.grad is not None]
    assert len(trained) > 20 and not any(name.startswith("visual.") for name, _ in trained)
    found, expected = (
        torch.cat([grad.flatten().float().cpu() for grad in each])
        for each in ([grad for _, grad in trained], [exact[name] for name, _ in trained])
    )
    assert distance(found, expected) < most
