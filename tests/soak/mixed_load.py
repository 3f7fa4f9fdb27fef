"""A stream of requests unlike each other: lengths, choices, shared beginnings, early leavers."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

_NUM_PREFIXES = 4
_SHARED_FRACTION = 1 / 3
_SEVERAL_CHOICES_FRACTION = 1 / 8
_LEAVER_FRACTION = 1 / 6
_LOGPROBS_FRACTION = 1 / 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedRequest:
    """What one client asks, and whether it waits for all of the answer.

    Attributes:
        prompt_token_ids: its prompt.
        num_new_tokens: length of every choice.
        num_choices: choices wanted.
        temperature: 0 or 1.
        num_top_logprobs: alternatives per token; None reports no log probabilities.
        num_parts_taken: the client leaves after so many parts of the answer; None: it stays.
    """

    prompt_token_ids: tuple[int, ...]
    num_new_tokens: int
    num_choices: int
    temperature: float
    num_top_logprobs: int | None
    num_parts_taken: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large requests may be.

    Attributes:
        vocabulary_size: prompts hold ids below it.
        longest_prompt_tokens: half of it is the length of shared beginnings.
        most_new_tokens: length of the longest choice.
    """

    vocabulary_size: int
    longest_prompt_tokens: int
    most_new_tokens: int


def mixed_requests(bounds: Bounds, *, seed: int = 0) -> Iterator[MixedRequest]:
    """Yield requests without end; equal arguments give equal ones."""
    source = random.Random(seed)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(source.choices(range(bounds.vocabulary_size), k=num_tokens))

    num_shared = bounds.longest_prompt_tokens // 2
    prefixes = [draw(num_shared) for _ in range(_NUM_PREFIXES)]
    for _ in itertools.count():
        is_shared = source.random() < _SHARED_FRACTION
        prefix = source.choice(prefixes) if is_shared else ()
        num_own = source.randint(1, bounds.longest_prompt_tokens - len(prefix))
        is_several = source.random() < _SEVERAL_CHOICES_FRACTION
        has_logprobs = source.random() < _LOGPROBS_FRACTION
        yield MixedRequest(
            prompt_token_ids=prefix + draw(num_own),
            num_new_tokens=source.randint(1, bounds.most_new_tokens),
            num_choices=source.randint(2, 4) if is_several else 1,
            temperature=float(source.randint(0, 1)),
            num_top_logprobs=2 if has_logprobs else None,
            num_parts_taken=source.randint(1, 3) if source.random() < _LEAVER_FRACTION else None,
        )
