"""A vocabulary cut into blocks: maxima, sums and inverse CDF that no neighbour can change.

A reduction over a whole row may be split among threads when the batch is small, which changes
its last bits. Here blocks of 64 are reduced, each by itself; the few hundred results of a row are
rounded to multiples of 2**-34 first and added up in float64, which is exact in any order (up to
524,288 tokens of weight 1). So is every other sum over a row.

No function here has a shape that depends on values, so that a GPU need not be waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.host_arrays import integers

BLOCK_SIZE_TOKENS = 64
# The weights of sums are whole multiples of this; a weight below half of it counts as 0.
_UNITS_PER_WEIGHT = 2.0**34
# So many elements at a time stay in a core's cache between one operation and the next.
_SLICE_ELEMENTS = 2**18


def to_blocked(logits: Tensor) -> Tensor:
    """Return logits as float32 whose width is a multiple of the block size.

    Args:
        logits: [B, V], any floating dtype.

    Returns:
        [B, N * 64] float32, contiguous, -inf behind V. Shares memory with ``logits`` only if
        those are of this form already.
    """
    padding = -logits.shape[1] % BLOCK_SIZE_TOKENS
    blocked = logits.to(torch.float32).contiguous()
    if padding:
        return torch.nn.functional.pad(blocked, (0, padding), value=-math.inf)
    return blocked


def block_maxima(blocked: Tensor) -> Tensor:
    """Return the maximum of each block: [B, N * 64] -> [B, N]. NaN wins."""
    return blocked.view(len(blocked), -1, BLOCK_SIZE_TOKENS).amax(dim=2)


def first_argmax(blocked: Tensor, maxima: Tensor) -> Tensor:
    """Return each row's best token id, the lowest of equals.

    Args:
        blocked: [B, N * 64].
        maxima: [B, N], its block maxima.

    Returns:
        [B] int64.
    """
    block_ids = maxima.argmax(dim=1)
    best_blocks = _chosen_blocks(blocked, block_ids)
    return block_ids * BLOCK_SIZE_TOKENS + best_blocks.argmax(dim=1)


def scaled_logits(logits: Tensor, row_maxima: Tensor, temperature: Tensor) -> Tensor:
    """Return (logit - maximum) / temperature in float32, element by element.

    The maximum is taken off first, so that a tiny temperature gives 0 and -inf, never NaN.
    """
    return logits.sub(row_maxima).div_(temperature)


def block_weights(blocked: Tensor, row_maxima: Tensor, temperature: Tensor) -> Tensor:
    """Return exp((logit - maximum) / temperature), element by element, float32.

    Args:
        blocked: [B, N * 64] float32.
        row_maxima: [B, 1] float32, finite.
        temperature: [B, 1] float32, above 0.
    """
    return scaled_logits(blocked, row_maxima, temperature).exp_()


def exact_mass(weights: Tensor) -> Tensor:
    """Return weights (at most 64 each) as float64 whose sums are exact, in whatever order."""
    units = weights.to(torch.float64).mul(_UNITS_PER_WEIGHT).round_()
    return units.mul_(1.0 / _UNITS_PER_WEIGHT)


def cumulative_block_mass(weights: Tensor) -> Tensor:
    """Return the running sum over blocks: [B, N * 64] float32 -> [B, N] float64."""
    sums = weights.view(len(weights), -1, BLOCK_SIZE_TOKENS).sum(dim=2)
    return exact_mass(sums).cumsum(dim=1)


def cumulative_mass(blocked: Tensor, row_maxima: Tensor, temperature: Tensor) -> Tensor:
    """Return the running sum over blocks of the weights, without keeping those.

    Args:
        blocked: [B, N * 64] float32.
        row_maxima: [B, 1] float32.
        temperature: [B, 1] float32.

    Returns:
        [B, N] float64.
    """
    num_rows, width = blocked.shape
    # A GPU has its own order of work; there every further call costs.
    step = max(1, _SLICE_ELEMENTS // width) if blocked.is_cpu else num_rows
    sums = blocked.new_empty((num_rows, width // BLOCK_SIZE_TOKENS))
    buffer = blocked.new_empty((min(step, num_rows), width))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        weights = buffer[: min(step, num_rows - start)]
        torch.sub(blocked[rows], row_maxima[rows], out=weights)
        weights.div_(temperature[rows]).exp_()
        torch.sum(weights.view(len(weights), -1, BLOCK_SIZE_TOKENS), dim=2, out=sums[rows])
    return exact_mass(sums).cumsum(dim=1)


def draw_by_token_id(
    blocked: Tensor, row_maxima: Tensor, temperature: Tensor, uniform: Tensor
) -> Tensor:
    """Return the token ids at which the cumulative weights, in order of ids, pass ``uniform``.

    Args:
        blocked: [B, N * 64] float32, at least one logit above -inf per row.
        row_maxima: [B, 1] float32.
        temperature: [B, 1] float32, above 0.
        uniform: [B] float64 in [0, 1).

    Returns:
        [B] int64.
    """
    cumulative = cumulative_mass(blocked, row_maxima, temperature)
    target = uniform * cumulative[:, -1]
    block_ids = invert_cumulative(cumulative, target)
    before = cumulative.gather(1, (block_ids - 1).clamp(min=0)[:, None])[:, 0]
    mass_before = torch.where(block_ids > 0, before, 0.0)
    blocks = _chosen_blocks(blocked, block_ids)
    inside = exact_mass(block_weights(blocks, row_maxima, temperature)).cumsum(dim=1)
    offsets = invert_cumulative(inside, target - mass_before)
    return block_ids * BLOCK_SIZE_TOKENS + offsets


def invert_cumulative(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index whose cumulative weight is above ``target``; in range even of NaN.

    A target that rounding has pushed to the total or beyond gives the last index that has a
    weight at all: an index without weight is never returned.

    Args:
        cumulative: [B, W] float64, not falling, the last column above 0.
        target: [B] float64, not negative.

    Returns:
        [B] int64.
    """
    passed = (cumulative <= target[:, None]).sum(dim=1)
    last_with_weight = (cumulative < cumulative[:, -1:]).sum(dim=1)
    return torch.minimum(passed, last_with_weight)


def take_rows(tensor: Tensor, indices: Sequence[int]) -> Tensor:
    """Return the rows at ``indices`` (rising, distinct): the tensor itself if that is all."""
    if len(indices) == tensor.shape[0]:
        return tensor
    return tensor[send(integers(indices), tensor.device)]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on the device; the host does not wait for it."""
    return tensor.to(device, non_blocking=True)


def _chosen_blocks(blocked: Tensor, block_ids: Tensor) -> Tensor:
    blocks = blocked.view(len(blocked), -1, BLOCK_SIZE_TOKENS)
    return blocks[torch.arange(blocked.shape[0], device=blocked.device), block_ids]
