"""Progress of a training run: a live line on a terminal, otherwise one line per step."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasuki.client.async_client import AsyncClient
from tasuki.client.step import Step
from tasuki.wire.errors import TasukiError

_WATCH_AGAIN_S = 0.5
_SHOWN = (
    ("eval/loss", "held-out loss", ".4f"),
    ("log_prob_gap_max", "gap", ".1e"),
    ("explained_variance", "explained", ".2f"),
)
"""Metrics in a step's line: name, label, format."""
INEXACT = (
    "warning: train.top_p or train.top_k filters tokens, but log-probs cover all tokens: importance ratios are biased; "
    "remove both keys to avoid this"
)
"""Printed once per run; the metric inexact_fraction has the amount."""


class TrainProgress:
    """Shows steps as they are reported and, on a terminal, the node's current stage. Use it in a `with` block."""

    def __init__(self, target: str, *, num_steps: int) -> None:
        self._console = Console()
        self._follower = _StageFollower(target, self._show_stage)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[stage]}"),
        )
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("starting", total=num_steps, stage="")
        self._has_warned = False

    def __enter__(self) -> TrainProgress:
        if self._console.is_terminal:
            self._bar.start()
            self._follower.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._follower.stop()
            self._bar.stop()

    def report(self, step: Step) -> None:
        if step.metrics.get("inexact_fraction") and not self._has_warned:
            self._has_warned = True
            sys.stderr.write(f"{INEXACT}\n")
        line = step_line(step)
        if not line:
            return
        if self._console.is_terminal:
            self._console.print(line, highlight=False)
            self._bar.update(self._task, completed=step.step, description=f"version {step.policy_version}")
        else:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def _show_stage(self, stage: str) -> None:
        self._bar.update(self._task, stage=stage)


def step_line(step: Step) -> str:
    """Formats a step as one line, leaving out parts that did not run. Empty if none did: after the last step without a held-out set."""
    parts: list[str] = []
    if step.mean_reward is not None:
        parts.append(f"reward {step.mean_reward:.3f}")
    elif "loss" in step.metrics:
        parts.append(f"loss {step.metrics['loss']:.4f}")
    if step.eval_score is not None:
        parts.append(f"held-out {step.eval_score:.3f}")
    for name, label, form in _SHOWN:
        if name in step.metrics:
            parts.append(f"{label} {step.metrics[name]:{form}}")
    if step.num_failed_rewards:
        parts.append(f"{step.num_failed_rewards} rewards failed")
    if step.num_skipped_updates:
        parts.append(f"{step.num_skipped_updates} updates skipped, gradients not finite")
    if not parts:
        return ""
    return "  ".join([f"step {step.step:>3}", f"version {step.policy_version}", *parts, f"{step.total_seconds():.1f} s"])


class _StageFollower(threading.Thread):
    """Watches the node on its own event loop, to show its stage while the training loop waits."""

    def __init__(self, target: str, show: Callable[[str], None]) -> None:
        super().__init__(name="tasuki-stages", daemon=True)
        self._target, self._show = target, show
        self._loop = asyncio.new_event_loop()
        self._work: asyncio.Task[None] | None = None

    def run(self) -> None:
        self._work = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._work)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    def stop(self) -> None:
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
        self.join()

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def _follow(self) -> None:
        async with AsyncClient(self._target) as client:
            while True:
                # The coordinator may restart; if it does not, the training loop reports that.
                with suppress(TasukiError):
                    async for watched in client.watch():
                        state = watched.state
                        self._show(f"{state.phase}" if state.phase else f"{state.stage} done, {state.next_stage} next")
                await asyncio.sleep(_WATCH_AGAIN_S)
