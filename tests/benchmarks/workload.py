"""What is asked: random prompts of exact lengths, none like another unless it is meant to be."""

from __future__ import annotations

import dataclasses
import itertools
import random

from tests.benchmarks.closed_loop import TokenIds

# Ordinary tokens of the bundled model: its special ones come first.
_FIRST_TOKEN_ID = 100
_LAST_TOKEN_ID = 49_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much work a table is made of.

    Attributes:
        client_counts: numbers of clients, or rows of a decode step.
        num_prompt_tokens: length of every prompt.
        num_new_tokens: length of every answer.
        num_requests_per_client: questions that each client puts.
        num_rounds: times that each load is repeated; figures are medians.
        num_long_prompt_tokens: length of the prompts of the prefix test.
        num_own_tokens: tokens at their end that no other one shares.
        num_prefixes: different beginnings of the prefix test.
        num_forward_steps: timed steps of the plain forward.
    """

    client_counts: tuple[int, ...] = (1, 8, 32)
    num_prompt_tokens: int = 158
    num_new_tokens: int = 64
    num_requests_per_client: int = 2
    num_rounds: int = 2
    num_long_prompt_tokens: int = 1000
    num_own_tokens: int = 16
    num_prefixes: int = 5
    num_forward_steps: int = 32


FULL = Sizes()
# To see that everything runs; its figures mean nothing.
QUICK = Sizes(
    client_counts=(1, 2),
    num_new_tokens=8,
    num_requests_per_client=1,
    num_rounds=1,
    num_long_prompt_tokens=200,
    num_prefixes=1,
    num_forward_steps=4,
)


class PromptSource:
    """Gives prompts; never the same one twice.

    Owner: one thread.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._random = random.Random(0)

    def distinct(self, count: int) -> list[TokenIds]:
        """Return prompts that share nothing."""
        return [self._draw(self._sizes.num_prompt_tokens) for _ in range(count)]

    def pairs_of_a_prefix(self) -> list[TokenIds]:
        """Return prompts, by twos alike up to their last tokens, twos unlike other twos."""
        sizes = self._sizes
        num_shared = sizes.num_long_prompt_tokens - sizes.num_own_tokens
        prefixes = [self._draw(num_shared) for _ in range(sizes.num_prefixes)]
        return list(
            itertools.chain.from_iterable(
                (prefix + self._draw(sizes.num_own_tokens) for _ in range(2)) for prefix in prefixes
            )
        )

    def _draw(self, count: int) -> list[int]:
        return self._random.choices(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID), k=count)
