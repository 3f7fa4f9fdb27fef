"""Sums over ranges of rows, groups of few rows and unused slots between used ones: same bits."""

import pytest
import torch

from models.adapters.ledger import Slot
from models.adapters.store import AdapterStore
from models.runner.adapter_layers import AdapterLayers
from models.runner.adapter_layout import AdapterRows, make_adapter_layout
from models.runner.module_discovery import discover_modules
from tests.tiny_models import FAMILIES, make_model
from tests.unit.models.adapters.peft_adapters import IDS, SavedAdapter, facts_of
from tests.unit.models.runner.test_adapter_layers import CPU, NUM_TOKENS, configs

NUM_SEQUENCES = 6


class WideBench:
    """A model with products of at least 64 x 64 (torch has another kernel below), three slots."""

    def __init__(self, folder):
        family = next(each for each in FAMILIES if each.name == "llama")
        self.model = make_model(family, hidden_size=128, head_dim=32, intermediate_size=128)
        facts = facts_of(self.model)
        adapters = [
            SavedAdapter(folder / str(number), self.model, configs("llama")[number]).read(facts)
            for number in (0, 2, 3)
        ]
        self.store = AdapterStore(
            discover_modules(self.model), 8, (8, 16, 32, 64), torch.float32, CPU
        )
        self.layers = AdapterLayers(self.model, self.store)
        self.slots = [Slot(8, 0), Slot(8, 1), Slot(8, 3)]
        for slot, weights in zip(self.slots, adapters, strict=True):
            self.store.write_(slot, weights)

    def layout(self, numbers, group_multiple=8):
        return make_adapter_layout(
            [
                AdapterRows(self.slots[number], index * NUM_TOKENS, NUM_TOKENS)
                for index, number in enumerate(numbers)
                if number is not None
            ],
            max_group_rows=32,
            device=CPU,
            group_multiple=group_multiple,
        )

    @torch.inference_mode()
    def run(self, layout):
        self.layers.begin_step(layout)
        return self.model(IDS.expand(NUM_SEQUENCES, -1), use_cache=False).logits


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return WideBench(tmp_path_factory.mktemp("wide"))


def test_rows_get_the_same_bits_by_themselves_and_in_a_range(bench):
    crowded = bench.layout([0, 1, 2, 0, None, 1])
    lonely = bench.layout([0, None, None, None, None, 1])
    assert crowded.row_range is not None
    assert lonely.row_range is None

    in_range, by_rows, base = (bench.run(layout) for layout in (crowded, lonely, None))

    assert not torch.equal(in_range[0], base[0])
    assert torch.equal(in_range[0], by_rows[0])
    assert torch.equal(in_range[5], by_rows[5])
    for logits, number in ((in_range, 4), (by_rows, 2)):
        assert torch.equal(logits[number].view(torch.int32), base[number].view(torch.int32))


def test_groups_of_the_fewest_rows_that_are_allowed_give_the_same_bits(bench):
    numbers = [0, 2, None, 1, 2, 0]
    few = bench.layout(numbers, bench.layers.group_multiple)

    assert torch.equal(bench.run(few), bench.run(bench.layout(numbers)))


def test_what_lies_in_an_unused_slot_of_a_range_reaches_no_row(bench):
    layout = make_adapter_layout(
        [AdapterRows(Slot(8, slot), row, 1) for row, slot in enumerate((0, 1, 3))],
        max_group_rows=32,
        device=CPU,
    )
    groups = layout.groups[0]
    assert groups.slot_range == slice(0, 4)
    assert groups.slots_in_use == frozenset({0, 1, 3})
    before = bench.run(layout)
    for module in range(len(bench.store.modules)):
        pair = bench.store.lora(8, module, groups.slots_in_use)
        if pair is not None:
            pair.a[2] = torch.nan
            pair.b[2] = torch.inf

    assert torch.equal(bench.run(layout), before)


def test_places_are_numbered_through_and_base_rows_have_the_one_behind_the_last():
    parts = [
        AdapterRows(Slot(8, 0), 3, 1),
        AdapterRows(Slot(16, 0), 2, 1),
        AdapterRows(Slot(8, 0), 5, 1),
    ]

    row_range = make_adapter_layout(parts, max_group_rows=32, device=CPU).row_range

    assert (row_range.start, row_range.stop, row_range.num_places) == (2, 6, 16)
    assert row_range.places.tolist() == [8, 0, 16, 1]
