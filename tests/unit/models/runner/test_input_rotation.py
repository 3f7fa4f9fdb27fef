"""Rows of adapters that turn a module's input, beside others: right, alone, and bit for bit."""

import pytest
import torch
from peft import OFTConfig

from models.adapters.ledger import Slot
from models.adapters.store import AdapterStore
from models.adapters.weights import AdapterWeights, ModuleDelta, ModuleShape
from models.requests import AdapterRef
from models.runner.adapter_layout import AdapterRows, make_adapter_layout
from models.runner.input_rotation import InputRotator
from tests.unit.models.adapters.peft_adapters import MODELS, SavedAdapter
from tests.unit.models.runner.test_adapter_layers import Bench, assert_close, configs

CPU = torch.device("cpu")
WIDTH = 24


def put(store, slot, rotation):
    """Fill a slot with an adapter that turns the only module's input."""
    deltas = {} if rotation is None else {"one": ModuleDelta(input_rotation=rotation)}
    weights = AdapterWeights(ref=AdapterRef("a", "v"), modules=deltas, rank=0, num_bytes=0)
    store.write_(slot, weights)
    return store.cost(weights).num_bytes


def rotations(num_blocks, size, seed):
    return torch.randn(num_blocks, size, size, generator=torch.Generator().manual_seed(seed))


def rotate(store, inputs, *parts):
    layout = make_adapter_layout(
        [AdapterRows(slot, start, stop - start) for slot, start, stop in parts],
        max_group_rows=32,
        device=CPU,
    )
    return InputRotator(store).rotate(0, layout.buckets, inputs)


@pytest.fixture
def store():
    module = ModuleShape(name="one", num_inputs=WIDTH, num_outputs=5)
    return AdapterStore([module], 8, (8, 16), torch.bfloat16, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_turned_by_its_own_adapter_in_float32(store, dtype):
    chosen = {
        Slot(8, 0): rotations(3, 8, 0),
        Slot(8, 3): rotations(12, 2, 1),
        Slot(8, 1): rotations(1, 8, 2),  # shared
        Slot(16, 0): rotations(1, WIDTH, 3),
    }
    for slot, rotation in chosen.items():
        put(store, slot, rotation)
    put(store, Slot(8, 2), None)
    inputs = torch.randn(1, 40, WIDTH, generator=torch.Generator().manual_seed(9)).to(dtype)
    kept = inputs.clone()
    parts = [
        (Slot(8, 0), 1, 12),
        (Slot(8, 3), 12, 13),
        (Slot(8, 2), 13, 15),
        (Slot(16, 0), 15, 20),
        (Slot(8, 1), 20, 38),
    ]

    turned = rotate(store, inputs, *parts)

    assert torch.equal(inputs, kept)
    assert turned.dtype == dtype
    expected = inputs.clone()
    for slot, start, stop in parts:
        if slot in chosen:
            num_blocks = WIDTH // chosen[slot].shape[-1]
            matrix = torch.block_diag(*chosen[slot].expand(num_blocks, -1, -1))
            expected[0, start:stop] = (inputs[0, start:stop].float() @ matrix).to(dtype)
    others = [0, 13, 14, 38, 39]
    assert torch.equal(turned[0, others], inputs[0, others])
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(turned, expected, rtol=tolerance, atol=tolerance)


def test_rows_of_others_leave_the_inputs_as_they_are(store):
    put(store, Slot(8, 0), None)
    put(store, Slot(8, 1), rotations(3, 8, 0))

    assert rotate(store, torch.ones(1, 8, WIDTH), (Slot(8, 0), 0, 5)) is None


def test_a_row_is_the_same_bit_for_bit_in_any_company(store):
    put(store, Slot(8, 0), rotations(3, 8, 0))
    put(store, Slot(8, 1), rotations(3, 8, 1))
    put(store, Slot(8, 2), rotations(1, 12, 2))
    inputs = torch.randn(1, 64, WIDTH, generator=torch.Generator().manual_seed(9))
    alone = torch.cat(
        [rotate(store, inputs, (Slot(8, row % 3), row, row + 1))[:, row] for row in range(64)]
    )

    crowd = rotate(store, inputs, *((Slot(8, row % 3), row, row + 1) for row in range(64)))
    one = rotate(store, inputs, (Slot(8, 1), 3, 60))

    assert torch.equal(crowd[0], alone)
    assert torch.equal(one[0, 4:60:3], alone[4:60:3])


def test_a_slot_holds_nothing_of_a_former_tenant(store):
    inputs = torch.ones(1, 8, WIDTH)
    first = put(store, Slot(8, 0), rotations(3, 8, 0))
    shared = put(store, Slot(8, 0), rotations(1, 4, 1))
    before = rotate(store, inputs, (Slot(8, 0), 0, 8))

    nothing = put(store, Slot(8, 0), None)

    assert (first, shared, nothing) == (4 * 3 * 64, 4 * 16, 0)
    assert not torch.equal(before, inputs)
    assert rotate(store, inputs, (Slot(8, 0), 0, 8)) is None


def test_a_slot_that_lost_its_tenant_holds_no_rotations(store):
    put(store, Slot(8, 0), rotations(3, 8, 0))
    put(store, Slot(8, 1), rotations(3, 8, 1))

    store.clear_(Slot(8, 0))
    store.clear_(Slot(16, 5))  # nobody was ever there

    assert set(store.rotations(8, 0)) == {1}


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_beside_lora_ia3_and_the_base_each_row_gets_what_peft_gives(tmp_path, family):
    bench = Bench(family)
    common = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "o_proj"]}
    chosen = [
        OFTConfig(**common, oft_block_size=16),
        OFTConfig(**common, oft_block_size=4, use_cayley_neumann=False, block_share=True),
        configs(family)[0],
        configs(family)[5],
    ]
    adapters = [
        SavedAdapter(tmp_path / str(number), MODELS[family], config)
        for number, config in enumerate(chosen)
    ]
    slots = [Slot(8, number) for number in range(len(adapters))]
    for adapter, slot in zip(adapters, slots, strict=True):
        bench.put(adapter, slot)
    plain = Bench(family).run([None] * 6)[0]
    order = [3, 0, None, 1, 2, 0]

    logits = bench.run([None if number is None else slots[number] for number in order])

    for row, number in zip(logits, order, strict=True):
        if number is None:
            assert torch.equal(row, plain)
        else:
            assert_close(row, adapters[number].logits[0])
