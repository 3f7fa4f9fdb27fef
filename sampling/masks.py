"""Processors that forbid or favour single tokens: bias, allowed ids, bad words, min_tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SamplingRow
from sampling.blocks import send
from sampling.host_arrays import integer_rows, integers, joined
from sampling.processors import ActiveRow


class LogitBiasProcessor:
    """Adds the request's bias; a token that is named twice gets the sum."""

    is_argmax_invariant = False

    def make_state(self, row: SamplingRow) -> array[float] | None:
        """Return each token id (exact) and its bias, one after the other, or None without one."""
        if not row.params.logit_bias:
            return None
        biases: dict[int, float] = {}
        for token_id, bias in row.params.logit_bias:
            biases[token_id] = biases.get(token_id, 0.0) + bias
        return array("d", [number for item in biases.items() for number in item])

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Add each row's biases to its logits ([B, V] float32) in place."""
        token_ids, biases = joined([each.state for each in active]).view(-1, 2).unbind(dim=1)
        rows = [(each.index, len(each.state) // 2) for each in active]
        place = _places(logits, rows, token_ids.to(torch.int64))
        logits[place] += send(biases.to(torch.float32), logits.device)


class AllowedTokensProcessor:
    """Masks everything but the request's allowed ids."""

    is_argmax_invariant = False

    def make_state(self, row: SamplingRow) -> Tensor | None:
        """Return the allowed ids ([M] int64), or None if all are allowed."""
        allowed = row.params.allowed_token_ids
        return torch.tensor(sorted(set(allowed))) if allowed else None

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Mask each row's logits ([B, V] float32) in place."""
        rows = [(each.index, len(each.state)) for each in active]
        place = _places(logits, rows, torch.cat([each.state for each in active]))
        kept = logits[place]
        indices = integers([each.index for each in active])
        logits.index_fill_(0, send(indices, logits.device), -math.inf)
        logits[place] = kept


class BadWordsProcessor:
    """Masks the last token of a bad word when the output ends with all that is before it.

    Only the output is looked at: a bad word that begins in the prompt is none.
    """

    is_argmax_invariant = False

    def make_state(self, row: SamplingRow) -> tuple[tuple[int, ...], ...] | None:
        """Return the words that are not empty, or None if there are none."""
        return tuple(word for word in row.params.bad_words_token_ids if word) or None

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Mask each row's logits ([B, V] float32) in place."""
        banned = [
            (each.index, word[-1])
            for each in active
            for word in each.state
            if len(word) == 1 or _ends_with(each.row.output_token_ids, word[:-1])
        ]
        _ban_(logits, banned)


class MinTokensProcessor:
    """Masks whatever would end the sequence until ``min_tokens`` tokens are out.

    That is the stop ids, and the EOS set unless the request ignores it: an EOS that ends nothing
    needs no holding back.
    """

    is_argmax_invariant = False

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def make_state(self, row: SamplingRow) -> tuple[int, ...] | None:
        """Return the ids to hold back, or None if enough tokens are out or nothing can end it."""
        params = row.params
        if len(row.output_token_ids) >= params.min_tokens:
            return None
        ending = set(params.stop_token_ids)
        if not params.ignore_eos:
            ending |= self._eos_token_ids
        return tuple(sorted(ending)) or None

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Mask each row's logits ([B, V] float32) in place."""
        banned = [
            (each.index, token_id)
            for each in active
            if len(each.row.output_token_ids) < each.row.params.min_tokens
            for token_id in each.state
        ]
        _ban_(logits, banned)


def _ends_with(tokens: Sequence[int], ending: Sequence[int]) -> bool:
    # The last token first: it nearly always differs.
    return (
        len(ending) <= len(tokens)
        and tokens[-1] == ending[-1]
        and list(tokens[len(tokens) - len(ending) :]) == list(ending)
    )


def _places(
    logits: Tensor, rows: Sequence[tuple[int, int]], token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return row and column of every token ([M] int64 each), row after row.

    Args:
        logits: what they are places of.
        rows: index of each row and how many of the tokens it has.
        token_ids: [M] int64 on the host.
    """
    indices, counts = integer_rows(rows).unbind(dim=1)
    indices = indices.repeat_interleave(counts, output_size=len(token_ids))
    return send(indices, logits.device), send(token_ids, logits.device)


def _ban_(logits: Tensor, banned: Sequence[tuple[int, int]]) -> None:
    """Mask pairs of row and token id."""
    if banned:
        indices, token_ids = send(integer_rows(banned), logits.device).unbind(dim=1)
        logits[indices, token_ids] = -math.inf
