"""Where a run's figures go beside its own folder."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from tasuki.algorithms.effects import check_effects
from tasuki.config.table import Schema

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)


class TrackConfig(Schema):
    """Trackers that follow the run's metrics.jsonl, each in a process beside it; see docs/client.md."""

    to: tuple[TrackerName, ...] = ()
    """"tensorboard", "wandb", "mlflow", "trackio"; each needs the extra of its name. They write below `output_dir`/track."""
    project: Annotated[str, Field(min_length=1)] = "tasuki"
    """Project, or experiment, of wandb, MLflow and trackio."""
    name: str | None = None
    """Of the run; by default the name of its output folder."""
    online: bool = False
    """Whether wandb uploads, with the account that it is logged in to. MLflow goes where MLFLOW_TRACKING_URI says."""

    @model_validator(mode="after")
    def _trackers_differ(self) -> TrackConfig:
        if len(set(self.to)) < len(self.to):
            raise ValueError("to names one of them twice")
        check_effects([("online", self.online, False, "wandb" in self.to, 'add "wandb" to track.to')])
        return self
