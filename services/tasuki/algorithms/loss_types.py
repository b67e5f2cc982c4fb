"""Settings of losses with defaults and ranges. Standard library only: the client and the configuration import it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeVar, get_args

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class SettingError(ValueError):
    """A setting out of range. `field` names it; `problem` says what is wrong and what is allowed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class Aggregation(StrEnum):
    """How token losses are reduced to one number; `algorithms.aggregation` computes the weights."""

    TOKEN_MEAN = "token_mean"  # noqa: S105  no password
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"  # noqa: S105
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"  # noqa: S105
    CONSTANT = "constant"
    """Sum over tokens, divided by the number of sequences times `LossConfig.aggregation_length`."""


class KlEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one token's log-probabilities; computed by `algorithms.kl`."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_STRAIGHT_THROUGH = "k3_straight_through"
    """The value of k3 with the gradient of k2."""


class OldPolicy(StrEnum):
    """The denominator policy of the ratio."""

    CURRENT = "current"
    """The current policy: the ratio is 1. For a single step per batch."""
    GIVEN = "given"
    """Samples have `old_log_probs`, computed by the trainer before the first step on the batch."""
    ROLLOUT = "rollout"
    """The rollout's log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoLoss:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7), with separate bounds 1 - clip_low and 1 + clip_high (arXiv:2503.14476 eq. 10)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Above 1; bounds the loss at -dual_clip * advantage for negative advantages (arXiv:1912.09729)."""

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_clip(self.clip_low, self.clip_high)
        _check(self.dual_clip is None or 1.0 < self.dual_clip < math.inf, "dual_clip", self.dual_clip, "greater than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss:
    """GSPO: one length-normalized ratio per sequence (arXiv:2507.18071 eq. 5). Clip bounds from its section 5.1."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss:
    """CISPO: the clipped ratio weighs the policy gradient, so that no token loses its gradient (arXiv:2506.13585 eq. 4).

    The paper leaves the lower bound open (clip_low 1). An upper bound of 5 is within ScaleRL's range (arXiv:2510.13786) and TRL's advice.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoLoss:
    """SAPO: a sigmoid around ratio 1 instead of a clip, so that the gradient fades rather than ends (arXiv:2511.20347).

    Higher temperatures damp sooner; by default that of negative advantages is higher.
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("temperature_positive", "temperature_negative"):
            value = getattr(self, name)
            _check(0.0 < value < math.inf, name, value, "greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientLoss:
    """REINFORCE: -advantage * log-probability, without ratio or clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """PPO's clipped value loss (arXiv:2005.12729 sec. 3)."""

    clip: float | None = None
    """Maximum distance of a value from its old one before its loss is clipped; by default plain squared error (arXiv:2006.05990)."""

    def __post_init__(self) -> None:
        check_numbers(self)
        _check(self.clip is None or 0.0 < self.clip < math.inf, "clip", self.clip, "greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoss:
    """Supervised fine-tuning: the negative log-probability of each counted token."""


Loss = PpoLoss | GspoLoss | CispoLoss | SapoLoss | PolicyGradientLoss | ValueLoss | SftLoss
_LOSSES_WITH_RATIO = (PpoLoss, GspoLoss, CispoLoss, SapoLoss)
# Trainers compute in float32.
_GREATEST = 1e30
_MOST_TOKENS = 2**32 - 1
# Outside this range, float32 weights approach 0 or infinity.
_DENOMINATORS = (1e-6, 1e15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Correction of the mismatch between rollout's and the trainer's probabilities; computed by `algorithms.correction`.

    The ratio r of a token is the trainer's probability divided by the rollout's. Losses without a policy gradient ignore all of this.
    """

    token_truncation: float | None = 2.0
    """Weighs each token by min(r, this); at least 1 (https://fengyao.notion.site/off-policy-rl)."""
    sequence_truncation: float | None = None
    """Weighs each token of a sequence by min(product of its r, this); at least 1."""
    token_mask: tuple[float, float] | None = None
    """Excludes tokens whose r is out of bounds. IcePop (arXiv:2510.18855) is token_mask=(0.5, 5.0), token_truncation=5.0."""
    geometric_mask: tuple[float, float] | None = None
    """Excludes sequences whose geometric mean of r is out of bounds."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("token_truncation", "sequence_truncation"):
            bound = getattr(self, name)
            _check(bound is None or 1.0 <= bound < math.inf, name, bound, "at least 1")
        for name in ("token_mask", "geometric_mask"):
            bounds = getattr(self, name)
            _check(bounds is None or _are_bounds(bounds), name, bounds, "two bounds, low <= 1 <= high <= 1e30")
        if self.token_truncation is not None and self.sequence_truncation is not None:
            raise SettingError("sequence_truncation", "excludes token_truncation; set one of them to None")

    @property
    def truncates(self) -> bool:
        return self.token_truncation is not None or self.sequence_truncation is not None

    @property
    def masks(self) -> bool:
        return self.token_mask is not None or self.geometric_mask is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Everything needed to compute a loss from a model's outputs."""

    loss: Loss = field(default_factory=PpoLoss)
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    aggregation_length: int | None = None
    """Tokens; for CONSTANT only, such as rollout's maximum completion length (arXiv:2503.20783 sec. 3.2)."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference policy in the loss."""
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_policy: OldPolicy = OldPolicy.CURRENT
    correction: Correction = field(default_factory=Correction)
    denominator: float | None = None
    """Divisor of the weights if one optimizer step uses several calls; None for the call's own count."""

    def __post_init__(self) -> None:
        self._check_types()
        _check(0.0 <= self.kl_coef < math.inf, "kl_coef", self.kl_coef, "0 or greater")
        _check(math.isfinite(self.entropy_coef), "entropy_coef", self.entropy_coef, "finite")
        low, high = _DENOMINATORS
        _check(
            self.denominator is None or low <= self.denominator <= high,
            "denominator",
            self.denominator,
            f"from {low:g} to {high:g}",
        )
        self._check_aggregation_length()
        if isinstance(self.loss, ValueLoss):
            for name in ("kl_coef", "entropy_coef"):
                _check(getattr(self, name) == 0.0, name, getattr(self, name), "0 with ValueLoss, which has no policy")
        if self.old_policy is not OldPolicy.CURRENT and not self.has_ratio:
            raise SettingError("old_policy", f"{self.old_policy}, but {type(self.loss).__name__} has no ratio; use current")

    def _check_types(self) -> None:
        """Accepts enum members by value, too."""
        for name, enum in (("aggregation", Aggregation), ("kl_estimator", KlEstimator), ("old_policy", OldPolicy)):
            object.__setattr__(self, name, member(enum, getattr(self, name), field=name))
        for name, classes in (("loss", get_args(Loss)), ("correction", (Correction,))):
            value = getattr(self, name)
            names = ", ".join(cls.__name__ for cls in classes)
            _check(isinstance(value, classes), name, repr(value), f"an instance of {names}")
        check_numbers(self)

    def _check_aggregation_length(self) -> None:
        if self.aggregation is not Aggregation.CONSTANT:
            problem = f"is {self.aggregation_length}, but aggregation is {self.aggregation}; it belongs to constant"
            if self.aggregation_length is not None:
                raise SettingError("aggregation_length", problem)
        elif self.aggregation_length is None or not 1 <= self.aggregation_length <= _MOST_TOKENS:
            problem = f"is {self.aggregation_length}; aggregation constant needs 1 or more tokens, at most {_MOST_TOKENS}"
            raise SettingError("aggregation_length", problem)

    @property
    def has_ratio(self) -> bool:
        """Whether the loss compares the policy with an old policy."""
        return isinstance(self.loss, _LOSSES_WITH_RATIO)

    @property
    def has_advantages(self) -> bool:
        """Whether the loss uses a policy gradient, and so advantages and the correction."""
        return self.has_ratio or isinstance(self.loss, PolicyGradientLoss)

    @property
    def truncates(self) -> bool:
        """Whether importance weights apply. With ROLLOUT the loss's ratio already is one."""
        return self.has_advantages and self.old_policy is not OldPolicy.ROLLOUT and self.correction.truncates

    @property
    def required_fields(self) -> frozenset[str]:
        """Names of the sample fields that this loss requires."""
        masks = self.has_advantages and self.correction.masks
        needed = {
            "advantages": self.has_advantages,
            "old_log_probs": self.old_policy is OldPolicy.GIVEN,
            "rollout_log_probs": self.old_policy is OldPolicy.ROLLOUT or self.truncates or masks,
            "ref_log_probs": self.kl_coef != 0.0,
            "returns": isinstance(self.loss, ValueLoss),
            "values": isinstance(self.loss, ValueLoss) and self.loss.clip is not None,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)


_Enum = TypeVar("_Enum", bound=StrEnum)


def member(enum: type[_Enum], value: object, *, field: str) -> _Enum:
    """The enum member that `value` is or names. Raises SettingError naming `field` and the allowed values."""
    try:
        return enum(value)
    except ValueError:
        raise SettingError(field, f"is {value!r}; must be one of {', '.join(enum)}") from None


def check_numbers(settings: DataclassInstance) -> None:
    """Raises SettingError naming the first numeric or bool field of a dataclass with a value of another type."""
    for each in fields(settings):
        name, _, optional = str(each.type).partition(" ")
        kind = {"int": Integral, "float": Real}.get(name)
        value = getattr(settings, each.name)
        if name == "bool" and not isinstance(value, bool):
            raise SettingError(each.name, f"is {value!r}; must be True or False")
        if kind is None or (value is None and optional):
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SettingError(each.name, f"is {value!r}; must be {'a whole number' if kind is Integral else 'a number'}")
        if kind is Real and isinstance(value, float | int) and _GREATEST < abs(value) < math.inf:
            raise SettingError(
                each.name, f"is {value!s:.20}; must be at most {_GREATEST:g}, since the trainer computes in float32"
            )


def _are_bounds(value: object) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(bound, Real) for bound in value):
        return False
    return 0.0 <= value[0] <= 1.0 <= value[1] <= _GREATEST


def _check(is_allowed: bool, field: str, value: object, allowed: str) -> None:
    if not is_allowed:
        raise SettingError(field, f"is {value}; must be {allowed}")


def _check_clip(clip_low: float, clip_high: float) -> None:
    _check(0.0 <= clip_low <= 1.0, "clip_low", clip_low, "from 0 to 1")
    _check(0.0 <= clip_high < math.inf, "clip_high", clip_high, "0 or greater")
