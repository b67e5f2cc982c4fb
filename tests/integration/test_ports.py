"""Ports: a client with a certificate or a token trains as on the unix socket."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tasuki.client import AsyncClient
from tests.integration.port_node import make_certs, make_tokens, mtls, port_config, port_node, tokens


async def test_client_with_a_certificate_generates_and_trains(tmp_path: Path) -> None:
    folder = make_certs(tmp_path / "certs")
    config = port_config(tmp_path, *mtls(folder), host="0.0.0.0")
    async with port_node(config, folder) as node:
        async with AsyncClient(node.target, credentials=node.credentials()) as client:
            assert (await client.state()).epoch == 1
            samples = await client.generate([[5, 6]], num_samples=2)
            assert len(samples) == 2
            assert (await client.trainer_state()).policy_version == 0
