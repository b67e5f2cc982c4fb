"""Every loss by name. A module of this folder is one loss: settings, ranges and formula in the class that it names `LOSS`."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from tasuki.algorithms.loss import Loss

LOSSES: Mapping[str, type[Loss]] = {
    module.name: import_module(f"{__name__}.{module.name}").LOSS for module in iter_modules(__path__)
}
"""Classes by the name of their module, as on the wire and in `[train.loss]`: "ppo", "policy_gradient", ..."""
