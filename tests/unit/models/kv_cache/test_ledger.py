import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


class SlowLedger:
    """The rules of BlockManager told a second time, by search through everything.

    A text is a (namespace, tokens) pair whose length is a multiple of the block size.
    """

    def __init__(self, num_blocks, block_size_tokens, is_kept):
        self.num_blocks = num_blocks
        self.size = block_size_tokens
        self.is_kept = is_kept
        self.block_by_text = {}
        self.released_at = {}
        self.tables = {}
        self.texts = {}
        self.now = 0

    def held(self):
        return {block_id for table in self.tables.values() for block_id in table}

    def num_free_blocks(self):
        return self.num_blocks - len(self.held())

    def prefixes(self, namespace, tokens):
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def match(self, namespace, tokens):
        found = []
        for text in self.prefixes(namespace, tokens[:-1]):
            if text not in self.block_by_text:
                break
            found.append(self.block_by_text[text])
        return found

    def make_room(self, num_new):
        """Forget what must be evicted before ``num_new`` blocks can be taken."""
        held = self.held()
        num_unused = self.num_blocks - len(held | set(self.block_by_text.values()))
        for _ in range(num_new - num_unused):
            evictable = [text for text, block in self.block_by_text.items() if block not in held]
            victim = min(evictable, key=lambda text: (self.released_at[text], -len(text[1])))
            del self.block_by_text[victim]

    def record(self, seq_id, namespace, tokens, num_computed):
        texts = self.prefixes(namespace, tokens[:num_computed])
        for text in (text for text in texts if text not in self.texts[seq_id]):
            block_id = self.tables[seq_id][len(text[1]) // self.size - 1]
            self.block_by_text.setdefault(text, block_id)
            self.texts[seq_id].add(text)

    def free(self, seq_id, is_valid):
        self.now += 1
        table = self.tables.pop(seq_id)
        for text in self.texts.pop(seq_id):
            self.released_at[text] = self.now
        held = self.held()
        for text, block_id in list(self.block_by_text.items()):
            is_lost = not self.is_kept and block_id not in held
            if block_id in table and (is_lost or not is_valid):
                del self.block_by_text[text]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "extend", "compute", "compute", "free", "spoil"]),
        st.integers(0, 5),
        st.integers(0, 7),
        st.integers(0, 24),
    ),
    max_size=60,
)
# texts that begin alike and part at different places
TEXTS = [
    [0] * 24,
    [0] * 7 + [1] * 17,
    [0] * 8 + [1] * 16,
    [0] * 12 + [2] * 12,
    [1] * 24,
    [1] * 4 + [0] * 20,
    [3, 1, 2] * 8,
    [3, 1, 2, 3, 1] + [9] * 19,
]


@settings(max_examples=250, deadline=None)
@given(operations=OPERATIONS, is_kept=st.booleans())
def test_random_operations_keep_the_ledger_equal_to_a_slow_model(operations, is_kept):
    blocks = BlockManager(8, 4, is_prefix_caching_enabled=is_kept)
    model = SlowLedger(8, 4, is_kept)
    # seq_id -> (namespace, tokens)
    sequences = {}

    for number, (operation, who, text, amount) in enumerate(operations):
        holders = sorted(sequences)
        seq_id = holders[who % len(holders)] if holders else None
        if operation == "allocate":
            namespace = ADAPTED if who % 3 == 0 else BASE
            allocate(blocks, model, sequences, number, namespace, TEXTS[text][: 1 + amount % 20])
        elif seq_id is None:
            continue
        elif operation == "extend":
            extend(blocks, model, sequences, seq_id, amount)
        elif operation == "compute":
            namespace, tokens = sequences[seq_id]
            num_computed = min(amount, len(tokens))
            blocks.record_computed(seq_id, tokens, num_computed)
            model.record(seq_id, namespace, tokens, num_computed)
        else:
            del sequences[seq_id]
            blocks.free(seq_id, is_content_valid=operation == "free")
            model.free(seq_id, operation == "free")
        blocks.check_invariants()
        assert blocks.num_free_blocks == model.num_free_blocks()
        assert blocks.num_cached_blocks == len(model.block_by_text)
        for known in TEXTS:
            for namespace in (BASE, ADAPTED):
                num_matched = blocks.match_prefix(namespace, known)
                assert num_matched == 4 * len(model.match(namespace, known))

    for seq_id in sequences:
        blocks.free(seq_id)
    blocks.check_invariants()
    assert blocks.num_free_blocks == 8


def allocate(blocks, model, sequences, seq_id, namespace, tokens):
    found = model.match(namespace, tokens)
    num_new = -(-len(tokens) // 4) - len(found)
    is_room = num_new + len(set(found) - model.held()) <= model.num_free_blocks()

    num_cached_tokens = blocks.try_allocate(seq_id, namespace, tokens, len(tokens))

    assert num_cached_tokens == (4 * len(found) if is_room else None)
    if is_room:
        model.tables[seq_id] = found
        model.make_room(num_new)
        model.tables[seq_id] = blocks.block_table(seq_id)
        assert list(model.tables[seq_id][: len(found)]) == found
        model.texts[seq_id] = set(model.prefixes(namespace, tokens[: 4 * len(found)]))
        sequences[seq_id] = (namespace, tokens)


def extend(blocks, model, sequences, seq_id, num_more):
    namespace, tokens = sequences[seq_id]
    tokens = [*tokens, *range(50, 50 + num_more)]
    num_new = max(-(-len(tokens) // 4) - len(model.tables[seq_id]), 0)
    is_room = num_new <= model.num_free_blocks()

    assert blocks.try_extend(seq_id, len(tokens)) == is_room

    if is_room:
        model.make_room(num_new)
        model.tables[seq_id] = blocks.block_table(seq_id)
        sequences[seq_id] = (namespace, tokens)
