"""Checks of a call's samples, as pure functions. Each raises InvalidArgument naming the first invalid sample and field."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.aggregation import denominator
from tasuki.algorithms.loss import CriticLoss
from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.setting import GREEDY_BELOW
from tasuki.models.images import ImageProcessor
from tasuki.models.routes import RouteShape
from tasuki.trainer.data.samples import Samples, starts
from tasuki.trainer.wire import Role
from tasuki.wire.errors import InvalidArgument, VersionOrder

_LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs")
# Rounding can make the log of a probability near 1 positive, by far less than this.
_LOG_PROB_TOLERANCE = 1e-3
_LEAST_TEMPERATURE = np.float32(GREEDY_BELOW)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on a sample."""

    vocab_size: int
    context_length: int
    micro_batch_tokens: int
    """Maximum tokens in a micro-batch, and so in a sample."""
    routes: RouteShape | None = None
    """Of the policy, if it replays them."""
    replays_old_policy: bool = False
    """Whether these are of the trainer's own pass, and not of rollout."""
    images: ImageProcessor | None = None
    """None if the model reads text alone."""
    has_aux_loss: bool = False
    """Whether the policy has trainer.router_aux_loss_coef."""
    starts_from_adapter: bool = False
    """Whether the policy has trainer.lora.path, without which the model is no reference."""


def check_sequences(samples: Samples, *, limits: BatchLimits) -> None:
    """Raises InvalidArgument for a sample that cannot be scored."""
    if not len(samples):
        raise InvalidArgument("samples", "the call has no samples")
    for field, lengths_S in (("prompt", samples.num_prompt_S), ("completion", samples.num_completion_S)):
        empty = np.flatnonzero(lengths_S == 0)
        if len(empty):
            raise InvalidArgument(f"samples[{empty[0]}].{field}_token_ids", f"empty; a {field} has at least one token")
    too_long = np.flatnonzero(samples.num_tokens_S > min(limits.context_length, limits.micro_batch_tokens))
    if len(too_long):
        raise _too_long(int(too_long[0]), num_tokens=int(samples.num_tokens_S[too_long[0]]), limits=limits)
    unknown = np.flatnonzero((samples.token_ids_T < 0) | (samples.token_ids_T >= limits.vocab_size))
    if len(unknown):
        problem = f"is not a token id of this model; give 0 to {limits.vocab_size - 1}"
        raise InvalidArgument(_token_place(samples, int(unknown[0])), f"{samples.token_ids_T[unknown[0]]} {problem}")
    temperature_N = samples.columns["temperature"]
    cold = np.flatnonzero(~(np.isfinite(temperature_N) & (temperature_N >= _LEAST_TEMPERATURE)))
    if len(cold):
        index, _ = _place(samples.num_completion_S, int(cold[0]))
        problem = f"is out of range; give a finite number of at least {_LEAST_TEMPERATURE:g}, and 1 for greedy sampling"
        raise InvalidArgument(f"samples[{index}].temperature", f"{temperature_N[cold[0]]:g} {problem}")


def check_loss(samples: Samples, *, config: LossConfig, role: Role) -> None:
    """Raises InvalidArgument for a loss unsuitable for the role or a missing field. Call check_sequences first."""
    check_columns(samples, config=config, role=role)
    if not samples.columns["loss_mask"].any():
        raise InvalidArgument("samples[].loss_mask", "masks every token of the call; at least one must count")


def check_share(samples: Samples, *, config: LossConfig, role: Role, limits: BatchLimits) -> None:
    """Checks a node's share of a fleet's call, which may have no samples or no counted tokens. Raises InvalidArgument."""
    if config.denominator is None:
        raise InvalidArgument("header.loss.settings.denominator", "missing; a share needs that of the whole call")
    if len(samples):
        check_sequences(samples, limits=limits)
        check_columns(samples, config=config, role=role)
    else:
        _check_kind(config, role)


def check_columns(samples: Samples, *, config: LossConfig, role: Role) -> None:
    """check_loss without the check for counted tokens."""
    _check_kind(config, role)
    for column in sorted(config.required_fields - samples.columns.keys()):
        why = {
            "ref_log_probs": f"kl_coef = {config.kl_coef:g}",
            "old_log_probs": "old_policy = given",
            "values": "the loss's clip",
        }.get(column, config.name)
        raise InvalidArgument(f"samples[0].{column}", f"empty, but {why} needs one for each completion token")
    for name, column_N in samples.columns.items():
        wrong = np.flatnonzero(~np.isfinite(column_N) if name != "loss_mask" else (column_N != 0) & (column_N != 1))
        if len(wrong):
            problem = "is neither 0 nor 1" if name == "loss_mask" else "is not finite"
            raise InvalidArgument(_completion_place(samples, int(wrong[0]), field=name), f"{column_N[wrong[0]]:g} {problem}")
    shown = np.flatnonzero(samples.is_image_N() & (samples.columns["loss_mask"] != 0))
    if len(shown):
        place = _completion_place(samples, int(shown[0]), field="loss_mask")
        raise InvalidArgument(place, "counts an image, which nobody drew; give 0 there")
    for name in (name for name in _LOG_PROBS if name in samples.columns):
        wrong = np.flatnonzero(samples.columns[name] > _LOG_PROB_TOLERANCE)
        if len(wrong):
            problem = "is above 0, so it is not a log-probability; give natural logarithms"
            place = _completion_place(samples, int(wrong[0]), field=name)
            raise InvalidArgument(place, f"{samples.columns[name][wrong[0]]:g} {problem}")


def check_routed(samples: Samples, *, config: LossConfig, limits: BatchLimits) -> None:
    """Raises InvalidArgument for samples without the experts of the log-probs that the loss needs."""
    needing = "old_log_probs" if limits.replays_old_policy else "rollout_log_probs"
    if limits.routes is not None and needing in config.required_fields and len(samples) and samples.routes_TR is None:
        source = "with_old_log_probs" if limits.replays_old_policy else "rollout"
        problem = f"empty, but trainer.router_replay needs the experts of {source}; give the sample's, or set it to false"
        raise InvalidArgument("samples[0].routed_experts", problem)


def check_denominator(samples: Samples, *, config: LossConfig) -> None:
    """Raises InvalidArgument for a denominator below the call's own count, whose auxiliary loss would weigh more than the step's."""
    own = denominator(samples.columns["loss_mask"], samples.num_completion_S, config=replace(config, denominator=None))
    if config.denominator is not None and own > config.denominator * (1 + 1e-6):
        problem = (
            f"is {config.denominator:g}, but the call alone counts {own:g}; trainer.router_aux_loss_coef needs the count of the step, "
            "which a custom loss does not give: set it to 0, or give the count"
        )
        raise InvalidArgument("header.loss.settings.denominator", problem)


def check_versions(samples: Samples, *, policy_version: int) -> None:
    """Raises VersionOrder naming the first sample from a policy version that this trainer never had."""
    later = np.flatnonzero(samples.policy_version_S > policy_version)
    if len(later):
        version = int(samples.policy_version_S[later[0]])
        raise VersionOrder(
            f"samples[{later[0]}].policy_version: {version} is above the trainer's {policy_version}, so other weights generated "
            "it; load their checkpoint, or generate again",
            have=policy_version,
            want=version,
        )


def _check_kind(config: LossConfig, role: Role) -> None:
    if (role is Role.CRITIC) is not isinstance(config.loss, CriticLoss):
        raise InvalidArgument("header.loss.name", f"{config.name} is not a loss of the {role}")


def _too_long(index: int, *, num_tokens: int, limits: BatchLimits) -> InvalidArgument:
    if num_tokens > limits.context_length:
        limit, name, advice = limits.context_length, "the model's context length", ""
    else:
        limit, name, advice = limits.micro_batch_tokens, "trainer.micro_batch_tokens", "; raise it, or remove the sample"
    problem = f"prompt and completion have {num_tokens} tokens, above {name} of {limit}{advice}"
    return InvalidArgument(f"samples[{index}]", problem, num_tokens=num_tokens, limit=limit)


def _token_place(samples: Samples, token: int) -> str:
    index, position = _place(samples.num_tokens_S, token)
    num_prompt = int(samples.num_prompt_S[index])
    if position < num_prompt:
        return f"samples[{index}].prompt_token_ids[{position}]"
    return f"samples[{index}].completion_token_ids[{position - num_prompt}]"


def _completion_place(samples: Samples, token: int, *, field: str) -> str:
    index, position = _place(samples.num_completion_S, token)
    return f"samples[{index}].{field}[{position}]"


def _place(lengths_S: NDArray[np.int64], token: int) -> tuple[int, int]:
    first_S = starts(lengths_S)
    index = int(np.searchsorted(first_S, token, side="right")) - 1
    return index, token - int(first_S[index])
