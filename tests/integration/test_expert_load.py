"""The load of a mixture's experts, over two ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tasuki.trainer.modules.routing import ExpertLoad, Router, replace_routers
from tests.integration.forked import processes
from tests.models import make_model


def load_of_rank(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = make_model("mixtral", seed=5)
    replace_routers(model)
    load = ExpertLoad(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), device=torch.device("cpu"))
    for router in model.modules():
        if isinstance(router, Router):
            # Over both ranks: 4, 2, 2, 0, 0.
            router.load_E += torch.tensor([[3, 0, 1, 0, 0], [1, 2, 1, 0, 0]][rank])
    metrics = load.take()
    results.put({name: (metric.total.item(), metric.weight.item()) for name, metric in metrics.items()})
    dist.destroy_process_group()


def test_counts_of_ranks_add_up_before_they_are_compared(tmp_path: Path) -> None:
    results = processes.Queue()
    ranks = [
        processes.Process(target=load_of_rank, args=(rank, str(tmp_path / "store"), results), daemon=True) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(30)
    for each in found:
        assert each["expert_load_max"] == (2.5, 1.0)
        assert each["idle_expert_fraction"][0] / each["idle_expert_fraction"][1] == 0.4
