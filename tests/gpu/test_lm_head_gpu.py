"""The vocabulary projection's Triton kernels on a GPU: float64's numbers, deterministic bits, and memory for one tile."""

import pytest
import torch
from torch import Tensor

from tasuki.algorithms import vocabulary_tiles
from tests.lm_head_cases import Case, make_case, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Relative error in norm, against float64; logits, gradients and results are each rounded once.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vocabulary_tiles.TILE_VALUES, "cuda", 1 << 18)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("coefs", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize(("num_places", "vocab_size"), [(1, 131), (7, 5000), (300, 5001), (300, 5632)])
def test_values_and_gradients_are_those_of_float64(
    dtype: torch.dtype, softcap: float | None, coefs: tuple[float, float], num_places: int, vocab_size: int
) -> None:
    case = make_case(num_places, vocab_size, dtype=dtype, softcap=softcap, device="cuda")
    in_float64 = case.to(torch.float64)
    results, expected = case.results(), in_float64.plain_results()
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, reference.float(), rtol=1e-5, atol=1e-4)
    gradients, expected_gradients = case.gradients(results, coefs), in_float64.gradients(expected, coefs)
    for result, reference in zip(gradients, expected_gradients, strict=True):
        assert result.dtype == dtype
        assert relative_error(result, reference) < TOLERANCE[dtype]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_gpu_gives_the_numbers_of_a_cpu(softcap: float | None) -> None:
    on_cpu = make_case(100, 3000, softcap=softcap)
    on_gpu = on_cpu.to("cuda")
    for a, b in zip(_all(on_gpu), _all(on_cpu), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_no_synchronization_and_the_same_bits_every_time() -> None:
    case = make_case(300, 5000, dtype=torch.bfloat16, device="cuda")
    _all(case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = _all(case), _all(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_logits_that_are_extreme() -> None:
    case = make_case(40, 3000, device="cuda")
    with torch.no_grad():
        case.hidden_NH[:, 0] = 1.0
        case.weight_VH[:1500, 0] = -1e30
        case.weight_VH[1500:, 0] = 1e4
        case.token_ids_N.fill_(2000)
    log_probs_N, entropy_N = results = case.results()
    gradients = case.gradients(results, (1.0, 0.5))
    expected_log_probs_N, expected_entropy_N = case.to(torch.float64).plain_results()
    # The spacing of float32 at 1e4 is 0.001.
    torch.testing.assert_close(log_probs_N, expected_log_probs_N.float(), rtol=0, atol=0.02)
    torch.testing.assert_close(entropy_N, expected_entropy_N.float(), rtol=0, atol=0.02)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_memory_is_for_one_tile() -> None:
    torch.cuda.empty_cache()
    num_places, vocab_size, hidden_size = 4096, 151_936, 256
    case = make_case(num_places, vocab_size, hidden_size=hidden_size, dtype=torch.bfloat16, device="cuda")
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.gradients(case.results(), (1.0, 0.0))
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes
    tile_bytes = vocabulary_tiles.TILE_VALUES["cuda"] * (4 + 2)
    assert extra_bytes < tile_bytes + 2 * case.weight_VH.nbytes < num_places * vocab_size * 4


def _all(case: Case) -> list[Tensor]:
    results = case.results()
    return [*results, *case.gradients(results, (1.0, 0.3))]
