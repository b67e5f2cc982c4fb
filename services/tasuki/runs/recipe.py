"""Settings of a run by key: those common to RL and supervised runs, and those that determine its results, with which alone it resumes."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import SftConfig, TrainConfig
from tasuki.config.trainer_schema import PERFORMANCE_TRAINER_KEYS
from tasuki.models.folder_files import file_digest, text_digests
from tasuki.models.known import read_model_shape
from tasuki.models.stored_tensors import VALUE_HEAD, read_stored, stored_shapes
from tasuki.wire.errors import InvalidArgument, PathNotFound, PathPermissionDenied

Recipe = Mapping[str, Any]
# Paths are compared by their contents.
_FREE_RUN_KEYS = {"dataset", "eval_dataset", "output_dir", "num_steps", "eval_every", "save_every", "keep_last"}
_FREE_TRAIN_KEYS = _FREE_RUN_KEYS | {"reward", "samples", "stop_at_eval_score", "max_prompt_tokens"}
_FREE_SFT_KEYS = _FREE_RUN_KEYS | {"num_epochs", "max_tokens"}
# Every recipe contains exactly one of them, which identifies the run's table.
_DATASETS = ("train.dataset", "sft.dataset")


def recipe(config: NodeConfig) -> Recipe:
    """Builds the recipe as JSON values. Files count by content; the model by its texts and its tensors' names and shapes."""
    table, run, free = ("train", config.train, _FREE_TRAIN_KEYS) if config.sft is None else ("sft", config.sft, _FREE_SFT_KEYS)
    assert run is not None
    lora = config.trainer.lora
    trainer = config.trainer if lora is None else config.trainer.model_copy(update={"lora": lora.unfused})
    tables = {
        "trainer": trainer.model_dump(mode="json", exclude=PERFORMANCE_TRAINER_KEYS),
        table: run.model_dump(mode="json", exclude=free),
    }
    if isinstance(run, TrainConfig):
        tables["rollout"] = config.rollout.model_dump(mode="json", include={"dtype", "engine", "lora"})
        if run.reward is not None:
            tables["train.reward"] = run.reward.model_dump(mode="json", include={"function", "weights", "on_error"})
    values = {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}
    values["seed"] = config.seed
    values["model.path"] = model_digests(config)
    values[f"{table}.dataset"] = file_digest(run.dataset)
    values[f"{table}.eval_dataset"] = None if run.eval_dataset is None else file_digest(run.eval_dataset)
    return json.loads(json.dumps(values))


def check_recipe(now: Recipe, *, begun_with: Recipe, output_dir: Path) -> None:
    """Raises InvalidArgument naming the first key that changed. Ignores keys that the other version of tasuki lacks."""
    for key in _DATASETS:
        if key in now and key not in begun_with:
            table = key.partition(".")[0]
            raise InvalidArgument(
                table, f"the run in {output_dir} was not started with [{table}]; choose another {table}.output_dir"
            )
    for key in sorted(now.keys() & begun_with.keys()):
        is_, was = now[key], begun_with[key]
        if is_ == was:
            continue
        key, is_, was = _difference(key, is_, was)
        what = f"is {is_!r}, but the run was started with {was!r}"
        if _is_digest(is_) or _is_digest(was):
            what = "has changed since the run was started"
        raise InvalidArgument(key, f"{what}; restore it to resume {output_dir}, or choose another output_dir for a new run")


def _difference(key: str, is_: Any, was: Any) -> tuple[str, Any, Any]:
    if not isinstance(is_, Mapping) or not isinstance(was, Mapping):
        return key, is_, was
    below = next(name for name in sorted(is_.keys() | was.keys()) if is_.get(name) != was.get(name))
    return _difference(f"{key}.{below}", is_.get(below), was.get(below))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and value.startswith("sha256:")


def model_digests(config: NodeConfig) -> dict[str, str]:
    """Digests of the model's texts, by file, and of names, dtypes and shapes of the tensors that are read, wherever they are stored.

    Does not read the weights, which may be hundreds of GB. Raises as read_stored.
    """
    folder, critic = config.model.path, config.trainer.critic
    stored = read_stored(folder)
    counted = {
        *stored_shapes(read_model_shape(folder), stored),
        *([VALUE_HEAD] if critic is not None and critic.path is None else []),
    }
    stored = {name: tensor for name, tensor in stored.items() if name in counted}
    return text_digests(folder) | {
        "tensors": _digest(f"{name} {stored[name].dtype} {stored[name].shape}" for name in sorted(stored))
    }


def model_digest(config: NodeConfig) -> str:
    """One of all of these."""
    return _digest(f"{name} {digest}" for name, digest in sorted(model_digests(config).items()))


def _digest(lines: Iterable[str]) -> str:
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


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
