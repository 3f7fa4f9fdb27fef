"""Draws from one row of which thousands of tokens stay, on the CPU, without sorting them.

Scaled logits are cut into steps of 1/32, all tokens of a step before all of the next one. The
mass of each step says in which step a filter ends and in which the draw falls; only the tokens of
these two are ranked. Sums are exact, so the token is the one that ranking them all would give.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sampling.batch import SamplingBatch
from sampling.blocks import exact_mass, invert_cumulative

# A power of two, so that to multiply by it rounds nothing. The last step takes all below -32,
# where a weight is below e**-32 and counts as 0.
_NUM_STEPS_PER_UNIT = 32
_NUM_STEPS = 1024


def draw_wide(row: Tensor, scaled: Tensor, batch: SamplingBatch, total: float) -> Tensor:
    """Draw from what top_p and min_p leave, in order of falling logits, ties by token id.

    Args:
        row: [V] float32 logits.
        scaled: [V] float32, their ``scaled_logits``.
        batch: one row, without top_k and typical_p.
        total: weight of the whole row.

    Returns:
        [] int64 token id.
    """
    weights = exact_mass(scaled.exp())
    steps = _steps(scaled)
    cumulative = _mass_of_steps(steps, weights).cumsum(dim=0)
    last = _last_step(cumulative, batch, total)

    token_ids = _ranked_ids(row, steps, last)
    inside = weights[token_ids].cumsum(dim=0)
    before = float(cumulative[last - 1]) if last > 0 else 0.0
    # A token stays if the mass before it is below p: the first one does, or ``last`` would be
    # lower; or the step is the first one, whose best token always stays.
    wanted_mass = _wanted_mass(batch, total)
    num_short = int((inside[:-1] + before < wanted_mass).sum()) + 1
    num_above = int((scaled[token_ids] >= batch.log_min_p).sum())
    num_kept = min(num_short, num_above) if last > 0 else max(min(num_short, num_above), 1)

    if num_kept > 0:
        cumulative[last] = before + inside[num_kept - 1]
    else:
        cumulative[last] = before
    cumulative = cumulative[None, : last + 1]
    target = batch.uniform * cumulative[:, -1]
    drawn = int(invert_cumulative(cumulative, target))
    if drawn < last:
        token_ids = _ranked_ids(row, steps, drawn)
        inside = weights[token_ids].cumsum(dim=0)
        before = float(cumulative[0, drawn - 1]) if drawn > 0 else 0.0
    else:
        inside = inside[:num_kept]
    return token_ids[invert_cumulative(inside[None], target - before)[0]]


def kept_bound(scaled: Tensor, batch: SamplingBatch, total: float) -> float:
    """Return a value of the scaled logits below which top_p and min_p keep nothing of weight.

    Arguments as those of ``draw_wide``.
    """
    mass = _mass_of_steps(_steps(scaled), exact_mass(scaled.exp()))
    num_short = int((mass.cumsum(dim=0) < _wanted_mass(batch, total)).sum())
    of_top_p = -min(num_short + 1, _NUM_STEPS) / _NUM_STEPS_PER_UNIT
    return max(of_top_p, float(batch.log_min_p))


def _steps(scaled: Tensor) -> Tensor:
    return scaled.mul(-_NUM_STEPS_PER_UNIT).clamp_(max=_NUM_STEPS - 1).to(torch.int64)


def _mass_of_steps(steps: Tensor, weights: Tensor) -> Tensor:
    """Return [_NUM_STEPS] float64; takes half of the time of a weighted ``bincount``."""
    return weights.new_zeros(_NUM_STEPS).scatter_add_(0, steps, weights)


def _wanted_mass(batch: SamplingBatch, total: float) -> float:
    (params,) = batch.params
    return params.top_p * total if params.top_p < 1.0 else math.inf


def _last_step(cumulative: Tensor, batch: SamplingBatch, total: float) -> int:
    """Return the last step of which something may stay; of all steps before it everything does."""
    of_top_p = int((cumulative < _wanted_mass(batch, total)).sum())
    of_min_p = min(-float(batch.log_min_p) * _NUM_STEPS_PER_UNIT, _NUM_STEPS - 1)
    return min(of_top_p, int(of_min_p), _NUM_STEPS - 1)


def _ranked_ids(row: Tensor, steps: Tensor, step: int) -> Tensor:
    """Return the token ids of one step in order of rank."""
    token_ids = (steps == step).nonzero()[:, 0]
    return token_ids[row[token_ids].sort(descending=True, stable=True).indices]
