"""Spans of a changeover and of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tasuki.coordinator.records import Intent
from tasuki.memory.stages import Phase
from tasuki.wire.errors import TasukiError
from tasuki.wire.tracing import CHANGEOVER_ID, NO_TRACER, REQUEST_ID, Span, SpanKind, Tracer, current, spanning


class ChangeoverTrace:
    """Span of a changeover, child of the call that requested it."""

    def __init__(self, tracer: Tracer, *, changeover_id: str, target: Phase, request_id: str) -> None:
        self._tracer, self._changeover_id = tracer, changeover_id
        attributes = {REQUEST_ID: request_id, CHANGEOVER_ID: changeover_id}
        self._span = tracer.begin(f"changeover to {target}", kind=SpanKind.INTERNAL, attributes=attributes)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Makes calls in the block children of the changeover."""
        with current(self._span):
            yield

    @contextmanager
    def stage(self, intent: Intent) -> Iterator[Span]:
        """Span of a stage, or of its undo; parent of the calls in the block."""
        name = f"undo {intent.stage}" if intent.is_undo else f"stage {intent.stage}"
        attributes = {REQUEST_ID: intent.request_id, CHANGEOVER_ID: self._changeover_id}
        with self.around(), spanning(self._tracer.begin(name, kind=SpanKind.INTERNAL, attributes=attributes)) as span:
            yield span

    def end(self, error: TasukiError | None) -> None:
        if error is not None:
            self._span.fail(error.reason)
        self._span.end()


NO_TRACE = ChangeoverTrace(NO_TRACER, changeover_id="", target=Phase.TRAIN, request_id="")
