"""Which rows are virtual tokens, and which models can be given keys and values."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from models.adapters.ledger import Slot
from models.kv_cache.store import LayerShape
from models.runner.cached_keys import are_cached_keys_attended
from models.runner.inputs import split_parts
from models.runner.virtual_rows import VirtualRows, find_virtual_rows, virtual_facts_of
from models.scheduling.step_plan import ScheduledSequence
from tests.unit.models.adapters.peft_adapters import MODELS

SLOT = Slot(8, 1)


def part(start, num_tokens, *, num_virtual_tokens=5, scored=range(0)):
    return ScheduledSequence(
        7,
        tuple(range(num_tokens)),
        start,
        (0, 1, 2),
        is_sampled=False,
        scored_positions=scored,
        slot=SLOT,
        num_virtual_tokens=num_virtual_tokens,
    )


@pytest.mark.parametrize(
    ("start", "num_tokens", "rows"),
    [
        (0, 3, [VirtualRows(SLOT, 10, 0, 3)]),
        (0, 5, [VirtualRows(SLOT, 10, 0, 5)]),
        (0, 9, [VirtualRows(SLOT, 10, 0, 5)]),
        (3, 9, [VirtualRows(SLOT, 10, 3, 2)]),
        (4, 1, [VirtualRows(SLOT, 10, 4, 1)]),
        (5, 1, []),
        (8, 4, []),
    ],
)
def test_rows_before_the_text_are_virtual(start, num_tokens, rows):
    scheduled = part(start, num_tokens)

    assert find_virtual_rows([scheduled], [10 + num_tokens - 1]) == tuple(rows)


def test_a_step_without_virtual_tokens_has_no_such_rows():
    parts = [part(0, 3, num_virtual_tokens=0), part(0, 1, num_virtual_tokens=0)]

    assert find_virtual_rows(parts, [2, 3]) == ()


def test_a_part_that_is_cut_keeps_its_virtual_tokens_and_tells_the_same_of_its_prompt():
    whole = part(0, 9, scored=range(5, 8))

    cut = [each for parts in split_parts([whole], 2) for each in parts]

    rows = [row for each in cut for row in find_virtual_rows([each], [len(each.token_ids) - 1])]
    assert [(row.start, row.num_rows) for row in rows] == [(0, 2), (2, 2), (4, 1)]
    assert whole.scored_tokens == range(1, 4)
    assert [at for each in cut for at in each.scored_tokens] == [1, 2, 3]


@pytest.mark.parametrize("name", MODELS)
def test_models_keep_what_attention_meets(name):
    assert are_cached_keys_attended(MODELS[name])


def test_a_model_that_keeps_keys_in_another_form_cannot_be_given_any(monkeypatch):
    update = DynamicLayer.update

    def halve(self, keys, values, *arguments, **keywords):
        keys, values = update(self, keys / 2, values, *arguments, **keywords)
        return keys * 2, values

    monkeypatch.setattr(DynamicLayer, "update", halve)

    assert not are_cached_keys_attended(MODELS["llama"])
    layers = [LayerShape(2, 16, 16)] * 3
    assert virtual_facts_of(MODELS["llama"], layers, max_num_tokens=9).key_values is None


@pytest.mark.parametrize(
    "layers",
    [
        [LayerShape(2, 16, 16), LayerShape(2, 16, 16), LayerShape(1, 16, 16)],
        [LayerShape(2, 16, 24)] * 3,
    ],
    ids=["layers differ", "keys and values differ"],
)
def test_layers_without_a_common_form_cannot_be_given_any(layers):
    facts = virtual_facts_of(MODELS["llama"], layers, max_num_tokens=9)

    assert facts.key_values is None
    assert facts.max_num_elements == 9 * 64


def test_the_probe_leaves_the_models_own_attention_in_place():
    model = MODELS["llama"]
    tokens = torch.arange(7)[None]
    with torch.inference_mode():
        before = model(tokens, use_cache=False).logits

        are_cached_keys_attended(model)

        assert torch.equal(model(tokens, use_cache=False).logits, before)
