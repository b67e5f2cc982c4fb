"""The table of experiment trackers."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from tasuki.config.table import Schema

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)


class TrackConfig(Schema):
    """Experiment trackers. Each follows the run's metrics.jsonl in its own process; see docs/client.md."""

    to: tuple[TrackerName, ...] = ()
    """"tensorboard", "wandb", "mlflow", "trackio"; each needs the extra of its name. They write to `output_dir`/track."""
    project: Annotated[str, Field(min_length=1)] = "tasuki"
    """Project (wandb, trackio) or experiment (MLflow)."""
    name: str | None = None
    """Name of the run; defaults to the name of its output folder."""
    online: bool = False
    """Whether wandb uploads, with the account that is logged in. MLflow uses MLFLOW_TRACKING_URI."""

    @model_validator(mode="after")
    def _trackers_differ(self) -> TrackConfig:
        if len(set(self.to)) < len(self.to):
            raise ValueError("to names one of them twice")
        return self
