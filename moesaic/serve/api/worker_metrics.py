"""Metrics of single workers and their ranks, for Prometheus. Counters begin anew when a worker is restarted."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moesaic.serve.cluster.client import EngineClient
from moesaic.serve.cluster.worker import State


def worker_metrics(client: EngineClient) -> Iterator[Metric]:
    resumed = CounterMetricFamily("moesaic:requests_resumed", "How often a request went on after its worker died.")
    resumed.add_metric([], client.resumed)
    yield resumed
    workers = client.workers
    labels = ["worker", "role"]
    for kind, name, text, values in (
        (GaugeMetricFamily, "up", "Whether the worker is ready.", [one.state is State.READY for one in workers]),
        (GaugeMetricFamily, "requests", "Requests at the worker.", [len(one.open) for one in workers]),
        (
            GaugeMetricFamily,
            "kv_cache_usage_perc",
            "Usage of the worker's KV cache, from 0 to 1.",
            [one.stats.cache_usage for one in workers],
        ),
        (CounterMetricFamily, "deaths", "How often the worker died.", [one.deaths for one in workers]),
        (CounterMetricFamily, "steps", "Steps of the worker.", [one.stats.steps for one in workers]),
        (
            CounterMetricFamily,
            "generation_tokens",
            "Tokens the worker generated.",
            [one.stats.generated_tokens for one in workers],
        ),
    ):
        family = kind(f"moesaic:worker_{name}", text, labels=labels)
        for worker, value in zip(workers, values, strict=True):
            family.add_metric([str(worker.number), worker.options.role], float(value))
        yield family
    for kind, name, text, field in (
        (GaugeMetricFamily, "weight_bytes", "Weights the rank holds.", "weights"),
        (GaugeMetricFamily, "cache_bytes", "KV cache the rank holds.", "cache"),
        (GaugeMetricFamily, "peak_bytes", "The most memory the rank ever had.", "peak"),
        (CounterMetricFamily, "sent_bytes", "Bytes the rank sent to others of its group.", "sent"),
        (CounterMetricFamily, "messages", "Messages the rank sent to others of its group.", "messages"),
    ):
        family = kind(f"moesaic:rank_{name}", text, labels=["worker", "rank"])
        for worker in workers:
            for rank in worker.rank_stats:
                family.add_metric([str(worker.number), str(rank.rank)], getattr(rank, field))
        yield family
