"""MatmulAttention against the reference, and its row independence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention.matmul import VALUE_SPAN_TOKENS
from models.attention.reference import ReferenceAttention
from models.errors import ConfigError
from tests.unit.models.attention.steps import Sequences

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "scaling": st.sampled_from([0.1, 0.3]),
        "sliding_window": st.integers(1, 90),
        "softcap": st.sampled_from([1.5, 20.0]),
        "s_aux": st.just("sinks"),
    },
)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    num_groups=st.integers(1, 3),
    width=st.sampled_from([8, 16, 24]),
    value_width=st.sampled_from([8, 16]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    options=OPTIONS,
    cut=st.floats(0, 1),
    is_attention_by_row=st.booleans(),
)
def test_steps_of_any_sequences_equal_the_reference(
    lengths,
    num_kv_heads,
    num_groups,
    width,
    value_width,
    block_size,
    options,
    cut,
    is_attention_by_row,
):
    num_heads = num_kv_heads * num_groups
    if "s_aux" in options:
        options = {**options, "s_aux": torch.linspace(-2, 3, num_heads)}
    ours, reference = (
        Sequences(
            lengths,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            width=width,
            value_width=value_width,
            block_size=block_size,
            **backend,
        )
        for backend in ({}, {"make_backend": ReferenceAttention})
    )
    # A chunk of each, then the rest, or only one token of it.
    first = {index: (0, int(cut * length)) for index, length in enumerate(lengths)}
    second = {
        index: (start, length if index % 2 else start + 1)
        for index, (length, (_, start)) in enumerate(zip(lengths, first.values(), strict=True))
        if start < length
    }
    for spans in (first, second):
        spans = {index: span for index, span in spans.items() if span[0] < span[1]}
        if not spans:
            continue
        expected = reference.step(spans, **options)
        found = ours.step(spans, multiple=8, is_attention_by_row=is_attention_by_row, **options)

        for index in spans:
            assert torch.allclose(found[index], expected[index], atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300}], ids=str)
def test_sequences_of_several_spans_equal_the_reference(options):
    ours = Sequences([700, 530])
    reference = Sequences([700, 530], make_backend=ReferenceAttention)
    spans = [{0: (0, 690), 1: (0, 529)}, {0: (690, 700), 1: (529, 530)}]

    for each in spans:
        expected = reference.step(each, **options)
        found = ours.step(each, **options)
        for index in each:
            assert torch.allclose(found[index], expected[index], atol=2e-5)


@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("length", [30, 700, VALUE_SPAN_TOKENS + 300])
def test_bfloat16_rows_are_equal_bit_for_bit_alone_and_in_any_company(width, length):
    longer = length + 513
    lengths = [length, longer, 3, length // 2, *[length - 3] * 6]
    sequences = Sequences(lengths, dtype=torch.bfloat16, num_heads=6, num_kv_heads=2, width=width)
    whole = sequences.run(0, [length])
    cuts = [length // 3, 1, 1, length // 5]
    cut = sequences.run(0, [*cuts, length - sum(cuts)])
    for index in range(1, len(lengths)):
        sequences.run(index, [lengths[index]])

    alone = sequences.step({0: (length - 1, length)})[0]
    company = sequences.step({index: (size - 1, size) for index, size in enumerate(lengths)})[0]
    mixed = sequences.step({1: (longer - 40, longer), 0: (length - 1, length), 2: (0, 3)})[0]

    assert torch.equal(cut, whole)
    assert torch.equal(alone[0], whole[-1])
    assert torch.equal(company[0], whole[-1])
    assert torch.equal(mixed[0], whole[-1])


def test_a_former_tenants_nan_does_not_reach_the_next_one():
    sequences = Sequences([20])
    expected = sequences.run(0, [20])
    sequences.pool.keys[0][:, :-1] = float("nan")
    sequences.pool.values[0][:, :-1] = float("nan")

    output = sequences.run(0, [18, 1, 1])

    assert torch.equal(output, expected) or torch.allclose(output, expected, atol=1e-6)
    assert not output.isnan().any()


def test_a_neighbours_nan_stays_with_the_neighbour():
    sequences = Sequences([20, 20, 7], dtype=torch.bfloat16)
    for index in range(3):
        sequences.run(index, [sequences.lengths[index]])
    expected = sequences.step({0: (19, 20), 2: (6, 7)})
    sequences.keys[1][:, -1] = float("nan")
    sequences.values[1][:, -1] = float("nan")

    output = sequences.step({0: (19, 20), 1: (19, 20), 2: (6, 7)})

    assert output[1].isnan().all()
    assert torch.equal(output[0], expected[0])
    assert torch.equal(output[2], expected[2])


def test_padding_rows_are_zero_and_store_nothing():
    sequences = Sequences([5])
    before = sequences.pool.keys[0].clone()

    sequences.step({0: (0, 5)}, multiple=8)

    changed = (sequences.pool.keys[0] != before).any(dim=-1).any(dim=0)
    assert int(changed.sum()) == 5


def test_an_unknown_attention_keyword_is_refused_by_name():
    sequences = Sequences([5])

    with pytest.raises(ConfigError, match="alibi_bias"):
        sequences.step({0: (0, 5)}, alibi_bias=torch.zeros(4))
