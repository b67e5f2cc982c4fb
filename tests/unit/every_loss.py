"""Every loss, with examples and random settings. A loss that is not listed here has its defaults."""

from hypothesis import strategies as st

from tasuki.algorithms.loss import Loss
from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses import LOSSES
from tasuki.algorithms.losses.cispo import CispoLoss
from tasuki.algorithms.losses.gspo import GspoLoss
from tasuki.algorithms.losses.policy_gradient import PolicyGradientLoss
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.algorithms.losses.sapo import SapoLoss
from tasuki.algorithms.losses.sft import SftLoss
from tasuki.algorithms.losses.value import ValueLoss

_LOW, _HIGH, _TEMPERATURE = st.floats(0.0, 1.0), st.floats(0.0, 10.0), st.floats(0.01, 10.0)
EXAMPLES: tuple[Loss, ...] = (
    PpoLoss(),
    PpoLoss(clip_low=0.1, clip_high=0.28),
    PpoLoss(dual_clip=1.5),
    GspoLoss(),
    GspoLoss(clip_low=0.2, clip_high=0.3),
    CispoLoss(),
    CispoLoss(clip_low=0.2, clip_high=0.2),
    SapoLoss(),
    SapoLoss(temperature_positive=0.5, temperature_negative=4.0),
    PolicyGradientLoss(),
    SftLoss(),
    ValueLoss(),
    ValueLoss(clip=0.5),
)
RANDOM: dict[type, st.SearchStrategy[Loss]] = {
    PpoLoss: st.builds(PpoLoss, clip_low=_LOW, clip_high=_HIGH, dual_clip=st.none() | st.floats(1.0, 100.0, exclude_min=True)),
    GspoLoss: st.builds(GspoLoss, clip_low=_LOW, clip_high=_HIGH),
    CispoLoss: st.builds(CispoLoss, clip_low=_LOW, clip_high=_HIGH),
    SapoLoss: st.builds(SapoLoss, temperature_positive=_TEMPERATURE, temperature_negative=_TEMPERATURE),
    PolicyGradientLoss: st.builds(PolicyGradientLoss),
    SftLoss: st.builds(SftLoss),
    ValueLoss: st.builds(ValueLoss, clip=st.none() | st.floats(0.0, 10.0, exclude_min=True)),
}
EVERY: tuple[Loss, ...] = (*EXAMPLES, *(cls() for cls in LOSSES.values() if cls not in RANDOM))
ANY_LOSS: st.SearchStrategy[Loss] = st.one_of(*RANDOM.values(), st.sampled_from(EVERY))


def has_ratio(loss: Loss) -> bool:
    return LossConfig(loss=loss).has_ratio
