"""The whole RL loop: evaluate, generate groups, score them, compute advantages, train, hand over the GPUs, repeat.

`tasuki train` and `make demo` run this file, also importable as tasuki.client.rl_loop. Copy it to write a loop.
GRPO, RLOO, REINFORCE++, ReMax, PPO with a critic, DAPO, GSPO, CISPO and SAPO are settings of it: docs/reference/algorithms.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.advantages import soft_overlong_penalty
from tasuki.algorithms.loss_types import OldPolicy
from tasuki.client.carry import CarriedGroup, Carry, staleness
from tasuki.client.chat import Tokenizer
from tasuki.client.dataset import Dataset, Row
from tasuki.client.episode import Episodes
from tasuki.client.episodes import EpisodePool
from tasuki.client.estimation import (
    Estimator,
    EstimatorState,
    Group,
    estimate_advantages,
    has_advantages,
    has_loss_tokens,
    mini_batches,
    training_samples,
)
from tasuki.client.evaluation import eval_figures
from tasuki.client.images import images_of
from tasuki.client.loop_state import PendingStep, is_save_due, note_updated, save_checkpoint, write_pending
from tasuki.client.progress import Progress
from tasuki.client.rewards import Completion, RewardPool, Scores
from tasuki.client.sample_dump import SampleDump
from tasuki.client.shown_samples import ShownSamples
from tasuki.client.step import Step, averaged, measure_samples
from tasuki.client.sync_client import Client
from tasuki.client.types import ForwardBackwardResult, Phase, Role, Sample, SamplingParams, TrainingSample, role_versions
from tasuki.config.train_schema import TrainConfig
from tasuki.wire.errors import GradientsNotFinite

_PART_BITS = 16
"""A call to generate has the step's number and, in its lowest bits, the part's: the same if the step is made again."""
_NOTE_EVERY = 128
"""Updates of a step after which they are recorded as made: the trainer remembers a thousand calls."""


_Made = tuple[list[list[int]], list[Sample], Episodes | None]  # [P] prompts, [P * G] samples in order, and their episodes


@dataclass(slots=True)
class RlLoop:
    """One run: the node, the data and the settings."""

    client: Client
    dataset: Dataset
    eval_rows: Sequence[Row]
    tokenizer: Tokenizer
    rewards: RewardPool | EpisodePool
    settings: TrainConfig
    state: EstimatorState = field(default_factory=EstimatorState)
    dump: SampleDump | None = None
    """Where samples of each step are written for inspection; eval_dump: those of evaluations."""
    eval_dump: SampleDump | None = None
    save_now: Callable[[], bool] = lambda: False
    """Polled after each training step: whether to save it even if no checkpoint is due."""
    progress: Progress = field(default_factory=Progress)
    carry: Carry = field(default_factory=Carry)
    """Groups that were cut by a changeover, with `oversample` above 1."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
            stop_token_ids=self.settings.stop_token_ids,
            stop=self.settings.stop,
        )

    def run(self, report: Callable[[Step], None], *, first_step: int = 0, pending: PendingStep | None = None) -> None:
        """Trains from `first_step` on. `report` gets each finished step, and a last one with the final evaluation only.

        pending: the first step, if an interrupted run had begun its updates.
        """
        settings = self.settings
        if pending is not None:
            report(self.completed(pending))
            first_step += 1
        number = settings.num_steps  # of a run resumed after its last step
        for number in range(first_step, settings.num_steps + 1):
            step = Step(number)
            is_last = number == settings.num_steps
            if self.needs_rollout(number):
                self.progress.begin(number, "to_rollout")
                step.acquire(self.client, Phase.ROLLOUT)
            step.policy_version = self.client.trainer_state().policy_version
            if self.eval_rows and (is_last or number % (settings.eval_every or settings.num_steps) == 0):
                self.evaluate(step)
            target = settings.stop_at_eval_score
            is_last |= target is not None and step.eval_score is not None and step.eval_score >= target
            if not is_last:
                self.learn(step)
            report(step)
            if is_last:
                break
        self.progress.begin(number, "export")
        self.client.export_model(settings.output_dir / "model")

    def needs_rollout(self, number: int) -> bool:
        """Whether a step generates; the last one does only to evaluate."""
        return number < self.settings.num_steps or bool(self.eval_rows)

    def evaluate(self, step: Step) -> None:
        """Generates and scores completions of the held-out prompts."""
        settings, evaluation = self.settings, self.settings.eval
        sampling = replace(
            self.sampling,
            max_new_tokens=settings.max_new_tokens if evaluation.max_new_tokens is None else evaluation.max_new_tokens,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            top_k=None,
        )
        with self.progress.timed(step, "evaluate", total=len(self.eval_rows) * evaluation.num_samples):
            made = self.make(self.eval_rows, sampling, num_samples=evaluation.num_samples, call_number=step.step << _PART_BITS)
            completions, scores = self.scored(self.eval_rows, *made)
            figures = eval_figures(scores, evaluation)
        if self.eval_dump is not None:
            shown = self.eval_dump.begin(step.step)
            shown.add(self.eval_rows, completions, made[1], scores, scores.rewards)
            self.eval_dump.write(shown)
        step.eval_score = figures.pop("mean", None)
        step.metrics |= {f"eval/{name}": value for name, value in figures.items()}

    def learn(self, step: Step) -> None:
        """Runs one step: groups of completions, their advantages, updates, and a checkpoint if one is due."""
        shown = ShownSamples(step.step) if self.dump is None else self.dump.begin(step.step)
        groups = self.sample_groups(step, shown)
        step.position = self.dataset.position()
        pending = PendingStep(step, schedule_steps=self.settings.num_steps, carried=self.carry.records())
        try:
            if groups:
                self.estimate(pending, groups, shown)
                self.update(pending, shown)
        finally:  # a run that resumes within the updates no longer has the texts
            if self.dump is not None:
                self.dump.write(shown)
        if pending.carried and not pending.samples:
            write_pending(self.settings.output_dir, pending)  # nothing was learned, but the next step continues these
        self.finish(pending)

    def completed(self, pending: PendingStep) -> Step:
        """Finishes a step whose updates an interrupted run had begun. None of them is made twice."""
        step, shown = pending.step, ShownSamples(pending.step.step)
        self.progress.begin(step.step, "to_train")
        self.dataset.seek(step.position)
        self.state, self.carry = EstimatorState.of(step.estimator), Carry.of(pending.carried)
        step.acquire(self.client, Phase.TRAIN)
        self.update(pending, shown)
        self.finish(pending)
        return step

    def finish(self, pending: PendingStep) -> None:
        """Ends a step after its updates, with a checkpoint if one is due."""
        step = pending.step
        is_saved = self.save_now() or is_save_due(step, self.settings.save_every)
        if not is_saved and self.needs_rollout(step.step + 1):
            # Runs while the step's figures and samples are written.
            step.begin_acquire(self.client, Phase.ROLLOUT)
        step.estimator = self.state.numbers()
        if is_saved:
            self.progress.begin(step.step, "save")
            save_checkpoint(pending, self.client, self.dataset.position(), output_dir=self.settings.output_dir)

    def sample_groups(self, step: Step, shown: ShownSamples) -> list[Group]:
        """Generates the groups of a step; with dynamic sampling, only groups whose rewards differ."""
        settings = self.settings
        generated: list[tuple[list[Sample], Scores]] = []

        def generate(num_prompts: int) -> list[Group]:
            is_carried = settings.oversample > 1
            rows = [] if is_carried else self.dataset.next_rows(num_prompts)
            is_last = len(generated) + 1 == settings.max_batches
            call_number = (step.step << _PART_BITS) + len(generated) + 1
            size, has_greedy = settings.group_size, settings.advantages.estimator is Estimator.GREEDY_BASELINE
            greedy, ran = list[Sample](), None
            with self.progress.timed(step, "generate", total=num_prompts * (size + has_greedy)):
                if has_greedy:
                    greedy = self.complete(rows, replace(self.sampling, temperature=0.0), num_samples=1)[1]
                if is_carried:
                    rows, (prompts, samples, ran) = self.first_complete(step, call_number=call_number)
                else:
                    prompts, samples, ran = self.make(rows, self.sampling, num_samples=size, call_number=call_number)
            if is_last:
                # Nothing more will be generated: the trainer resumes while rewards are computed.
                step.begin_acquire(self.client, Phase.TRAIN)
            with self.progress.timed(step, "reward"):
                completions, scores = self.scored(rows, prompts, samples, ran)
                greedy_rewards: list[float | None] = [None] * len(prompts)
                if has_greedy:
                    greedy_rewards = self.shaped(greedy, self.scored(rows, prompts, greedy)[1].rewards).tolist()
            generated.append((samples, scores))
            step.metrics |= {} if ran is None else ran.figures()
            rewards_S = self.shaped(samples, scores.rewards)
            shown.add(rows, completions, samples, scores, rewards_S)
            branches = [] if ran is None else [one.training_samples() for one in ran.episodes]
            groups = zip(range(0, len(samples), size), prompts, rewards_S.reshape(-1, size), greedy_rewards, strict=True)
            return [
                Group(prompt, samples[place : place + size], rewards, reward, branches[place : place + size])
                for place, prompt, rewards, reward in groups
            ]

        groups: list[Group] = []
        num_generated = 0
        while len(groups) < settings.prompts_per_step and len(generated) < settings.max_batches:
            batch = generate(settings.prompts_per_step - len(groups))
            num_generated += len(batch)
            alike = [group for group in batch if len(group.samples) > 1 and not group.differs()]
            step.num_equal_groups += len(alike)
            step.num_failed_groups += sum(bool(np.isnan(group.rewards).any()) for group in alike)
            groups += batch if settings.max_batches == 1 else [group for group in batch if group.differs()]
        if settings.max_batches > 1:
            step.metrics["num_generated_groups"] = num_generated
        measure_samples(step, generated, group_size=settings.group_size)
        return groups

    def first_complete(self, step: Step, *, call_number: int) -> tuple[list[Row], _Made]:
        """Generates until enough groups are complete, those cut before among them; the others are carried into the next step."""
        settings, carry, version = self.settings, self.carry, step.policy_version or 0
        step.metrics |= carry.drop_stale(oldest=version - settings.max_staleness)
        num_new = settings.num_running_groups - len(carry.groups)
        size, enough, count = settings.group_size, settings.prompts_per_step, self.progress.counter()
        numbered = list(enumerate(self.dataset.next_rows(num_new), start=step.step << _PART_BITS))
        if isinstance(self.rewards, EpisodePool):
            carry.groups += [CarriedGroup.begin_episodes(number, row, group_size=size) for number, row in numbered]
            taken = carry.take_episodes(self.client, self.rewards, self.sampling, num_groups=enough, on_progress=count)
            ran = self.rewards.scored([one for group in taken for one in group.episodes], num_samples=size)
            prompts, samples = ran.samples(num_samples=size)
        else:
            for number, row in numbered:
                prompt = self.tokenizer.encode_prompt(row["prompt"], row)
                carry.groups.append(CarriedGroup.begin(number, row, prompt, group_size=size))
            taken = carry.take(
                self.client,
                self.sampling,
                num_groups=enough,
                call_number=call_number,
                decode=self.tokenizer.decode_whole,
                on_progress=count,
            )
            samples = [replace(sample, prompt_index=place) for place, group in enumerate(taken) for sample in group.samples]
            prompts, ran = [list(group.prompt_token_ids) for group in taken], None
        drawn = [sample for group in taken for sample in group.drawn]
        step.metrics |= staleness(drawn, policy_version=version) | {"carried_groups": float(len(carry.groups))}
        return [group.row for group in taken], (prompts, samples, ran)

    def make(self, rows: Sequence[Row], sampling: SamplingParams, *, num_samples: int, call_number: int) -> _Made:
        """Generates completions, or runs episodes, whose tokens after the first prompt are the completion."""
        if not isinstance(self.rewards, EpisodePool):
            return *self.complete(rows, sampling, num_samples=num_samples, call_number=call_number), None
        count = self.progress.counter()
        ran = self.rewards.run(self.client, rows, sampling, num_samples=num_samples, number=call_number, on_progress=count)
        return *ran.samples(num_samples=num_samples), ran

    def complete(
        self, rows: Sequence[Row], sampling: SamplingParams, *, num_samples: int, call_number: int | None = None
    ) -> tuple[list[list[int]], list[Sample]]:
        """Generates completions; returns the prompts and the samples, ordered by prompt."""
        prompts = [self.tokenizer.encode_prompt(row["prompt"], row) for row in rows]
        images, count = [images_of(row["prompt"]) for row in rows], self.progress.counter()
        return prompts, self.client.generate(
            prompts, sampling, num_samples=num_samples, call_number=call_number, images=images, on_progress=count
        )

    def scored(
        self, rows: Sequence[Row], prompts: Sequence[list[int]], samples: Sequence[Sample], ran: Episodes | None = None
    ) -> tuple[list[Completion], Scores]:
        """Decodes samples for the reward functions, and calls these. Episodes have their rewards."""
        completions = [
            Completion.of(sample, text=self.tokenizer.decode(sample.token_ids), prompt_token_ids=prompts[sample.prompt_index])
            for sample in samples
        ]
        if isinstance(self.rewards, EpisodePool):
            assert ran is not None
            return completions, ran.scores
        return completions, self.rewards.score(rows, completions, group_size=len(samples) // len(rows))

    def shaped(self, samples: Sequence[Sample], rewards_S: NDArray[np.float32]) -> NDArray[np.float32]:
        """Applies DAPO's penalty for completions near the length limit."""
        limit, buffer = self.settings.max_new_tokens, self.settings.overlong_tokens
        if buffer is None:
            return rewards_S
        lengths_S = np.array([len(sample.token_ids) for sample in samples])
        return rewards_S + soft_overlong_penalty(lengths_S, max_completion_tokens=limit, buffer_tokens=buffer)

    def estimate(self, pending: PendingStep, groups: Sequence[Group], shown: ShownSamples) -> None:
        """Computes the advantages and records the step, with everything that its updates need. Without a gradient does nothing."""
        settings = self.settings
        has_others = settings.loss.kl_coef or settings.loss.entropy_coef or settings.advantages.kl_coef
        has_gradient = has_others or not settings.advantages.estimator.needs_groups or any(each.differs() for each in groups)
        samples, places = training_samples(groups, mask_truncated=settings.mask_truncated)
        if not has_gradient or not has_loss_tokens(samples):
            return
        step = pending.step
        self.progress.begin(step.step, "to_train")
        step.acquire(self.client, Phase.TRAIN)
        samples = self.with_log_probs(step, samples)
        estimate = estimate_advantages(
            samples,
            rewards_PG=np.stack([group.rewards for group in groups]),
            places=places,
            greedy_rewards_P=np.array([group.greedy_reward for group in groups], dtype=np.float64),
            settings=settings.advantages,
            state=self.state,
        )
        self.state = estimate.state
        step.metrics |= estimate.metrics
        step.estimator = self.state.numbers()
        generated = [sample for group in groups for sample in group.samples]
        shown.add_learned(estimate.samples, [generated[place] for place in places])
        if settings.critic_loss() is not None:
            step.critic_version = role_versions(self.client.trainer_state())[Role.CRITIC]
        pending.samples = estimate.samples
        pending.log_probs_of = next((shown.wanted(part) for role, part in self.updates(pending) if role is Role.POLICY), ())
        if self.dump is not None:
            self.dump.write_ahead(shown)
        write_pending(settings.output_dir, pending)

    def update(self, pending: PendingStep, shown: ShownSamples) -> None:
        """Takes an optimizer step for each update of the step that has none yet, and adds their metrics to the step."""
        wanted = pending.log_probs_of
        for number, (role, samples) in enumerate(self.updates(pending)):
            asked, wanted = ((), wanted) if role is Role.CRITIC else (wanted, ())
            if number < len(pending.measured):
                continue
            try:
                done = self.update_role(pending, role, samples, request_id=f"{pending.request_id}-{number}", log_probs_of=asked)
            except GradientsNotFinite:
                note_updated(self.settings.output_dir, pending)  # --resume goes on after what was learned
                raise
            shown.add_log_probs(samples, asked, [np.array(one.log_probs, dtype=np.float32) for one in done.log_probs])
            if len(pending.measured) % _NOTE_EVERY == 0:
                write_pending(self.settings.output_dir, pending)
        pending.step.metrics |= averaged(pending.measured)

    def updates(self, pending: PendingStep) -> Iterator[tuple[Role, list[TrainingSample]]]:
        """Samples of each optimizer step, by role."""
        settings, number = self.settings, pending.step.step
        # Without a gradient, a step would still move the weights through AdamW's moments.
        has_others = bool(settings.loss.kl_coef or settings.loss.entropy_coef)
        seeds = [(self.dataset.seed, number, epoch) for epoch in range(settings.num_epochs)]
        for mini_batch in mini_batches(pending.samples, num_parts=settings.num_mini_batches, seeds=seeds):
            if settings.critic_loss() is not None:
                yield Role.CRITIC, mini_batch
            if number >= settings.critic_warmup_steps and (has_others or has_advantages(mini_batch)):
                yield Role.POLICY, mini_batch

    def with_log_probs(self, step: Step, samples: list[TrainingSample]) -> list[TrainingSample]:
        """Adds the log-probs and values that the losses need, computed by the networks before the step's updates."""
        settings = self.settings
        if settings.loss.kl_coef or settings.advantages.kl_coef:
            with self.progress.timed(step, "ref_log_probs"):
                ref = self.client.compute_log_probs(samples, role=Role.REFERENCE)
            samples = [replace(sample, ref_log_probs=row) for sample, row in zip(samples, ref, strict=True)]
        if settings.policy_loss().old_policy is OldPolicy.GIVEN:
            with self.progress.timed(step, "old_log_probs"):
                samples = self.client.with_old_log_probs(samples)
        if settings.critic_loss() is not None:
            with self.progress.timed(step, "values"):
                values = self.client.compute_values(samples)
            samples = [replace(sample, values=row) for sample, row in zip(samples, values, strict=True)]
        return samples

    def update_role(
        self, pending: PendingStep, role: Role, samples: list[TrainingSample], *, request_id: str, log_probs_of: Sequence[int]
    ) -> ForwardBackwardResult:
        """Takes one optimizer step of the role, and adds its figures to the pending step."""
        step, is_critic = pending.step, role is Role.CRITIC
        loss = self.settings.critic_loss() if is_critic else self.settings.policy_loss()
        waits = 0 if is_critic else self.settings.critic_warmup_steps
        num_updates = self.settings.num_updates * (1 if self.settings.critic_loss() is None else 2)
        with self.progress.timed(
            step, "critic" if is_critic else "forward_backward", done=len(pending.measured), total=num_updates
        ):
            done = self.client.forward_backward(samples, loss, role=role, log_probs_of=log_probs_of, request_id=request_id)
        with step.timed("critic" if is_critic else "optim_step"):
            stepped = self.client.optim_step(
                role=role,
                schedule_step=step.step - waits,
                schedule_steps=(pending.schedule_steps or self.settings.num_steps) - waits,
                request_id=f"{request_id}-step",
            )
        metrics, figures = dict(done.metrics), {"grad_norm": stepped.grad_norm, "learning_rate": stepped.learning_rate}
        step.num_skipped_updates += stepped.is_skipped
        if is_critic:
            step.num_critic_steps += not stepped.is_skipped
            metrics = {f"critic/{name}": value for name, value in (metrics | figures).items()}
        elif not stepped.is_skipped:
            step.num_policy_steps += 1
            step.grad_norm, step.learning_rate = stepped.grad_norm, stepped.learning_rate
        pending.measured.append(metrics)
        return done
