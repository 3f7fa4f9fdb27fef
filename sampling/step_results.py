"""What the host learns of a step: gathered on the device, copied once, made into results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.batch import SampledRow, SamplingRow
from sampling.blocks import cumulative_mass, take_rows
from sampling.errors import NonFiniteLogitsError, NoTokenLeftError, RowSamplingError
from sampling.ranking import rank_best

_INF = math.inf


def fetch_results(
    scores: Tensor,
    maxima: Tensor,
    best: Tensor,
    tokens: Tensor,
    rows: Sequence[SamplingRow],
) -> list[SampledRow]:
    """Return what each row drew, with the log probabilities it asked for.

    The only copy from the device of a step: one tensor of float64, in which every token id and
    every logit is exact.

    Args:
        scores: [B, N * 64] float32, the model's own logits.
        maxima: [B, N] float32, their block maxima.
        best: [B] float32, each row's best logit behind all processors.
        tokens: [B] int64, what was drawn; means nothing for a row without a finite best logit.
        rows: B rows.
    """
    num_top = [row.params.num_top_logprobs for row in rows]
    reporting = [index for index, count in enumerate(num_top) if count is not None]
    most_top = max((count for count in num_top if count is not None), default=0)
    gathered = [tokens.to(torch.float64), maxima.amax(dim=1), best]
    if reporting:
        gathered += _reported(
            take_rows(scores, reporting),
            take_rows(maxima, reporting),
            take_rows(tokens, reporting),
            most_top,
        )
    values = copy_to_host(torch.cat(gathered))
    num_rows, num_reporting = len(rows), len(reporting)
    reports = _Reports(values[3 * num_rows :], num_reporting)
    place_of = {index: place for place, index in enumerate(reporting)}

    results = []
    for index, (token, raw_best, final_best) in enumerate(
        zip(values, values[num_rows:], values[2 * num_rows : 3 * num_rows], strict=False)
    ):
        count = num_top[index]
        if not (-_INF < raw_best < _INF and -_INF < final_best < _INF):
            results.append(SampledRow(-1, error=_error(raw_best, final_best)))
        elif count is None:
            results.append(SampledRow(int(token)))
        else:
            logprob, top = reports.read(place_of[index], raw_best, count)
            results.append(SampledRow(int(token), logprob, top))
    return results


def copy_to_host(values: Tensor) -> list[float]:
    """Return [M] float64 as numbers; waits for the device."""
    numbers: list[float] = values.tolist()
    return numbers


class _Reports:
    """Reads what ``_reported`` has gathered, on the host."""

    def __init__(self, values: Sequence[float], num_rows: int) -> None:
        self._totals = values[:num_rows]
        self._chosen = values[num_rows : 2 * num_rows]
        best = values[2 * num_rows :]
        # Fewer than were asked for where the vocabulary has no more.
        self._num_best = len(best) // 2 // max(num_rows, 1)
        self._token_ids = best[: len(best) // 2]
        self._logits = best[len(best) // 2 :]

    def read(
        self, place: int, maximum: float, num_top: int
    ) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return a row's log probabilities: of its token and, with ids, of its best tokens."""
        log_total = math.log(self._totals[place])
        start = place * self._num_best
        end = start + min(num_top, self._num_best)
        # The formula of RawDistribution.logprob, without a call for each token.
        top = [
            (int(token_id), logit - maximum - log_total)
            for token_id, logit in zip(
                self._token_ids[start:end], self._logits[start:end], strict=True
            )
            if logit > -_INF
        ]
        return self._chosen[place] - maximum - log_total, tuple(top)


def _reported(scores: Tensor, maxima: Tensor, tokens: Tensor, num_top: int) -> list[Tensor]:
    """Return flat columns: totals, logits of the tokens, best token ids, their logits."""
    row_maxima = maxima.amax(dim=1, keepdim=True)
    totals = cumulative_mass(scores, row_maxima, torch.ones_like(row_maxima))[:, -1]
    columns = [totals, scores.gather(1, tokens[:, None]).flatten()]
    if num_top:
        best = rank_best(scores, maxima, num_top)
        columns += [best.token_ids.flatten(), best.logits.flatten()]
    return columns


def _error(raw_best: float, best: float) -> RowSamplingError:
    """Return why a row whose best logits these are, of which one is not finite, gets no token."""
    if math.isfinite(raw_best) and best == -math.inf:
        return NoTokenLeftError()
    return NonFiniteLogitsError()
