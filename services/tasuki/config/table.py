"""Base of every table of the configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tasuki.config.ports import check_listen

Listen = Annotated[str, AfterValidator(check_listen)]
# numpy, torch and SGLang take these alike.
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Schema(BaseModel):
    """Base of every table: no unknown keys, no change after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
