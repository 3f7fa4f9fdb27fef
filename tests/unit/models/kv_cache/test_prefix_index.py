import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.kv_cache.prefix_index import GroupNamespace, PrefixChain, PrefixIndex, root_key
from models.requests import AdapterRef, PrefixNamespace

# Fields that try to look like absent ones, like other fields, or like the encoding itself.
CRAFTED = ["", "None", "null", "m", "a", "\x00", "\x01", "\x00\x00", "1\x00", "m\x01", "\ud800"]
FIELDS = st.one_of(st.sampled_from(CRAFTED), st.text(max_size=4))
NAMESPACES = st.builds(
    PrefixNamespace,
    model_id=FIELDS,
    adapter=st.none() | st.builds(AdapterRef, id=FIELDS, version=FIELDS),
    cache_salt=st.none() | FIELDS,
)
CHAIN_NAMESPACES = NAMESPACES | st.builds(GroupNamespace, request_id=FIELDS, namespace=NAMESPACES)


@given(CHAIN_NAMESPACES, CHAIN_NAMESPACES)
def test_different_namespaces_have_different_roots(first, second):
    assert (root_key(first) == root_key(second)) == (first == second)


def test_crafted_fields_never_meet_across_the_places_they_can_stand_in():
    namespaces = [PrefixNamespace("m")]
    for text in CRAFTED:
        namespaces.append(PrefixNamespace("m", cache_salt=text))
        namespaces.append(GroupNamespace(text, PrefixNamespace("m")))
        for other in CRAFTED:
            namespaces.append(PrefixNamespace("m", AdapterRef(text, other)))
            namespaces.append(PrefixNamespace("m", AdapterRef(text, other), "m"))

    roots = [root_key(namespace) for namespace in namespaces]

    assert len(set(roots)) == len(namespaces)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PrefixNamespace("m"), PrefixNamespace("m", AdapterRef("None", "None"))),
        (PrefixNamespace("m"), PrefixNamespace("m", cache_salt="None")),
        (PrefixNamespace("m"), PrefixNamespace("m", cache_salt="")),
        (PrefixNamespace("m", AdapterRef("a", "1")), PrefixNamespace("m", AdapterRef("a", "2"))),
        (PrefixNamespace("m", AdapterRef("a1", "")), PrefixNamespace("m", AdapterRef("a", "1"))),
        (PrefixNamespace("m", AdapterRef("a", "1")), PrefixNamespace("m", cache_salt="a1")),
        (PrefixNamespace("m"), PrefixNamespace("m2")),
        (PrefixNamespace("m"), GroupNamespace("r", PrefixNamespace("m"))),
        (
            GroupNamespace("r", PrefixNamespace("m")),
            GroupNamespace("s", PrefixNamespace("m")),
        ),
    ],
    ids=lambda namespace: repr(namespace)[:40],
)
def test_equal_tokens_in_two_namespaces_have_different_keys(first, second):
    tokens = [1, 2, 3, 4]

    assert PrefixChain(first, 4).key(0, tokens) != PrefixChain(second, 4).key(0, tokens)


def test_equal_namespaces_and_tokens_have_equal_keys():
    keys = [
        PrefixChain(PrefixNamespace("m", AdapterRef("a", "1"), "s"), 2).key(1, [1, 2, 3, 4])
        for _ in range(2)
    ]

    assert keys[0] == keys[1]


def test_a_key_depends_on_every_token_before_the_end_of_its_block():
    tokens = [10, 11, 12, 13, 14, 15]
    key = PrefixChain(PrefixNamespace("m"), 3).key(1, tokens)

    for position in range(6):
        changed = [*tokens]
        changed[position] += 1
        assert PrefixChain(PrefixNamespace("m"), 3).key(1, changed) != key


def test_a_key_does_not_depend_on_tokens_behind_its_block():
    first = PrefixChain(PrefixNamespace("m"), 2).key(0, [1, 2, 3, 4])
    second = PrefixChain(PrefixNamespace("m"), 2).key(0, [1, 2, 9])

    assert first == second


def test_a_growing_text_has_the_keys_of_the_whole_text():
    grown = PrefixChain(PrefixNamespace("m"), 2)
    tokens = []
    keys = []
    for token_id in range(8):
        tokens.append(token_id)
        if len(tokens) % 2 == 0:
            keys.append(grown.key(len(tokens) // 2 - 1, tokens))

    whole = PrefixChain(PrefixNamespace("m"), 2)

    assert keys == [whole.key(index, list(range(8))) for index in range(4)]


def test_the_parent_of_the_first_block_is_the_root():
    chain = PrefixChain(PrefixNamespace("m"), 2)
    key = chain.key(0, [1, 2])

    assert chain.parent_key(0) == root_key(PrefixNamespace("m"))
    assert chain.parent_key(1) == key


def index_of(tokens, blocks, block_size_tokens=1):
    """Return an index that holds one chain, and the chain."""
    index = PrefixIndex()
    chain = PrefixChain(PrefixNamespace("m"), block_size_tokens)
    for position, block_id in enumerate(blocks):
        key = chain.key(position, tokens)
        index.add(key, chain.parent_key(position), block_id)
    return index, chain


def test_the_longest_findable_beginning_is_found():
    index, chain = index_of([5, 6, 7], [30, 31, 32])
    other = PrefixChain(PrefixNamespace("m"), 1)

    assert index.find(chain, [5, 6, 7], 3) == [30, 31, 32]
    assert index.find(chain, [5, 6, 7], 2) == [30, 31]
    assert index.find(other, [5, 6, 8], 3) == [30, 31]


def test_a_chain_is_not_found_behind_a_gap():
    index, chain = index_of([5, 6, 7], [30, 31, 32])

    index.remove(31)

    assert index.find(chain, [5, 6, 7], 3) == [30]


def test_a_second_block_with_the_same_content_is_not_findable():
    index, chain = index_of([5], [30])

    index.add(chain.key(0, [5]), chain.parent_key(0), 31)

    assert 31 not in index
    assert index.find(chain, [5], 1) == [30]


def test_eviction_takes_the_least_recently_released_block_first():
    index, _ = index_of([5, 6, 7], [30, 31, 32])
    for block_id in (32, 31, 30):
        index.release(block_id)

    assert [index.evict() for _ in range(3)] == [32, 31, 30]


def test_a_touched_block_is_evicted_last():
    index, chain = index_of([5, 6], [30, 31])
    index.release(30)
    index.release(31)

    index.touch(chain.key(0, [5, 6]))

    assert [index.evict(), index.evict()] == [31, 30]


def test_a_referenced_block_is_findable_but_not_evictable():
    index, chain = index_of([5], [30])
    index.release(30)

    index.reference(30)

    assert index.num_evictable == 0
    assert index.find(chain, [5], 1) == [30]


def test_an_evicted_block_is_not_findable():
    index, chain = index_of([5], [30])
    index.release(30)

    index.evict()

    assert index.find(chain, [5], 1) == []
    assert len(index) == 0


def test_a_prefix_that_would_go_before_its_extension_is_reported():
    index, _ = index_of([5, 6], [30, 31])
    index.release(30)
    index.release(31)

    with pytest.raises(RuntimeError, match="before its extension"):
        index.check_invariants()


def test_token_ids_of_any_size_are_told_apart():
    ids = [0, 1, 255, 256, 65536, 2**31, 2**40]
    texts = list(itertools.product(ids, repeat=2))

    keys = {PrefixChain(PrefixNamespace("m"), 2).key(0, text) for text in texts}

    assert len(keys) == len(texts)
