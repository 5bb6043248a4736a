"""Prometheus's counters of one server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..generation.engine import EngineState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Has a registry of its own, so that several servers can run in one process."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("wisparse_requests", "Requests answered, by HTTP status", ["status"], registry=registry)
        self.cancelled = Counter("wisparse_cancelled", "Requests whose client went away", registry=registry)
        self.tokens = Counter("wisparse_generated_tokens", "Tokens generated", registry=registry)
        self.prompt_tokens = Counter("wisparse_prompt_tokens", "Prompt tokens read", registry=registry)
        self.cached_tokens = Counter(
            "wisparse_cached_prompt_tokens", "Prompt tokens that the cache still held", registry=registry
        )
        self.first_token = Histogram(
            "wisparse_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.token_time = Histogram(
            "wisparse_time_per_token_seconds",
            "Mean time of an answer's tokens after its first",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._unread = Gauge(
            "wisparse_weights_unread_ratio",
            "Share of the projections' weights left unread at sparse positions",
            registry=registry,
        )
        running = Gauge("wisparse_running", "Requests in the batch", registry=registry)
        running.set_function(lambda: state().running)
        waiting = Gauge("wisparse_waiting", "Requests that wait for a place in the batch", registry=registry)
        waiting.set_function(lambda: state().waiting)

    def page(self, unread: float | None) -> bytes:
        """The text of ``/metrics``; ``unread``: the share of weights left unread, None if nothing was decoded."""
        self._unread.set(float("nan") if unread is None else unread)
        return generate_latest(self._registry)
