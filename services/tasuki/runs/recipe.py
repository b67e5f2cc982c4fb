"""What a run's numbers depend on, by the keys that say it: a run goes on only with what it was begun with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.config.performance_keys import PERFORMANCE_TRAINER_KEYS
from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import TrainConfig
from tasuki.wire.errors import InvalidArgument

Recipe = Mapping[str, Any]
# total_steps goes with num_steps, which may grow.
_FREE_TRAINER_KEYS = PERFORMANCE_TRAINER_KEYS | {"total_steps"}
# Paths count by what is there.
_FREE_RUN_KEYS = {"dataset", "eval_dataset", "output_dir", "num_steps", "eval_every", "save_every"}
_FREE_TRAIN_KEYS = _FREE_RUN_KEYS | {"reward", "samples", "stop_at_eval_score", "max_prompt_tokens"}
_FREE_SFT_KEYS = _FREE_RUN_KEYS | {"num_epochs", "max_tokens"}
# One of them is in every recipe, and tells the table of the run.
_DATASETS = ("train.dataset", "sft.dataset")
_DIGEST = "sha256:"
# Of configuration, tokenizer and chat template.
_MODEL_TEXTS = (".json", ".jinja", ".model", ".txt")


def recipe(config: NodeConfig) -> Recipe:
    """As JSON would give it back. Files count by their content, the model by its texts and by names and sizes of its weights."""
    table, run, free = ("train", config.train, _FREE_TRAIN_KEYS) if config.sft is None else ("sft", config.sft, _FREE_SFT_KEYS)
    assert run is not None
    tables = {
        "trainer": config.trainer.model_dump(mode="json", exclude=_FREE_TRAINER_KEYS),
        table: run.model_dump(mode="json", exclude=free),
    }
    if isinstance(run, TrainConfig):
        tables["rollout"] = config.rollout.model_dump(
            mode="json", include={"dtype", "engine", "float32_logits", "lora", "seed"}
        )
        tables["train.reward"] = run.reward.model_dump(mode="json", include={"function", "functions", "on_error"})
    values = {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}
    values["model.path"] = _model_digest(config.model.path)
    values[f"{table}.dataset"] = _file_digest(run.dataset)
    values[f"{table}.eval_dataset"] = None if run.eval_dataset is None else _file_digest(run.eval_dataset)
    return json.loads(json.dumps(values))


def check_recipe(now: Recipe, *, begun_with: Recipe, output_dir: Path) -> None:
    """Raises InvalidArgument naming the first key that is not as it was; one that another version of tasuki lacks is passed over."""
    for key in _DATASETS:
        if key in now and key not in begun_with:
            table = key.partition(".")[0]
            raise InvalidArgument(
                table, f"the run in {output_dir} was not begun with [{table}]; choose another {table}.output_dir"
            )
    for key in sorted(now.keys() & begun_with.keys()):
        is_, was = now[key], begun_with[key]
        if is_ == was:
            continue
        key, is_, was = _difference(key, is_, was)
        what = f"is {is_!r}, but the run was begun with {was!r}"
        if _is_digest(is_) and _is_digest(was):
            what = "has another content than the run was begun with"
        raise InvalidArgument(key, f"{what}; put it back to resume {output_dir}, or choose another output_dir for a new run")


def _difference(key: str, is_: Any, was: Any) -> tuple[str, Any, Any]:
    """The first key below two different values at which they differ, and what is there; None where one has no such key."""
    if not isinstance(is_, Mapping) or not isinstance(was, Mapping):
        return key, is_, was
    below = next(name for name in sorted(is_.keys() | was.keys()) if is_.get(name) != was.get(name))
    return _difference(f"{key}.{below}", is_.get(below), was.get(below))


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_DIGEST)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return _DIGEST + hashlib.file_digest(file, "sha256").hexdigest()


def _model_digest(folder: Path) -> str:
    """Without reading the weights, which may be hundreds of GB."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (*_MODEL_TEXTS, ".safetensors"))
    parts = [
        f"{path.name} {_file_digest(path) if path.suffix in _MODEL_TEXTS else path.stat().st_size}"
        for path in files
        if path.is_file()
    ]
    return _DIGEST + hashlib.sha256("\n".join(parts).encode()).hexdigest()
