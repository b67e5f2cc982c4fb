"""A whole fleet beside a single trainer: the same losses, the same weights on all nodes, and the bytes that cross the link."""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tasuki.client import Client, Phase
from tests.fleet.batches import batch, losses_alone, write_node
from tests.fleet.network import Place, places_of
from tests.fleet.nodes import real_fleet

NUM_STEPS = 20
pytestmark = pytest.mark.timeout(900)


class LinkMeter:
    """Bytes that the nodes received over their interfaces, by activity."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self.crossed: dict[str, list[int]] = {}
        """Sums over the nodes, for each time."""

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        before = self._received()
        yield
        self.crossed.setdefault(what, []).append(self._received() - before)

    def _received(self) -> int:
        return sum(place.received_bytes() for place in self._places)


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_the_whole_fleet_learns_as_one_trainer_and_only_gradients_cross_the_link(folder: Path, num_nodes: int) -> None:
    base = write_node(folder)
    expected = losses_alone(folder, num_steps=NUM_STEPS)
    losses: list[float] = []
    digests: set[bytes] = set()
    with places_of(num_nodes) as places, real_fleet(folder, places, base=base) as fleet:
        fleet.start()
        fleet.wait_until_up()
        meter = LinkMeter(places)
        with Client(fleet.target) as client:
            for step in range(NUM_STEPS):
                client.acquire(Phase.TRAIN)
                with meter.during("forward_backward"):
                    losses.append(client.forward_backward(batch(step)).loss)
                with meter.during("optim_step"):
                    assert client.optim_step().version == step + 1
                with meter.during("to_rollout"):
                    client.acquire(Phase.ROLLOUT)
                (digest,) = set(fleet.weights_digests())
                digests.add(digest)
            num_parameters = client.trainer_state().num_parameters
        judged = fleet.tasuki("doctor", base, "--set", f"state_dir={fleet.nodes[0].state_dir}", "--json")
        is_apart = places[0].host != places[1].host
    figures: dict[str, Any] = {
        "num_nodes": num_nodes,
        "num_parameters": num_parameters,
        "gradient_bytes": 2 * (num_nodes - 1) * 4 * num_parameters,
    }
    findings = {one["name"]: one for one in json.loads(judged.stdout) if one["name"].startswith("fleet")}
    figures["doctor"] = {name: one["found"] for name, one in findings.items()}
    figures |= {what: int(statistics.median(crossed)) for what, crossed in meter.crossed.items()}
    figures["largest_loss_difference"] = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    Path("runs/fleet").mkdir(parents=True, exist_ok=True)
    Path(f"runs/fleet/link-{num_nodes}.json").write_text(json.dumps(figures, indent=1) + "\n")
    assert losses == pytest.approx(expected, abs=1e-5)
    assert len(digests) == NUM_STEPS
    assert not [one for one in findings.values() if one["verdict"] == "fail"], judged.stdout
    assert "by gloo" in findings["fleet gradients"]["found"]
    if is_apart:
        # Each of two nodes sends its gradients once (of three, 4/3 times). The rest are calls, whose size does not depend on the model.
        assert figures["gradient_bytes"] <= figures["optim_step"] < 1.25 * figures["gradient_bytes"]
        assert figures["forward_backward"] < 100_000
        assert figures["to_rollout"] < 100_000
