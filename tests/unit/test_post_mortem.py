"""Errors of commands whose node died while they ran: the failed process in words, and no blame for an orderly stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.config.paths import exit_path, log_path
from tasuki.config.schema import ModelConfig, NodeConfig
from tasuki.node.exit_report import explained, node_down, why_it_ended, write_exit_report
from tasuki.wire.errors import Draining, NodeDown, PeerUnavailable, ServiceFailed, TasukiError, UnsupportedModel


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    log_path(tmp_path, "supervisor").parent.mkdir()
    log_path(tmp_path, "supervisor").write_text("event=started service=trainer pid=7\n")
    return NodeConfig(state_dir=tmp_path, model=ModelConfig(path=tmp_path))


@pytest.mark.parametrize("failure", [PeerUnavailable("gone"), Draining("drains"), NodeDown("has ended")])
def test_an_orderly_stop_is_a_node_that_is_down(failure: TasukiError, config: NodeConfig) -> None:
    write_exit_report(config.state_dir, reason="asked by SIGTERM", first=None, exit_codes={"trainer": 1, "rollout": -9})
    with pytest.raises(NodeDown, match="has ended: asked by SIGTERM"), explained(config):
        raise failure


@pytest.mark.parametrize("report", ["", "[]", "{}", '{"reason": 1}', "[" * 100_000, '{"reason": "r", "first": 3}'])
def test_a_damaged_report_is_none(report: str, config: NodeConfig) -> None:
    exit_path(config.state_dir).write_text(report)
    assert "has ended without a report" in why_it_ended(config).message
    assert "the last one ended" not in node_down(config.state_dir).message


def test_a_service_that_ended_too_often_is_named_in_words_with_what_it_said(config: NodeConfig) -> None:
    reason = "coordinator ended by itself, more often than restart.max_restarts allows"
    write_exit_report(
        config.state_dir, reason=reason, first="coordinator", exit_codes={"coordinator": -9}, restarts={"coordinator": 5}
    )
    log_path(config.state_dir, "coordinator").write_text("event=epoch epoch=6\n")
    error = why_it_ended(config)
    assert isinstance(error, ServiceFailed)
    assert error.message.startswith(f"{reason} (signal SIGKILL, restarted 5 times); ")
    assert error.message.endswith("coordinator.log says:\nevent=epoch epoch=6")
    log_path(config.state_dir, "coordinator").write_text("tasuki: error UNSUPPORTED_MODEL: none of ours\n")
    assert isinstance(why_it_ended(config), UnsupportedModel)


def test_a_node_whose_supervisor_and_guard_were_killed_left_no_word(config: NodeConfig) -> None:
    assert isinstance(why_it_ended(config), NodeDown)
    assert "its supervisor and guard were killed" in why_it_ended(config).message


def test_a_supervisor_that_started_nothing_is_a_failure_with_its_words(config: NodeConfig) -> None:
    log_path(config.state_dir, "supervisor").write_text("tasuki: error UNSUPPORTED_MODEL: none of ours\n")
    assert isinstance(why_it_ended(config), UnsupportedModel)
    log_path(config.state_dir, "supervisor").write_text("Traceback (most recent call last):\n  File x\nImportError: no torch\n")
    with pytest.raises(ServiceFailed, match="ImportError: no torch"):
        raise why_it_ended(config)
