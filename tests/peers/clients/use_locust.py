"""Locust, a load generator: many users at once, none of whom gets an error."""

from __future__ import annotations

from typing import Any

from locust import HttpUser, constant, task
from locust.env import Environment


class Reader(HttpUser):
    wait_time = constant(0)

    @task(2)
    def streamed(self) -> None:
        body = {"prompt": "The number 7 is", "max_tokens": 8, "stream": True, "ignore_eos": True}
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines[-1:] != [b"data: [DONE]"]:
                answer.failure(f"ended with {lines[-1:]}")

    @task(1)
    def chat(self) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        self.client.post("/v1/chat/completions", json=body)


def check_sixteen_users(at: Any) -> None:
    environment = Environment(user_classes=[Reader], host=at.url)
    runner = environment.create_local_runner()
    runner.start(16, spawn_rate=16)
    while runner.stats.total.num_requests < 200:
        runner.greenlet.join(0.1)
    runner.quit()
    assert runner.stats.total.num_failures == 0, runner.stats.errors
