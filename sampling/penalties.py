"""Repetition, frequency and presence penalties over the few tokens that a row has seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SamplingRow
from sampling.processors import ActiveRow

# Beyond these a product with a float32 logit may be 0 * inf.
_MIN_REPETITION_PENALTY = 1e-30
_MAX_REPETITION_PENALTY = 1e30
_INITIAL_CAPACITY = 64


def penalized(
    values: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return the penalised logits of tokens that were seen; element by element.

    First repetition (a positive logit is divided by it, any other multiplied), then frequency
    times the count in the output and presence once for a count above 0. The result stays finite;
    a token that is masked out (-inf) stays so.

    Args:
        values: [M] float32 logits.
        counts: [M] float32, how often the token is in the output (0: in the prompt only).
        repetition: [M] float32, above 0; 1 is off.
        frequency: [M] float32.
        presence: [M] float32.
    """
    limits = torch.finfo(values.dtype)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    result = repeated - (frequency * counts + presence * (counts > 0))
    return torch.where(values == -math.inf, values, result.clamp(limits.min, limits.max))


class TokenCounts:
    """The distinct tokens of one row and how often each is in its output.

    Invariants: ``token_ids[:size]`` are distinct; ``counts[i]`` belongs to ``token_ids[i]``.
    Owner: step thread.
    """

    def __init__(self, row: SamplingRow) -> None:
        is_prompt_counted = row.params.repetition_penalty != 1.0
        seen = list(dict.fromkeys(row.prompt_token_ids)) if is_prompt_counted else []
        self.size = len(seen)
        self._places = {token_id: place for place, token_id in enumerate(seen)}
        capacity = max(_INITIAL_CAPACITY, 2 * self.size)
        self._token_ids = torch.zeros(capacity, dtype=torch.int64)
        self._token_ids[: self.size] = torch.tensor(seen, dtype=torch.int64)
        self._counts = torch.zeros(capacity, dtype=torch.float32)
        self._num_seen_output_tokens = 0

    @property
    def token_ids(self) -> Tensor:
        """[size] int64."""
        return self._token_ids[: self.size]

    @property
    def counts(self) -> Tensor:
        """[size] float32."""
        return self._counts[: self.size]

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that were drawn since the last call."""
        for token_id in output_token_ids[self._num_seen_output_tokens :]:
            place = self._place(token_id)
            self._counts[place] += 1.0
        self._num_seen_output_tokens = len(output_token_ids)

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is not None:
            return place
        if self.size == len(self._token_ids):
            self._token_ids = torch.cat((self._token_ids, torch.zeros_like(self._token_ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        place = self.size
        self._places[token_id] = place
        self._token_ids[place] = token_id
        self.size += 1
        return place


class PenaltyProcessor:
    """The three penalties in one pass; repetition counts prompt and output, the others output."""

    is_argmax_invariant = False

    def make_state(self, row: SamplingRow) -> TokenCounts | None:
        """Return the row's counts, or None if all three penalties are off."""
        params = row.params
        if (
            params.repetition_penalty == 1.0
            and params.frequency_penalty == 0.0
            and params.presence_penalty == 0.0
        ):
            return None
        return TokenCounts(row)

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Penalise the tokens that each row has seen.

        Args:
            logits: [B, V] float32, changed in place.
            active: rows with a state.
        """
        sizes, columns = [], []
        for each in active:
            each.state.catch_up(each.row.output_token_ids)
            sizes.append(each.state.size)
            params = each.row.params
            repetition = min(
                max(params.repetition_penalty, _MIN_REPETITION_PENALTY), _MAX_REPETITION_PENALTY
            )
            columns.append((repetition, params.frequency_penalty, params.presence_penalty))
        repeats = torch.tensor(sizes)
        indices = torch.tensor([each.index for each in active]).repeat_interleave(repeats)
        per_token = torch.tensor(columns, dtype=torch.float32).repeat_interleave(repeats, dim=0)
        token_ids = torch.cat([each.state.token_ids for each in active])
        counts = torch.cat([each.state.counts for each in active])

        place = (indices.to(logits.device), token_ids.to(logits.device))
        repetition_column, frequency, presence = per_token.to(logits.device).unbind(dim=1)
        logits[place] = penalized(
            logits[place], counts.to(logits.device), repetition_column, frequency, presence
        )
