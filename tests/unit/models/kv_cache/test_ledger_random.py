from hypothesis import given, settings
from hypothesis import strategies as st

from models.kv_cache.ledger import BlockManager
from models.requests import AdapterRef, PrefixNamespace

BASE = PrefixNamespace("m")
ADAPTED = PrefixNamespace("m", AdapterRef("a", "1"))


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
