"""The same load on two engines, step by step in turn, so that a busy machine slows both alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

from models.adapters.weights import AdapterWeights
from models.engine.engine import Engine
from models.errors import ModelServiceError
from models.requests import GenerationEnd, GenerationRequest, TokenDelta, TokenPrompt
from sampling.params import SamplingParams
from tests.benchmarks.closed_loop import TokenIds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        prompt: its tokens.
        num_new_tokens: exact length of the answer.
        adapter: None for the base model.
    """

    prompt: TokenIds
    num_new_tokens: int
    adapter: AdapterWeights | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step.

    Attributes:
        duration_s: with the admissions before it.
        num_tokens: tokens drawn.
        is_decode: every open request drew a token, in the step before too: no prompt was run.
    """

    duration_s: float
    num_tokens: int
    is_decode: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One load, with adapters and without.

    Attributes:
        without: the steps of the engine that has none.
        with_adapters: the steps of the other.
    """

    without: tuple[TimedStep, ...]
    with_adapters: tuple[TimedStep, ...]

    @property
    def output_ratio(self) -> float:
        """Output tokens a second, with adapters over without."""
        return _tokens_per_s(self.with_adapters) / _tokens_per_s(self.without)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second with adapters."""
        return _tokens_per_s(self.with_adapters)

    def step_ratio(self, *, is_decode: bool) -> float | None:
        """Return the median step time without adapters over that with; None without such steps."""
        without_ms = self.step_ms(self.without, is_decode=is_decode)
        with_ms = self.step_ms(self.with_adapters, is_decode=is_decode)
        return None if without_ms is None or with_ms is None else without_ms / with_ms

    @staticmethod
    def step_ms(steps: Sequence[TimedStep], *, is_decode: bool) -> float | None:
        """Return the median milliseconds of the steps of one kind; None if there are none."""
        durations = [step.duration_s for step in steps if step.is_decode == is_decode]
        return 1000 * statistics.median(durations) if durations else None


class SteppedLoad:
    """A closed loop of clients on an engine whose steps the caller runs.

    Owner: one thread, which owns the engine too.
    """

    def __init__(self, engine: Engine, jobs: Sequence[Job], num_clients: int) -> None:
        """Queue the jobs; nothing runs.

        Args:
            engine: idle.
            jobs: in the order in which clients take them.
            num_clients: requests that are open at the same time.
        """
        self._engine = engine
        self._waiting = list(enumerate(jobs))[::-1]
        self._num_clients = num_clients
        self._num_open = 0
        self._was_all_drawn = False
        self.steps: list[TimedStep] = []

    @property
    def has_work(self) -> bool:
        """Whether a request waits or is open."""
        return bool(self._waiting) or self._num_open > 0

    def step(self) -> None:
        """Admit what clients ask now, run one step, and note how long both took."""
        began_at_s = time.perf_counter()
        while self._waiting and self._num_open < self._num_clients:
            self._admit(*self._waiting.pop())
        num_open, num_tokens = self._num_open, 0
        for _, event in self._engine.step():
            if isinstance(event, ModelServiceError):
                raise event
            if isinstance(event, TokenDelta):
                num_tokens += len(event.token_ids)
            elif isinstance(event, GenerationEnd):
                self._num_open -= 1
        is_all_drawn = num_tokens == num_open
        self.steps.append(
            TimedStep(
                duration_s=time.perf_counter() - began_at_s,
                num_tokens=num_tokens,
                is_decode=is_all_drawn and self._was_all_drawn,
            )
        )
        self._was_all_drawn = is_all_drawn and self._num_open == num_open

    def _admit(self, number: int, job: Job) -> None:
        request = GenerationRequest(
            request_id=f"bench-{number}",
            prompt=TokenPrompt(token_ids=()),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=job.num_new_tokens, ignore_eos=True
            ),
            seed=0,
            is_max_tokens_explicit=True,
            adapter=None if job.adapter is None else job.adapter.ref,
        )
        prepared = self._engine.prepare(request, tuple(job.prompt), time.monotonic())
        self._engine.admit(prepared, job.adapter)
        self._num_open += 1


def compare(
    without: Engine, with_adapters: Engine, jobs: Sequence[Job], num_clients: int
) -> Comparison:
    """Run the jobs on both engines, a step of the one, two of the other, two of the one, ...

    Args:
        without: gets the jobs without their adapters.
        with_adapters: gets them with theirs.
        jobs: prompts that neither has seen.
        num_clients: requests that are open at the same time.
    """
    plain_jobs = [dataclasses.replace(job, adapter=None) for job in jobs]
    first = SteppedLoad(without, plain_jobs, num_clients)
    second = SteppedLoad(with_adapters, jobs, num_clients)
    order = [first, second]
    while first.has_work or second.has_work:
        for load in order:
            if load.has_work:
                load.step()
        order.reverse()
    return Comparison(without=tuple(first.steps), with_adapters=tuple(second.steps))


def _tokens_per_s(steps: Sequence[TimedStep]) -> float:
    return sum(step.num_tokens for step in steps) / sum(step.duration_s for step in steps)
