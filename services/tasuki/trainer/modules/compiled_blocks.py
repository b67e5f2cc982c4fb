"""Compiles layers with torch.compile, for any number of tokens: one graph before attention and one after it.

Attention stays outside, with its lengths and exchanges, and so do experts, whose choice is replayed in recomputation. Hooks of a
layer run uncompiled around it: FSDP2's, which gather and free parameters, and those that wait for weights after a resume.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from tasuki.planner.step_bytes import TRIAL_TOKENS
from tasuki.trainer.data.micro_batch import SequencePart, TokenBatch, token_batch
from tasuki.trainer.data.samples import Samples
from tasuki.trainer.modules.routing import Router
from tasuki.wire.errors import InvalidArgument

_FIELD = "trainer.compile"
_TOKENS_DIM = 1
# Several of each at once: passes with and without gradients, adapters on and off, frozen networks, kinds of layers.
_MOST_GRAPHS = 64
_log = logging.getLogger("tasuki.trainer")


def compile_blocks(causal_lm: nn.Module) -> None:
    """Compiles every layer's forward pass when it first runs. Parameters keep their names."""
    _configure()
    decoder: Any = causal_lm.get_submodule("model")
    sparse = [layer for layer in decoder.layers if _is_sparse(layer.mlp)]
    for layer in sparse:
        layer.mlp.forward = torch.compiler.disable(layer.mlp.forward)
    for layer in decoder.layers:
        layer.forward = _compiled(layer.forward)
    left_out = "attention,experts" if sparse else "attention"
    _log.info("event=compiling layers=%d left_out=%s", len(decoder.layers), left_out)


def compile_mlps(causal_lm: nn.Module) -> None:
    """Compiles every dense MLP separately, for layers that call it tile by tile."""
    decoder: Any = causal_lm.get_submodule("model")
    for layer in decoder.layers:
        if not _is_sparse(layer.mlp):
            layer.mlp.forward = _compiled(layer.mlp.forward)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """For passes that compile graphs ahead of their use. Raises InvalidArgument if torch cannot compile."""
    started = time.monotonic()
    try:
        yield
    except (TorchDynamoException, CppCompileError, InvalidCxxCompiler) as error:
        first_line = str(error).strip().partition("\n")[0]
        problem = f'"blocks" is not possible here: {type(error).__name__}: {first_line}; fix that, or choose "none"'
        raise InvalidArgument(_FIELD, problem) from error
    if not num_graphs():
        problem = '"blocks" compiled nothing: torch.compile is switched off in this process'
        raise InvalidArgument(_FIELD, problem)
    _log.info("event=compiled graphs=%d seconds=%.1f", num_graphs(), time.monotonic() - started)
    _log_later_graphs()


def trial_batch(part: SequencePart, *, device: torch.device) -> TokenBatch:
    """A sequence for each part. Torch unifies equal sizes, so its length differs from every size in a model."""
    num = part.num_parts
    samples = Samples(
        num_prompt_S=np.full(num, 1),
        num_completion_S=np.full(num, TRIAL_TOKENS),
        policy_version_S=np.zeros(num, dtype=np.uint64),
        token_ids_T=np.zeros(num * (1 + TRIAL_TOKENS), dtype=np.int32),
        columns={"loss_mask": np.ones(num * TRIAL_TOKENS, dtype=np.float32)},
    )
    return token_batch(samples, device=device, part=part)


def num_graphs() -> int:
    """Graphs created by this process, each with or without its backward pass."""
    return counters["stats"]["unique_graphs"]


@cache
def _configure() -> None:
    """Configures torch.compile for the whole process, where nobody else uses it."""
    import torch._inductor.config as inductor

    dynamo: Any = torch._dynamo.config
    # Worker processes would need supervision, and would outlive a killed rank.
    inductor.compile_threads = 1
    # Adapters on and off need different graphs. Without guards on FSDP2's modules, torch would not notice the switch.
    dynamo.skip_fsdp_guards = False
    # Beyond this limit torch would silently run uncompiled.
    dynamo.recompile_limit = _MOST_GRAPHS
    # Numbers in the model's configuration are constants, not graph inputs.
    dynamo.specialize_float = True


def _is_sparse(mlp: nn.Module) -> bool:
    return any(isinstance(module, Router) for module in mlp.modules())


def _compiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return partial(_run, torch.compile(forward, dynamic=True), forward)


def _run(
    compiled: Callable[..., Tensor], plain: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """hidden_states: [1, T, H]. Torch would create separate graphs for a single token."""
    forward = compiled if hidden_states.shape[_TOKENS_DIM] > 1 else plain
    return forward(hidden_states, *args, **kwargs)


@cache
def _log_later_graphs() -> None:
    """Logs compilations that happen later, during a call."""
    started = time.monotonic()

    def start(_: CallbackArgs) -> None:
        nonlocal started
        started = time.monotonic()

    def end(_: CallbackArgs) -> None:
        _log.info("event=compiled_late graphs=%d seconds=%.1f", num_graphs(), time.monotonic() - started)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
