"""Shows on the loaded model that company changes no bit of a sequence's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.errors import ConfigError
from models.kv_cache.store import KVCachePool
from models.runner.packed_forward import PackedForward
from models.scheduling.step_plan import ScheduledSequence

MAX_LENGTH_TOKENS = 90
# How the compared sequence is cut: alone, and beside the other one, which comes first.
_ALONE = (1.0,)
_TOGETHER = (0.3, 0.1, 0.6)


def check_batch_invariance(
    forward: PackedForward, pool: KVCachePool, *, vocabulary_size: int
) -> None:
    """Run a sequence alone, then beside another one and cut, and compare its logits bit for bit.

    Uses the first blocks of the pool, before any sequence does.

    Args:
        forward: of the model; its policy is fixed.
        pool: with two blocks or more.
        vocabulary_size: prompts are drawn below it.

    Raises:
        ConfigError: a bit differs.
    """
    size = pool.plan.block_size_tokens
    num_blocks = min(pool.plan.num_blocks // 2, -(-MAX_LENGTH_TOKENS // size))
    # Both sequences are in one pass.
    length = min(MAX_LENGTH_TOKENS, num_blocks * size, forward.policy.max_forward_rows // 2)
    generator = torch.Generator().manual_seed(1)
    own, other = torch.randint(vocabulary_size, (2, length), generator=generator).tolist()
    tables = [tuple(range(num_blocks)), tuple(range(num_blocks, 2 * num_blocks))]
    alone = _run(forward, [own], tables[:1], _cuts(length, _ALONE))
    together = _run(forward, [own, other], tables, _cuts(length, _TOGETHER))
    if not torch.equal(alone, together):
        share = float((alone != together).float().mean())
        raise ConfigError(
            "batch_invariant",
            f"does not hold on this device: company changed {share:.2g} of a sequence's logits",
        )


def _cuts(length: int, shares: Sequence[float]) -> list[range]:
    """Cut [0, length) by shares, the last token on its own."""
    cuts, start = [], 0
    for share in shares[:-1]:
        stop = start + max(1, int(share * length))
        cuts.append(range(start, stop))
        start = stop
    return [*cuts, range(start, length - 1), range(length - 1, length)]


def _run(
    forward: PackedForward,
    prompts: Sequence[Sequence[int]],
    tables: Sequence[tuple[int, ...]],
    cuts: Sequence[range],
) -> Tensor:
    """Return the logits of every token of the first prompt, [T, V].

    The other one goes before it, cut alike; in the last step it is run from its beginning, beside
    the first one's last token.
    """
    collected = []
    for number, cut in enumerate(cuts):
        parts = []
        for index, prompt in enumerate(prompts):
            span = cut
            if index > 0 and number == len(cuts) - 1:
                span = range(len(prompt) - 1)
            parts.append(
                ScheduledSequence(
                    index,
                    tuple(prompt[span.start : span.stop]),
                    span.start,
                    tables[index],
                    is_sampled=False,
                )
            )
        inputs = forward.pack(parts[::-1])
        last = inputs.last_rows[-1]
        rows = range(last + 1 - len(parts[0].token_ids), last + 1)
        logits = forward.run(inputs, rows)
        assert logits is not None
        collected.append(logits)
    return torch.cat(collected)
