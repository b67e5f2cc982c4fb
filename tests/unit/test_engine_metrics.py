"""SGLang's metrics, as the front reads them from its ranks' files."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from tasuki.rollout.metrics import EngineMetrics


def write(file: Path, name: str, *, value: float, rank: str) -> None:
    """Writes a metric as a rank's process does."""
    written = MmapedDict(str(file))
    written.write_value(mmap_key(name, name, ["dp_rank"], [rank], "A help text."), value, 1.0)
    written.close()


def test_each_ranks_value_is_read_again_at_every_scrape_whatever_file_is_new(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, tmp_path)
    assert generate_latest(registry) == b"", "no other metric of this process"
    write(tmp_path / "gauge_mostrecent_7.db", "sglang:token_usage", value=0.25, rank="0")
    write(tmp_path / "gauge_mostrecent_8.db", "sglang:token_usage", value=0.75, rank="1")
    (tmp_path / "counter_8.db").touch()  # just created by its rank
    told = generate_latest(registry).decode().splitlines()
    assert sorted(told) == [
        "# HELP sglang:token_usage A help text.",
        "# TYPE sglang:token_usage gauge",
        'sglang:token_usage{dp_rank="0"} 0.25',
        'sglang:token_usage{dp_rank="1"} 0.75',
    ]
