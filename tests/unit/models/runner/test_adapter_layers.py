"""Many adapters and base rows in one pass equal what PEFT's own forward gives each of them."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig

from models.adapters.ledger import Slot
from models.adapters.store import AdapterStore
from models.runner.adapter_layers import AdapterLayers
from models.runner.adapter_layout import AdapterRows, make_adapter_layout
from models.runner.module_discovery import discover_modules
from tests.tiny_models import FAMILIES
from tests.unit.models.adapters.peft_adapters import IDS, MODELS, SavedAdapter, facts_of

CPU = torch.device("cpu")
NUM_TOKENS = IDS.shape[1]
LINEARS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "qwen3-moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
FEEDFORWARD = {"llama": "down_proj", "qwen3": "down_proj", "gpt2": "mlp.c_proj", "qwen3-moe": None}


def configs(family):
    """Return six adapters that differ in method, rank and targets."""
    targets = LINEARS[family]
    forward = [FEEDFORWARD[family]] if FEEDFORWARD[family] else []

    def lora(**options):
        return LoraConfig(
            **{"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": targets}
            | options
        )

    return [
        lora(),
        lora(r=24, use_rslora=True),
        lora(r=2, target_modules=targets[:1]),
        lora(use_dora=True),
        lora(r=9, lora_bias=True, rank_pattern={targets[0]: 3}, target_modules=targets[:2]),
        IA3Config(
            target_modules=[targets[1], *forward],
            feedforward_modules=forward,
            task_type="CAUSAL_LM",
        ),
    ]


class Bench:
    """A copy of a tiny model with a store of adapters on it."""

    def __init__(self, family, *, model=None, num_slots=8, max_group_rows=32):
        self.model = copy.deepcopy(MODELS[family] if model is None else model)
        self.facts = facts_of(self.model)
        self.store = AdapterStore(
            discover_modules(self.model), num_slots, (8, 16, 32, 64), torch.float32, CPU
        )
        self.layers = AdapterLayers(self.model, self.store)
        self._max_group_rows = max_group_rows

    def put(self, adapter, slot):
        self.store.write_(slot, adapter.read(self.facts))

    @torch.inference_mode()
    def run(self, slots):
        """Return logits [B, T, V]: the same tokens, each row of the batch with its own slot."""
        parts = [
            AdapterRows(slot, number * NUM_TOKENS, NUM_TOKENS)
            for number, slot in enumerate(slots)
            if slot is not None
        ]
        layout = make_adapter_layout(parts, max_group_rows=self._max_group_rows, device=CPU)
        self.layers.begin_step(layout, head_layout=layout)
        positions = torch.arange(NUM_TOKENS).expand(len(slots), -1)
        ids = IDS.expand(len(slots), -1)
        return self.model(ids, position_ids=positions, use_cache=False).logits


def assert_close(actual, expected):
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("max_group_rows", [8, 32])
@pytest.mark.parametrize("family", LINEARS)
def test_six_adapters_and_the_base_in_one_pass_equal_peft(tmp_path, family, max_group_rows):
    bench = Bench(family, max_group_rows=max_group_rows)
    base = MODELS[family]
    adapters = [
        SavedAdapter(tmp_path / str(number), base, config)
        for number, config in enumerate(configs(family))
    ]
    slots = [Slot(rank, number) for number, rank in enumerate((8, 32, 8, 8, 16, 8))]
    for adapter, slot in zip(adapters, slots, strict=True):
        bench.put(adapter, slot)
    with torch.inference_mode():
        plain = base(IDS, use_cache=False).logits[0]
    order = [3, None, 0, 5, 1, 0, None, 2, 4]

    logits = bench.run([None if number is None else slots[number] for number in order])

    for row, number in zip(logits, order, strict=True):
        assert_close(row, plain if number is None else adapters[number].logits[0])


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Three adapters of llama: plain, DoRA, IA3."""
    folder = tmp_path_factory.mktemp("trio")
    chosen = [configs("llama")[number] for number in (0, 3, 5)]
    return [
        SavedAdapter(folder / str(number), MODELS["llama"], config)
        for number, config in enumerate(chosen)
    ]


def test_base_rows_are_bit_for_bit_those_without_adapters(trio):
    bench = Bench("llama")
    alone = bench.run([None] * 4)
    slots = [Slot(8, number) for number in range(3)]
    for adapter, slot in zip(trio, slots, strict=True):
        bench.put(adapter, slot)

    mixed = bench.run([slots[0], None, slots[1], slots[2]])

    assert torch.equal(mixed[1], alone[1])


def test_a_row_is_the_same_bit_for_bit_in_any_company(trio):
    bench = Bench("llama")
    slots = [Slot(8, number) for number in range(3)]
    for adapter, slot in zip(trio, slots, strict=True):
        bench.put(adapter, slot)
    alone = {slot: bench.run([slot, None, None, None])[0] for slot in slots}

    for order in ([0, 1, 2, 0], [2, 2, 2, 1], [1, None, 0, None]):
        mixed = bench.run([None if number is None else slots[number] for number in order])
        for row, number in zip(mixed, order, strict=True):
            assert number is None or torch.equal(row, alone[slots[number]])


def test_nothing_of_a_former_tenant_is_left(trio):
    bench = Bench("llama")
    slot, other = Slot(8, 1), Slot(8, 0)
    bench.put(trio[0], other)
    for adapter in trio:  # the last one has no matrices at all
        bench.put(adapter, slot)
        after = bench.run([slot, other])
        fresh = Bench("llama")
        fresh.put(trio[0], other)
        fresh.put(adapter, slot)
        assert torch.equal(after, fresh.run([slot, other]))


def test_a_slot_that_was_written_before_its_bucket_had_matrices_gets_zeros(trio):
    bench = Bench("llama")
    bench.put(trio[2], Slot(8, 0))  # IA3: no matrices
    bench.put(trio[0], Slot(8, 1))  # makes the bucket's matrices

    logits = bench.run([Slot(8, 0), Slot(8, 1)])

    assert_close(logits[0], trio[2].logits[0])
    assert_close(logits[1], trio[0].logits[0])


def test_an_adapter_costs_what_its_bucket_holds(tmp_path, trio):
    bench = Bench("llama")
    weights = trio[0].read(bench.facts)
    larger = SavedAdapter(tmp_path, MODELS["llama"], configs("llama")[1]).read(bench.facts)

    small, large = bench.store.cost(weights), bench.store.cost(larger)

    elements = sum(
        shape.num_inputs + shape.num_outputs
        for shape in bench.store.modules
        if shape.name in weights.modules
    )
    assert (small.rank, small.num_bytes) == (4, 4 * 8 * elements)
    assert (large.rank, large.num_bytes) == (24, 4 * 32 * elements)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.name in MODELS])
def test_modules_are_those_that_every_row_passes_once(family):
    model = MODELS[family]

    shapes = discover_modules(model)

    names = {shape.name for shape in shapes}
    assert names
    assert not any("expert" in name for name in names)
    facts = facts_of(model)
    assert {facts.output_head, facts.input_embedding} <= names
    assert all(shape == facts.modules[shape.name] for shape in shapes)
    for layer in range(model.config.num_hidden_layers):
        assert any(f".{layer}." in name for name in names)


def test_rows_of_one_slot_are_cut_into_groups_and_padded_to_the_next_size():
    parts = [
        AdapterRows(Slot(8, 3), 0, 1),
        AdapterRows(Slot(8, 1), 1, 1),
        AdapterRows(Slot(8, 3), 2, 70),
        AdapterRows(Slot(16, 0), 72, 2),
    ]

    layout = make_adapter_layout(parts, max_group_rows=32, device=CPU)

    assert [
        (groups.bucket_rank, groups.slots.tolist(), len(groups.gathered) // groups.num_groups)
        for groups in layout.groups
    ] == [(8, [1, 3], 8), (8, [3, 3], 32), (16, [0], 8)]
    small, large, _ = layout.groups
    assert small.rows.tolist() == [1, *range(65, 72)]
    assert small.places.tolist() == [0, *range(8, 15)]
    assert large.rows.tolist() == [0, *range(2, 65)]
    assert large.places is None
    assert small.slot_range is None
    assert layout.groups[2].slot_range == slice(0, 1)


def test_without_rows_there_is_no_layout():
    assert make_adapter_layout([], max_group_rows=32, device=CPU) is None
