"""Settings that all losses have. Torch-free: client and configuration import it too."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, cast

from tasuki.algorithms.loss import CriticLoss, Loss, PolicyLoss, RatioLoss
from tasuki.algorithms.losses import LOSSES
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.setting import GREATEST, SettingError, check_number, check_whole, member


class Aggregation(StrEnum):
    """How token losses are reduced to one number; `algorithms.aggregation` computes the weights."""

    TOKEN_MEAN = "token_mean"  # noqa: S105  no password
    """Sum over tokens, divided by the counted tokens."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"  # noqa: S105
    """Sum over tokens, divided by the sequences."""
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"  # noqa: S105
    """Mean of each sequence's own mean."""
    CONSTANT = "constant"
    """Sum over tokens, divided by the number of sequences times `LossConfig.aggregation_length`."""


class KlEstimator(StrEnum):
    """Estimators of KL(policy || reference) from one token's log-probabilities; computed by `algorithms.objective`."""

    K1 = "k1"
    """d, the log ratio; unbiased, may be negative."""
    K2 = "k2"
    """d^2 / 2; low variance, biased."""
    K3 = "k3"
    """exp(-d) - 1 + d; unbiased, never negative."""
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


# Outside this range, float32 weights approach 0 or infinity.
_DENOMINATORS = (1e-6, 1e15)
_MOST_TOKENS = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Correction of the mismatch between rollout's and the trainer's probabilities; computed by `algorithms.objective`.

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
        for name in ("token_truncation", "sequence_truncation"):
            bound = getattr(self, name)
            if bound is not None:
                check_number(name, bound, least=1.0)
        for name in ("token_mask", "geometric_mask"):
            bounds = getattr(self, name)
            if bounds is not None:
                object.__setattr__(self, name, _bounds(name, bounds))
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
    """Everything needed to compute a loss from a model's outputs. As a name and settings it is a wire message and a table of a file."""

    loss: Loss = field(default_factory=PpoLoss)
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number: docs/reference/algorithms.md has the weights."""
    aggregation_length: int | None = None
    """Tokens; for CONSTANT only, such as rollout's maximum completion length (arXiv:2503.20783 sec. 3.2)."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the reference policy in the loss."""
    kl_estimator: KlEstimator = KlEstimator.K3
    """How the divergence is estimated from one token's log-probs."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_policy: OldPolicy = OldPolicy.CURRENT
    correction: Correction = field(default_factory=Correction)
    denominator: float | None = None
    """Divisor of the weights if one optimizer step uses several calls; None for the call's own count."""

    def __post_init__(self) -> None:
        """Accepts enum members by value, too."""
        for name, enum in (("aggregation", Aggregation), ("kl_estimator", KlEstimator), ("old_policy", OldPolicy)):
            object.__setattr__(self, name, member(enum, getattr(self, name), field=name))
        if type(self.loss) not in LOSSES.values():
            names = ", ".join(cls.__name__ for cls in LOSSES.values())
            raise SettingError("loss", f"is {self.loss!r}; must be an instance of {names}")
        if not isinstance(self.correction, Correction):
            raise SettingError("correction", f"is {self.correction!r}; must be an instance of Correction")
        check_number("kl_coef", self.kl_coef, least=0.0)
        check_number("entropy_coef", self.entropy_coef)
        if self.denominator is not None:
            check_number("denominator", self.denominator, least=_DENOMINATORS[0], most=_DENOMINATORS[1])
        self._check_aggregation_length()
        if isinstance(self.loss, CriticLoss):
            for name in ("kl_coef", "entropy_coef"):
                if getattr(self, name):
                    raise SettingError(name, f"is {getattr(self, name)}; must be 0 with {self.name}, which has no policy")
        if self.old_policy is not OldPolicy.CURRENT and not self.has_ratio:
            raise SettingError("old_policy", f"{self.old_policy}, but {self.name} has no ratio; use current")

    def _check_aggregation_length(self) -> None:
        length = self.aggregation_length
        if self.aggregation is Aggregation.CONSTANT:
            check_whole("aggregation_length", length, least=1, most=_MOST_TOKENS)
            object.__setattr__(self, "aggregation_length", int(cast("int", length)))
        elif length is not None:
            problem = f"is {length}, but aggregation is {self.aggregation}; it belongs to constant"
            raise SettingError("aggregation_length", problem)

    @classmethod
    def read(cls, name: str, settings: Mapping[str, object], *, common: Collection[str] | None = None) -> "LossConfig":
        """Builds the loss of that name from its own settings and the common ones, side by side; others keep their defaults.

        common: allowed common settings; by default all. A correction consists of what its table names; an empty one corrects nothing.
        Raises SettingError naming the setting, or "name".
        """
        if not isinstance(name, str) or name not in LOSSES:
            raise SettingError("name", f"{name!r} is not a loss; give one of {', '.join(LOSSES)}")
        own = [each.name for each in fields(LOSSES[name])]
        shared = COMMON if common is None else common
        unknown = settings.keys() - {*own, *shared}
        if unknown:
            raise SettingError(min(unknown), f"unknown key; {name} has {', '.join(sorted((*own, *shared)))}")
        given: dict[str, Any] = {key: value for key, value in settings.items() if key in shared}
        if isinstance(given.get("correction"), Mapping):
            given["correction"] = _read_correction(given["correction"])
        return cls(loss=LOSSES[name](**{key: value for key, value in settings.items() if key in own}), **given)

    @property
    def name(self) -> str:
        """Of the loss, such as "ppo"."""
        return next(name for name, cls in LOSSES.items() if type(self.loss) is cls)

    def settings(self) -> dict[str, Any]:
        """What `read` takes besides the name: numbers, words, booleans, lists and a table of them. Leaves out None."""
        shared = {name: getattr(self, name) for name in COMMON if name != "correction"}
        correction = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self.correction).items()}
        every = {**asdict(self.loss), **shared, "correction": _without_none(correction)}
        return {key: str(value) if isinstance(value, StrEnum) else value for key, value in _without_none(every).items()}

    @property
    def has_ratio(self) -> bool:
        """Whether the loss compares the policy with an old policy."""
        return isinstance(self.loss, RatioLoss)

    @property
    def has_advantages(self) -> bool:
        """Whether the loss uses a policy gradient, and so advantages and the correction."""
        return self.has_ratio or (isinstance(self.loss, PolicyLoss) and self.loss.has_advantages)

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
            "returns": isinstance(self.loss, CriticLoss),
            "values": isinstance(self.loss, CriticLoss) and self.loss.needs_old_values,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)


COMMON = tuple(each.name for each in fields(LossConfig) if each.name != "loss")
"""Settings of every loss."""


def _read_correction(table: Mapping[str, Any]) -> Correction:
    known = {each.name: None for each in fields(Correction)}
    unknown = table.keys() - known.keys()
    if unknown:
        raise SettingError(f"correction.{min(unknown)}", f"unknown key; it has {', '.join(known)}")
    try:
        return Correction(**{**known, **table})
    except SettingError as error:
        raise SettingError(f"correction.{error.field}", error.problem) from error


def _bounds(name: str, bounds: object) -> tuple[float, float]:
    try:
        low, high = cast("Sequence[float]", bounds)
        check_number(name, low, least=0.0, most=1.0)
        check_number(name, high, least=1.0)
    except (TypeError, ValueError):
        raise SettingError(name, f"is {bounds}; must be two bounds, low <= 1 <= high <= {GREATEST:g}") from None
    return low, high


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}
