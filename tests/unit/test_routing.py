"""Routers of a mixture of experts: transformers' results, a choice made once, and the load of each expert."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tasuki.planner.node import Checkpointing
from tasuki.trainer.backends.fsdp.activations import tile_mlps
from tasuki.trainer.modules.routing import ExpertLoad, Router, routing_operators
from tests.extent import crossed
from tests.models import make_model
from tests.operators import CountedOperators
from tests.routes import balancing_loss, gates_of, hidden_states
from tests.unit.test_packed_attention import LENGTHS, pack, policy_of

AUXILIARY = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")

SPARSE = ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
(CHOICE,) = routing_operators()


def routers_of(module: nn.Module) -> list[Router]:
    return [each for each in module.modules() if isinstance(each, Router)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SPARSE[:2])
def test_results_and_gradients_are_those_of_transformers(kind: str, dtype: torch.dtype) -> None:
    model = make_model(kind, seed=3).to(dtype)
    theirs: Any = next(module for name, module in model.named_modules() if name.endswith("mlp.gate"))
    ours = Router(theirs)
    generator = torch.Generator().manual_seed(1)
    hidden_TH = torch.randn(200, ours.weight.shape[1], generator=generator).to(dtype)
    gradients: list[Tensor] = []
    results: list[tuple[Tensor, ...]] = []
    for router in (theirs, ours):
        x_TH = hidden_TH.clone().requires_grad_()
        router.weight.grad = None
        results.append(router(x_TH))
        weights_TK = results[-1][1]
        (weights_TK.float() * torch.linspace(-1.0, 1.0, weights_TK.numel()).view_as(weights_TK)).sum().backward()
        gradients += [x_TH.grad, router.weight.grad]
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    for expected, found in zip(gradients[:2], gradients[2:], strict=True):
        assert expected.any() and torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", [None, 25])
@pytest.mark.parametrize(
    ("kind", "checkpointing"), crossed(SPARSE, [Checkpointing.NONE, Checkpointing.ATTENTION, Checkpointing.FULL])
)
def test_experts_are_chosen_once_though_a_layer_is_computed_twice(
    kind: str, checkpointing: Checkpointing, num_tokens: int | None
) -> None:
    policy, batch = policy_of(make_model(kind, seed=5), checkpointing=checkpointing), pack(LENGTHS)
    if num_tokens is not None:
        tile_mlps(policy.causal_lm, num_tokens=num_tokens)
    num_tiles = 1 if num_tokens is None else -(-sum(LENGTHS) // num_tokens)
    with CountedOperators() as counted:
        scores_N, _ = policy(batch)
        assert counted.runs[CHOICE] == num_tiles * len(routers_of(policy))
        scores_N.sum().backward()
    assert counted.runs[CHOICE] == num_tiles * len(routers_of(policy))


@pytest.mark.parametrize("kind", SPARSE)
def test_a_router_that_would_choose_otherwise_in_backward_does_not(kind: str) -> None:
    """Backward reuses the choice of forward even if routing would now differ; here the weights have changed in between."""
    policy, batch = policy_of(make_model(kind, seed=5), checkpointing=Checkpointing.FULL), pack(LENGTHS)
    router, chosen = routers_of(policy)[0], []
    router.register_forward_hook(lambda _module, _args, result: chosen.append(result[2].clone()))
    scores_N, _ = policy(batch)
    router.weight.data = -router.weight.data
    scores_N.sum().backward()
    with torch.no_grad():
        policy(batch)
    first_TK, again_TK, otherwise_TK = chosen
    assert torch.equal(again_TK, first_TK) and not torch.equal(otherwise_TK, first_TK)


@pytest.mark.parametrize("kind", SPARSE)
def test_the_load_is_that_of_transformers_choice(kind: str, mesh: DeviceMesh) -> None:
    policy, batch = policy_of(make_model(kind, seed=5), checkpointing=Checkpointing.FULL), pack(LENGTHS)
    load = ExpertLoad(policy.causal_lm, mesh=mesh, device=torch.device("cpu"))
    routers, counts = routers_of(policy), []

    def count(router: Any, _args: Any, result: Any) -> None:
        counts.append(torch.bincount(result[2].flatten(), minlength=len(router.weight)))

    with torch.no_grad():
        policy(batch)
    assert not routers[0].load_E.any(), "scoring is no training"
    hooks = [router.register_forward_hook(count) for router in routers]
    scores_N, _ = policy(batch)
    for hook in hooks:
        hook.remove()
    scores_N.sum().backward()
    metrics, counts_LE = load.take(), torch.stack(counts).double()
    assert metrics["expert_load_max"].value == (counts_LE.amax(1) / counts_LE.mean(1)).max()
    assert metrics["idle_expert_fraction"].value == (counts_LE == 0).double().mean()
    assert not routers[0].load_E.any()


@pytest.mark.parametrize(("kind", "experts"), [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts")])
def test_replayed_experts_halve_the_log_prob_gap_to_another_precision(kind: str, experts: str) -> None:
    """The engine is in float32, the trainer in bfloat16, with the same weights."""
    model = make_model(kind, seed=1, num_hidden_layers=4, **{experts: 8}).to(torch.bfloat16)
    engine, trainer, batch = policy_of(model.float()), policy_of(model.bfloat16()), pack((65,) * 8, seed=1)
    chosen: list[Tensor] = []
    for router in routers_of(engine):
        router.register_forward_hook(lambda _module, _args, result: chosen.append(result[2]))
    with torch.no_grad():
        exact_N = engine(batch)[0]
        replaying = replace(batch, routes_TR=torch.stack(chosen, dim=1).flatten(1).to(torch.int16))
        gap, replayed = (float((trainer(each)[0] - exact_N).abs().max()) for each in (batch, replaying))
    assert replayed < 0.5 * gap


@pytest.mark.parametrize(
    ("kind", "checkpointing", "num_tokens"), crossed(AUXILIARY, Checkpointing, (None, 25))[: len(AUXILIARY)]
)
def test_the_auxiliary_loss_and_its_gradient_are_those_of_transformers(
    kind: str, checkpointing: Checkpointing, num_tokens: int | None, mesh: DeviceMesh
) -> None:
    checkpointing = Checkpointing.FULL if checkpointing is Checkpointing.OFFLOADED else checkpointing
    model = make_model(kind, seed=5, **({} if kind == "gpt_oss" else {"num_hidden_layers": 3}))
    policy, batch = policy_of(model, checkpointing=checkpointing), pack(LENGTHS)
    if num_tokens is not None:
        tile_mlps(policy.causal_lm, num_tokens=num_tokens)
    load = ExpertLoad(policy.causal_lm, mesh=mesh, device=torch.device("cpu"), aux_loss_coef=0.5)
    with torch.no_grad():
        policy(batch)
    assert load.end_pass(share=1.0) is None, "scoring is no training"
    for share in (0.25, 0.75):  # two micro-batches with the same tokens
        scores_N, _ = policy(batch)
        (0.0 * scores_N.sum() + load.end_pass(share=share)).backward()
    hidden = hidden_states(model)
    for first, end in pairwise(batch.cu_seqlens_S.tolist()):
        model(batch.input_ids_T[None, first:end])
    expected = balancing_loss(model, [torch.cat(each) for each in hidden])
    (0.5 * expected).backward()
    torch.testing.assert_close(load.take()["router_aux_loss"].value.float(), expected.detach())
    for (name, param), (_, found) in zip(model.named_parameters(), policy.causal_lm.named_parameters(), strict=True):
        if param.grad is not None and "lm_head" not in name:
            torch.testing.assert_close(found.grad, param.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert all(gate.weight.grad.any() for gate in gates_of(model))


def test_dummies_are_not_counted(mesh: DeviceMesh) -> None:
    policy = policy_of(make_model("qwen3_moe", seed=5))
    load = ExpertLoad(policy.causal_lm, mesh=mesh, device=torch.device("cpu"), aux_loss_coef=1.0)
    policy(replace(pack(LENGTHS), num_dummies=5))
    load.end_pass(share=1.0)
    assert routers_of(policy)[0].load_E.sum() == 2 * (sum(LENGTHS) - 5)


def test_biases_move_towards_even_load_by_the_rate_of_a_step(mesh: DeviceMesh) -> None:
    policy = policy_of(make_model("deepseek_v3", seed=5, n_routed_experts=5, n_group=1, topk_group=1))
    load = ExpertLoad(policy.causal_lm, mesh=mesh, device=torch.device("cpu"), bias_update_rate=0.25)
    (router,) = routers_of(policy)
    before_E = router.e_score_correction_bias.clone()
    for counts in ([3, 0, 1, 0, 0], [1, 2, 1, 1, 0]):  # of two calls; 4, 2, 2, 1, 0 around 1.8
        router.load_E += torch.tensor(counts)
        load.take()
    load.update_biases()
    assert (router.e_score_correction_bias - before_E).tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.25, 0.25])
