"""Logits and rows in, one token per row out. Knows nothing of models, text or scheduling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sampling.batch import SampledRow, SamplingBatch, SamplingRow, is_filtered
from sampling.blocks import block_maxima, first_argmax, take_rows, to_blocked
from sampling.draw import draw_filtered, draw_plain
from sampling.errors import NonFiniteLogitsError, NoTokenLeftError, RowSamplingError
from sampling.logprobs import RawDistribution, raw_distributions
from sampling.masks import (
    AllowedTokensProcessor,
    BadWordsProcessor,
    LogitBiasProcessor,
    MinTokensProcessor,
)
from sampling.params import SamplingParams
from sampling.penalties import PenaltyProcessor
from sampling.processors import ActiveRow, LogitsProcessor

__all__ = ["SampledRow", "Sampler", "SamplingRow"]


class Sampler:
    """Draws one token for each row of a batch.

    Order of operations, each on what the one before has left:

    1. raw log probabilities, if asked for: log softmax of the model's own logits
    2. repetition penalty (prompt and output), then frequency and presence (output)
    3. logit bias
    4. masks: allowed ids, bad words, EOS and stop ids before ``min_tokens``
    5. further processors, in the order they were given
    6. greedy rows: the best token, the lowest id among equals; they skip the rest
    7. temperature
    8. top_k
    9. top_p
    10. min_p
    11. typical_p
    12. one uniform number of (seed, position) through the inverse of the cumulative weights: in
        order of token ids for a row without filters (8 to 11), in order of falling logits (ties
        by token id) for a row with one

    All in float32 or float64, whatever the dtype of the logits.

    Law: token and log probabilities of a row are the same bit for bit whatever the number of
    rows, its place among them and its neighbours. Rows are grouped by what their own parameters
    ask for, and nothing is summed across more than a block of 64 tokens in an order that the
    batch could change.

    Owner: step thread.
    """

    def __init__(
        self,
        vocabulary_size: int,
        eos_token_ids: frozenset[int],
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Make a sampler for one model.

        Args:
            vocabulary_size: width of the logits; may be more than the tokenizer has.
            eos_token_ids: what ``min_tokens`` holds back; ids outside of the logits are ignored.
            processors: run after the built-in ones, see the class.
        """
        self._vocabulary_size = vocabulary_size
        eos_in_range = frozenset(i for i in eos_token_ids if 0 <= i < vocabulary_size)
        self._processors: tuple[LogitsProcessor, ...] = (
            PenaltyProcessor(),
            LogitBiasProcessor(),
            AllowedTokensProcessor(),
            BadWordsProcessor(),
            MinTokensProcessor(eos_in_range),
            *processors,
        )

    def make_row(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> SamplingRow:
        """Return the state of a sequence that joins.

        A row that is made again with the tokens it had drawn goes on as if undisturbed.

        Args:
            params: of the request.
            seed: the choice's own.
            prompt_token_ids: ids in [0, vocabulary_size).
            output_token_ids: tokens drawn before, copied.

        Raises:
            InvalidSamplingParamsError: a token id in ``params`` is not in the vocabulary.
        """
        params.check_vocabulary(self._vocabulary_size)
        row = SamplingRow(params, seed, prompt_token_ids, list(output_token_ids))
        row.states = tuple(
            None
            if params.is_greedy and processor.is_argmax_invariant
            else processor.make_state(row)
            for processor in self._processors
        )
        return row

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """Draw the next token of each row and append it to the row's output.

        A row that cannot be sampled gets an error instead of a token; the others are not touched
        by that.

        Args:
            logits: [B, V] of any floating dtype on any device; not changed.
            rows: B rows of this sampler, all different.

        Returns:
            One result per row, in their order.
        """
        if not rows:
            return []
        scores = to_blocked(logits)
        maxima = block_maxima(scores)
        errors: list[RowSamplingError | None] = [
            None if is_finite else NonFiniteLogitsError()
            for is_finite in maxima.amax(dim=1).isfinite().tolist()
        ]
        distributions = _distributions(scores, maxima, rows, errors)

        active = self._active(rows, errors)
        if any(active):
            if scores.data_ptr() == logits.data_ptr():
                scores = scores.clone()
            _process_(scores[:, : self._vocabulary_size], self._processors, active)
            touched = sorted({each.index for group in active for each in group})
            maxima = _refreshed(maxima, scores, touched)
            _note_errors_(errors, maxima, touched)

        tokens = _choose(scores, maxima, rows, errors)
        logprobs = _chosen_logprobs(logits, tokens, distributions)
        results = []
        for index, row in enumerate(rows):
            if (error := errors[index]) is not None:
                results.append(SampledRow(-1, error=error))
                continue
            row.output_token_ids.append(tokens[index])
            top = distributions[index].top if index in distributions else ()
            results.append(SampledRow(tokens[index], logprobs.get(index), top))
        return results

    def _active(
        self, rows: Sequence[SamplingRow], errors: Sequence[RowSamplingError | None]
    ) -> list[list[ActiveRow]]:
        """Return per processor the sound rows that have a state for it."""
        groups: list[list[ActiveRow]] = [[] for _ in self._processors]
        for index, row in enumerate(rows):
            if errors[index] is not None:
                continue
            for group, state in zip(groups, row.states, strict=True):
                if state is not None:
                    group.append(ActiveRow(index, row, state))
        return groups


def _distributions(
    scores: Tensor,
    maxima: Tensor,
    rows: Sequence[SamplingRow],
    errors: Sequence[RowSamplingError | None],
) -> dict[int, RawDistribution]:
    """Return the raw distributions of the sound rows that report log probabilities, by index."""
    num_top = {
        index: row.params.num_top_logprobs
        for index, row in enumerate(rows)
        if row.params.num_top_logprobs is not None and errors[index] is None
    }
    if not num_top:
        return {}
    indices = list(num_top)
    found = raw_distributions(
        take_rows(scores, indices), take_rows(maxima, indices), list(num_top.values())
    )
    return dict(zip(indices, found, strict=True))


def _chosen_logprobs(
    logits: Tensor, tokens: Mapping[int, int], distributions: Mapping[int, RawDistribution]
) -> dict[int, float]:
    """Return the raw log probability of each reporting row's token; ``logits`` are unprocessed."""
    indices = [index for index in distributions if index in tokens]
    if not indices:
        return {}
    token_ids = [tokens[index] for index in indices]
    chosen = logits[torch.tensor(indices), torch.tensor(token_ids)].to(torch.float32).tolist()
    return {
        index: distributions[index].logprob(logit)
        for index, logit in zip(indices, chosen, strict=True)
    }


def _process_(
    scores: Tensor, processors: Sequence[LogitsProcessor], active: Sequence[Sequence[ActiveRow]]
) -> None:
    for processor, group in zip(processors, active, strict=True):
        if group:
            processor.apply_(scores, group)


def _refreshed(maxima: Tensor, scores: Tensor, touched: Sequence[int]) -> Tensor:
    fresh = block_maxima(take_rows(scores, touched))
    return maxima.index_copy(0, torch.tensor(touched, device=maxima.device), fresh)


def _note_errors_(
    errors: list[RowSamplingError | None], maxima: Tensor, touched: Sequence[int]
) -> None:
    best = maxima.amax(dim=1).tolist()
    for index in touched:
        if best[index] == -math.inf:
            errors[index] = NoTokenLeftError()
        elif not math.isfinite(best[index]):
            errors[index] = NonFiniteLogitsError()


def _choose(
    scores: Tensor,
    maxima: Tensor,
    rows: Sequence[SamplingRow],
    errors: Sequence[RowSamplingError | None],
) -> dict[int, int]:
    """Return the token of each sound row by index, group by group."""
    greedy, plain, filtered = [], [], []
    for index, row in enumerate(rows):
        if errors[index] is not None:
            continue
        if row.params.is_greedy:
            greedy.append(index)
        elif is_filtered(row.params):
            filtered.append(index)
        else:
            plain.append(index)

    tokens: dict[int, int] = {}
    if greedy:
        # On all rows: the blocks are found already, to copy rows out would cost more.
        best = first_argmax(scores, maxima).tolist()
        tokens.update((index, best[index]) for index in greedy)
    if plain:
        batch = SamplingBatch.from_rows([rows[index] for index in plain])
        row_maxima = take_rows(maxima, plain).amax(dim=1, keepdim=True)
        drawn = draw_plain(take_rows(scores, plain), row_maxima, batch)
        tokens.update(zip(plain, drawn, strict=True))
    if filtered:
        batch = SamplingBatch.from_rows([rows[index] for index in filtered])
        drawn = draw_filtered(take_rows(scores, filtered), take_rows(maxima, filtered), batch)
        tokens.update(zip(filtered, drawn, strict=True))
    return tokens
