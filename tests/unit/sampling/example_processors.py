"""Processors that tests load by dotted path."""

from collections.abc import Sequence

import torch

from sampling.processors import ActiveRow
from sampling.sampler import SamplingRow


class OnlyEvenTokens:
    """Masks odd token ids for rows whose seed is even; remembers what it was applied to."""

    is_argmax_invariant = False

    def __init__(self) -> None:
        self.applied_to: list[list[int]] = []

    def make_state(self, row: SamplingRow) -> str | None:
        return "even" if row.seed % 2 == 0 else None

    def apply_(self, logits: torch.Tensor, active: Sequence[ActiveRow]) -> None:
        self.applied_to.append([each.row.seed for each in active])
        for each in active:
            logits[each.index, 1::2] = -torch.inf


class Flatten:
    """Halves every logit: the best token stays the best."""

    is_argmax_invariant = True

    def __init__(self) -> None:
        self.num_calls = 0

    def make_state(self, row: SamplingRow) -> bool:
        return True

    def apply_(self, logits: torch.Tensor, active: Sequence[ActiveRow]) -> None:
        self.num_calls += 1
        for each in active:
            logits[each.index] *= 0.5


class NeedsAnArgument:
    def __init__(self, word: str) -> None:
        self.word = word


class NotAProcessor:
    pass
