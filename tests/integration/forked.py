"""Processes that are forks of one that has imported torch and transformers: a test that needs many ranks pays for that once."""

from __future__ import annotations

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["torch", "tests.integration.breaking_rank", "tests.integration.dtensor_ranks", "tests.integration.learning"]
)
