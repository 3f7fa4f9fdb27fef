import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling.params import derive_seed
from sampling.rng import uniform

# A chi-square statistic with 15 degrees of freedom is above 59.2 once in 3 million times;
# the seeds are fixed, so the test gives the same answer on every run.
CHI_SQUARE_LIMIT_15 = 59.2


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**40))
def test_every_number_is_in_the_unit_interval_and_repeats(seed, position):
    number = uniform(seed, position)

    assert 0.0 <= number < 1.0
    assert number == uniform(seed, position)


def test_a_stream_is_splitmix64_from_its_mixed_seed():
    # First three outputs of SplitMix64 with state 1234567, from its published test vector.
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423)

    state = _unmixed(1234567)

    assert [uniform(state, position) for position in range(3)] == [
        (word >> 11) / 2**53 for word in published
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([uniform(7, position) for position in range(16000)], id="positions"),
        pytest.param([uniform(seed, 0) for seed in range(16000)], id="seeds"),
        pytest.param([uniform(derive_seed(7, i), i) for i in range(16000)], id="choices"),
    ],
)
def test_numbers_fill_sixteen_bins_evenly(numbers):
    counts = [0] * 16
    for number in numbers:
        counts[int(number * 16)] += 1

    expected = len(numbers) / 16
    statistic = sum((count - expected) ** 2 / expected for count in counts)

    assert statistic < CHI_SQUARE_LIMIT_15


def test_neighbouring_seeds_do_not_share_a_shifted_stream():
    first = {uniform(0, position) for position in range(500)}
    others = {uniform(seed, position) for seed in range(1, 20) for position in range(500)}

    assert not first & others


def _unmixed(word: int) -> int:
    """Invert the finaliser of SplitMix64, so that a stream with a known state can be asked for."""
    modulus = 2**64
    word ^= (word >> 31) ^ (word >> 62)
    word = word * pow(0x94D049BB133111EB, -1, modulus) % modulus
    word ^= (word >> 27) ^ (word >> 54)
    word = word * pow(0xBF58476D1CE4E5B9, -1, modulus) % modulus
    return word ^ (word >> 30) ^ (word >> 60)
