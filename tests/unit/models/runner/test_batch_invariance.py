"""Fixed rows: equal bits in any company, also in float32, and the check that says so."""

import dataclasses

import pytest
import torch
from torch import nn

from models.adapters.ledger import Slot
from models.attention.backend import attach
from models.attention.matmul import MatmulAttention
from models.config import KVCacheConfig
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, plan_kv_cache
from models.loading.arithmetic import product_dtype
from models.loading.loader import discover_layers
from models.runner.adapter_layout import AdapterRows, make_adapter_layout
from models.runner.batch_invariance import check_batch_invariance
from models.runner.packed_forward import PackedForward
from models.runner.row_stability import FIXED_ROWS, RowPolicy, fix_rows, make_row_independent
from models.scheduling.step_plan import ScheduledSequence
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def family(name):
    return next(family for family in FAMILIES if family.name == name)


def make_forward(model, policy, backend_class=MatmulAttention):
    layers = discover_layers(model)
    config = KVCacheConfig(budget_bytes=1 << 30, block_size_tokens=BLOCK_SIZE)
    plan = dataclasses.replace(plan_kv_cache(config, layers, model.dtype), num_blocks=24)
    pool = KVCachePool(plan, layers, model.dtype, CPU)
    backend = backend_class(pool, product_dtype(model.dtype, CPU))
    attach(model, backend)
    return PackedForward(model, pool, backend, policy), pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_with_fixed_rows_company_changes_no_bit(name, dtype):
    model = make_model(family(name), dtype=dtype)
    policy = fix_rows(model, 64)
    forward, pool = make_forward(model, policy)

    check_batch_invariance(forward, pool, vocabulary_size=VOCABULARY_SIZE)


def test_every_forward_pass_has_the_same_rows():
    model = make_model(family("llama"))
    forward, _ = make_forward(model, fix_rows(model, 40))
    tables = [tuple(range(4)), tuple(range(4, 8))]

    for lengths in ([1], [1, 1], [30, 9]):
        parts = [
            ScheduledSequence(index, (3,) * length, 0, tables[index], is_sampled=False)
            for index, length in enumerate(lengths)
        ]
        inputs = forward.pack(parts)
        assert inputs.token_ids.shape == (1, 40)
        assert not inputs.layout.prefills
        assert [group.num_rows for group in inputs.layout.decodes] == [1] * sum(lengths)


@pytest.mark.parametrize(("max_rows", "rows"), [(1, 8), (19, 24), (128, 128), (5000, FIXED_ROWS)])
def test_fixed_rows_are_no_more_than_a_step_can_have(max_rows, rows):
    policy = fix_rows(nn.Linear(4, 4), max_rows)

    assert policy == RowPolicy(rows, rows, smallest_tile_rows=0, is_fixed=True)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_mixture_of_experts_is_refused(name):
    with pytest.raises(ConfigError, match="experts") as caught:
        fix_rows(make_model(family(name)), 64)

    assert caught.value.field == "batch_invariant"


def test_on_the_cpu_nothing_changes():
    model = nn.Sequential(nn.Linear(16, 16)).bfloat16()

    policies = [
        make_row_independent(
            model, dtype=torch.bfloat16, max_rows=16, is_batch_invariant=is_batch_invariant
        )
        for is_batch_invariant in (False, True)
    ]

    assert policies[0] == policies[1]
    assert not policies[0].is_fixed


def test_another_device_gets_fixed_rows_if_asked():
    model = nn.Linear(4, 4, device="meta")

    assert make_row_independent(
        model, dtype=torch.bfloat16, max_rows=64, is_batch_invariant=True
    ) == fix_rows(model, 64)


class Biased(MatmulAttention):
    """Its rows know how many they are."""

    def __call__(self, module, query, *tensors, **keywords):
        output, _ = super().__call__(module, query, *tensors, **keywords)
        return output + len(self._layout.slots) * 1e-6, None


def test_the_check_finds_what_depends_on_the_company():
    model = make_model(family("llama"))
    forward, pool = make_forward(model, fix_rows(model, 64), Biased)

    with pytest.raises(ConfigError, match="does not hold on this device") as caught:
        check_batch_invariance(forward, pool, vocabulary_size=VOCABULARY_SIZE)

    assert caught.value.field == "batch_invariant"


def test_fixed_groups_of_adapters_have_one_shape_in_any_company():
    def rows(index, start, count, rank=8):
        return AdapterRows(Slot(rank, index), row_start=start, num_rows=count)

    layout = make_adapter_layout(
        [rows(0, 0, 1), rows(1, 1, 20), rows(3, 21, 2), rows(0, 23, 1, rank=16)],
        max_group_rows=16,
        is_fixed=True,
        device=CPU,
    )

    assert [(group.num_groups, len(group.gathered)) for group in layout.groups] == [(1, 16)] * 5
    assert sorted(row for group in layout.groups for row in group.rows.tolist()) == [*range(24)]
