"""Log-probs, entropies and gradients of the vocabulary projection against torch's log_softmax over all logits, in float64."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tasuki.algorithms import lm_head, vocabulary_tiles
from tasuki.algorithms.vocabulary_tiles import ALIGNMENT, most_logits, tile_width
from tests.lm_head_cases import make_case, relative_error

# Relative error of gradients, in norm. Those of bfloat16 are rounded once, at the end.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-3}
# One tile; many, the last of which is narrower.
TILE_VALUES = (1 << 24, 1 << 15)


@pytest.fixture(params=TILE_VALUES, ids=["one tile", "many tiles"])
def tile_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(vocabulary_tiles.TILE_VALUES, "cpu", request.param)
    return request.param


@pytest.mark.usefixtures("tile_values")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("coefs", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize(("num_places", "vocab_size"), [(1, 1), (1, 131), (50, 1001), (300, 1024)])
def test_values_and_gradients_are_those_of_float64(
    dtype: torch.dtype, softcap: float | None, coefs: tuple[float, float], num_places: int, vocab_size: int
) -> None:
    case = make_case(num_places, vocab_size, dtype=dtype, softcap=softcap)
    in_float64 = case.to(torch.float64)
    results, expected = case.results(), in_float64.plain_results()
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, reference.float(), rtol=1e-6, atol=1e-5)
    gradients, references = case.gradients(results, coefs), in_float64.gradients(expected, coefs)
    for result, reference in zip(gradients, references, strict=True):
        assert result.dtype == dtype
        assert relative_error(result, reference) < TOLERANCE[dtype]


@pytest.mark.usefixtures("tile_values")
def test_strides_do_not_matter() -> None:
    case = make_case(50, 1001)
    expected = case.results()
    strided = [torch.stack([tensor.detach(), tensor.detach()], dim=-1)[..., 0] for tensor in (case.hidden_NH, case.weight_VH)]
    hidden_NH, weight_VH = (tensor.requires_grad_() for tensor in strided)
    token_ids_N, temperature_N = (
        torch.stack([tensor, tensor], dim=-1)[:, 0] for tensor in (case.token_ids_N, case.temperature_N)
    )
    results = lm_head.token_log_probs(hidden_NH, weight_VH, token_ids_N, temperature_N=temperature_N)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference)
    # expand() has stride 0, as has the gradient of a sum.
    gradients = torch.autograd.grad(results[0].sum(), (hidden_NH, weight_VH))
    references = torch.autograd.grad(expected[0], (case.hidden_NH, case.weight_VH), torch.ones(50))
    for result, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(result, reference)


@pytest.mark.usefixtures("tile_values")
def test_extreme_logits_leave_everything_finite() -> None:
    case = make_case(40, 1000)
    with torch.no_grad():
        case.hidden_NH[:, 0] = 1.0
        case.weight_VH[:500, 0] = -1e30
        case.weight_VH[500:, 0] = 1e4
        case.token_ids_N.fill_(700)
    results = case.results()
    for result, reference in zip(results, case.to(torch.float64).plain_results(), strict=True):
        # The spacing of float32 at 1e4 is 0.001.
        torch.testing.assert_close(result, reference.float(), rtol=0, atol=0.02)
    assert all(gradient.isfinite().all() for gradient in case.gradients(results, (1.0, 0.5)))


@pytest.mark.usefixtures("tile_values")
def test_tokens_with_a_logit_of_minus_infinity_count_nothing() -> None:
    case = make_case(40, 1000)
    kept = case.to("cpu")
    with torch.no_grad():
        case.hidden_NH[:, 0] = kept.hidden_NH[:, 0] = 1.0
        case.weight_VH[:700, 0] = -torch.inf
        case.token_ids_N.clamp_(min=700)
    log_probs_N, entropy_N = case.results()
    expected = lm_head.token_log_probs(
        kept.hidden_NH, kept.weight_VH[700:], case.token_ids_N - 700, temperature_N=case.temperature_N
    )
    torch.testing.assert_close(log_probs_N, expected[0])
    torch.testing.assert_close(entropy_N, expected[1])
    # Gradient of the weight; that of the hidden states has a factor of minus infinity.
    result = torch.autograd.grad(entropy_N.sum(), case.weight_VH)[0]
    reference = torch.autograd.grad(expected[1].sum(), kept.weight_VH)[0]
    torch.testing.assert_close(result, reference)


@pytest.mark.usefixtures("tile_values")
def test_nan_is_not_hidden() -> None:
    case = make_case(5, 1001)
    with torch.no_grad():
        case.hidden_NH[2, 0] = torch.nan
    log_probs_N, entropy_N = case.results()
    assert log_probs_N.isnan().tolist() == entropy_N.isnan().tolist() == [False, False, True, False, False]


def test_tied_weights_get_the_sum_of_both_gradients() -> None:
    case = make_case(20, 131)
    in_float64 = case.to(torch.float64)
    embedded, expected = case.weight_VH[case.token_ids_N], in_float64.weight_VH[case.token_ids_N]
    log_probs_N, _ = lm_head.token_log_probs(embedded, case.weight_VH, case.token_ids_N, temperature_N=torch.ones(20))
    log_probs_N.sum().backward()
    torch.log_softmax(expected @ in_float64.weight_VH.T, dim=-1).gather(-1, case.token_ids_N.unsqueeze(-1)).sum().backward()
    assert case.weight_VH.grad is not None and in_float64.weight_VH.grad is not None
    assert relative_error(case.weight_VH.grad, in_float64.weight_VH.grad) < TOLERANCE[torch.float32]


class Operations(TorchDispatchMode):
    """Returns the size of the largest result in elements, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.most_values = self.num_products = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor)]
        self.most_values = max([self.most_values, *sizes])
        self.num_products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return results


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_no_tensor_is_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    num_places, vocab_size, tile_values = 300, 5001, 1 << 17
    monkeypatch.setitem(vocabulary_tiles.TILE_VALUES, "cpu", tile_values)
    case = make_case(num_places, vocab_size, hidden_size=8, dtype=dtype, softcap=2.0)
    with Operations() as operations:
        case.gradients(case.results(), (1.0, 0.3))
    limit = tile_values + num_places * vocabulary_tiles.ALIGNMENT
    assert tile_values / 2 < operations.most_values <= limit < num_places * vocab_size / 4


@pytest.mark.parametrize(("num_frozen", "products_of_a_tile"), [(0, 4), (1, 3)])
def test_a_frozen_weight_costs_no_product_and_the_last_tile_is_computed_once(
    monkeypatch: pytest.MonkeyPatch, num_frozen: int, products_of_a_tile: int
) -> None:
    monkeypatch.setitem(vocabulary_tiles.TILE_VALUES, "cpu", 1 << 14)
    case = make_case(50, 1000)
    expected_grad = torch.autograd.grad(case.results()[0].sum(), case.hidden_NH)[0]
    case.weight_VH.requires_grad_(not num_frozen)
    with Operations() as operations:
        case.results()[0].sum().backward()
    assert operations.num_products == products_of_a_tile * 4 - 1
    assert case.hidden_NH.grad is not None and torch.equal(case.hidden_NH.grad, expected_grad)
    assert (case.weight_VH.grad is None) == bool(num_frozen)


SIZES = {
    "num_places": some.integers(1, 200_000),
    "hidden_size": some.integers(1, 16_384),
    "vocab_size": some.integers(1, 300_000),
    "device": some.sampled_from(sorted(vocabulary_tiles.TILE_VALUES)),
}


@given(**SIZES)
def test_a_tile_is_aligned_or_all_and_no_larger_than_told(num_places: int, hidden_size: int, vocab_size: int, device: str):
    width = tile_width(num_places, hidden_size=hidden_size, vocab_size=vocab_size, device=device)
    assert width == vocab_size or (0 < width < vocab_size and width % ALIGNMENT == 0)
    most = most_logits(num_places, hidden_size=hidden_size, vocab_size=vocab_size, device=device)
    assert num_places * width <= most <= vocabulary_tiles.TILE_VALUES[device] + num_places * ALIGNMENT


@given(more=some.integers(1, 1000), **SIZES)
def test_more_places_never_have_fewer_logits(more: int, num_places: int, hidden_size: int, vocab_size: int, device: str):
    few, many = (
        most_logits(count, hidden_size=hidden_size, vocab_size=vocab_size, device=device)
        for count in (num_places, num_places + more)
    )
    assert few <= many


@pytest.mark.usefixtures("tile_values")
def test_shards_of_the_vocabulary_give_the_whole_results() -> None:
    """Two ranks in two threads, which exchange four numbers a position."""
    whole = make_case(50, 1002)
    expected = whole.results()
    references = torch.autograd.grad(expected[0].sum() + 0.3 * expected[1].sum(), (whole.hidden_NH, whole.weight_VH))
    meeting, values = Barrier(2), dict[int, torch.Tensor]()

    def of_rank(rank: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        def gather(mine: torch.Tensor) -> torch.Tensor:
            values[rank] = mine
            meeting.wait(60)
            return torch.stack([values[0], values[1]])

        weight_VH = whole.weight_VH.detach().chunk(2)[rank].clone().requires_grad_()
        hidden_NH = whole.hidden_NH.detach().clone().requires_grad_()
        shard = lm_head.VocabularyShard(rank, gather)
        results = lm_head.token_log_probs(
            hidden_NH, weight_VH, whole.token_ids_N, temperature_N=whole.temperature_N, shard=shard
        )
        return results, torch.autograd.grad(results[0].sum() + 0.3 * results[1].sum(), (hidden_NH, weight_VH))

    with ThreadPoolExecutor(2) as ranks:
        (results, (hidden, first)), (others, (more, second)) = ranks.map(of_rank, range(2))
    for result, other, reference in zip(results, others, expected, strict=True):
        assert torch.equal(result, other)
        torch.testing.assert_close(result, reference)
    assert relative_error(hidden + more, references[0]) < 3e-6
    assert relative_error(torch.cat((first, second)), references[1]) < 3e-6
