import pytest

from models.kv_cache.ledger import BlockManager
from models.requests import AdapterRef, PrefixNamespace

BASE = PrefixNamespace("m")
ADAPTED = PrefixNamespace("m", AdapterRef("a", "1"))


@pytest.fixture
def blocks():
    """Eight blocks of four tokens."""
    return BlockManager(8, 4)


def compute(blocks, seq_id, tokens, namespace=BASE):
    """Allocate a sequence and record all of its tokens; return the cached tokens."""
    num_cached_tokens = blocks.try_allocate(seq_id, namespace, tokens, len(tokens))
    assert num_cached_tokens is not None
    blocks.record_computed(seq_id, tokens, len(tokens))
    blocks.check_invariants()
    return num_cached_tokens


def leave_behind(blocks, seq_id, tokens, namespace=BASE):
    """Compute a sequence and free it."""
    compute(blocks, seq_id, tokens, namespace)
    blocks.free(seq_id)
    blocks.check_invariants()


def test_a_table_covers_the_tokens_that_were_asked_for(blocks):
    assert blocks.try_allocate(1, BASE, range(5), 9) == 0

    assert len(blocks.block_table(1)) == 3
    assert blocks.num_free_blocks == 5


def test_a_refused_allocation_changes_nothing(blocks):
    leave_behind(blocks, 1, range(8))
    blocks.try_allocate(2, BASE, range(100, 120), 20)

    assert blocks.try_allocate(3, BASE, range(20), 20) is None

    blocks.check_invariants()
    assert blocks.num_free_blocks == 3
    assert blocks.num_holders == 1
    assert blocks.match_prefix(BASE, range(9)) == 8


def test_a_refused_allocation_succeeds_once_there_is_room(blocks):
    blocks.try_allocate(1, BASE, range(100, 120), 20)
    tokens = list(range(16))
    assert blocks.try_allocate(2, BASE, tokens, 16) is None
    blocks.free(1)

    assert blocks.try_allocate(2, BASE, tokens, 16) == 0
    assert len(blocks.block_table(2)) == 4


class ReadCountingList(list):
    """Counts how often its tokens are read."""

    num_reads = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_refused_sequence_is_not_hashed_again(blocks):
    leave_behind(blocks, 1, range(8))
    blocks.try_allocate(2, ADAPTED, range(20), 20)
    tokens = ReadCountingList(range(20))
    blocks.try_allocate(3, BASE, tokens, 20)
    assert tokens.num_reads > 0
    tokens.num_reads = 0

    assert blocks.try_allocate(3, BASE, tokens, 20) is None

    assert tokens.num_reads == 0


def test_only_new_blocks_are_hashed_when_a_sequence_grows(blocks):
    tokens = ReadCountingList(range(20))
    blocks.try_allocate(1, BASE, tokens, 20)
    blocks.record_computed(1, tokens, 16)
    tokens.num_reads = 0

    blocks.record_computed(1, tokens, 19)
    assert tokens.num_reads == 0
    blocks.record_computed(1, tokens, 20)
    assert tokens.num_reads == 1


def test_a_refusal_does_not_lend_its_hashes_to_another_sequence(blocks):
    leave_behind(blocks, 1, range(8))
    blocks.try_allocate(2, ADAPTED, range(20), 20)
    assert blocks.try_allocate(3, BASE, range(20), 20) is None

    assert blocks.try_allocate(4, BASE, range(50, 59), 9) == 0


def test_found_blocks_that_are_unreferenced_count_as_needed(blocks):
    leave_behind(blocks, 1, range(8))
    blocks.try_allocate(2, BASE, range(100, 120), 20)
    assert blocks.num_free_blocks == 3

    # 2 found + 2 new, of 3 that can be had
    assert blocks.try_allocate(3, BASE, range(16), 16) is None
    assert blocks.try_allocate(3, BASE, range(12), 12) == 8


def test_found_blocks_that_are_referenced_need_no_room(blocks):
    compute(blocks, 1, range(16))
    blocks.try_allocate(2, BASE, range(100, 112), 12)
    assert blocks.num_free_blocks == 1

    assert blocks.try_allocate(3, BASE, range(17), 17) == 16

    assert blocks.block_table(3)[:4] == blocks.block_table(1)
    assert blocks.num_free_blocks == 0
    blocks.check_invariants()


def test_blocks_to_spare_stay_free(blocks):
    assert blocks.try_allocate(1, BASE, range(16), 16, num_blocks_to_spare=5) is None
    assert blocks.try_allocate(1, BASE, range(16), 16, num_blocks_to_spare=4) == 0


def test_extending_keeps_the_blocks_that_are_there(blocks):
    blocks.try_allocate(1, BASE, range(4), 4)
    before = blocks.block_table(1)

    assert blocks.try_extend(1, 4)
    assert blocks.block_table(1) == before
    assert blocks.try_extend(1, 9)
    assert blocks.block_table(1)[:1] == before
    assert len(blocks.block_table(1)) == 3


def test_a_refused_extension_changes_nothing(blocks):
    blocks.try_allocate(1, BASE, range(4), 4)
    before = blocks.block_table(1)

    assert not blocks.try_extend(1, 33)

    assert blocks.block_table(1) == before
    assert blocks.num_free_blocks == 7


def test_at_least_one_token_stays_to_be_computed(blocks):
    leave_behind(blocks, 1, range(8))

    assert blocks.match_prefix(BASE, range(8)) == 4
    assert blocks.match_prefix(BASE, range(9)) == 8
    assert blocks.try_allocate(2, BASE, range(8), 8) == 4


def test_a_match_takes_nothing(blocks):
    leave_behind(blocks, 1, range(8))

    blocks.match_prefix(BASE, range(9))

    assert blocks.num_free_blocks == 8
    blocks.check_invariants()


def test_only_full_computed_blocks_are_findable(blocks):
    blocks.try_allocate(1, BASE, range(10), 10)

    blocks.record_computed(1, range(10), 7)
    assert blocks.match_prefix(BASE, range(10)) == 4
    blocks.record_computed(1, range(10), 10)
    assert blocks.match_prefix(BASE, range(10)) == 8


def test_a_running_sequence_shares_what_it_has_computed(blocks):
    compute(blocks, 1, range(8))

    assert blocks.try_allocate(2, BASE, range(9), 9) == 8
    assert blocks.block_table(2)[:2] == blocks.block_table(1)


def test_output_blocks_are_findable_too(blocks):
    tokens = [1, 2, 3]
    blocks.try_allocate(1, BASE, tokens, 4)
    for token_id in (4, 5, 6, 7, 8):
        blocks.record_computed(1, tokens, len(tokens))
        tokens.append(token_id)
        blocks.try_extend(1, len(tokens))
    blocks.record_computed(1, tokens, len(tokens))

    assert blocks.match_prefix(BASE, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_namespaces_share_nothing(blocks):
    leave_behind(blocks, 1, range(8))

    assert blocks.match_prefix(ADAPTED, range(9)) == 0
    assert blocks.try_allocate(2, ADAPTED, range(9), 9) == 0


def test_the_same_block_computed_twice_stays_private_the_second_time(blocks):
    blocks.try_allocate(1, BASE, range(8), 8)
    blocks.try_allocate(2, BASE, range(8), 8)
    tables = blocks.block_table(1), blocks.block_table(2)

    blocks.record_computed(1, range(8), 8)
    blocks.record_computed(2, range(8), 8)

    assert (blocks.block_table(1), blocks.block_table(2)) == tables
    assert blocks.num_cached_blocks == 2
    blocks.free(2)
    assert blocks.num_free_blocks == 6
    assert blocks.try_allocate(3, BASE, range(9), 9) == 8
    assert blocks.block_table(3)[:2] == tables[0]


def test_blocks_are_evicted_only_when_one_is_needed(blocks):
    leave_behind(blocks, 1, range(16))

    blocks.try_allocate(2, BASE, range(100, 116), 16)
    assert blocks.match_prefix(BASE, range(17)) == 16
    blocks.try_extend(2, 17)
    assert blocks.match_prefix(BASE, range(17)) == 12


def test_the_least_recently_used_chain_is_evicted_first(blocks):
    leave_behind(blocks, 1, range(16))
    leave_behind(blocks, 2, range(100, 116))
    leave_behind(blocks, 3, range(17))

    blocks.try_allocate(4, BASE, range(200, 216), 16)

    assert blocks.match_prefix(BASE, range(17)) == 16
    assert blocks.match_prefix(BASE, range(100, 117)) == 0


def test_the_last_blocks_of_a_chain_are_evicted_first(blocks):
    leave_behind(blocks, 1, range(32))

    for num_needed in range(1, 9):
        blocks.try_allocate(num_needed + 1, ADAPTED, [num_needed], 4)
        assert blocks.match_prefix(BASE, range(33)) == 32 - 4 * num_needed


def test_a_prefix_kept_by_a_twin_is_not_evicted_before_its_extension(blocks):
    # 2 computes the first block as well, and then an extension that only it has
    blocks.try_allocate(1, BASE, range(4), 4)
    blocks.try_allocate(2, BASE, range(8), 8)
    blocks.record_computed(1, range(4), 4)
    blocks.record_computed(2, range(8), 8)

    blocks.free(1)
    blocks.free(2)

    blocks.check_invariants()
    blocks.try_allocate(3, ADAPTED, range(28), 28)
    assert blocks.match_prefix(BASE, range(9)) == 4


def test_a_found_block_is_not_evicted_for_the_new_blocks_behind_it(blocks):
    leave_behind(blocks, 1, range(4))
    leave_behind(blocks, 2, range(100, 128))
    assert blocks.num_cached_blocks == 8

    assert blocks.try_allocate(3, BASE, range(32), 32) == 4
    blocks.check_invariants()


def test_content_that_went_wrong_is_not_findable_any_more(blocks):
    compute(blocks, 1, range(8))
    blocks.try_allocate(2, BASE, range(9), 9)

    blocks.free(1, is_content_valid=False)

    blocks.check_invariants()
    assert blocks.match_prefix(BASE, range(9)) == 0
    blocks.free(2)
    assert blocks.num_free_blocks == 8
    assert blocks.num_cached_blocks == 0


def test_freeing_a_sequence_that_holds_nothing_has_no_effect(blocks):
    blocks.free(7)

    assert blocks.num_free_blocks == 8


def test_a_sequence_cannot_hold_two_tables(blocks):
    blocks.try_allocate(1, BASE, range(4), 4)

    with pytest.raises(RuntimeError, match="holds blocks already"):
        blocks.try_allocate(1, BASE, range(4), 4)


def test_without_prefix_caching_blocks_are_findable_only_while_they_are_held():
    blocks = BlockManager(8, 4, is_prefix_caching_enabled=False)
    compute(blocks, 1, range(8))
    assert blocks.match_prefix(BASE, range(9)) == 8

    blocks.free(1)

    blocks.check_invariants()
    assert blocks.match_prefix(BASE, range(9)) == 0
    assert blocks.num_cached_blocks == 0
