"""The GPU's kernels against plain torch, run by Triton's interpreter on a CPU."""

import pytest
import torch

from tasuki.algorithms import lm_head_tiles, lm_head_triton
from tasuki.algorithms.lm_head_tiles import Places, RunningSoftmax, SoftmaxGradient, TileKernels

NUM_PLACES, VOCAB_SIZE, WIDTH = 9, 300, 128


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> TileKernels:
    # Programs walk a row in several steps, the last of which is partial.
    monkeypatch.setattr(lm_head_triton, "_FOLD_COLUMNS", 32)
    monkeypatch.setattr(lm_head_triton, "_GRADIENT_COLUMNS", 32)
    return lm_head_triton


def make_places(softcap: float | None) -> Places:
    generator = torch.Generator().manual_seed(1)
    token_ids_N = torch.randint(VOCAB_SIZE, (NUM_PLACES,), generator=generator)
    return Places(token_ids_N, 0.5 + torch.rand(NUM_PLACES, generator=generator), softcap)


def tiles() -> dict[int, torch.Tensor]:
    """Logits by the first token of their tile, some of them extreme."""
    logits_NV = 5 * torch.randn(NUM_PLACES, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits_NV[0, 5], logits_NV[1, :WIDTH] = -1e30, -torch.inf
    logits_NV[2] -= 1e4
    return {start: logits_NV[:, start : start + WIDTH].contiguous() for start in range(0, VOCAB_SIZE, WIDTH)}


def folded(kernels: TileKernels, places: Places) -> RunningSoftmax:
    softmax = RunningSoftmax.empty(places)
    for start, logits_NC in tiles().items():
        kernels.fold(logits_NC, softmax, places, first_id=start)
    return softmax


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # raised by the interpreter's numpy
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_kernels_are_those_of_plain_torch(kernels: TileKernels, softcap: float | None) -> None:
    places = make_places(softcap)
    softmax, expected = folded(kernels, places), folded(lm_head_tiles, places)
    for method in (RunningSoftmax.log_sum, RunningSoftmax.log_probs, RunningSoftmax.entropy):
        assert method(expected).isfinite().all()
        torch.testing.assert_close(method(softmax), method(expected))
    log_sum_N, entropy_N, weights_N = expected.log_sum(), expected.entropy(), torch.linspace(-1, 2, NUM_PLACES)
    for grads in ((weights_N, None), (None, weights_N), (weights_N, 0.3 * weights_N)):
        factors = SoftmaxGradient.of(log_sum_N, entropy_N, *grads, places=places)
        for start, logits_NC in tiles().items():
            result, reference = (
                each.gradient(logits_NC.clone(), factors, places, first_id=start, dtype=torch.float32)
                for each in (kernels, lm_head_tiles)
            )
            torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)
