"""Models and datasets of the Hugging Face hub, fetched once into its cache, and checks of a model folder, before anything is started."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasuki.client.dataset import refuse_filled
from tasuki.config.checks import check_critic_model, check_model
from tasuki.config.load import value_at
from tasuki.config.schema import NodeConfig
from tasuki.models.config_json import read_json_object
from tasuki.models.family import Model
from tasuki.models.folder_files import INDEX_FILE, WEIGHT_SUFFIXES, model_files, other_files
from tasuki.models.known import read_model_shape, read_whole_model
from tasuki.models.stored_tensors import check_stored
from tasuki.models.tokenizer import read_stop_token_ids, read_tokenizer
from tasuki.node.processes import to_stderr
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, NotInstalled, PathNotFound, UnsupportedModel
from tasuki.wire.extras import install_extras
from tasuki.wire.regular_file import open_regular

_MODELS = ("model.path", "trainer.critic.path")
_READ = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_LEFT_OUT = ["*/*.safetensors", "consolidated*", "onnx/*", "original/*"]
"""Weights in other formats beside the model's."""
_TELL_EVERY_S = 10.0
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def with_local_files(config: NodeConfig, *, has_weights: bool = True, has_rows: bool = True) -> NodeConfig:
    """The configuration with local paths for ids of the hub. Downloads what its cache lacks; HF_HUB_OFFLINE and the like hold.

    has_weights: False takes a model's other files, and asks the hub only if its cache lacks them. has_rows: False leaves ids of datasets.
    Raises NotInstalled without the extra `hub`, and InvalidArgument naming the key for what the hub does not give.
    """
    values: dict[str, Path] = {}
    for key in _MODELS:
        if (given := _id(config, key)) is not None:
            with _explained(key, given):
                values[key] = _model_folder(given, [] if has_weights else _WEIGHTS, key=key)
    for table, run in (("train", config.train), ("sft", config.sft)):
        for key in (f"{table}.dataset", f"{table}.eval_dataset"):
            if has_rows and run is not None and (given := _id(config, key)) is not None:
                with _explained(key, given):
                    values[key] = _dataset_file(given, columns=run.columns, key=key)
    for key, path in values.items():
        config = _with(config, key.split("."), path)
    return config


def weights_to_fetch(config: NodeConfig) -> dict[str, int]:
    """Key of a model -> bytes of its files that the cache lacks, as the hub lists them. Raises as with_local_files."""
    lacking: dict[str, int] = {}
    for key in _MODELS:
        if (given := _id(config, key)) is not None:
            with _explained(key, given):
                from huggingface_hub import errors

                try:
                    _snapshot(given, local_files_only=True)
                except errors.LocalEntryNotFoundError:
                    files = _snapshot(given, dry_run=True)
                    lacking[key] = sum(file.file_size for file in files if file.will_download)
    return lacking


def _with(table: Any, key: Sequence[str], path: Path) -> Any:
    name, *below = key
    return table.model_copy(update={name: _with(getattr(table, name), below, path) if below else path})


def _id(config: NodeConfig, key: str) -> str | None:
    """The key's id; None for a local path, which is absolute."""
    path = value_at(config, key)
    return str(path) if isinstance(path, Path) and not path.is_absolute() else None


def _model_folder(given: str, left_out: list[str], *, key: str) -> Path:
    from huggingface_hub import constants, errors, file_download
    from huggingface_hub.utils import disable_progress_bars

    if left_out:
        with suppress(errors.LocalEntryNotFoundError):
            return Path(_snapshot(given, left_out, local_files_only=True))
    name = given.partition("@")[0]
    to_stderr(
        f"{key}: there is no folder {given} here; taking {'all but the weights' if left_out else 'it'} from the hub or its cache"
    )
    if not sys.stderr.isatty():
        disable_progress_bars()
    cache = Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(repo_id=name, repo_type="model")
    with _size_told(cache / "blobs", lambda size: to_stderr(f"{key}: {size / 1e9:.2f} GB of {given} are here")):
        folder = _snapshot(given, left_out)
    to_stderr(f"{key}: {given} is in {folder}")
    return Path(folder)


def _snapshot(given: str, left_out: Sequence[str] = (), **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    name, _, revision = given.partition("@")
    ignored = [*_LEFT_OUT, *left_out]
    return snapshot_download(name, revision=revision or None, allow_patterns=_READ, ignore_patterns=ignored, **options)


def _dataset_file(given: str, *, columns: Mapping[str, str], key: str) -> Path:
    """A JSONL file of the split beside the library's own files, written once."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    place, *parts = given.split(":")
    name, _, revision = place.partition("@")
    subset, split = (*parts, "", "")[:2]
    to_stderr(f"{key}: taking {given} from the hub or its cache")
    rows: Any = datasets.load_dataset(name, subset or None, split=split or "train", revision=revision or None)
    if columns:
        rows = rows.select_columns(list(dict.fromkeys(columns.values())))
    path = Path(rows.cache_files[0]["filename"]).with_name(f"tasuki-{rows._fingerprint}.jsonl")
    if not path.exists():
        aside = path.with_suffix(".partial")
        with aside.open("w") as file:
            for number, row in enumerate(rows, start=1):
                named = {**row, **{field: row[column] for field, column in columns.items()}}
                refuse_filled(named, place=f"{given}: row {number}")
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        aside.replace(path)
    to_stderr(f"{key}: {len(rows):,} rows of {given} are in {path}")
    return path


@contextmanager
def _size_told(folder: Path, told: Callable[[int], None]) -> Iterator[None]:
    """Tells the bytes of a folder's files now and then, where no terminal shows the library's own bars."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(_TELL_EVERY_S):
            with suppress(OSError):  # renamed as they are complete
                told(sum(path.stat().st_size for path in folder.glob("*")))

    thread = threading.Thread(target=tell, name="tasuki-download", daemon=True)
    if not sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()


@contextmanager
def _explained(key: str, given: str) -> Iterator[None]:
    """Turns errors of both libraries into one line with the cure."""
    try:
        import datasets.exceptions
        from huggingface_hub import constants, errors
    except ModuleNotFoundError as error:
        text = f"{key}: there is no {given} here; to take it from the Hugging Face hub, {install_extras('hub')}"
        raise NotInstalled(text, packages=str(error.name), extras="hub") from error
    address = f"{constants.ENDPOINT}/{given.partition('@')[0].partition(':')[0]}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise InvalidArgument(
            key, f"{given} is gated: accept its terms at {address}, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidArgument(key, f"{given}: the hub has no such revision") from error
    except (errors.RepositoryNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        advice = "check the name; for a private one set HF_TOKEN or run `hf auth login`"
        raise InvalidArgument(key, f"{given} is neither a path here nor on the hub, at {address}: {advice}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise InvalidArgument(
            key, f"{given} is neither a path here nor in the hub's cache ({constants.HF_HOME}), and {offline}"
        ) from error
    except TypeError as error:  # a row that is no JSON
        raise InvalidArgument(key, f"{given}: {error}; name the columns to read in `columns`") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise InvalidArgument(key, f"{given}: {' '.join(f'{error}{cause}'.split())}") from error


def check_model_folders(config: NodeConfig) -> None:
    """Judges policy and critic, and the settings that depend on them. Raises as check_model_folder and check_model, and UnsupportedModel
    for what the engine would compute in another way.
    """
    policy, critic = check_model_folder(config.model.path), None
    if config.trainer.critic is not None:
        path = config.trainer.critic.path or config.model.path
        critic = read_model_shape(path)
        check_critic_model(config, policy.shape, critic)
        # Without a path, the policy's folder may have its head.
        check_stored(path, critic, key="trainer.critic.path", is_critic=True)
    check_model(config, policy.shape, critic=critic)
    if config.served_adapter is not None and read_json_object(config.model.path / "config.json", field="model.path").get(
        "quantization_config"
    ):
        raise InvalidArgument("rollout.lora", '= "adapter" needs weights that are not quantized; leave it at "merged"')
    if config.device == "cpu" and policy.attention.logit_softcap is not None:
        architecture = policy.shape.architecture
        problem = f"{architecture} caps attention's logits, which SGLang's CPU attention does not support; serve it on GPUs"
        raise UnsupportedModel(f"model.path: {problem}", architecture=architecture, field="device")


def has_weights(path: Path, *, key: str = "model.path") -> bool:
    """Whether a folder has more than the config.json that `tasuki plan` needs. Raises PathPermissionDenied."""
    with named_if_denied(path, key=key):
        return path.is_dir() and any(file.suffix in WEIGHT_SUFFIXES or file.name == INDEX_FILE for file in path.iterdir())


def check_model_folder(path: Path, *, key: str = "model.path") -> Model:
    """Judges a folder by everything but the values of its weights: config.json, the tensors' headers, the tokenizer.

    Raises PathNotFound or InvalidArgument naming what is missing, PathPermissionDenied, and the errors of read_model for config.json and of
    check_stored.
    """
    with named_if_denied(path, key=key):
        if not path.is_dir():
            raise PathNotFound(f"{key}: {path} is not a folder; give a Hugging Face model folder", path=path)
        config = path / "config.json"
        if not config.is_file():
            found = "'s config.json is not a regular file" if config.exists() else " has no config.json"
            raise PathNotFound(f"{key}: {path}{found}; give a Hugging Face model folder", path=config)
        table = read_json_object(config, field=key)
        if not table.get("architectures"):
            raise InvalidArgument(key, f"{config} has no `architectures`, so the model is unknown")
        model = read_whole_model(table)
        check_stored(path, model.shape, key=key)
        if (path / "generation_config.json").is_file():
            read_json_object(path / "generation_config.json", field=key)
        for file in sorted({*model_files(path), *other_files(path)}):  # an export copies the others at the end of a run
            try:
                open_regular(file).close()
            except PermissionError:
                raise
            except OSError as error:
                raise InvalidArgument(key, f"{file} cannot be read ({error.strerror}): check its links") from error
        if not (path / "tokenizer_config.json").is_file():
            raise PathNotFound(f"{key}: {path} has no tokenizer_config.json; save the tokenizer into the folder", path=path)
        with suppress(NotInstalled):  # `tasuki plan` needs no libraries
            read_tokenizer(path)
            read_stop_token_ids(path, vocab_size=None)
    return model
