"""Reading, writing and showing a node's configuration; errors are named by key."""

import re
from pathlib import Path

import pytest

from tasuki.algorithms.loss_types import LossConfig
from tasuki.algorithms.losses.ppo import PpoLoss
from tasuki.cli.__main__ import main
from tasuki.config import load
from tasuki.config.checks import HEARTBEAT_S
from tasuki.config.load import has_bf16, load_config, save_config, slow_dtypes, without_effect
from tasuki.config.paths import node_targets, socket_dir
from tasuki.rpc.port import fleet_port
from tasuki.wire.address import socket_folder, unix_target
from tasuki.wire.channel import MAX_PORT_CALLS
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tests.refusal import refusing

RUN = '[train]\ndataset = "a"\noutput_dir = "b"\n[train.reward]\nfunction = "a:b"\n'
MINIMAL = 'state_dir = "state"\n[model]\npath = "model"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_paths_in_the_file_are_relative_to_its_folder(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, f"{MINIMAL}[security]\ncallers = 'v'\n[paths]\nwrite = ['a']\n"))
    assert (config.state_dir, config.model.path) == (tmp_path / "state", tmp_path / "model")
    assert (config.security.callers, config.paths.write) == (tmp_path / "v", (tmp_path / "a",))


def test_paths_in_overrides_are_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(write(tmp_path, MINIMAL), overrides=["state_dir=here"])
    assert config.state_dir == tmp_path / "elsewhere" / "here"


def test_overrides_are_typed_as_in_toml_and_bare_words_are_strings(tmp_path: Path) -> None:
    overrides = ["trainer.num_ranks=4", "trainer.learning_rate=1e-5", "rollout.dtype=float32", "trainer.checkpointing=full"]
    config = load_config(write(tmp_path, MINIMAL), overrides=overrides)
    assert (config.trainer.num_ranks, config.trainer.learning_rate, config.rollout.dtype) == (4, 1e-5, "float32")
    assert config.trainer.checkpointing == "full"


@pytest.mark.parametrize("output_dir", ["model", "model/run", "here/run", "model/../a"])
def test_a_run_does_not_write_into_its_model_nor_its_data(tmp_path: Path, output_dir: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "here").symlink_to("model")
    text = f'{MINIMAL}[sft]\ndataset = "a"\noutput_dir = "{output_dir}"\nnum_steps = 1\n'
    with refusing("sft.output_dir"):
        load_config(write(tmp_path, text))


AVX2, ZEN4, ARM = "flags\t\t: fpu avx2 fma\n", "flags\t\t: avx2 avx512_bf16\n", "Features\t: fp asimd bf16\n"


@pytest.mark.parametrize(("cpuinfo", "dtype"), [(AVX2, "float32"), (ZEN4, "bfloat16"), (ARM, "bfloat16"), ("", "float32")])
def test_dtypes_that_are_not_given_are_those_that_the_cpu_is_fast_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, dtype: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}")
    is_fast = has_bf16(tmp_path / "cpuinfo")
    monkeypatch.setattr("tasuki.config.load.has_bf16", lambda: is_fast)
    config, file = load_config(write(tmp_path, MINIMAL)), tmp_path / "node.toml"
    assert (config.trainer.compute_dtype, config.rollout.dtype, slow_dtypes(config)) == (dtype, dtype, [])
    assert config.model_dump(exclude_unset=True).get("trainer", {}) == {}  # any node that runs is adopted
    given = load_config(file, overrides=["rollout.dtype=bfloat16"])
    assert (given.rollout.dtype, slow_dtypes(given)) == ("bfloat16", [] if is_fast else ["rollout.dtype"])
    assert load_config(file, overrides=["device=cuda"]).rollout.dtype == "bfloat16"
    save_config(config, file)
    assert load_config(file) == config


TLS = ["security.cert=c", "security.key=k"]
CALLERS, INSECURE = "security.callers=t", "security.insecure=true"
ANYWHERE, LOOPBACK = "listen=0.0.0.0:5000", "listen=127.0.0.1:5001"
EPISODES = ["train.dataset=d", "train.output_dir=o", "train.max_new_tokens=8"]
R2 = "trainer.router_replay=old_policy"
NO_SIZE = "give a whole number of bytes above 0, or text"


@pytest.mark.parametrize(
    ("overrides", "field", "told"),
    [
        (["trainer.lora={rank_pattern = {layers.2.* = 8}}"], "trainer.lora", 'give a table in TOML, such as {a = 1, "b.*" = 2}'),
        (["rollout.tp=2"], "rollout.tp", "unknown key"),
        (["trainer.num_ranks=0"], "trainer.num_ranks", "greater than 0"),
        (["trainer.learning_rate=-1"], "trainer.learning_rate", "greater than or equal to 0"),
        (["trainer.learning_rate=1.5"], "trainer.learning_rate", "less than or equal to 1"),
        (["rollout.engine.max_total_tokens=-5"], "rollout.engine.max_total_tokens", "at least 1"),
        (["rollout.engine.ep_size=2"], "rollout.engine.ep_size", "rollout.tp_size, which splits each expert"),
        (["device=tpu"], "device", "'cpu' or 'cuda'"),
        (["state_dir.kind=cpu"], "state_dir.kind", "is a value, not a table"),
        (["trainer.betas=[1.5, 2.0]"], "trainer.betas.0", "less than 1"),
        (['trainer.lora.target_modules=["q_proj", "gate"]'], "trainer.lora.target_modules.1", "'q_proj'"),
        (["trainer.num_ranks"], "set", "expected a.b=value"),
        (["seed=3\ndevice = 'cuda'"], "set", "gives seed more than one line"),
        (["device=cuda", "trainer.router_replay=true", "rollout.engine.speculative_algorithm=NGRAM"], "trainer.router_replay", "drafts"),
        ([R2, *EPISODES, "train.reward.function=r:f"], "trainer.router_replay", 'needs train.old_policy = "given"'),
        ([R2, "sft.dataset=d", "sft.output_dir=o"], "trainer.router_replay", 'needs train.old_policy = "given"'),
        (["device=cuda", "rollout.dtype=float32"], "rollout.dtype", 'device = "cuda"'),
        (["device=cuda", "memory.host_budget_bytes=1GB"], "memory.host_budget_bytes", 'device = "cpu"'),
        (["trainer.param_dtype=bfloat16", "trainer.lora.rank=8"], "trainer.param_dtype", "[trainer.lora]"),
        (["trainer.attention_backend=fa4"], "trainer.attention_backend", '= "fa4" needs device = "cuda"'),
        (["rollout.lora=adapter"], "rollout.lora", '= "adapter" needs a table [trainer.lora]'),
        (["rollout.lora=adapter", 'trainer.lora.target_modules=["qkv_proj"]'], "rollout.lora", "adapters of qkv_proj"),
        (["trainer.lora.rank=8", "trainer.reference_on_host=true"], "trainer", "the frozen model is the reference; remove"),
        (['trainer.learning_rate="1e-5"'], "trainer.learning_rate", "give a number, without quotes (got '1e-5')"),
        (["state_dir=1"], "state_dir", "give a path in quotes (got 1)"),
        (["state_dir=~no-such-user/x"], "state_dir", "names an unknown user"),
        (["state_dir=a\0b"], "state_dir", "contains a null character"),
        (["rollout.engine.x.y=1"], "rollout.engine.x", "give a number, a text, true or false, or a list of them"),
        (['trainer.prefix_sharing="true"'], "trainer.prefix_sharing", "Input should be 'auto', True or False (got 'true')"),
        *((["memory.host_budget_bytes=" + text], "memory.host_budget_bytes", NO_SIZE) for text in ("0", "much", "8XB")),
        *(([f"train.episode.server={url}", *EPISODES], "train.episode.server", "HOST") for url in ("http://a:b@c/run", "https://c/run")),
        # What was meant.
        (["trainer.learnin_rate=1"], "trainer.learnin_rate", "unknown key, did you mean learning_rate? see docs"),
        (["coordnator.drain_grace_s=1"], "coordnator", "unknown key, did you mean coordinator? see docs"),
        (["trainer.critic.learning_rat=1"], "trainer.critic.learning_rat", "unknown key, did you mean learning_rate? see docs"),
        (["trainer.zzz=1"], "trainer.zzz", "unknown key; see docs"),
        (["train.ppo_mini_batch_size=256"], "train.ppo_mini_batch_size", "name is train.num_mini_batches, with their number instead"),
        (["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator", "unknown key; tasuki's name is train.algorithm"),
        (["actor_rollout_ref.rollout.n=8"], "actor_rollout_ref.rollout.n", "unknown key; tasuki's name is train.group_size"),
        (
            ["trainer.megatron.tensor_model_parallel_size=2"],
            "trainer.megatron.tensor_model_parallel_size",
            "unknown key; tasuki's name is rollout.tp_size, or trainer.megatron.tensor_parallel",
        ),
        (["trainer.megatron.sequence_parallel=true"], "trainer.megatron.sequence_parallel", "sequence parallelism always on"),
        (
            ["trainer.lora.lora_A_init_method=xavier"],
            "trainer.lora.lora_A_init_method",
            "unknown key; tasuki's name is trainer.lora.init",
        ),
        # Ports.
        ([ANYWHERE], "listen", "is not loopback: set security.cert and security.key"),
        ([ANYWHERE, INSECURE], "listen", "is not loopback: set security.cert"),
        ([ANYWHERE, *TLS], "listen", "set security.client_ca or security.callers"),
        ([LOOPBACK], "listen", "open to every user of the machine"),
        ([LOOPBACK, CALLERS, "metrics.listen=localhost:5003"], "metrics.listen", "is already taken by listen"),
        (["metrics.listen=0.0.0.0:9464"], "metrics.listen", "is not loopback"),
        (["security.cert=c"], "security.key", "security.cert"),
        (["security.key=c"], "security.cert", "security.key"),
        ([LOOPBACK, CALLERS, INSECURE], "security.insecure", "remove it"),
        *(([f"listen={address}"], "listen", "must be") for address in ("::1:5000", "127.0.0.1:0")),
        (["metrics.listen=127.0.0.1:70000"], "metrics.listen", "must be"),
        (["listen=127.0.0.1:65534"], "listen", "needs two ports after it"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_key_and_the_cure(tmp_path: Path, overrides: list[str], field: str, told: str) -> None:
    with refusing(field) as refused:
        load_config(write(tmp_path, MINIMAL), overrides=overrides)
    assert refused.value.message.startswith(field) and told in refused.value.message


@pytest.mark.parametrize(
    "overrides",
    [
        [ANYWHERE, *TLS, "security.client_ca=a"],
        [ANYWHERE, *TLS, "security.client_ca=a", "security.callers=r"],
        ["listen=[::]:5002", *TLS, CALLERS],
        [LOOPBACK, CALLERS],
        ["listen=[::1]:5001", INSECURE],
        ["listen=localhost:5001", CALLERS, "metrics.listen=127.0.0.1:5004"],
        [*TLS, "security.client_ca=a"],
    ],
)
def test_ports_that_know_their_callers_are_taken(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(write(tmp_path, MINIMAL), overrides=overrides)
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config


def test_a_fleets_port_has_room_for_the_waits_of_all_its_ranks(tmp_path: Path) -> None:
    fleet = ("fleet.name=lab", "fleet.num_nodes=100", "fleet.node_rank=0", "fleet.leader=127.0.0.1:29400")
    overrides = [*fleet, "trainer.num_ranks=8", "rollout.tp_size=8", INSECURE]
    assert fleet_port(load_config(write(tmp_path, MINIMAL), overrides=overrides)).max_calls == MAX_PORT_CALLS + 2 * 100 * 8


def test_an_adapter_to_start_from_is_refused_with_a_reference_that_would_not_have_it(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL + RUN)
    load_config(file, overrides=["trainer.lora.path=a", "train.loss.kl_coef=0"])
    with pytest.raises(InvalidArgument, match="trainer.lora.path .* merge it into the model"):
        load_config(file, overrides=["trainer.lora.path=a", "train.loss.kl_coef=0.1"])


@pytest.mark.parametrize("stage_s", [0.1, 7, 600, 7200])
def test_deadlines_are_noticed_in_their_order(tmp_path: Path, stage_s: float) -> None:
    deadlines = load_config(write(tmp_path, MINIMAL), overrides=[f"coordinator.stage_timeout_s={stage_s}"]).coordinator
    assert 4 * HEARTBEAT_S <= deadlines.stall_s <= deadlines.progress_s
    assert deadlines.stage_timeout_s <= deadlines.recovery_timeout_s
    assert stage_s < 2 or deadlines.progress_s <= deadlines.stage_timeout_s


@pytest.mark.parametrize(("key", "instead"), load.known_names("earlier_versions").items())
def test_a_key_that_is_gone_is_told_what_to_write(tmp_path: Path, key: str, instead: str) -> None:
    with refusing(key, match=re.escape(instead)):
        load_config(write(tmp_path, MINIMAL), overrides=[f"{key}=1"])


@pytest.mark.parametrize(("text", "num_bytes"), [("8GB", 8 * 10**9), ("512MiB", 2**29), ("4096", 4096)])
def test_a_budget_is_bytes_or_text_with_a_unit_and_survives_saving(tmp_path: Path, text: str, num_bytes: int) -> None:
    config = load_config(write(tmp_path, MINIMAL), overrides=[f"memory.host_budget_bytes={text}"])
    assert config.memory.host_budget_bytes == num_bytes
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml") == config


def test_missing_file_and_broken_toml_are_errors_of_ours(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match=r"nowhere\.toml does not exist"):
        load_config(tmp_path / "nowhere.toml")
    for text in ("state_dir = \n", f"a = {'1' * 5000}\n", f"a = {'[' * 5000}\n"):
        with pytest.raises(InvalidArgument, match="is not TOML"):
            load_config(write(tmp_path, text))


def test_saved_configuration_reads_back_as_the_same(tmp_path: Path) -> None:
    text = MINIMAL + (
        '[trainer]\nbetas = [0.8, 0.95]\nlr_schedule = "cosine"\nlearning_rate = 1e-6\n'
        '[train]\ndataset = "a \\"b\\" \\\\ \\u007f ü 😀.jsonl"\noutput_dir = "out"\nloss = { kl_coef = 0.1 }\n'
        '[train.reward]\nfunction = "rewards:exact"\non_error = "zero"\n'
    )
    config = load_config(write(tmp_path, text))
    (tmp_path / "elsewhere").mkdir()
    save_config(config, tmp_path / "elsewhere" / "saved.toml")
    assert load_config(tmp_path / "elsewhere" / "saved.toml") == config


def test_socket_folder_is_private_and_short_enough_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20)
    deep.mkdir()
    for state_dir in (tmp_path / "s", deep):
        place = socket_dir(state_dir)
        assert place.stat().st_mode & 0o777 == 0o700
        assert len(str(place)) <= 68
        assert socket_dir(state_dir) == place
        place.rmdir()


def test_a_port_is_beside_the_socket(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), overrides=["listen=127.0.0.1:5005", "security.insecure=true"])
    ports = {"coordinator": "127.0.0.1:5005", "trainer": "127.0.0.1:5006", "rollout": "127.0.0.1:5007"}
    assert config.port_targets == ports
    assert node_targets(config)["rollout"] == unix_target(config.state_dir, service="rollout")
    assert not socket_folder(config.state_dir).exists()


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match=r"has no node\.toml or run\.toml; give"):
        load_config(tmp_path)


def test_key_of_another_library_is_answered_with_ours(tmp_path: Path) -> None:
    loss = {"name", *LossConfig().settings(), *PpoLoss.__dataclass_fields__}
    for own in {
        one for text in load.known_names("other_libraries").values() for one in text.partition(", with")[0].split(", or ")
    }:
        *above, last = own.split(".")
        assert last in (loss if above == ["train", "loss"] else load._keys_beside([*above, last])), own
    with pytest.raises(InvalidArgument, match=r"train\.loss\.beta: unknown key; tasuki's name is train\.loss\.kl_coef"):
        load_config(write(tmp_path, MINIMAL + RUN), overrides=["train.loss.beta=0.1"])


def test_every_key_has_its_origin_and_the_text_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, f"{MINIMAL}[trainer]\nbetas = [0.9, 0.95]\n[rollout.engine]\nschedule_policy = 'lof'\n{RUN}")
    overrides = ["trainer.learning_rate=1e-5", "train.loss={name='gspo'}"]
    assert main(["config", str(file), *(word for override in overrides for word in ("--set", override))]) == 0
    printed = capsys.readouterr().out
    assert {
        "betas = [0.9, 0.95]  # file", 'schedule_policy = "lof"  # file', "learning_rate = 1e-05  # --set", 'name = "gspo"  # --set',
        "num_ranks = 1  # default",
    } <= set(printed.splitlines())  # fmt: skip
    (tmp_path / "printed.toml").write_text(printed)
    assert load_config(tmp_path / "printed.toml") == load_config(file, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["train.value_loss.clip=0.2"], ["train.value_loss.clip"]),
        (["train.algorithm=rloo", "train.advantages.std=population"], ["train.advantages.std"]),
        (["train.algorithm=rloo", "train.advantages.std=none"], []),
        (["train.advantages.lam=0.9"], ["train.advantages.lam"]),
        (["train.max_staleness=2"], ["train.max_staleness"]),
        (["train.loss.name=policy_gradient", "train.old_policy=given"], ["train.old_policy"]),
        (["train.old_policy=rollout", "train.loss.correction.sequence_truncation=2"], ["train.loss.correction.sequence_truncation"]),
        (["train.eval_every=5", "train.stop_at_eval_score=0.5"], ["train.eval_every", "train.stop_at_eval_score"]),
        (["train.eval_dataset=c", "train.eval.top_p=0.5"], ["train.eval.top_p"]),
    ],
)  # fmt: skip
def test_settings_without_effect_are_told_and_taken(tmp_path: Path, overrides: list[str], keys: list[str]) -> None:
    told = without_effect(load_config(write(tmp_path, MINIMAL + RUN), overrides=overrides))
    assert [problem.partition(" = ")[0] for problem in told] == keys
