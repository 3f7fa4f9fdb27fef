"""VarlenAttention against the reference, by an emulation of the kernel. No GPU runs any of this."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from models.attention.reference import ReferenceAttention
from models.attention.varlen import BLOCK_MULTIPLE_TOKENS, VarlenAttention
from models.errors import ConfigError
from tests.unit.models.attention.emulated_varlen import emulated_varlen
from tests.unit.models.attention.steps import Sequences

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Kernel:
    """Emulates, and keeps the arguments of its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, *tensors, **keywords):
        self.calls.append((tensors, keywords))
        return emulated_varlen(*tensors, **keywords)


def make_pair(lengths, *, is_batch_invariant=False, **shapes):
    """Return the same sequences behind VarlenAttention and the reference, and the kernel."""
    kernel = Kernel()
    shapes = {"dtype": torch.bfloat16, "block_size": BLOCK_MULTIPLE_TOKENS, **shapes}
    ours = Sequences(
        lengths,
        make_backend=lambda pool: VarlenAttention(
            pool, is_batch_invariant=is_batch_invariant, attend=kernel
        ),
        **shapes,
    )
    return ours, Sequences(lengths, make_backend=ReferenceAttention, **shapes), kernel


def assert_equal(ours, reference, spans, **keywords):
    expected = reference.step(spans, **keywords)
    found = ours.step(spans, multiple=4, **keywords)
    for index in spans:
        torch.testing.assert_close(
            found[index].float(),
            expected[index].float(),
            atol=TOLERANCE[ours.queries[0].dtype],
            rtol=TOLERANCE[ours.queries[0].dtype],
        )


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 2),
    num_groups=st.integers(1, 2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    options=st.fixed_dictionaries(
        {}, optional={"scaling": st.just(0.3), "sliding_window": st.integers(1, 13)}
    ),
    cut=st.floats(0, 1),
    is_batch_invariant=st.booleans(),
)
def test_steps_of_any_sequences_equal_the_reference(
    lengths, num_kv_heads, num_groups, dtype, options, cut, is_batch_invariant
):
    ours, reference, _ = make_pair(
        lengths,
        num_heads=num_kv_heads * num_groups,
        num_kv_heads=num_kv_heads,
        width=8,
        dtype=dtype,
        is_batch_invariant=is_batch_invariant,
    )
    first = {index: (0, max(1, int(cut * length))) for index, length in enumerate(lengths)}
    second = {
        index: (start, length if index % 2 else start + 1)
        for index, (length, (_, start)) in enumerate(zip(lengths, first.values(), strict=True))
        if start < length
    }
    for spans in (first, second):
        if spans:
            assert_equal(ours, reference, spans, **options)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 270}], ids=str)
def test_sequences_of_several_blocks_equal_the_reference(options, is_batch_invariant):
    ours, reference, _ = make_pair([530, 260, 3], is_batch_invariant=is_batch_invariant)
    for sequences in (ours, reference):
        # What lies before the chunks under test, stored without attending to it.
        for index, length in ((0, 525), (1, 255)):
            size = sequences.pool.plan.block_size_tokens
            for position in range(length):
                block = sequences.tables[index][position // size]
                for pool, drawn in (
                    (sequences.pool.keys[0], sequences.keys),
                    (sequences.pool.values[0], sequences.values),
                ):
                    pool[:, block, position % size] = drawn[index][:, position]

    assert_equal(ours, reference, {0: (525, 528), 1: (255, 256), 2: (0, 2)}, **options)
    assert_equal(ours, reference, {0: (528, 529), 1: (256, 259)}, **options)
    assert_equal(ours, reference, {0: (529, 530), 1: (259, 260), 2: (2, 3)}, **options)


def test_one_call_a_layer_reads_the_pool_in_place():
    ours, _, kernel = make_pair([5, 3, 9])

    ours.step({0: (0, 5), 1: (0, 3), 2: (0, 9)})

    (((_, keys, values, *_), keywords),) = kernel.calls
    assert keys.untyped_storage().data_ptr() == ours.pool.keys[0].untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == ours.pool.values[0].untyped_storage().data_ptr()
    assert keywords["num_splits"] == 1


def test_of_decodes_only_the_kernel_may_group_the_heads():
    ours, _, kernel = make_pair([5, 3])
    ours.step({0: (0, 4), 1: (0, 2)})
    ours.step({0: (4, 5), 1: (2, 3)})

    assert [keywords["window_size"] for _, keywords in kernel.calls] == [(-1, 0), (-1, -1)]


def test_batch_invariant_calls_differ_in_nothing_that_chooses_a_kernel():
    ours, _, kernel = make_pair([5, 300], is_batch_invariant=True)
    ours.step({0: (0, 4)})
    ours.step({0: (4, 5)})
    ours.step({0: (4, 5), 1: (0, 2)})

    assert {keywords["window_size"] for _, keywords in kernel.calls} == {(-1, 0)}
    assert len({tensors[6] for tensors, _ in kernel.calls}) == 1


def test_a_former_tenants_nan_does_not_reach_the_next_one():
    ours, reference, _ = make_pair([20])
    ours.pool.keys[0][:, :-1] = torch.nan
    ours.pool.values[0][:, :-1] = torch.nan

    assert_equal(ours, reference, {0: (0, 18)})
    assert_equal(ours, reference, {0: (18, 19)})


@pytest.mark.parametrize(
    "option", [{"softcap": 2.0}, {"s_aux": torch.zeros(4)}], ids=["softcap", "sinks"]
)
def test_what_the_kernel_cannot_do_is_refused(option):
    ours, _, kernel = make_pair([3])

    with pytest.raises(ConfigError) as caught:
        ours.step({0: (0, 3)}, **option)

    assert caught.value.field == "attention_backend"
    assert not kernel.calls


def test_an_unknown_attention_keyword_is_refused_by_name():
    ours, _, _ = make_pair([3])

    with pytest.raises(ConfigError, match="alibi_bias"):
        ours.step({0: (0, 3)}, alibi_bias=torch.zeros(4))


def test_the_emulation_has_the_arguments_of_torchs_function():
    ours, theirs = inspect.signature(emulated_varlen), inspect.signature(varlen_attn)

    assert [(each.name, each.kind, each.default) for each in ours.parameters.values()] == [
        (each.name, each.kind, each.default) for each in theirs.parameters.values()
    ]


def test_torchs_own_function_takes_our_arguments_and_returns_our_shape():
    # On the meta device, where it checks them and computes nothing.
    ours, _, kernel = make_pair([5, 3])
    ours.step({0: (0, 4), 1: (0, 2)}, sliding_window=2)
    tensors, keywords = kernel.calls[0]

    def to_meta(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    output = varlen_attn(
        *map(to_meta, tensors), **{name: to_meta(value) for name, value in keywords.items()}
    )

    assert output.shape == tensors[0].shape
    assert output.dtype == torch.bfloat16
