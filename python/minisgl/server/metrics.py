"""The numbers at /metrics, in the text format of Prometheus.

Metrics contain no text of any request, and labels have few values. Replies are counted in the API
process as they are delivered. Of several API processes, the one that is asked adds up the numbers
of all. Numbers that only the scheduler knows come with its outputs (`EngineStats`), to all of them.

What is counted for each token is a plain number of the event loop's thread (`PlainCounter`,
`PlainHistogram`), which costs a fraction of a microsecond; Prometheus' own classes take a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from minisgl.message import EngineStats, MetricSample

_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_TIME_SUFFIX = "_created"  # of samples that say since when is counted
_SAMPLE_SUFFIXES = ("", "_total", "_bucket", "_count", "_sum", _TIME_SUFFIX)
_DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class PlainCounter(Collector):
    """A counter. Only one thread may count, because nothing is locked."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name = f"minisgl_{name}"
        self._documentation = documentation
        self._value = 0
        registry.register(self)

    def inc(self, number: int) -> None:
        self._value += number

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, self._value)


class PlainHistogram(Collector):
    """A histogram. Only one thread may observe, because nothing is locked."""

    def __init__(
        self, name: str, documentation: str, registry: CollectorRegistry, bounds: Sequence[float]
    ) -> None:
        self._name = f"minisgl_{name}"
        self._documentation = documentation
        self._bounds = (*map(float, bounds), float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += times * value

    def collect(self) -> Iterable[Metric]:
        labels = ["+Inf" if bound == float("inf") else str(bound) for bound in self._bounds]
        buckets = list(zip(labels, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)


class _EngineGauge(NamedTuple):
    name: str
    documentation: str
    value: Callable[[EngineStats], float]


class _EngineCounter(NamedTuple):
    """A counter of the scheduler, which begins at zero in each epoch."""

    name: str
    documentation: str
    count: Callable[[EngineStats], int]


_ENGINE_GAUGES = (
    _EngineGauge(
        "requests_running",
        "Prompts that hold pages of the KV cache",
        lambda stats: stats.num_running,
    ),
    _EngineGauge(
        "requests_waiting",
        "Prompts that wait to be admitted: for their turn, pages, or their grammar",
        lambda stats: stats.num_waiting,
    ),
    _EngineGauge(
        "kv_pages_used_ratio",
        "Share of KV pages that are held: neither free nor evictable",
        lambda stats: stats.num_pages_used / stats.num_pages,
    ),
    _EngineGauge(
        "step_budget_tokens",
        "Prompt tokens that a step may compute beside running requests",
        lambda stats: stats.budget_tokens,
    ),
    _EngineGauge(
        "step_budget_seconds",
        "How long a step may hold up running requests; it grows when prompts wait too long",
        lambda stats: stats.budget_ms / 1e3,
    ),
)
_ENGINE_COUNTERS = (
    _EngineCounter(
        "retractions_total",
        "Times that a running or partly computed request lost its pages, and waits again",
        lambda stats: stats.num_retractions,
    ),
    _EngineCounter(
        "steps_total",
        "Steps that the scheduler launched",
        lambda stats: stats.num_steps,
    ),
    _EngineCounter(
        "computed_tokens_total",
        "Tokens of prompts and retracted requests that were computed",
        lambda stats: stats.num_computed_tokens,
    ),
    _EngineCounter(
        "cached_tokens_total",
        "Tokens that admitted requests found in the prefix cache",
        lambda stats: stats.num_cached_tokens,
    ),
)


class EngineMetrics:
    """The numbers of the scheduler, which are equal in all API processes."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        gauge = partial(Gauge, namespace="minisgl", registry=self._registry)
        self._gauges = [(each, gauge(each.name, each.documentation)) for each in _ENGINE_GAUGES]
        # Not Prometheus' own class, which also tells when a process began to count.
        self._counters = [
            (each, PlainCounter(each.name, each.documentation, self._registry))
            for each in _ENGINE_COUNTERS
        ]
        self._counted: dict[str, int] = {}  # in this epoch, by name

    def update(self, stats: EngineStats) -> None:
        """Set the state of this epoch's scheduler after its latest step."""
        for shown, gauge in self._gauges:
            gauge.set(shown.value(stats))
        for entry, counter in self._counters:
            counted = self._counted.get(entry.name, 0)
            # It is less where it comes late, from a detokenizer that was replaced.
            count = max(counted, entry.count(stats))
            counter.inc(count - counted)
            self._counted[entry.name] = count

    def end_epoch(self) -> None:
        """The scheduler is dead: nothing runs in it, and its successor counts from zero."""
        for _, gauge in self._gauges:
            gauge.set(0)
        self._counted = {}

    def expose(self) -> bytes:
        """In the text format."""
        return generate_latest(self._registry)


class Metrics:
    """The numbers of one API process, and those of the engine."""

    def __init__(self) -> None:
        self.engine = EngineMetrics()
        self._registry = CollectorRegistry()  # this process's own
        counter = partial(Counter, namespace="minisgl", registry=self._registry)
        histogram = partial(Histogram, namespace="minisgl", registry=self._registry)
        self._requests = counter(
            "http_requests_total", "HTTP requests by route and status", ["route", "status"]
        )
        self._errors = counter("errors_total", "Errors answered, by their code", ["code"])
        self._failures = counter(
            "worker_failures_total", "Workers that died or hung, by their name", ["worker"]
        )
        self.aborts = counter(
            "aborts_total",
            "Answers that were ended: their reader went away or is too slow, they took too long, "
            "or their request has another answer that ends with an error",
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens of prompts, cached ones too")
        self.cached_tokens = counter(
            "cached_prompt_tokens_total", "Tokens of prompts that came from the prefix cache"
        )
        self.output_tokens = PlainCounter(
            "output_tokens_total", "Tokens of answers", self._registry
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "From a prompt's arrival to its first token",
            buckets=_FIRST_TOKEN_BUCKETS_S,
        )
        self.queue_time = histogram(
            "request_queue_seconds",
            "From a prompt's arrival until it has pages",
            buckets=_FIRST_TOKEN_BUCKETS_S,
        )
        self.prefill_time = histogram(
            "request_prefill_seconds",
            "From when a prompt has pages to its first token",
            buckets=_FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token_latency = PlainHistogram(
            "inter_token_latency_seconds",
            "From a token to the next",
            self._registry,
            _INTER_TOKEN_BUCKETS_S,
        )
        self.request_duration = histogram(
            "request_duration_seconds",
            "From a prompt's arrival to the end of its answer",
            buckets=_DURATION_BUCKETS_S,
        )

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def count_error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def watch_workers(self, names: Iterable[str]) -> None:
        """Begin to count the failures of workers: a series that begins at 1 shows no increase."""
        for name in names:
            self._failures.labels(name)

    def count_failure(self, worker: str) -> None:
        self._failures.labels(worker).inc()

    def samples(self) -> list[MetricSample]:
        """This process's own numbers, for another API process to add up."""
        return [
            MetricSample(sample.name, sample.labels, sample.value)
            for metric in self._registry.collect()
            for sample in metric.samples
        ]

    def expose(self, others: Iterable[MetricSample] = ()) -> bytes:
        """All metrics, in the text format.

        Args:
            others: the samples of all other API processes.
        """
        total = CollectorRegistry()
        total.register(_Sum(self._registry, others))
        return generate_latest(total) + self.engine.expose()


class _Sum(Collector):
    """The metrics of a registry, with samples of others added to its own."""

    def __init__(self, registry: CollectorRegistry, others: Iterable[MetricSample]) -> None:
        self._registry = registry
        self._others: dict[str, list[MetricSample]] = {}
        for sample in others:
            self._others.setdefault(sample.name, []).append(sample)

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            yield self._with_others(metric)

    def _with_others(self, metric: Metric) -> Metric:
        total = Metric(metric.name, metric.documentation, metric.type)
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        own = [MetricSample(each.name, each.labels, each.value) for each in metric.samples]
        names = {metric.name + suffix for suffix in _SAMPLE_SUFFIXES}
        others = [sample for name in names for sample in self._others.get(name, ())]
        for sample in [*own, *others]:
            key = (sample.name, tuple(sample.labels.items()))
            if sample.name.endswith(_TIME_SUFFIX):
                values[key] = min(values.get(key, sample.value), sample.value)
            else:
                values[key] = values.get(key, 0.0) + sample.value
        for (name, labels), value in values.items():
            total.add_sample(name, dict(labels), value)
        return total
