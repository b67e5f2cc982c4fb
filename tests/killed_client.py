"""Lives of `tasuki train` that end by SIGKILL at a chosen time, and the figures of the run that they make together."""

import asyncio
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc.aio

from tests.conftest import ENVIRONMENT

LIMIT_S = 300.0
_DEATHS_AT_A_CALL = 2
_RUNS_S = 0.004
"""A call's time until its client dies."""
_PRELOADED = "TASUKI_TESTS_PRELOADED"
REWARD = """
def odd(prompt, completion, **fields):
    return float(len(set(completion)) % 2)

async def two_turns(policy, prompt):
    first = await policy.generate(await policy.encode(prompt))
    second = await policy.generate([*first.context, *await policy.encode("c")])
    return float(len({*first.token_ids, *second.token_ids}) % 2)
"""
RL: Mapping[str, object] = {
    "train.dataset": "train.jsonl", "train.eval_dataset": "held_out.jsonl", "train.reward.function": "odd_reward:odd",
    "train.prompts_per_step": 3, "train.group_size": 4, "train.max_new_tokens": 6, "train.save_every": 2, "train.eval_every": 2,
    "train.eval.temperature": 1.0,
}  # fmt: skip
SFT: Mapping[str, object] = {
    "sft.dataset": "sft.jsonl", "sft.eval_dataset": "sft.jsonl", "sft.samples_per_step": 3, "sft.save_every": 3, "sft.eval_every": 2,
}  # fmt: skip


def write_task(folder: Path) -> Path:
    """Writes the reward and the datasets."""
    (folder / "odd_reward.py").write_text(REWARD)
    for name, letters in (("train", "abcdefgh"), ("held_out", "xyz")):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": letter * 4}) + "\n" for letter in letters))
    lines = [json.dumps({"prompt": letter * 4, "completion": letter * 2}) for letter in "abcdefghij"]
    (folder / "sft.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@dataclass(frozen=True, slots=True)
class Run:
    """A run on the node of `config`, in a folder with the task."""

    config: Path
    folder: Path
    output: str
    settings: Mapping[str, object]
    repeats: str = ""
    """Another run, with carried groups, whose samples this one takes."""

    @property
    def output_dir(self) -> Path:
        return self.folder / self.output

    @property
    def calls(self) -> Path:
        """The deaths at each call, as JSON."""
        return self.folder / f"{self.output}.calls.json"

    def live(self, *options: str, dies_after_s: float | None = None, dies_at_new_calls: bool = False) -> bool:
        """Trains in a process of its own. Returns whether the run has ended; False if it was killed.

        dies_after_s: from the moment that the node is asked for anything. dies_at_new_calls: see `_die_at_new_calls`.
        """
        table = next(iter(self.settings)).partition(".")[0]
        settings = {f"{table}.output_dir": str(self.output_dir), **self.settings}
        arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={json.dumps(value)}")]
        argv = ["train", str(self.config), *options, *arguments]
        log = self.folder / f"{self.output}.log"
        groups = self.folder / f"{self.repeats or self.output}.groups"
        calls = self.calls if dies_at_new_calls else None
        arguments = argv, self.folder, log, dies_after_s, calls, groups, bool(self.repeats)
        process = _forks(self.config.parent / "model").Process(target=_train, args=arguments)
        process.start()
        process.join(LIMIT_S)
        assert process.exitcode in (0, -signal.SIGKILL), f"{process.exitcode}: {log.read_text()}"
        return process.exitcode == 0

    def figures(self) -> list[dict[str, Any]]:
        """Figures of each step, without times."""
        steps = [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in step.items() if not name.endswith("seconds")} for step in steps]

    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        steps = [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]
        return sum(sum(step["seconds"].values()) for step in steps) / len(steps)

    def results(self) -> dict[str, str]:
        """Digests of the exported model's files, and the checkpoints' names."""
        files = [path for path in (self.output_dir / "model").rglob("*") if path.is_file()]
        node = str(self.config.parent).encode()  # adapter_config.json names the base model's folder
        digests = {path.name: hashlib.sha256(path.read_bytes().replace(node, b"")).hexdigest() for path in files}
        saved = sorted(path.parent.name for path in (self.output_dir / "checkpoints").glob("*/loop.json"))
        models = sorted(path.name for path in self.output_dir.glob("model*"))
        return digests | {"checkpoints": str(saved), "models": str(models)}


@cache
def _forks(model: Path) -> Any:
    """A server whose children have imported the command and read a tokenizer: a life of a client then begins at once."""
    os.environ[_PRELOADED] = str(model)
    context = multiprocessing.get_context("forkserver")
    sys.path[:0] = [path for path in ENVIRONMENT["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    context.set_forkserver_preload(["tests.killed_client"])
    context.Process(target=os.getpid).start()
    del os.environ[_PRELOADED]
    return context


def _record_groups(file: Path) -> None:
    """Writes after each generation of carried groups which were taken, and all groups with their samples."""
    from tasuki.client.carry import Carry

    take = Carry.take

    def recorded(self: Carry, *args: Any, call_number: int, **rest: Any) -> Any:
        groups = list(self.groups)
        taken = take(self, *args, call_number=call_number, **rest)
        with file.open("a") as lines:
            lines.write(json.dumps([call_number, [group.id for group in taken], [group.as_json() for group in groups]]) + "\n")
        return taken

    Carry.take = recorded


def _repeat_groups(file: Path) -> None:
    """Takes the recorded samples, which continue those carried so far, in place of generating."""
    from tasuki.client.carry import CarriedGroup, Carry

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = {call_number: rest for call_number, *rest in lines}  # the last: what a killed client had generated is lost

    def repeated(self: Carry, *_: Any, call_number: int, **__: Any) -> Any:
        taken, records = told[call_number]
        groups = [CarriedGroup.of(record) for record in records]
        for own, group in zip(self.groups, groups, strict=True):
            assert (own.id, own.row, list(own.prompt_token_ids)) == (group.id, group.row, list(group.prompt_token_ids))
            for before, after in zip(own.samples, group.samples, strict=True):
                length = len(before.token_ids)
                assert before.token_ids.tolist() == after.token_ids[:length].tolist()
                assert before.rollout_log_probs.tolist() == after.rollout_log_probs[:length].tolist()
        self.groups = [group for group in groups if group.id not in taken]
        return [group for group in groups if group.id in taken]

    Carry.take = repeated


def _train(
    argv: list[str], folder: Path, log: Path, dies_after_s: float | None, calls: Path | None, groups: Path, repeats: bool
) -> None:
    from tasuki.cli import __main__, train

    (_repeat_groups if repeats else _record_groups)(groups)
    os.chdir(folder)
    os.environ.update(ENVIRONMENT)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if dies_after_s is not None:
        timer = threading.Timer(dies_after_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        train.check_longest_sample = lambda *_, **__: timer.start()
    if calls is not None:
        _die_at_new_calls(calls)
    os._exit(__main__.main(argv))


def _die_at_new_calls(file: Path) -> None:
    """Ends the process at each call that changes or asks for something: in one life while it runs, in the next when it is answered.

    file: the deaths by call; lives share it.
    """
    deaths: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def name(method: str, messages: Sequence[Any]) -> str:
        """The same in each life: what a step's calls ask for differs, and repeats of other calls are told by what has been reached."""
        found, request_id = hashlib.sha256(), ""
        for message in messages:
            bare = type(message).FromString(message.SerializeToString())
            for part in (bare, getattr(bare, "header", None)):
                if part is not None and "command" in part.DESCRIPTOR.fields_by_name:
                    request_id = request_id or part.command.request_id
                    part.ClearField("command")
            if "request_id" in bare.DESCRIPTOR.fields_by_name:
                bare.ClearField("request_id")
            found.update(bare.SerializeToString(deterministic=True))
        place = request_id if "-" in request_id else str(sum(" step " in each for each in deaths))
        kind = "step" if "-" in request_id or method.endswith("Generate") else "other"
        return f"{method} {kind} {place if kind == 'other' or '-' in request_id else ''} {found.hexdigest()[:16]}"

    for kind in ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"):
        multicallable = getattr(grpc.aio._channel, f"{kind}MultiCallable")

        def call(self: Any, request: Any, *, ask: Any = multicallable.__call__, **options: Any) -> Any:
            method = self._method.decode().rpartition("/")[2]
            if method.startswith(("Get", "Watch")):
                return ask(self, request, **options)
            messages = [request] if hasattr(request, "SerializeToString") else list(request)
            given = request if hasattr(request, "SerializeToString") else iter(messages)
            key = name(method, messages)
            number = deaths.get(key, 0)
            if number < _DEATHS_AT_A_CALL:
                deaths[key] = number + 1
                file.write_text(json.dumps(deaths, indent=1))
            made = ask(self, given, **options)
            if number == 0:
                asyncio.get_running_loop().call_later(_RUNS_S, die)
            elif number == 1:
                made.add_done_callback(lambda _: die())
            return made

        multicallable.__call__ = call


if _PRELOADED in os.environ:
    import matplotlib.figure  # noqa: F401

    from tasuki.cli import __main__, train  # noqa: F401
    from tasuki.runs.tokenizer import ModelTokenizer

    ModelTokenizer(Path(os.environ[_PRELOADED])).encode_prompt("a")
