"""Prometheus metrics: what the engine's Stats become, and the page itself."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.ipc.messages import Stats
from headrace.engine.metrics.prometheus import ServerMetrics, selected

REPORT = [
    {
        "op": "linear",
        "chosen": "native",
        "candidates": [
            {"name": "native", "status": "unverified", "rank": 2},
            {"name": "reference", "status": "yes", "rank": 0},
        ],
    },
    {"op": "sample", "chosen": "", "candidates": []},
]


def page(metrics: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render("")[0].decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_stats_are_read_at_the_scrape() -> None:
    stats = Stats(kv_total_blocks=8)
    metrics = ServerMetrics("m", lambda: stats, lambda: REPORT)
    model = (("model_name", "m"),)
    assert page(metrics)["headrace_kv_cache_usage_ratio", model] == 0
    stats.kv_used_blocks, stats.running, stats.prefix_hits = 2, 3, 40
    stats.graphs, stats.graphs_planned = 5, 14
    found = page(metrics)
    assert found["headrace_kv_cache_usage_ratio", model] == 0.25
    assert found["headrace_requests_running", model] == 3
    assert found["headrace_prefix_cache_hits_total", model] == 40
    assert found["headrace_graphs_captured", model] == 5
    assert found["headrace_graphs_planned", model] == 14


def test_selection() -> None:
    assert list(selected(REPORT)) == [("linear", "native", "unverified")]
    metrics = ServerMetrics("m", Stats, lambda: REPORT * 3)
    labels = (("impl", "native"), ("model_name", "m"), ("op", "linear"), ("status", "unverified"))
    assert page(metrics)["headrace_selection_info", labels] == 1


def test_before_the_engine_is_ready() -> None:
    found = page(ServerMetrics('odd "name"\n\\', Stats, list))
    assert found["headrace_kv_cache_usage_ratio", (("model_name", 'odd "name"\n\\'),)] == 0


def test_no_creation_times_and_two_servers_in_one_process() -> None:
    first, second = ServerMetrics("a", Stats, list), ServerMetrics("b", Stats, list)
    first.generation_tokens.inc(5)
    assert page(first)["headrace_generation_tokens_total", (("model_name", "a"),)] == 5
    assert page(second)["headrace_generation_tokens_total", (("model_name", "b"),)] == 0
    assert b"_created" not in first.render("")[0]
