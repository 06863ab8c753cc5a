"""What the router counts. Names under `vllm:` are those that existing dashboards look for.

Prompt tokens come in six numbers that only shrink, and what is lost between them has a reason: see
`hit_rate`.
"""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from engine.clock import Clock
from prefix_index.index import Role
from router.fleet import Fleet
from router.hit_rate import FETCHED, KINDS
from router.journey import Journey
from router.labelled import Labelled
from router.line import Line
from router.transcript import Transcript

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
LONG_SECONDS = (*SECONDS, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.11, 1.25, 1.5, 2.0, 4.0, 10.0)
TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Metrics:
    """One registry for one router. `model` labels the vllm-named series."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = {"model_name": model, "engine": "0"}
        labels = list(self._model)

        def counter(name: str, text: str, *names: str) -> Counter:
            return Counter(name, text, names, registry=self.registry)

        self._labelled = Labelled(self.registry)
        self._requests = counter(
            "kvferry_requests", "Requests that ended, by door and how.", "door", "status"
        )
        self._routes = counter(
            "kvferry_routes", "Attempts, by who computed the prompt.", "computed_by"
        )
        self._worker_failures = counter(
            "kvferry_worker_failures", "Legs that failed, by worker and status.", "worker", "code"
        )
        self.retries = counter("kvferry_retries", "Attempts after the first of a request.")
        self._tokens = counter(
            "kvferry_prompt_tokens",
            "Prompt tokens: all, seen before, held by anyone, by the chosen pair, by who computes,"
            " there and not computed; and those fetched from another worker instead.",
            "kind",
        )
        self._lost_tokens = counter(
            "kvferry_lost_prompt_tokens", "Prompt tokens that were computed, by why.", "reason"
        )
        self.rejections = counter(
            "kvferry_rejections", "Requests that admission refused, by why.", "reason"
        )
        self.waited = Histogram(
            "kvferry_line_seconds",
            "Time in the router's line, of those who stood in it.",
            buckets=LONG_SECONDS,
            registry=self.registry,
        )
        self._ratio = Histogram(
            "kvferry_prediction_ratio",
            "What happened over what was predicted, by worker: times to the first token (of who"
            " computes) and of each further one (of who streams).",
            ("what", "worker"),
            buckets=RATIOS,
            registry=self.registry,
        )
        self._error = Summary(
            "kvferry_prediction_error_seconds",
            "How far from what happened the prediction was.",
            ("what", "worker"),
            registry=self.registry,
        )
        self._regret = Histogram(
            "kvferry_regret_seconds",
            "How much sooner the first token would have come from the best alternative, as far as"
            " can be known afterwards; 0 where it would not.",
            buckets=(0.0, *LONG_SECONDS),
            registry=self.registry,
        )
        self.shipped_bytes = counter("kvferry_shipped_bytes", "KV bytes shipped to decode.")
        self.fetched_bytes = counter(
            "kvferry_fetched_bytes", "KV bytes that prefill took from other workers."
        )
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens.", *labels)
        self._generated = counter("vllm:generation_tokens", "Tokens generated.", *labels)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", *labels)
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens not computed.", *labels)
        self._success = counter(
            "vllm:request_success", "Choices that ended well.", *labels, "finished_reason"
        )
        self._ttft = self._seconds("vllm:time_to_first_token_seconds", LONG_SECONDS)
        self._tpot = self._seconds("vllm:request_time_per_output_token_seconds", TOKEN_SECONDS)
        self._e2e = self._seconds("vllm:e2e_request_latency_seconds", LONG_SECONDS)
        self.transfer = Histogram(
            "kvferry_transfer_seconds",
            "First byte offered to last cell committed.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def watch(self, fleet: Fleet, num_running: Callable[[], int]) -> None:
        """Add what is read at the moment of a scrape."""
        running = self._gauge("vllm:num_requests_running", "Open requests.", *self._model)
        running.labels(**self._model).set_function(num_running)
        waiting = self._gauge("vllm:num_requests_waiting", "Waiting at workers.", *self._model)
        waiting.labels(**self._model).set_function(
            lambda: sum(each.record.load.waiting for each in fleet.workers)
        )
        usage = self._gauge("vllm:kv_cache_usage_perc", "Decode's blocks in use.", *self._model)
        usage.labels(**self._model).set_function(lambda: _usage(fleet))
        live = self._gauge("kvferry_live_workers", "Workers with a lease.", "role")
        for role in Role:
            live.labels(role=role.value).set_function(partial(fleet.num_live, role))
        late = self._gauge(
            "kvferry_news_late_seconds",
            "Since the oldest prompt was computed of which the index has told nothing yet.",
        )
        late.set_function(lambda: fleet.news.late_s)
        held = self._gauge(
            "kvferry_quarantines",
            "Of a worker's wires and calls to it, or of the worker, by those they damage.",
            "subject",
        )
        for subject in ("wire", "worker"):
            held.labels(subject=subject).set_function(partial(_num_quarantines, fleet, subject))

    def watch_line(self, line: Line) -> None:
        waiting = self._gauge("kvferry_line_requests", "Requests waiting at the router.")
        waiting.set_function(lambda: len(line))

    def watch_departures(self, fleet: Fleet, clock: Clock) -> None:
        """Forget workers that have been gone for a while."""
        self._labelled.watch(fleet, clock)

    def request_ended(self, door: str, status: str) -> None:
        self._labelled.of(self._requests, door, status).inc()

    def routed(self, *, by_prefill: bool) -> None:
        self._labelled.of(self._routes, "prefill" if by_prefill else "decode").inc()

    def worker_failed(self, worker: str, code: str) -> None:
        self._labelled.of_worker(worker, self._worker_failures, worker, code).inc()

    def finished(self, journey: Journey, transcript: Transcript) -> None:
        """A request ended well."""
        rate, of, model = journey.hit_rate, self._labelled.of, tuple(self._model.values())
        for kind, count in zip(KINDS, rate.chain(), strict=True):
            of(self._tokens, kind).inc(count)
        of(self._tokens, FETCHED).inc(rate.fetched)
        for loss, count in rate.lost.items():
            of(self._lost_tokens, loss.value).inc(count)
        self.shipped_bytes.inc(journey.shipped_bytes)
        self.fetched_bytes.inc(journey.fetched_bytes)
        if journey.transfer_ms:
            self.transfer.observe(journey.transfer_ms / 1000)
        of(self._prompt, *model).inc(journey.prompt_tokens)
        of(self._generated, *model).inc(transcript.num_tokens)
        of(self._queries, *model).inc(journey.prompt_tokens)
        of(self._hits, *model).inc(journey.spared_tokens)
        for reason in transcript.finish_reasons:
            of(self._success, *model, reason).inc()
        of(self._e2e, *model).observe(journey.clock.now() - journey.accepted_at)
        if journey.ttft_s is not None:
            of(self._ttft, *model).observe(journey.ttft_s)
        tpot_s = journey.tpot_s(transcript.tokens_per_choice)
        if tpot_s is not None:
            of(self._tpot, *model).observe(tpot_s)

        self._judge(journey, tpot_s)

    def _judge(self, journey: Journey, tpot_s: float | None) -> None:
        """Compare what the decision expected with what happened."""
        forecast, ttft_s = journey.forecast, journey.ttft_after_choice_s
        if forecast is None or ttft_s is None:
            return
        self._compare("first token", forecast.computing, forecast.ttft_ms / 1000, ttft_s)
        if tpot_s is not None and forecast.token_ms:
            self._compare("each token", forecast.streaming, forecast.token_ms / 1000, tpot_s)
        regret_ms = forecast.regret_ms(ttft_s * 1000)
        if regret_ms is not None:
            self._regret.observe(regret_ms / 1000)

    def _compare(self, what: str, worker: str, predicted_s: float, happened_s: float) -> None:
        of = self._labelled.of_worker
        if predicted_s > 0:
            of(worker, self._ratio, what, worker).observe(happened_s / predicted_s)
        of(worker, self._error, what, worker).observe(abs(happened_s - predicted_s))

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _seconds(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.removeprefix("vllm:").replace("_", " ").capitalize() + "."
        return Histogram(name, text, list(self._model), buckets=buckets, registry=self.registry)


def _usage(fleet: Fleet) -> float:
    loads = [each.record.load for each in fleet.workers if each.record.role is Role.DECODE]
    total = sum(load.total_blocks for load in loads)
    return 1 - sum(load.free_blocks for load in loads) / total if total else 0.0


def _num_quarantines(fleet: Fleet, subject: str) -> int:
    found = (each for worker in fleet.workers for each in worker.record.load.quarantines)
    return sum(bool(each.wire) == (subject == "wire") for each in found)
