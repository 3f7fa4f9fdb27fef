"""Repetition, frequency and presence penalties over the few tokens that a row has seen."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SamplingRow
from sampling.blocks import send
from sampling.host_arrays import float_rows, integers, joined
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

    Attributes:
        size: how many distinct tokens.
        knobs: repetition (clamped), frequency and presence penalty of the row.

    Invariants: the first ``size`` ids are distinct.
    Owner: step thread.
    """

    def __init__(self, row: SamplingRow) -> None:
        params = row.params
        self.knobs = (
            min(max(params.repetition_penalty, _MIN_REPETITION_PENALTY), _MAX_REPETITION_PENALTY),
            params.frequency_penalty,
            params.presence_penalty,
        )
        is_prompt_counted = params.repetition_penalty != 1.0
        seen = list(dict.fromkeys(row.prompt_token_ids)) if is_prompt_counted else []
        self.size = len(seen)
        self._places = {token_id: place for place, token_id in enumerate(seen)}
        values = [number for token_id in seen for number in (token_id, 0.0)]
        self._reserve(max(_INITIAL_CAPACITY, 2 * self.size), values)
        self._num_seen_output_tokens = 0

    @property
    def ids_and_counts(self) -> memoryview:
        """2 * size float64 numbers: each token id (exact) and how often it is in the output."""
        return memoryview(self._values)[: 2 * self.size]

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count the output tokens that were drawn since the last call."""
        for number in range(self._num_seen_output_tokens, len(output_token_ids)):
            # First the place: a new token may need a new array.
            place = self._place(output_token_ids[number])
            self._values[2 * place + 1] += 1.0
        self._num_seen_output_tokens = len(output_token_ids)

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is not None:
            return place
        place = self.size
        if 2 * place == len(self._values):
            self._reserve(2 * place, self._values)
        self._places[token_id] = place
        self._values[2 * place] = token_id
        self.size += 1
        return place

    def _reserve(self, capacity: int, values: Sequence[float]) -> None:
        """Make an array with room for ``capacity`` tokens.

        An array takes a number in a tenth of the time that a tensor takes, and a part of it is
        had in a tenth of the time too.
        """
        self._values = array("d", bytes(8 * 2 * capacity))
        self._values[: len(values)] = array("d", values)


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
        sizes, columns, seen = [], [], []
        for each in active:
            state = each.state
            state.catch_up(each.row.output_token_ids)
            sizes.append(state.size)
            seen.append(state.ids_and_counts)
            columns.append((each.index, *state.knobs))
        # One repeat for all that a row says to each of its tokens.
        per_token = float_rows(columns).repeat_interleave(
            integers(sizes), dim=0, output_size=sum(sizes)
        )
        indices = per_token[:, 0].to(torch.int64)
        knobs = per_token[:, 1:].to(torch.float32)
        device = logits.device
        token_ids, counts = joined(seen).view(-1, 2).unbind(dim=1)
        place = (send(indices, device), send(token_ids.to(torch.int64), device))
        repetition_column, frequency, presence = send(knobs, device).unbind(dim=1)
        logits[place] = penalized(
            logits[place],
            send(counts.to(torch.float32), device),
            repetition_column,
            frequency,
            presence,
        )
