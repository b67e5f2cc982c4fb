"""Settings common to RL and supervised runs, and their names in errors: the client knows fields, a user the configuration's keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tasuki.config.train_schema import SftConfig, TrainConfig
from tasuki.wire.errors import InvalidArgument, PathNotFound, PathPermissionDenied


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    table: str
    """Table in the configuration: "train" or "sft"."""
    output_dir: Path
    num_steps: int
    length_key: str
    """Key that determines num_steps: "train.num_steps", "sft.num_epochs"."""
    save_every: int | None
    keep_last: int
    stop_at_eval_score: float | None = None

    @classmethod
    def of(cls, run: TrainConfig | SftConfig, *, num_steps: int, length_key: str = "num_steps") -> "RunSettings":
        """length_key: of the run's table."""
        table, stop = ("train", run.stop_at_eval_score) if isinstance(run, TrainConfig) else ("sft", None)
        kept = {name: getattr(run, name) for name in ("output_dir", "save_every", "keep_last")}
        return cls(table=table, num_steps=num_steps, length_key=f"{table}.{length_key}", stop_at_eval_score=stop, **kept)


@contextmanager
def field_as_key(field: str, key: str) -> Iterator[None]:
    """Makes errors of the client's `field`, or of a field below it, name `key` of the configuration."""
    try:
        yield
    except InvalidArgument as error:
        wrong = error.metadata["field"]
        if wrong != field and not wrong.startswith(f"{field}."):
            raise
        problem = error.message.removeprefix(f"{wrong}: ")
        numbers = {name: value for name, value in error.metadata.items() if name != "field"}
        raise InvalidArgument(f"{key}{wrong.removeprefix(field)}", problem, **numbers) from error
    except PathNotFound as error:
        raise PathNotFound(f"{key}: {error.message.removeprefix(f'{field} ')}", **error.metadata) from error
    except PathPermissionDenied as error:
        raise PathPermissionDenied(f"{key}: {error.message.removeprefix(f'{field}: ')}", **error.metadata) from error
