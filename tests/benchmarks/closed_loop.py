"""Clients that each ask one question after the other, and what they saw. Knows no transport."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

TokenIds = Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer.

    Attributes:
        first_token_s: seconds from the question to its first text.
        num_tokens: tokens drawn.
        num_cached_tokens: tokens of the prompt that the prefix cache held.
    """

    first_token_s: float
    num_tokens: int
    num_cached_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What one load of prompts gave.

    Attributes:
        duration_s: seconds from the first question to the last token.
        answers: in the order in which they were complete.
    """

    duration_s: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return sum(answer.num_tokens for answer in self.answers) / self.duration_s

    @property
    def first_token_ms(self) -> float:
        """Median time to the first token."""
        return 1000 * statistics.median(answer.first_token_s for answer in self.answers)


async def run_closed_loop(
    prompts: Sequence[TokenIds],
    num_clients: int,
    ask: Callable[[TokenIds], Awaitable[Answer]],
    clock: Callable[[], float] = time.monotonic,
) -> LoadResult:
    """Let clients work off prompts, each client one at a time.

    Args:
        prompts: questions in the order in which they are taken.
        num_clients: how many are open at the same time.
        ask: puts one question and waits for the whole answer.
        clock: seconds.
    """
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def work() -> None:
        for prompt in waiting:
            answer = await ask(prompt)
            answers.append(answer)

    started_at_s = clock()
    await asyncio.gather(*(work() for _ in range(num_clients)))
    return LoadResult(duration_s=clock() - started_at_s, answers=tuple(answers))
