"""Repetition, frequency and presence penalties over the few tokens that a row has seen."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SamplingRow
from sampling.blocks import send
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
        self._reserve(max(_INITIAL_CAPACITY, 2 * self.size), seen, [])
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
        for number in range(self._num_seen_output_tokens, len(output_token_ids)):
            # First the place: a new token may need new arrays.
            place = self._place(output_token_ids[number])
            self._count_values[place] += 1.0
        self._num_seen_output_tokens = len(output_token_ids)

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is not None:
            return place
        if self.size == len(self._id_values):
            self._reserve(2 * self.size, self._id_values, self._count_values)
        place = self.size
        self._places[token_id] = place
        self._id_values[place] = token_id
        self.size += 1
        return place

    def _reserve(self, capacity: int, token_ids: Sequence[int], counts: Sequence[float]) -> None:
        """Make arrays with room for ``capacity`` tokens, and the tensors that share their memory.

        An array takes a number in a tenth of the time that a tensor takes.
        """
        self._id_values = array("q", [*token_ids, *[0] * (capacity - len(token_ids))])
        self._count_values = array("f", [*counts, *[0.0] * (capacity - len(counts))])
        self._token_ids = torch.frombuffer(self._id_values, dtype=torch.int64)
        self._counts = torch.frombuffer(self._count_values, dtype=torch.float32)


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
        sizes, columns, token_ids, counts = [], [], [], []
        for each in active:
            each.state.catch_up(each.row.output_token_ids)
            sizes.append(each.state.size)
            token_ids.append(each.state.token_ids)
            counts.append(each.state.counts)
            params = each.row.params
            repetition = min(
                max(params.repetition_penalty, _MIN_REPETITION_PENALTY), _MAX_REPETITION_PENALTY
            )
            columns.append(
                (each.index, repetition, params.frequency_penalty, params.presence_penalty)
            )
        # One repeat for all that a row says to each of its tokens.
        per_token = torch.tensor(columns, dtype=torch.float64).repeat_interleave(
            torch.tensor(sizes), dim=0, output_size=sum(sizes)
        )
        indices = per_token[:, 0].to(torch.int64)
        knobs = per_token[:, 1:].to(torch.float32)
        device = logits.device
        place = (send(indices, device), send(torch.cat(token_ids), device))
        repetition_column, frequency, presence = send(knobs, device).unbind(dim=1)
        logits[place] = penalized(
            logits[place], send(torch.cat(counts), device), repetition_column, frequency, presence
        )
