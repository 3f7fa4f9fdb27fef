"""Logits and rows in, one token per row out. Knows nothing of models, text or scheduling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SampledRow, SamplingBatch, SamplingRow, is_filtered
from sampling.blocks import block_maxima, first_argmax, send, take_rows, to_blocked
from sampling.draw import draw_filtered, draw_plain
from sampling.host_arrays import integers
from sampling.masks import (
    AllowedTokensProcessor,
    BadWordsProcessor,
    LogitBiasProcessor,
    MinTokensProcessor,
)
from sampling.params import SamplingParams
from sampling.penalties import PenaltyProcessor
from sampling.processors import ActiveRow, LogitsProcessor
from sampling.step_results import fetch_results

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
    ask for; no more than a block of 64 tokens is summed in an order that matters, and that order
    is always the same (see ``sampling.blocks``).

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
            vocabulary_size: most columns of logits; may be more than the tokenizer has.
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
        self._copies = torch.empty((0, 0))

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
        row.is_processed = any(state is not None for state in row.states)
        return row

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """Draw the next token of each row and append it to the row's output.

        A row that cannot be sampled gets an error instead of a token; the others are not touched
        by that. Everything that the host has to know comes from the device in one copy.

        Args:
            logits: [B, V] of any floating dtype on any device; not changed. V may differ from step
                to step: a column of -inf more or less changes no row's bits. Token ids of ``rows``
                are below V.
            rows: B rows of this sampler, all different.

        Returns:
            One result per row, in their order.
        """
        if not rows:
            return []
        scores = to_blocked(logits)
        maxima = block_maxima(scores)
        touched = [index for index, row in enumerate(rows) if row.is_processed]
        if not touched:
            tokens, final_best = _choose(scores, maxima, rows), maxima.amax(dim=1)
        else:
            width = min(logits.shape[1], self._vocabulary_size)
            tokens, final_best = self._choose_processed(scores, maxima, rows, touched, width)
        results = fetch_results(scores, maxima, final_best, tokens, rows)
        for row, result in zip(rows, results, strict=True):
            if result.error is None:
                row.output_token_ids.append(result.token_id)
        return results

    def _choose_processed(
        self,
        scores: Tensor,
        maxima: Tensor,
        rows: Sequence[SamplingRow],
        touched: Sequence[int],
        width: int,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and best logits, both [B], where some rows have processors to run.

        Those rows are copied, and processors see ``width`` columns; the others are read where
        they are.
        """
        processed = self._copied(scores, touched)
        touched_rows = [rows[index] for index in touched]
        self._process_(processed[:, :width], touched_rows)
        processed_maxima = block_maxima(processed)
        tokens = _choose(processed, processed_maxima, touched_rows)
        best = processed_maxima.amax(dim=1)
        if len(touched) == len(rows):
            return tokens, best
        is_touched = set(touched)
        others = [index for index in range(len(rows)) if index not in is_touched]
        order = send(integers([*touched, *others]), scores.device)
        place = torch.empty_like(order).index_copy_(
            0, order, torch.arange(len(rows), device=scores.device)
        )
        other_tokens = _choose(scores, maxima, rows, others)
        other_best = maxima.amax(dim=1)[order[len(touched) :]]
        return torch.cat((tokens, other_tokens))[place], torch.cat((best, other_best))[place]

    def _copied(self, scores: Tensor, indices: Sequence[int]) -> Tensor:
        """Return a copy of some rows, valid until the next call.

        Always into the same memory: to ask the system for fresh pages costs more than to fill
        them.
        """
        num_rows, width = len(indices), scores.shape[1]
        copies = self._copies
        if copies.device != scores.device or copies.shape[1] != width or len(copies) < num_rows:
            self._copies = copies = scores.new_empty((num_rows, width))
        copies = copies[:num_rows]
        if num_rows == len(scores):
            return copies.copy_(scores)
        place = send(integers(indices), scores.device)
        return torch.index_select(scores, 0, place, out=copies)

    def _process_(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Run each processor on the rows that have a state for it, in place."""
        for number, processor in enumerate(self._processors):
            active = [
                ActiveRow(index, row, row.states[number])
                for index, row in enumerate(rows)
                if row.states[number] is not None
            ]
            if active:
                processor.apply_(logits, active)


def _choose(
    scores: Tensor,
    maxima: Tensor,
    rows: Sequence[SamplingRow],
    indices: Sequence[int] | None = None,
) -> Tensor:
    """Return the tokens of the rows at ``indices`` (None: all), [n] int64, group by group.

    Of a row without a finite maximum the token means nothing, but it is one of the vocabulary.
    """
    chosen = range(len(rows)) if indices is None else indices
    greedy, plain, filtered = [], [], []
    for index in chosen:
        params = rows[index].params
        if params.is_greedy:
            greedy.append(index)
        elif is_filtered(params):
            filtered.append(index)
        else:
            plain.append(index)

    device = scores.device
    groups = []
    if greedy:
        # On all rows: the blocks are found already, to copy rows out would cost more.
        groups.append((greedy, take_rows(first_argmax(scores, maxima), greedy)))
    if plain:
        batch = SamplingBatch.from_rows([rows[index] for index in plain], device)
        row_maxima = take_rows(maxima, plain).amax(dim=1, keepdim=True)
        groups.append((plain, draw_plain(take_rows(scores, plain), row_maxima, batch)))
    if filtered:
        batch = SamplingBatch.from_rows([rows[index] for index in filtered], device)
        drawn = draw_filtered(take_rows(scores, filtered), take_rows(maxima, filtered), batch)
        groups.append((filtered, drawn))
    if len(groups) == 1:
        return groups[0][1]
    place_of = {index: place for place, index in enumerate(chosen)}
    places = [place_of[index] for group, _ in groups for index in group]
    drawn = torch.cat([tokens for _, tokens in groups])
    return torch.empty_like(drawn).index_copy_(0, send(integers(places), device), drawn)
