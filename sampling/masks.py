"""Processors that forbid or favour single tokens: bias, allowed ids, bad words, min_tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SamplingRow
from sampling.processors import ActiveRow


class LogitBiasProcessor:
    """Adds the request's bias; a token that is named twice gets the sum."""

    is_argmax_invariant = False

    def make_state(self, row: SamplingRow) -> tuple[Tensor, Tensor] | None:
        """Return (token ids [M] int64, biases [M] float32), or None without a bias."""
        if not row.params.logit_bias:
            return None
        biases: dict[int, float] = {}
        for token_id, bias in row.params.logit_bias:
            biases[token_id] = biases.get(token_id, 0.0) + bias
        return torch.tensor(list(biases)), torch.tensor(list(biases.values()), dtype=torch.float32)

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Add each row's biases to its logits ([B, V] float32) in place."""
        for each in active:
            token_ids, biases = each.state
            logits[each.index, token_ids.to(logits.device)] += biases.to(logits.device)


class AllowedTokensProcessor:
    """Masks everything but the request's allowed ids."""

    is_argmax_invariant = False

    def make_state(self, row: SamplingRow) -> Tensor | None:
        """Return the allowed ids ([M] int64), or None if all are allowed."""
        allowed = row.params.allowed_token_ids
        return torch.tensor(sorted(set(allowed))) if allowed else None

    def apply_(self, logits: Tensor, active: Sequence[ActiveRow]) -> None:
        """Mask each row's logits ([B, V] float32) in place."""
        for each in active:
            token_ids = each.state.to(logits.device)
            kept = logits[each.index, token_ids]
            logits[each.index] = -math.inf
            logits[each.index, token_ids] = kept


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
        for each in active:
            output = each.row.output_token_ids
            banned = [word[-1] for word in each.state if _ends_with(output, word[:-1])]
            _ban_(logits, each.index, banned)


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
        for each in active:
            if len(each.row.output_token_ids) < each.row.params.min_tokens:
                _ban_(logits, each.index, each.state)


def _ends_with(tokens: Sequence[int], ending: Sequence[int]) -> bool:
    return len(ending) <= len(tokens) and list(tokens[len(tokens) - len(ending) :]) == list(ending)


def _ban_(logits: Tensor, index: int, token_ids: Sequence[int]) -> None:
    if token_ids:
        logits[index, torch.tensor(token_ids, device=logits.device)] = -math.inf
