"""Randomness as a function of (seed, position). Holds no state, so nothing can be out of step.

The number that a row draws depends on its own seed and on how many tokens it has drawn before,
on nothing else: not on its neighbours, not on the batch, not on when it joined. A sequence that
is resumed elsewhere with k output tokens draws token k + 1 as if undisturbed.
"""

from sampling.params import mix_64

# 2**64 divided by the golden ratio, made odd: the increment of SplitMix64.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_NUM_DISCARDED_BITS = 64 - 53
_UNIT = 2.0**-53


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to one token of one seed.

    It is output number ``position`` of the SplitMix64 stream whose start is ``mix_64(seed)``
    (mixed first, since seeds are often small and their streams would otherwise overlap), reduced
    to the 53 bits that a float holds exactly.

    Args:
        seed: any integer; counts modulo 2**64.
        position: how many tokens the sequence has drawn before, 0 or more.
    """
    return uniform_of_stream(stream_start(seed), position)


def stream_start(seed: int) -> int:
    """Return what ``uniform_of_stream`` wants to know of a seed: worked out once a sequence."""
    return mix_64(seed)


def uniform_of_stream(start: int, position: int) -> float:
    """Return ``uniform(seed, position)`` of the seed with this ``stream_start``."""
    word = mix_64(start + (position + 1) * _GOLDEN_GAMMA)
    return (word >> _NUM_DISCARDED_BITS) * _UNIT
