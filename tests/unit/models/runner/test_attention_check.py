"""The trial of a backend: the good ones pass, and any that reads something else does not."""

import pytest
import torch

from models.attention.matmul import MatmulAttention
from models.attention.reference import ReferenceAttention
from models.attention.varlen import VarlenAttention
from models.config import KVCacheConfig
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, LayerShape, plan_kv_cache
from models.loading.arithmetic import product_dtype
from models.runner.attention_check import TOLERANCE, check_attention
from tests.unit.models.attention.emulated_varlen import emulated_varlen

CPU = torch.device("cpu")
LAYERS = [LayerShape(2, 8, 8), LayerShape(2, 8, 8), LayerShape(1, 16, 16)]


def make_pool(*, num_blocks=8, block_size=256, dtype=torch.bfloat16):
    elements = sum(
        each.num_kv_heads * (each.key_width + each.value_width) * block_size for each in LAYERS
    )
    config = KVCacheConfig(
        budget_bytes=elements * dtype.itemsize * (num_blocks + 1), block_size_tokens=block_size
    )
    return KVCachePool(plan_kv_cache(config, LAYERS, dtype), LAYERS, dtype, CPU)


def check(pool, backend):
    return check_attention(backend, pool, LAYERS, num_heads=4, name="mine")


def varlen(pool, attend=emulated_varlen):
    return VarlenAttention(pool, is_batch_invariant=False, attend=attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_blocks", "block_size"), [(8, 16), (6, 16), (3, 16), (2, 16), (15, 1)]
)
def test_attention_by_matmul_passes(dtype, num_blocks, block_size):
    pool = make_pool(num_blocks=num_blocks, block_size=block_size, dtype=dtype)

    error = check(pool, MatmulAttention(pool, product_dtype(dtype, CPU)))

    assert error <= TOLERANCE[dtype]


def test_the_reference_equals_itself():
    pool = make_pool(block_size=16)

    assert check(pool, ReferenceAttention(pool)) == 0


def with_last_token_hidden(*tensors, seqused_k, **keywords):
    return emulated_varlen(*tensors, seqused_k=(seqused_k - 1).clamp(min=1), **keywords)


def with_blocks_in_another_order(*tensors, block_table, **keywords):
    table = block_table.clone()
    table[:, :2] = table[:, :2].flip(1)
    return emulated_varlen(*tensors, block_table=table, **keywords)


def without_window(*tensors, window_size, **keywords):
    del window_size
    return emulated_varlen(*tensors, window_size=(-1, 0), **keywords)


def with_rows_not_written(*tensors, **keywords):
    # what more than one split does in some versions
    output = emulated_varlen(*tensors, **keywords)
    output[1:] = torch.nan
    return output


@pytest.mark.parametrize(
    "kernel",
    [
        with_last_token_hidden,
        with_blocks_in_another_order,
        without_window,
        with_rows_not_written,
    ],
)
def test_a_kernel_that_computes_something_else_is_refused(kernel, monkeypatch):
    # The least that crosses a block: the emulation is slow.
    monkeypatch.setattr("models.runner.attention_check.WINDOW_TOKENS", 3)
    pool = make_pool(block_size=256)

    with pytest.raises(
        ConfigError, match="outputs of 'mine' differ from the reference's"
    ) as caught:
        check(pool, varlen(pool, kernel))

    assert caught.value.field == "attention_backend"
