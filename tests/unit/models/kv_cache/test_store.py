"""The tensors of the KV cache against a dict, and how many blocks a budget holds."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import KVCacheConfig
from models.errors import ConfigError
from models.kv_cache.store import KVCachePlan, KVCachePool, LayerShape, plan_kv_cache

CPU = torch.device("cpu")
# as of a model whose values are narrower than its keys, and whose layers differ
LAYERS = (LayerShape(2, 6, 4), LayerShape(3, 5, 7))
ELEMENTS_PER_TOKEN = 2 * (6 + 4) + 3 * (5 + 7)
BLOCK_SIZE = 4
NUM_BLOCKS = 6


def plan(budget_bytes, *, block_size=BLOCK_SIZE, dtype=torch.float32, layers=LAYERS):
    config = KVCacheConfig(budget_bytes=budget_bytes, block_size_tokens=block_size)
    return plan_kv_cache(config, layers, dtype)


def make_pool(dtype=torch.float32):
    bytes_per_token = ELEMENTS_PER_TOKEN * dtype.itemsize
    size = KVCachePlan(
        NUM_BLOCKS, BLOCK_SIZE, bytes_per_token, (NUM_BLOCKS + 1) * BLOCK_SIZE * bytes_per_token
    )
    return KVCachePool(size, LAYERS, dtype, CPU)


@pytest.mark.parametrize(
    ("dtype", "bytes_per_element"),
    [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)],
)
def test_a_token_costs_its_keys_and_values_in_all_layers(dtype, bytes_per_element):
    assert plan(1 << 20, dtype=dtype).bytes_per_token == ELEMENTS_PER_TOKEN * bytes_per_element


@pytest.mark.parametrize("spare_bytes", [0, 1, 4 * ELEMENTS_PER_TOKEN * BLOCK_SIZE - 1])
def test_one_block_of_the_budget_is_set_apart(spare_bytes):
    bytes_per_block = 4 * ELEMENTS_PER_TOKEN * BLOCK_SIZE

    result = plan(10 * bytes_per_block + spare_bytes)

    assert result.num_blocks == 9
    assert result.num_tokens == 9 * BLOCK_SIZE
    assert result.total_bytes == 10 * bytes_per_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tensors_take_what_the_plan_says(dtype):
    bytes_per_block = ELEMENTS_PER_TOKEN * dtype.itemsize * BLOCK_SIZE
    result = plan(5 * bytes_per_block, dtype=dtype)
    pool = KVCachePool(result, LAYERS, dtype, CPU)

    tensors = (*pool.keys, *pool.values)
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == result.total_bytes
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert [tuple(keys.shape) for keys in pool.keys] == [(2, 5, 4, 6), (3, 5, 4, 5)]
    assert [tuple(values.shape) for values in pool.values] == [(2, 5, 4, 4), (3, 5, 4, 7)]
    assert pool.null_block_id == result.num_blocks == 4


def test_the_smallest_budget_is_two_blocks():
    bytes_per_block = 4 * ELEMENTS_PER_TOKEN * BLOCK_SIZE

    assert plan(2 * bytes_per_block).num_blocks == 1
    with pytest.raises(ConfigError) as caught:
        plan(2 * bytes_per_block - 1)

    assert caught.value.field == "kv_budget_bytes"
    assert str(caught.value) == (
        "kv_budget_bytes: 1791 bytes hold no KV block: this model needs at least 1792 bytes "
        "(224 a token)"
    )


@dataclasses.dataclass(frozen=True)
class Write:
    layer: int
    slots: tuple[int, ...]
    seed: int


def rows_of(write):
    """Return the keys [H, T, Dk] and values [H, T, Dv] of a write."""
    shape = LAYERS[write.layer]
    generator = torch.Generator().manual_seed(write.seed)
    size = (shape.num_kv_heads, len(write.slots))
    return (
        torch.randn(*size, shape.key_width, generator=generator),
        torch.randn(*size, shape.value_width, generator=generator),
    )


slots = st.lists(
    st.integers(0, NUM_BLOCKS * BLOCK_SIZE - 1), min_size=1, max_size=9, unique=True
).map(tuple)
writes = st.lists(
    st.builds(Write, layer=st.integers(0, 1), slots=slots, seed=st.integers(0, 999)), max_size=8
)


@settings(deadline=None)
@given(
    writes=writes,
    layer=st.integers(0, 1),
    blocks=st.lists(st.integers(0, NUM_BLOCKS), min_size=1, max_size=10),
    is_table_of_rows=st.booleans(),
)
def test_what_is_gathered_is_what_was_written_last(writes, layer, blocks, is_table_of_rows):
    pool = make_pool()
    stored = {}  # (layer, head, slot) -> (key, value)
    for write in writes:
        keys, values = rows_of(write)
        pool.write_(write.layer, keys, values, torch.tensor(write.slots))
        for head in range(keys.shape[0]):
            for row, slot in enumerate(write.slots):
                stored[write.layer, head, slot] = (keys[head, row], values[head, row])
    shape = LAYERS[layer]
    block_ids = torch.tensor([blocks, blocks[::-1]] if is_table_of_rows else blocks)

    keys, values = pool.gather(layer, pool.gather_index(block_ids, shape.num_kv_heads))

    expected_keys, expected_values = [], []
    for head in range(shape.num_kv_heads):
        for block in block_ids.flatten().tolist():
            for slot in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE):
                nothing = (torch.zeros(shape.key_width), torch.zeros(shape.value_width))
                key, value = stored.get((layer, head, slot), nothing)
                expected_keys.append(key)
                expected_values.append(value)
    assert torch.equal(keys, torch.stack(expected_keys))
    assert torch.equal(values, torch.stack(expected_values))
    assert keys.is_contiguous()
    assert values.is_contiguous()


@settings(deadline=None)
@given(writes=writes, cleared=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4))
def test_the_null_block_stays_zero(writes, cleared):
    pool = make_pool()
    for write in writes:
        pool.write_(write.layer, *rows_of(write), torch.tensor(write.slots))
        pool.clear_values_(write.layer, torch.tensor(cleared))

    for tensor in (*pool.keys, *pool.values):
        assert not tensor[:, pool.null_block_id].any()


def test_clearing_wipes_the_values_of_those_blocks_even_if_they_are_no_numbers():
    pool = make_pool()
    for tensor in (*pool.keys, *pool.values):
        tensor[:, :NUM_BLOCKS] = float("nan")

    pool.clear_values_(1, torch.tensor([2, 5]))

    wiped = [block for block in range(NUM_BLOCKS) if not pool.values[1][:, block].any()]
    assert wiped == [2, 5]
    assert pool.values[0][:, :NUM_BLOCKS].isnan().all()


def test_an_index_is_head_major():
    index = make_pool().gather_index(torch.tensor([[3, 0], [6, 6]]), 2)

    assert index.tolist() == [3, 0, 6, 6, 10, 7, 13, 13]
    assert index.dtype == torch.int64
