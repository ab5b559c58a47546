"""The metrics of all models of a server as one registry, and what their clients used, by the names of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moesaic.serve.api.metrics import Metrics
from moesaic.serve.api.rate_limits import KeyUse


def registry_of(parts: Sequence[Metrics]) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(AllMetrics(parts))
    return found


class AllMetrics:
    """A metric is listed once, and where there are several models every sample of it says of which it is."""

    def __init__(self, parts: Sequence[Metrics]) -> None:
        self.parts = parts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for part in self.parts:
            for family in part.collect():
                whole = families.setdefault(family.name, family)
                samples = family.samples
                if len(self.parts) > 1:
                    samples = [one._replace(labels={"model_name": part.model, **one.labels}) for one in samples]
                whole.samples = samples if whole is family else [*whole.samples, *samples]
        yield from families.values()
        yield from key_metrics(self.parts[0].users)
        yield from self.parts[0].more_of_all()

    def describe(self) -> Iterator[Metric]:
        yield from ()


def key_metrics(users: Sequence[KeyUse]) -> Iterator[Metric]:
    if not users:
        return
    requests = CounterMetricFamily("moesaic:key_requests", "Responses, by key and status.", labels=["key", "status"])
    running = GaugeMetricFamily("moesaic:key_requests_running", "Requests under way, by key.", labels=["key"])
    prompt = CounterMetricFamily("moesaic:key_prompt_tokens", "Prompt tokens, by key.", labels=["key"])
    generated = CounterMetricFamily("moesaic:key_generation_tokens", "Tokens generated, by key.", labels=["key"])
    for user in sorted(users, key=lambda one: one.name):
        for status, count in sorted(user.statuses.items()):
            requests.add_metric([user.name, str(status)], count)
        running.add_metric([user.name], user.running)
        prompt.add_metric([user.name], user.prompt_tokens)
        generated.add_metric([user.name], user.generated_tokens)
    yield from (requests, running, prompt, generated)
