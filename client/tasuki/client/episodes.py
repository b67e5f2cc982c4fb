"""Episodes: the user's functions run in worker processes, and take turns with the policy. P prompts, G episodes of each."""

import itertools
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from tasuki.client.chat import Tokenizer
from tasuki.client.dataset import Row
from tasuki.client.episode import Asked, Batch, Episode, Episodes, credit_turns
from tasuki.client.episode_worker import BLOCKED
from tasuki.client.generation import number_of_call
from tasuki.client.reward_worker import judged
from tasuki.client.rewards import Scores, source_of
from tasuki.client.sync_client import Client
from tasuki.client.turns import Turns
from tasuki.client.types import FinishReason, Phase, Sample, SamplingParams
from tasuki.client.worker_process import LOOK_EVERY_S, WorkerEnded, WorkerProcess, Workers
from tasuki.wire.errors import InvalidArgument, RewardFailed
from tasuki.wire.process_tree import parent_and_state

_GRACE_S = 10.0
"""Beyond its time limit an episode is still waited for: its worker may be busy with others."""
_MAX_REFUSED = 100
"""Turns that an episode may ask for beyond its limits."""
_MAX_LOSSES, _MAX_RUNS = 3, 20
"""Times that an episode's worker may end while it runs by itself, and that it is begun: another of the worker's may be at fault."""
_NO_TURN = {
    "text": "", "tool_calls": [], "token_ids": [], "log_probs": [], "finish_reason": "length", "num_prompt_tokens": 0,
    "message": {"role": "assistant", "content": ""}, "shown": {"role": "assistant", "content": ""},
}  # fmt: skip


class EpisodePool:
    """Worker processes that run episodes. Use it in a `with` block, which ends them on exit."""

    def __init__(
        self,
        function: str,
        *,
        command: Sequence[str] = (),
        tokenizer: Tokenizer | None,
        max_tokens: int,
        folders: Sequence[Path | str] = (),
        num_workers: int = 1,
        timeout_s: float = 60.0,
        max_turns: int = 16,
        on_error: Literal["fail", "zero", "skip"] = "fail",
        discount: float = 1.0,
    ) -> None:
        """function: "module:function", an async function of `policy` and of fields of the row, which returns the reward.

        command: of a program that `function` runs. It is called with `row`, `command` and `folder`, the last of `folders`, instead.

        tokenizer: None only checks the function. max_tokens: of an episode, prompts included. timeout_s: of an episode, without the
        time that the policy takes. discount: factor by which the rewards of each further turn count less, see `policy.reward`.
        Raises InvalidArgument when the function cannot be imported.
        """
        self._discount, self._failed_reward = discount, 0.0 if on_error == "zero" else math.nan
        self._tokenizer, self._max_tokens, self._max_turns = tokenizer, max_tokens, max_turns
        self._timeout_s, self._on_error, self._function = timeout_s, on_error, " ".join(command) or function
        self._program = {"command": list(command), "folder": str([Path.cwd(), *folders][-1])} if command else None
        sources, serves = [source_of(function, folders)], "tasuki.client.episode_worker"
        self._workers = Workers(sources, [self._function], key="episode.function", num=num_workers, serves=serves)
        (self._signature,) = self._workers.signatures
        self.rewards_turns = self._signature.rewards_turns
        self._stopped: dict[WorkerProcess, float] = {}
        """Since when a worker's process has been stopped by a signal."""
        self._ids, self._key = itertools.count(), uuid.uuid4().hex
        self._carried: Batch | None = None

    def __enter__(self) -> "EpisodePool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, and every process that their episodes have started, immediately."""
        self._workers.close()
        if self._carried is not None:
            self._carried.close()

    def check_rows(self, rows: Sequence[Row], *, path: Path | str) -> None:
        """Raises InvalidArgument for an argument that a row does not have."""
        if self._program is not None:
            return
        for number, row in enumerate(rows, start=1):
            missing = [name for name in self._signature.required if name not in row and name != "policy"]
            if missing or "policy" in row:
                name = missing[0] if missing else "policy"
                problem = (
                    f"takes `{name}`, but {path}: row {number} has only {', '.join(row)}; add the field, or give a default"
                )
                if not missing:
                    problem = f"is given `policy`, but {path}: row {number} has a field of that name; rename it"
                raise InvalidArgument("episode.function", f"{self._function} {problem}", argument=name)

    def run(
        self,
        client: Client,
        rows: Sequence[Row],
        sampling: SamplingParams,
        *,
        num_samples: int,
        number: int,
        on_progress: Callable[[int, int], None] = lambda done, num_tokens: None,
    ) -> Episodes:
        """Runs `num_samples` episodes of each row. number: of this call; equal calls have equal seeds.

        on_progress: called with the number of ended episodes and of tokens drawn so far.

        Raises RewardFailed naming episode, row and cause if an episode fails and on_error is "fail".
        """
        episodes = [Episode(index, rows[index // num_samples]) for index in range(len(rows) * num_samples)]
        batch = Batch(number, sampling)
        batch.begin(episodes, on_progress)
        self._workers.call(lambda is_over: self._run(client, batch, is_over, lambda: False))
        return self.scored(episodes, num_samples=num_samples)

    def advance(
        self,
        client: Client,
        episodes: Sequence[Episode],
        sampling: SamplingParams,
        *,
        is_enough: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Runs episodes until `is_enough`, then begins phase TRAIN, which cuts the turns being drawn: the next call continues them.

        The functions and their tools run on meanwhile. Episodes of earlier calls that are not among `episodes` end. Raises as `run`.
        """
        batch = self._carried = self._carried or Batch(-1, sampling, is_carried=True)
        batch.begin(episodes, on_progress)
        self._workers.call(lambda is_over: self._run(client, batch, is_over, is_enough))

    def scored(self, episodes: Sequence[Episode], *, num_samples: int) -> Episodes:
        """Ended episodes, `num_samples` of each row, with their rewards."""
        for first in range(0, len(episodes), num_samples):
            credit_turns(episodes[first : first + num_samples], discount=self._discount, failed=self._failed_reward)
        return Episodes(episodes, self._scores(episodes))

    def _run(self, client: Client, batch: Batch, is_over: threading.Event, is_enough: Callable[[], bool]) -> None:
        is_kept = False
        for episode in batch.release(self._workers.all):
            self._send(batch, episode, None, None)
        waiting = deque(one for one in batch.episodes if not one.has_ended and one.id not in batch.running)
        try:
            while (waiting or batch.running) and not is_over.is_set() and not is_enough():
                for episode in self._begun(batch, waiting):
                    batch.running[episode.id] = episode
                cut = [(episode, *asked) for episode in batch.running.values() for asked in episode.cut]
                if cut:
                    client.acquire(Phase.ROLLOUT)  # unless the node is in it
                for episode, number, asked in cut:
                    episode.cut.clear()
                    self._draw(client, batch, episode, number, asked)
                for run, *message in batch.told_meanwhile:
                    if run in batch.running:
                        self._take(client, batch, batch.running[run], *message)
                batch.told_meanwhile.clear()
                if not batch.lost:
                    batch.lost += self._told(client, batch, timeout_s=0.0 if batch.arrived.qsize() else LOOK_EVERY_S)
                    self._take_arrived(batch)
                lost = {worker: how for worker, how in batch.lost or self._overdue(batch) if worker in self._workers.all}
                batch.lost.clear()
                for worker, how in lost.items():
                    waiting.extend(self._lost(batch, worker, how))
            if batch.is_carried and not is_over.is_set():
                client.begin_acquire(Phase.TRAIN)
            while batch.is_carried and batch.generated and not is_over.is_set():
                connection.wait([batch.wake], LOOK_EVERY_S)
                self._take_arrived(batch)
            is_kept = batch.is_carried and not is_over.is_set()
        finally:
            if not is_kept:
                for generated in list(batch.generated.values()):
                    generated.cancel()
                if batch.running:
                    for worker in list(self._workers.all):
                        self._workers.replace(worker)
                batch.close()
                self._carried = None if batch.is_carried else self._carried

    def _begun(self, batch: Batch, waiting: deque[Episode]) -> list[Episode]:
        """Gives the waiting episodes to the workers in turn."""
        begun: list[Episode] = []
        ready = self._workers.started()
        has_suspect = any(one.num_losses for one in batch.running.values())
        for _ in range(len(waiting) if ready else 0):
            episode = waiting.popleft()
            if episode.num_losses and has_suspect:  # those whose worker has ended run one at a time
                waiting.append(episode)
                continue
            has_suspect |= bool(episode.num_losses)
            worker = ready[episode.index % len(ready)]
            episode.turns, episode.num_runs, episode.num_open = Turns(), episode.num_runs + 1, 0
            episode.id, episode.num_refused, episode.cut = next(self._ids), 0, []
            taken = self._signature.taken
            arguments = {name: value for name, value in episode.row.items() if taken is None or name in taken}
            if self._program is not None:
                arguments = {"row": episode.row, **self._program}
            batch.worker_of[episode.id] = worker
            episode.runs_since = None
            begun.append(episode)
            self._send(batch, episode, None, {"arguments": arguments, "timeout_s": self._timeout_s})
        return begun

    def _send(self, batch: Batch, episode: Episode, number: int | None, fields: Mapping[str, Any] | None) -> None:
        worker = batch.worker_of[episode.id]
        try:
            worker.ask((episode.id, number, fields), timeout_s=math.inf)
        except WorkerEnded as error:
            batch.lost.append((worker, str(error)))

    def _told(self, client: Client, batch: Batch, *, timeout_s: float) -> list[tuple[WorkerProcess, str]]:
        """Waits a moment for the workers and the policy. Returns the workers that have ended, and how."""
        ended: list[tuple[WorkerProcess, str]] = []
        for worker, message, how in self._workers.told(self._workers.all, batch.wake, timeout_s=timeout_s):
            if how:
                ended.append((worker, how))
            elif (episode := batch.running.get(message[0])) is not None:
                self._take(client, batch, episode, *message[1:])
            elif self._carried is not None:
                self._carried.told_meanwhile.append(message)
        return ended

    def _take(self, client: Client, batch: Batch, episode: Episode, number: int | None, kind: str, fields: Any) -> None:
        """A message of an episode: that it runs by itself, its end, or a turn that it asks for."""
        if kind == "left":
            episode.cut = [one for one in episode.cut if one[0] != number]
            if number is not None and (generated := batch.generated.get((episode.id, number))) is not None:
                generated.cancel()
        if kind in ("runs", "left"):
            episode.runs_since = time.monotonic()
            return
        if kind == "end":
            value, cause, episode.turn_rewards = fields
            episode.reward, episode.failure = judged(value, cause)
            if episode.failure and self._on_error == "fail":
                raise self._failed(episode, batch)
            episode.has_ended = True
            del batch.running[episode.id], batch.worker_of[episode.id]
            batch.count(ended=1)
            return
        try:
            if kind == "encode":
                assert self._tokenizer is not None
                self._send(batch, episode, number, {"token_ids": self._tokenizer.encode_text(fields["text"])})
                return
            assert self._tokenizer is not None
            turn = Asked.of(kind, fields, episode.row, turns=episode.turns, tokenizer=self._tokenizer)
            room = self._max_tokens - turn.num_tokens
            if room < 1 or len(episode.turns.turns) + episode.num_open >= self._max_turns:
                episode.turns.is_truncated = True
                episode.num_refused += 1
                over = {"error": f"the episode has had its {self._max_turns} turns or {self._max_tokens} tokens"}
                empty = {**_NO_TURN, "context": [*turn.token_ids_before.tolist(), *turn.new_token_ids.tolist()]}
                self._send(batch, episode, number, empty if episode.num_refused < _MAX_REFUSED else over)
                return
            wanted = [limit for limit in (fields["max_new_tokens"], batch.sampling.max_new_tokens, room) if limit is not None]
            call = number_of_call(batch.number, episode.index, len(episode.turns.turns) + episode.num_open)
            sampling = replace(batch.sampling, max_new_tokens=min(wanted), stop=turn.stop or batch.sampling.stop)
            turn = replace(turn, sampling=sampling, call_number=call, session_key=f"{self._key}-{episode.id}")
        except InvalidArgument as error:
            self._send(batch, episode, number, {"error": error.message})
            return
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # arguments have no types
            self._send(batch, episode, number, {"error": f"{kind}: {error}"})
            return
        assert number is not None
        self._draw(client, batch, episode, number, turn)

    def _draw(self, client: Client, batch: Batch, episode: Episode, number: int, asked: Asked) -> None:
        assert self._tokenizer is not None
        generated = client.submit(partial(asked.draw, is_carried=batch.is_carried, decode=self._tokenizer.decode_whole))
        batch.generated[episode.id, number] = generated
        episode.num_open += 1
        episode.runs_since = None
        generated.add_done_callback(partial(batch.arrive, episode, episode.id, number, asked))

    def _take_arrived(self, batch: Batch) -> None:
        with suppress(BlockingIOError):
            os.read(batch.wake, 1 << 16)
        while batch.arrived.qsize():
            self._answer(batch, *batch.arrived.get())

    def _answer(self, batch: Batch, episode: Episode, run: int, number: int, asked: Asked, done: Future[Sample]) -> None:
        """Records a turn and passes it to its episode."""
        batch.generated.pop((run, number), None)
        if run not in batch.running:
            return  # begun again meanwhile, or over
        episode.num_open -= 1
        if done.cancelled():
            return
        assert self._tokenizer is not None
        try:
            sample = done.result()
            if batch.is_carried and sample.finish_reason is FinishReason.CUT:
                episode.cut.append((number, replace(asked, before=sample)))
                return
            told = asked.answered(sample, turns=episode.turns, tokenizer=self._tokenizer)
        except InvalidArgument as error:  # of what the episode has asked
            self._send(batch, episode, number, {"error": error.message})
            return
        batch.count(tokens=len(sample.token_ids))
        if sample.finish_reason is FinishReason.LENGTH and asked.num_tokens + len(sample.token_ids) >= self._max_tokens:
            episode.turns.is_truncated = True
        self._send(batch, episode, number, told)

    def _overdue(self, batch: Batch) -> list[tuple[WorkerProcess, str]]:
        """Workers that are stopped, or with an episode that has not ended in time: its code blocks the worker's event loop."""
        now = time.monotonic()
        limit = now - self._timeout_s - _GRACE_S
        late = [batch.worker_of[one.id] for one in batch.running.values() if one.runs_since and one.runs_since < limit]
        found = dict.fromkeys(late, f"blocked its worker for over {self._timeout_s:g} s; it was killed")
        stopped = [worker for worker in self._workers.all if parent_and_state(worker.pid)[1] == "T"]
        self._stopped = {worker: self._stopped.get(worker, now) for worker in stopped}
        too_long = [worker for worker, since in self._stopped.items() if since < now - _GRACE_S]
        found |= dict.fromkeys(too_long, f"had its worker stopped for over {_GRACE_S:g} s; it was killed")
        return list(found.items())

    def _lost(self, batch: Batch, worker: WorkerProcess, how: str) -> list[Episode]:
        """Replaces a worker. Returns its episodes, which begin again; those lost too often have failed."""
        lost = [one for one in batch.running.values() if batch.worker_of[one.id] is worker]
        self._workers.replace_ended(worker, how)
        again: list[Episode] = []
        has_told = f"exit code {BLOCKED}" in how  # which episode was at fault
        for episode in lost:
            del batch.running[episode.id]
            episode.num_losses += episode.runs_since is not None and not has_told
            if episode.num_losses < _MAX_LOSSES and episode.num_runs < _MAX_RUNS:
                again.append(episode)
                continue
            episode.failure, episode.has_ended = how, True
            if self._on_error == "fail":
                raise self._failed(episode, batch)
        return again

    def _scores(self, episodes: Sequence[Episode]) -> Scores:
        rewards = np.array([self._failed_reward if one.failure else one.reward for one in episodes], np.float32)
        failures = [one.failure for one in episodes]
        return Scores(rewards, sum(map(bool, failures)), {"episode": rewards}, failures)

    def _failed(self, episode: Episode, batch: Batch) -> RewardFailed:
        sample, size = batch.episodes.index(episode), len({id(one.row) for one in batch.episodes})
        prompt = sample * size // len(batch.episodes)
        text = f"episode {self._function} failed for sample {sample} (prompt {prompt}): {episode.failure}"
        return RewardFailed(text, sample=sample, prompt=prompt, cause=episode.failure, reward="episode")
