import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.blocks import (
    block_maxima,
    block_weights,
    cumulative_block_mass,
    cumulative_mass,
    exact_mass,
    first_argmax,
    invert_cumulative,
    take_rows,
    to_blocked,
)


@given(vocabulary_size=st.integers(1, 300), num_rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_best_token_is_the_first_of_equals(vocabulary_size, num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (num_rows, vocabulary_size), generator=generator).float()

    blocked = to_blocked(logits)
    best = first_argmax(blocked, block_maxima(blocked)).tolist()

    assert best == [row.index(max(row)) for row in logits.tolist()]


@given(
    weights=st.lists(st.sampled_from([0.0, 0.1, 1.0, 1e-300]), min_size=1, max_size=20).filter(any),
    uniform=st.sampled_from([0.0, 0.3, 0.999999, 1.0 - 2.0**-53]),
)
def test_an_index_without_weight_is_never_returned(weights, uniform):
    cumulative = torch.tensor([weights], dtype=torch.float64).cumsum(dim=1)

    index = int(invert_cumulative(cumulative, uniform * cumulative[:, -1])[0])

    assert weights[index] > 0.0


def test_a_target_at_the_total_gives_the_last_index_that_has_a_weight():
    cumulative = torch.tensor([[0.0, 1.0, 3.0, 3.0]], dtype=torch.float64)

    assert invert_cumulative(cumulative, torch.tensor([3.0], dtype=torch.float64)).tolist() == [2]


def test_logits_are_padded_behind_the_vocabulary_only():
    logits = torch.arange(70.0)[None]

    blocked = to_blocked(logits)

    assert blocked.shape == (1, 128)
    assert torch.equal(blocked[:, :70], logits)
    assert blocked[0, 70:].tolist() == [-math.inf] * 58


# The arithmetic that row independence rests on, one by one: a processor or a torch build that
# breaks one of these is named here.
PRIMITIVES = {
    "exp": lambda x: block_weights(x, x.amax(dim=1, keepdim=True), torch.full((len(x), 1), 0.7)),
    "mass": lambda x: cumulative_block_mass(x.abs()),
    "exp float64": lambda x: x.to(torch.float64).exp(),
    "cumsum float64": lambda x: x.to(torch.float64).cumsum(dim=1),
    "stable sort": lambda x: x.sort(dim=1, descending=True, stable=True).indices,
}


@pytest.mark.parametrize("name", PRIMITIVES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_primitive_gives_a_row_the_same_bits_in_every_batch(name, num_threads):
    torch.set_num_threads(num_threads)
    primitive = PRIMITIVES[name]
    rows = torch.randn((37, 1024 * 3), generator=torch.Generator().manual_seed(1))

    together = primitive(rows)

    for num_rows in (1, 2, 5, 36):
        for start in (0, 1, 37 - num_rows):
            part = primitive(rows[start : start + num_rows].clone())
            assert torch.equal(part, together[start : start + num_rows])


@settings(max_examples=50)
@given(
    weights=st.lists(st.floats(0.0, 1.0, width=32), min_size=2, max_size=300),
    seed=st.integers(0, 999),
)
def test_exact_masses_have_one_sum_in_every_order(weights, seed):
    mass = exact_mass(torch.tensor(weights))
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed))

    sums = {float(each.sum()) for each in (mass, mass[order], mass.sort().values)}

    assert sums == {math.fsum(mass.tolist())}
    assert sums == {float(mass[order].cumsum(dim=0)[-1])}
    assert float((mass - torch.tensor(weights).double()).abs().max()) <= 2.0**-35


@pytest.mark.parametrize("num_threads", [1, 2])
def test_masses_do_not_depend_on_which_rows_are_worked_on_together(num_threads):
    torch.set_num_threads(num_threads)
    rows = torch.randn((9, 49_152), generator=torch.Generator().manual_seed(1)) * 3
    maxima = rows.amax(dim=1, keepdim=True)
    temperature = torch.linspace(0.2, 2.0, 9)[:, None]

    together = cumulative_mass(rows, maxima, temperature)

    for start, end in ((0, 1), (3, 4), (2, 9), (4, 7)):
        part = cumulative_mass(rows[start:end], maxima[start:end], temperature[start:end])
        assert torch.equal(part, together[start:end])
    weights = block_weights(rows, maxima, temperature)
    assert torch.equal(together, cumulative_block_mass(weights))


@settings(max_examples=30)
@given(width=st.integers(1, 200), start=st.integers(0, 30), seed=st.integers(0, 99))
def test_exp_and_cumsum_do_not_depend_on_where_a_value_stands(width, start, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, width, generator=generator)
    shifted = torch.cat((torch.zeros(1, start), values), dim=1)

    assert torch.equal(values.exp(), shifted.exp()[:, start:])
    assert torch.equal(values.double().exp(), shifted.double().exp()[:, start:])
    padded = torch.cat((values.double(), torch.zeros(1, start).double()), dim=1)
    assert torch.equal(values.double().cumsum(dim=1), padded.cumsum(dim=1)[:, :width])


def test_taking_all_rows_copies_nothing():
    rows = torch.randn(3, 4)

    assert take_rows(rows, [0, 1, 2]) is rows
    assert torch.equal(take_rows(rows, [0, 2]), rows[::2])
