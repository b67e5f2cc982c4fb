"""Checks a Hugging Face model folder before any process is started for it."""

from contextlib import suppress
from pathlib import Path

from tasuki.config.checks import check_critic_model, check_model
from tasuki.config.schema import NodeConfig
from tasuki.models.config_json import read_json_object
from tasuki.models.family import Model
from tasuki.models.folder_files import INDEX_FILE, WEIGHT_SUFFIXES, model_files, other_files
from tasuki.models.known import read_model, read_model_shape
from tasuki.models.stored_tensors import check_stored
from tasuki.models.tokenizer import read_stop_token_ids, read_tokenizer
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, NotInstalled, PathNotFound, UnsupportedModel
from tasuki.wire.regular_file import open_regular


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
    if config.device == "cpu" and (policy.attention.logit_softcap, policy.final_logit_softcap) != (None, None):
        architecture = policy.shape.architecture
        problem = f"{architecture} caps logits, which SGLang's CPU attention does not support; serve it on GPUs"
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
        model = read_model(table)
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
