"""Adapters with virtual tokens: what PEFT saved is read as PEFT reads it, or refused by name."""

import dataclasses
import json

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig

from models.adapters.faults import AdapterFaultError
from models.adapters.ledger import Slot
from models.adapters.peft_config import read_peft_config
from models.adapters.reading import max_adapter_bytes
from models.adapters.store import AdapterStore
from models.adapters.virtual_tokens import VirtualEmbeddings, VirtualKeyValues
from tests.tiny_models import FAMILIES, make_model
from tests.unit.models.adapters.peft_adapters import (
    MODELS,
    SavedAdapter,
    facts_of,
    quiet,
    refusal,
)

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")

LLAMA = MODELS["llama"]
FACTS = facts_of(LLAMA)
NUM_LAYERS, NUM_HEADS, WIDTH = 3, 2, 16
COMMON = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
EMBEDDED = {
    "prompt": PromptTuningConfig(**COMMON),
    "mlp": PromptEncoderConfig(**COMMON, encoder_hidden_size=24),
    "lstm": PromptEncoderConfig(
        **COMMON, encoder_reparameterization_type="LSTM", encoder_hidden_size=12
    ),
}
PREFIXES = {
    "plain": PrefixTuningConfig(**COMMON),
    "projected": PrefixTuningConfig(**COMMON, prefix_projection=True, encoder_hidden_size=24),
}
ALL = EMBEDDED | PREFIXES


def save(folder, config, base=LLAMA):
    return SavedAdapter(folder, base, dataclasses.replace(config))


def loaded_prompt(folder, base=LLAMA):
    """Return what PEFT itself puts before a prompt."""
    with quiet(), torch.no_grad():
        return PeftModel.from_pretrained(base, folder).eval().get_prompt(batch_size=1)


@pytest.mark.parametrize("config", EMBEDDED.values(), ids=EMBEDDED)
def test_embeddings_are_what_the_encoder_gave(tmp_path, config):
    weights = save(tmp_path, config).read(FACTS)

    assert isinstance(weights.virtual_tokens, VirtualEmbeddings)
    assert torch.equal(weights.virtual_tokens.embeddings, loaded_prompt(tmp_path)[0])
    assert weights.num_virtual_tokens == weights.virtual_tokens.num_tokens == 5
    assert weights.num_bytes == 5 * 64 * 4
    assert weights.rank == 0
    assert not weights.modules
    assert not weights.warnings


@pytest.mark.parametrize("config", PREFIXES.values(), ids=PREFIXES)
def test_keys_and_values_are_those_of_pefts_cache(tmp_path, config):
    weights = save(tmp_path, config).read(FACTS)

    virtual = weights.virtual_tokens
    assert isinstance(virtual, VirtualKeyValues)
    assert virtual.keys.shape == virtual.values.shape == (NUM_LAYERS, NUM_HEADS, 5, WIDTH)
    layers = loaded_prompt(tmp_path).layers
    for number in range(NUM_LAYERS):
        assert torch.equal(virtual.keys[number], layers[number].keys[0])
        assert torch.equal(virtual.values[number], layers[number].values[0])
    assert weights.num_virtual_tokens == 5
    assert weights.num_bytes == 2 * NUM_LAYERS * NUM_HEADS * 5 * WIDTH * 4


def test_virtual_tokens_of_zeros_are_no_reason_for_a_warning(tmp_path):
    adapter = save(tmp_path, PREFIXES["plain"])
    adapter.edit_tensors(lambda name, tensor: torch.zeros_like(tensor))

    assert not adapter.read(FACTS).warnings


def test_another_base_name_is_told(tmp_path):
    adapter = save(tmp_path, EMBEDDED["prompt"])
    adapter.edit_config(base_model_name_or_path="other")

    assert "trained on 'other'" in adapter.read(FACTS).warnings[0]


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_more_virtual_tokens_than_the_limit_are_refused(tmp_path, config):
    adapter = save(tmp_path, config)

    adapter.read(facts_of(LLAMA, max_virtual_tokens=5))
    assert refusal(lambda: adapter.read(facts_of(LLAMA, max_virtual_tokens=4))) == (
        "its 5 virtual tokens are over the limit of 4"
    )


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_what_the_file_holds_must_be_whole_finite_and_all(tmp_path, config):
    def refused(edit):
        adapter = save(tmp_path / edit.__name__, config)
        edit(adapter)
        return refusal(lambda: adapter.read(FACTS))

    def cut(adapter):
        adapter.edit_tensors(lambda name, tensor: tensor[:4].contiguous())

    def narrow(adapter):
        adapter.edit_tensors(lambda name, tensor: tensor[:, :-2].contiguous())

    def poison(adapter):
        adapter.edit_tensors(lambda name, tensor: tensor.index_fill(0, torch.tensor(1), torch.nan))

    def rename(adapter):
        adapter.edit_tensors(lambda name, tensor: None)
        adapter.add_tensor("base_model.prompt_encoder.default.embedding.weight", torch.ones(5, 64))

    def add(adapter):
        adapter.add_tensor("base_model.model.model.embed_tokens.extra", torch.ones(5))

    assert "prompt_embeddings is [4, " in refused(cut)
    assert "prompt_embeddings is [5, " in refused(narrow)
    assert refused(poison) == "the tensor 'prompt_embeddings' holds NaN or infinity"
    assert "'base_model.prompt_encoder.default.embedding.weight'" in refused(rename)
    assert "does not account for the tensor" in refused(add)


def test_an_adapter_of_another_width_is_refused(tmp_path):
    wide = make_model(FAMILIES[0], hidden_size=128, head_dim=16)

    adapter = save(tmp_path, EMBEDDED["prompt"], wide)

    assert refusal(lambda: adapter.read(FACTS)) == (
        "prompt_embeddings is [5, 128], but this model and the adapter's configuration need [5, 64]"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 4}, "3 layers of 4 heads, 64 elements in all"),
        ({"num_hidden_layers": 2}, "2 layers of 2 heads, 32 elements in all"),
        # the same number of elements in all
        ({"num_key_value_heads": 1, "head_dim": 32}, "3 layers of 1 heads, 32 elements in all"),
    ],
)
def test_keys_of_another_form_are_refused(tmp_path, changes, words):
    adapter = save(tmp_path, PREFIXES["plain"], make_model(FAMILIES[0], **changes))

    reason = refusal(lambda: adapter.read(FACTS))

    assert f"it has keys for {words}" in reason
    assert "this model has 3 layers of 2 heads, 32 elements in all" in reason


def test_a_model_whose_layers_differ_has_no_prefix_tuning_but_prompt_tuning(tmp_path):
    uneven = dataclasses.replace(
        FACTS, virtual_tokens=dataclasses.replace(FACTS.virtual_tokens, key_values=None)
    )

    assert save(tmp_path / "a", EMBEDDED["prompt"]).read(uneven).num_virtual_tokens == 5
    adapter = save(tmp_path / "b", PREFIXES["plain"])
    assert "prefix tuning cannot work on this model" in refusal(lambda: adapter.read(uneven))


def as_file(config, **changes):
    values = {"num_layers": 3, "num_attention_heads": 2, "token_dim": 32}
    return json.dumps(config.to_dict() | values | changes).encode()


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_every_option_of_peft_is_known(config):
    for field in dataclasses.fields(config):
        assert "option" not in outcome(config, field.name), field.name


def outcome(config, name):
    try:
        return repr(read_peft_config(as_file(config, **{name: {"some": "value"}})))
    except AdapterFaultError as fault:
        return str(fault)


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_virtual_tokens": None}, "num_virtual_tokens are not given"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens must be a whole number of at least 1"),
        ({"num_virtual_tokens": True}, "num_virtual_tokens must be"),
        ({"num_transformer_submodules": 2}, "made for 2 transformer submodules"),
        ({"modules_to_save": ["lm_head"]}, "(modules_to_save) is not supported yet"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "the task 'SEQ_2_SEQ_LM'"),
        ({"new_in_peft_9": 1}, "'new_in_peft_9' is not known"),
    ],
)
def test_what_cannot_work_is_refused_by_name(config, changes, words):
    with pytest.raises(AdapterFaultError) as caught:
        read_peft_config(as_file(config, **changes))

    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["num_layers", "num_attention_heads", "token_dim"])
def test_prefix_tuning_must_tell_the_form_of_its_keys(name):
    with pytest.raises(AdapterFaultError, match=f"its {name} is not given"):
        read_peft_config(as_file(PREFIXES["plain"], **{name: None}))


def test_a_slot_holds_and_counts_its_own_tenants_virtual_tokens_only(tmp_path):
    store = AdapterStore((), 2, (8, 16), torch.bfloat16, torch.device("cpu"))
    first, second = Slot(8, 0), Slot(8, 1)
    prompt = save(tmp_path / "a", EMBEDDED["prompt"]).read(FACTS)
    prefix = save(tmp_path / "b", PREFIXES["plain"]).read(FACTS)
    neither = dataclasses.replace(prompt, virtual_tokens=None)

    assert store.cost(prompt).num_bytes == prompt.num_bytes
    assert store.cost(prefix).num_bytes == prefix.num_bytes
    assert store.cost(neither).num_bytes == 0
    store.write_(first, prompt)
    store.write_(second, prefix)
    assert torch.equal(store.virtual_tokens(first).embeddings, prompt.virtual_tokens.embeddings)
    assert torch.equal(store.virtual_tokens(second).keys, prefix.virtual_tokens.keys)
    store.write_(first, prefix)
    store.write_(second, neither)
    assert torch.equal(store.virtual_tokens(first).values, prefix.virtual_tokens.values)
    assert store.virtual_tokens(second) is None


def test_the_limit_of_a_files_size_leaves_room_for_them():
    one = facts_of(LLAMA, max_virtual_tokens=1)

    num_elements = 2 * NUM_LAYERS * NUM_HEADS * WIDTH
    assert max_adapter_bytes(FACTS) - max_adapter_bytes(one) == 255 * num_elements * 4
