"""Prometheus metrics of one server, in a registry of their own.

Every sample carries `model_name`, the first served name. Histograms and request counters are observed by the API
process; gauges and cache counters come from the engine's latest Stats at the moment of the scrape.

| name | kind | meaning |
|---|---|---|
| headrace_time_to_first_token_seconds | histogram | request received to its first token, each choice |
| headrace_inter_token_latency_seconds | histogram | between tokens of a choice; what arrives together shares the gap |
| headrace_request_latency_seconds | histogram | request received to the choice's end |
| headrace_request_queue_seconds | histogram | submitted to first scheduled |
| headrace_request_prompt_tokens, headrace_request_generation_tokens | histogram | lengths |
| headrace_prompt_tokens_total, headrace_generation_tokens_total | counter | as in `usage` |
| headrace_prompt_cached_tokens_total | counter | prompt tokens answered from the prefix cache, as in `usage` |
| headrace_requests_finished_total{finish_reason} | counter | stop, length, abort, error; each choice |
| headrace_http_requests_total{method,route,status} | counter | every HTTP request |
| headrace_requests_running, headrace_requests_waiting | gauge | sequences in the engine |
| headrace_sleeping | gauge | 1 from POST /sleep until all is awake again |
| headrace_kv_cache_usage_ratio | gauge | used blocks / all blocks |
| headrace_graphs_captured, headrace_graphs_planned | gauge | sizes of steps that are, and will be, captured |
| headrace_prefix_cache_queries_total, headrace_prefix_cache_hits_total | counter | prompt tokens looked up, found |
| headrace_preemptions_total | counter | |
| headrace_engine_steps_total, headrace_engine_step_tokens_total | counter | steps and the tokens they computed |
| headrace_selection_info{op,impl,status} | gauge 1 | which implementation serves an op |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.ipc.messages import Stats

_LATENCY = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_LENGTH = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics:
    """What the API process observes. `stats` and `selection` are asked at each scrape."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Stats],
        selection: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._model = model_name
        self.first_token = self._histogram(
            "headrace_time_to_first_token_seconds", "Request received to its first token.", _LATENCY
        )
        self.inter_token = self._histogram(
            "headrace_inter_token_latency_seconds", "Time between tokens of one choice.", _LATENCY
        )
        self.latency = self._histogram(
            "headrace_request_latency_seconds", "Request received to the choice's end.", _LATENCY
        )
        self.queue = self._histogram(
            "headrace_request_queue_seconds", "Submitted to first scheduled.", _LATENCY
        )
        self.prompt_length = self._histogram(
            "headrace_request_prompt_tokens", "Prompt tokens of a prompt.", _LENGTH
        )
        self.generation_length = self._histogram(
            "headrace_request_generation_tokens", "Tokens generated for a choice.", _LENGTH
        )
        self.prompt_tokens = self._counter("headrace_prompt_tokens", "Prompt tokens, as in usage.")
        self.generation_tokens = self._counter(
            "headrace_generation_tokens", "Generated tokens, as in usage."
        )
        self.cached_tokens = self._counter(
            "headrace_prompt_cached_tokens", "Prompt tokens found in the prefix cache."
        )
        finished = Counter(
            "headrace_requests_finished",
            "Choices that ended, by reason.",
            ("model_name", "finish_reason"),
            registry=self.registry,
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in FINISH_REASONS}
        self._http = Counter(
            "headrace_http_requests",
            "HTTP requests answered.",
            ("model_name", "method", "route", "status"),
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(model_name, stats, selection))

    def http(self, method: str, route: str, status: int) -> None:
        """Count a request. `route` is the pattern that matched, so that the label's values are few."""
        self._http.labels(self._model, method, route, str(status)).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) for a scraper that sent this Accept header."""
        encoder, content_type = exposition.choose_encoder(accept)
        return encoder(_WithoutCreated(self.registry)), content_type

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
        return family.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)


class _WithoutCreated(Collector):
    """The registry without the `_created` time stamps: a third of the page, and nothing asks for them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
            family.samples = kept
            yield family


class _EngineCollector(Collector):
    """Turns the engine's Stats into samples when scraped."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], Stats],
        selection: Callable[[], Iterable[dict[str, Any]]],
    ) -> None:
        self._model = model_name
        self._stats = stats
        self._selection = selection

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.kv_used_blocks / stats.kv_total_blocks if stats.kv_total_blocks else 0.0
        yield self._gauge("headrace_requests_running", "Sequences that run.", stats.running)
        yield self._gauge("headrace_requests_waiting", "Sequences that wait.", stats.waiting)
        yield self._gauge("headrace_sleeping", "Whether the server sleeps.", int(stats.sleeping))
        yield self._gauge("headrace_kv_cache_usage_ratio", "KV blocks in use, 0 to 1.", used)
        yield self._gauge("headrace_graphs_captured", "Step sizes captured.", stats.graphs)
        yield self._gauge("headrace_graphs_planned", "Step sizes to capture.", stats.graphs_planned)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("preemptions", "Sequences preempted.", stats.preemptions),
            ("engine_steps", "Steps run.", stats.steps),
            ("engine_step_tokens", "Tokens computed in steps.", stats.step_tokens),
        ):
            yield self._counter(f"headrace_{name}", text, value)
        info = GaugeMetricFamily(
            "headrace_selection_info",
            "The implementation that serves an op.",
            labels=("model_name", "op", "impl", "status"),
        )
        for op, impl, status in dict.fromkeys(selected(self._selection())):
            info.add_metric((self._model, op, impl, status), 1.0)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family


def selected(report: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(op, chosen implementation, its status) of a selection report in plain data."""
    for decision in report:
        chosen = str(decision.get("chosen") or "")
        status = next(
            (
                str(candidate.get("status") or "")
                for candidate in decision.get("candidates") or ()
                if candidate.get("name") == chosen
            ),
            "",
        )
        if chosen:
            yield str(decision.get("op") or ""), chosen, status
