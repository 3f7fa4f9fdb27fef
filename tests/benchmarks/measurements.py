"""Takes the measurements in one run and keeps them; ``report`` turns them into rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from models.config import EngineConfig
from models.engine.build import resolve_model_path
from tests.benchmarks.closed_loop import LoadResult, TokenIds
from tests.benchmarks.engine_speed import EngineClients, running_engine
from tests.benchmarks.http_client import Load, run_http_load
from tests.benchmarks.plain_forward import load_plain_model, time_plain_decode_ms
from tests.benchmarks.service_process import (
    ServiceProcess,
    replica_rss_bytes,
    running_service,
)
from tests.benchmarks.step_meter import StepRecord, metered_steps
from tests.benchmarks.workload import PromptSource, Sizes

ENGINE, HTTP = "engine", "http"
# Mean length of the KV that the compared decode steps read, and how far from it still counts.
NUM_KV_TOKENS = 200
KV_TOKENS = range(160, 241)

# (prompts, number of clients, new tokens) -> what they saw
RunLoad = Callable[[Sequence[TokenIds], int, int], LoadResult]


@dataclasses.dataclass(slots=True)
class Measurements:
    """Everything that was measured; what was not asked for stays empty.

    Attributes:
        loads: by transport and number of clients, a result per round.
        prefix_loads: by transport, one client's answers: by twos, the first of a prefix, then one
            that shares it.
        steps: every step of the engine in this process.
        plain_step_ms: by number of rows.
        ready_s: from the launcher's begin to its ready line.
        first_token_s: from the launcher's begin to the first token of a request put then.
        rss_bytes: by deployment, after all loads.
    """

    loads: dict[tuple[str, int], list[LoadResult]] = dataclasses.field(default_factory=dict)
    prefix_loads: dict[str, LoadResult] = dataclasses.field(default_factory=dict)
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    plain_step_ms: dict[int, float] = dataclasses.field(default_factory=dict)
    ready_s: float | None = None
    first_token_s: float | None = None
    rss_bytes: dict[str, int] = dataclasses.field(default_factory=dict)


class Bench:
    """One run.

    The engine's rounds lie before and after those through HTTP, so that a machine that gets
    slower or faster meanwhile does not show as a difference between the two. Only one of the two
    works at any time.
    """

    def __init__(
        self, sizes: Sizes, config: EngineConfig, cache_folder: Path, say: Callable[[str], None]
    ) -> None:
        """Measure nothing yet.

        Args:
            sizes: how much.
            config: of the engine in this process; the service has the defaults.
            cache_folder: where the converted model is kept.
            say: told what goes on.
        """
        self._sizes = sizes
        self._config = config
        self._cache_folder = cache_folder
        self._say = say
        self._prompts = PromptSource(sizes)
        self._found = Measurements()

    def run(self, parts: Collection[str]) -> Measurements:
        """Measure the named parts: engine, http, start."""
        num_rounds_after = self._sizes.num_rounds // 2
        with ExitStack() as stack:
            if "engine" in parts:
                self._say("engine: loading")
                engine = stack.enter_context(running_engine(self._config, self._cache_folder))
                self._measure_plain_forward()
                self._warm_up(ENGINE, engine.run)
                self._measure_prefixes(ENGINE, engine.run)
                self._run_engine_rounds(engine, range(num_rounds_after, self._sizes.num_rounds))
            if "http" in parts or "start" in parts:
                self._measure_service(has_loads="http" in parts)
            if "engine" in parts:
                self._run_engine_rounds(engine, range(num_rounds_after))
        return self._found

    def _measure_plain_forward(self) -> None:
        # After the engine was built: with the number of threads that it has set.
        self._say("plain transformers forward")
        path = resolve_model_path(self._config.model, self._cache_folder, lambda _: None)
        model = load_plain_model(path)
        for num_rows in self._sizes.client_counts:
            self._found.plain_step_ms[num_rows] = time_plain_decode_ms(
                model,
                num_rows,
                num_kv_tokens=NUM_KV_TOKENS,
                num_steps=self._sizes.num_forward_steps,
            )

    def _measure_service(self, *, has_loads: bool) -> None:
        self._say("service: starting")
        with running_service(self._cache_folder) as service:
            run = _make_http_runner(service, self._config.model.model_id)
            first = run(self._prompts.distinct(1), 1, 1)
            self._found.ready_s = service.ready_s
            self._found.first_token_s = service.ready_s + first.answers[0].first_token_s
            if has_loads:
                self._warm_up(HTTP, run)
                self._measure_prefixes(HTTP, run)
                self._run_rounds(HTTP, run, range(self._sizes.num_rounds))
            self._found.rss_bytes = replica_rss_bytes(service.process.pid)

    def _run_engine_rounds(self, engine: EngineClients, rounds: Iterable[int]) -> None:
        with metered_steps() as steps:
            self._run_rounds(ENGINE, engine.run, rounds)
        self._found.steps += steps

    def _run_rounds(self, transport: str, run: RunLoad, rounds: Iterable[int]) -> None:
        sizes = self._sizes
        for _ in rounds:
            for num_clients in sizes.client_counts:
                prompts = self._prompts.distinct(num_clients * sizes.num_requests_per_client)
                result = run(prompts, num_clients, sizes.num_new_tokens)
                _check(result, sizes.num_new_tokens)
                self._found.loads.setdefault((transport, num_clients), []).append(result)
                self._say(
                    f"{transport}, clients: {num_clients}; {result.tokens_per_s:.1f} tokens/s, "
                    f"first token after {result.first_token_ms:.0f} ms"
                )

    def _measure_prefixes(self, transport: str, run: RunLoad) -> None:
        self._say(f"{transport}: shared prefixes")
        result = run(self._prompts.pairs_of_a_prefix(), 1, 1)
        for cold, warm in zip(result.answers[::2], result.answers[1::2], strict=True):
            if cold.num_cached_tokens or not warm.num_cached_tokens:
                raise RuntimeError("the prefix cache held what it should not, or the reverse")
        self._found.prefix_loads[transport] = result

    def _warm_up(self, transport: str, run: RunLoad) -> None:
        """Let the libraries make their kernels for the shapes that will occur."""
        self._say(f"{transport}: warming up")
        for num_clients in self._sizes.client_counts:
            run(self._prompts.distinct(num_clients), num_clients, 4)


def _make_http_runner(service: ServiceProcess, model_id: str) -> RunLoad:
    def run(prompts: Sequence[TokenIds], num_clients: int, num_new_tokens: int) -> LoadResult:
        return run_http_load(
            Load(
                host="127.0.0.1",
                port=service.port,
                model_id=model_id,
                num_clients=num_clients,
                num_new_tokens=num_new_tokens,
                prompts=prompts,
            )
        )

    return run


def _check(result: LoadResult, num_new_tokens: int) -> None:
    """Check that the load was the one that is spoken of; says nothing about speed."""
    for answer in result.answers:
        if answer.num_tokens != num_new_tokens or answer.num_cached_tokens:
            raise RuntimeError(f"not the answer that was asked for: {answer}")
