"""pack and split_parts against slow, obvious references."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.adapters.ledger import Slot
from models.attention.layout import KEY_MULTIPLE_TOKENS
from models.runner.inputs import MIN_GROUP_FILL, pack, split_parts
from models.scheduling.step_plan import ScheduledSequence

NULL_BLOCK = 100_000
CPU = torch.device("cpu")

spans = st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 40)))


def make_parts(spans, block_size, *, is_sampled=True):
    """Return one part per (start, number of tokens), each with blocks and tokens of its own."""
    parts = []
    for seq_id, (start, count) in enumerate(spans):
        # one block more than needed, as the scheduler's tables have
        num_blocks = -(-(start + count) // block_size) + 1
        table = tuple(1000 * seq_id + (7 * index) % 997 for index in range(num_blocks))
        tokens = tuple(1 + 1000 * seq_id + index for index in range(count))
        parts.append(ScheduledSequence(seq_id, tokens, start, table, is_sampled))
    return parts


def pack_parts(parts, block_size, multiple=1):
    return pack(
        parts, block_size=block_size, null_block_id=NULL_BLOCK, multiple=multiple, device=CPU
    )


def expected_rows(part, block_size):
    """Return (token, position, slot) of every token of a part."""
    rows = []
    for offset, token in enumerate(part.token_ids):
        position = part.start + offset
        slot = part.block_ids[position // block_size] * block_size + position % block_size
        rows.append((token, position, slot))
    return rows


def expected_table(part, block_size, num_entries):
    """Return the blocks of [0, end), filled up with null blocks."""
    table = []
    for index in range(num_entries):
        is_used = index * block_size < part.end
        table.append(part.block_ids[index] if is_used else NULL_BLOCK)
    return table


def num_padded_blocks(end, block_size):
    """Return the fewest blocks that hold ``end`` tokens and are whole multiples of keys."""
    count = 1
    while count * block_size < end or count * block_size % KEY_MULTIPLE_TOKENS:
        count += 1
    return count


@settings(deadline=None)
@given(
    spans=st.lists(spans, min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 16, 48, 64, 128]),
    multiple=st.sampled_from([1, 8]),
)
def test_a_packed_step_equals_a_slow_reference(spans, block_size, multiple):
    parts = make_parts(spans, block_size)

    inputs = pack_parts(parts, block_size, multiple)

    layout = inputs.layout
    num_tokens = sum(len(part.token_ids) for part in parts)
    assert layout.num_tokens == num_tokens == len(layout.slots)
    rows = list(
        zip(
            inputs.token_ids[0].tolist(),
            inputs.positions[0].tolist(),
            layout.slots.tolist(),
            strict=False,
        )
    )
    assert len(rows) == num_tokens
    taken = []
    for part, last in zip(parts, inputs.last_rows, strict=True):
        own = range(last + 1 - len(part.token_ids), last + 1)
        assert [rows[row] for row in own] == expected_rows(part, block_size)
        taken.extend(own)
    assert sorted(taken) == list(range(num_tokens))


@settings(deadline=None)
@given(
    spans=st.lists(spans, min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 16, 48, 64, 128]),
)
def test_every_single_token_is_in_one_decode_group_and_every_chunk_is_one_segment(
    spans, block_size
):
    parts = make_parts(spans, block_size)

    inputs = pack_parts(parts, block_size)

    by_last_row = dict(zip(inputs.last_rows, parts, strict=True))
    seen = []
    for group in inputs.layout.decodes:
        assert group.num_rows == len(group.lengths) > 0
        width = group.block_ids.shape[1]
        assert width == num_padded_blocks(max(group.lengths.tolist()), block_size)
        for offset in range(group.num_rows):
            part = by_last_row[group.row_start + offset]
            assert len(part.token_ids) == 1
            assert group.lengths[offset] == part.end
            assert group.block_ids[offset].tolist() == expected_table(part, block_size, width)
            assert num_padded_blocks(part.end, block_size) >= MIN_GROUP_FILL * width
            seen.append(part.seq_id)
    for segment in inputs.layout.prefills:
        part = by_last_row[segment.row_start + segment.num_rows - 1]
        assert len(part.token_ids) == segment.num_rows > 1
        assert (segment.start, segment.end) == (part.start, part.end)
        width = num_padded_blocks(part.end, block_size)
        assert segment.block_ids.tolist() == expected_table(part, block_size, width)
        seen.append(part.seq_id)
    assert sorted(seen) == [part.seq_id for part in parts]


@settings(deadline=None)
@given(
    spans=st.lists(spans, min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 16, 48]),
)
def test_fresh_blocks_are_those_whose_first_slot_is_written(spans, block_size):
    parts = make_parts(spans, block_size)

    fresh = pack_parts(parts, block_size).layout.fresh_block_ids

    slots = [row[2] for part in parts for row in expected_rows(part, block_size)]
    expected = sorted(slot // block_size for slot in slots if slot % block_size == 0)
    assert sorted([] if fresh is None else fresh.tolist()) == expected
    assert fresh is None or len(fresh)


@settings(deadline=None)
@given(count=st.integers(1, 40), multiple=st.sampled_from([1, 8, 16]))
def test_padding_rows_are_at_the_end_and_fill_up_to_the_multiple(count, multiple):
    inputs = pack_parts(make_parts([(3, count)], 4), 4, multiple)

    num_rows = inputs.token_ids.shape[1]
    assert inputs.token_ids.shape == inputs.positions.shape == (1, num_rows)
    assert num_rows % multiple == 0
    assert 0 <= num_rows - count < multiple
    assert not inputs.token_ids[0, count:].any()
    assert not inputs.positions[0, count:].any()


def test_indices_are_64_bit_integers():
    inputs = pack_parts(make_parts([(0, 1), (4, 9)], 4), 4)

    (group,) = inputs.layout.decodes
    (segment,) = inputs.layout.prefills
    tensors = (inputs.token_ids, inputs.positions, inputs.layout.slots, group.block_ids)
    tensors += (group.lengths, segment.block_ids, inputs.layout.fresh_block_ids)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_a_much_shorter_table_gets_a_group_of_its_own():
    inputs = pack_parts(make_parts([(63, 1), (639, 1), (600, 1)], 16), 16)

    assert [group.lengths.tolist() for group in inputs.layout.decodes] == [[640, 601], [64]]
    assert [group.row_start for group in inputs.layout.decodes] == [0, 2]


def split(parts, max_rows):
    return list(split_parts(parts, max_rows))


@settings(deadline=None)
@given(
    spans=st.lists(spans, min_size=1, max_size=12),
    sampled=st.lists(st.booleans(), min_size=12, max_size=12),
    max_rows=st.integers(1, 50),
)
def test_a_cut_step_loses_nothing_and_keeps_the_order(spans, sampled, max_rows):
    parts = [
        dataclasses.replace(part, is_sampled=flag)
        for part, flag in zip(make_parts(spans, 4), sampled, strict=False)
    ]

    forwards = split(parts, max_rows)

    # token by token: (sequence, position, token, whether the next token is drawn from it)
    def tokens_of(parts):
        return [
            (part.seq_id, part.start + offset, token, part.is_sampled and is_last)
            for part in parts
            for offset, token in enumerate(part.token_ids)
            for is_last in [offset + 1 == len(part.token_ids)]
        ]

    assert tokens_of(part for forward in forwards for part in forward) == tokens_of(parts)
    tables = {part.seq_id: part.block_ids for part in parts}
    assert all(tables[part.seq_id] == part.block_ids for forward in forwards for part in forward)
    sizes = [sum(len(part.token_ids) for part in forward) for forward in forwards]
    assert all(size == max_rows for size in sizes[:-1])
    assert 0 < sizes[-1] <= max_rows
    assert len(forwards) == math.ceil(sum(sizes) / max_rows)


@settings(deadline=None)
@given(spans=st.lists(spans, min_size=1, max_size=12), max_rows=st.integers(1, 50))
def test_no_forward_pass_has_two_parts_of_one_sequence(spans, max_rows):
    for forward in split(make_parts(spans, 4), max_rows):
        assert len({part.seq_id for part in forward}) == len(forward)


def test_only_the_last_part_of_a_cut_chunk_is_sampled():
    forwards = split(make_parts([(4, 20)], 4), 8)

    assert [[part.is_sampled for part in forward] for forward in forwards] == [
        [False],
        [False],
        [True],
    ]
    assert [(part.start, part.end) for (part,) in forwards] == [(4, 12), (12, 20), (20, 24)]


@settings(deadline=None)
@given(
    start=st.integers(0, 9),
    count=st.integers(1, 40),
    begin=st.integers(0, 50),
    num_scored=st.integers(0, 50),
    max_rows=st.integers(1, 50),
)
def test_scored_positions_are_cut_with_their_chunk(start, count, begin, num_scored, max_rows):
    end = start + count
    scored = range(min(start + begin, end), min(start + begin + num_scored, end))
    (part,) = make_parts([(start, count)], 4)

    forwards = split([dataclasses.replace(part, scored_positions=scored)], max_rows)

    cut = [each for (each,) in forwards]
    assert [at for each in cut for at in each.scored_positions] == list(scored)
    assert all(each.start <= at < each.end for each in cut for at in each.scored_positions)


def test_a_chunk_that_ends_at_the_limit_is_not_cut():
    parts = make_parts([(0, 3), (0, 5), (0, 8), (2, 1)], 4)

    assert split(parts, 8) == [parts[:2], parts[2:3], parts[3:]]


@pytest.mark.parametrize("max_rows", [0, 1000])
def test_a_step_below_the_limit_is_one_forward_pass(max_rows):
    parts = make_parts([(0, 3), (0, 500)], 4)

    assert split(parts, max_rows) == [parts]


@pytest.mark.parametrize("max_rows", [0, 8])
def test_a_step_without_sequences_is_no_forward_pass(max_rows):
    assert split([], max_rows) == []


@settings(deadline=None)
@given(
    parts=st.lists(
        st.tuples(spans, st.sampled_from([None, Slot(8, 0), Slot(8, 3), Slot(16, 1)])),
        min_size=1,
        max_size=12,
    )
)
def test_every_row_of_an_adapter_is_gathered_for_its_own_slot_and_no_other_row_is(parts):
    bare = make_parts([span for span, _ in parts], 16)
    owned = [
        dataclasses.replace(part, slot=slot) for part, (_, slot) in zip(bare, parts, strict=True)
    ]

    inputs = pack_parts(owned, 16)

    expected = {}
    for part, last_row in zip(owned, inputs.last_rows, strict=True):
        if part.slot is not None:
            for row in range(last_row + 1 - len(part.token_ids), last_row + 1):
                expected[row] = part.slot
    found = {}
    for groups in inputs.adapters.groups if inputs.adapters is not None else ():
        rows_of_group = groups.gathered.view(groups.num_groups, -1)
        places = range(groups.gathered.numel()) if groups.places is None else groups.places.tolist()
        for row, place in zip(groups.rows.tolist(), places, strict=True):
            group, column = divmod(place, rows_of_group.shape[1])
            assert rows_of_group[group, column] == row
            found[row] = Slot(groups.bucket_rank, int(groups.slots[group]))
    assert found == expected
