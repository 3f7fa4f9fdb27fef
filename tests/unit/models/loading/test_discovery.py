"""discover_layers: what attention layers hand over, and which models are refused for it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface

from models.errors import ConfigError
from models.kv_cache.store import LayerShape
from models.loading.loader import discover_layers
from tests.tiny_models import FAMILIES, Family, make_model


class PluggedModel:
    """Calls the attention interface once per entry of ``layers``, as transformers' models do."""

    device = torch.device("cpu")

    def __init__(self, layers, *, num_hidden_layers=None, **keywords):
        self.config = SimpleNamespace(
            _attn_implementation="eager",
            num_hidden_layers=len(layers) if num_hidden_layers is None else num_hidden_layers,
        )
        self.outputs = []
        self._layers = layers
        self._keywords = keywords

    def __call__(self, input_ids, position_ids, use_cache):
        assert input_ids.shape == position_ids.shape == (1, 1)
        assert use_cache is False
        attention = AttentionInterface()[self.config._attn_implementation]
        for layer_idx, num_kv_heads, key_width, value_width in self._layers:
            output, _ = attention(
                SimpleNamespace(layer_idx=layer_idx),
                torch.zeros(1, 4, 1, key_width),
                torch.zeros(1, num_kv_heads, 1, key_width),
                torch.zeros(1, num_kv_heads, 1, value_width),
                None,
                **{"scaling": 1.0, "dropout": 0.0, **self._keywords},
            )
            self.outputs.append(tuple(output.shape))


LAYERS = [(0, 2, 16, 16), (1, 1, 24, 8)]


def test_the_shapes_of_every_layer_are_noted():
    model = PluggedModel(LAYERS)

    assert discover_layers(model) == [LayerShape(2, 16, 16), LayerShape(1, 24, 8)]
    assert model.outputs == [(1, 1, 4, 16), (1, 1, 4, 8)]
    assert model.config._attn_implementation == "eager"


def test_layers_are_listed_by_their_index():
    assert discover_layers(PluggedModel(LAYERS[::-1]))[1] == LayerShape(1, 24, 8)


def test_no_registered_name_is_left_behind():
    before = set(AttentionInterface._global_mapping)

    discover_layers(PluggedModel(LAYERS))
    with pytest.raises(ConfigError):
        discover_layers(PluggedModel(LAYERS, num_hidden_layers=3))

    # names of dropped engines may go at any time
    assert set(AttentionInterface._global_mapping) <= before


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            PluggedModel([], num_hidden_layers=2),
            r"has 2 layers, but 0 use the attention interface: \[\]",
        ),
        (
            PluggedModel(LAYERS, num_hidden_layers=3),
            r"has 3 layers, but 2 use the attention interface: \[0, 1\]",
        ),
        (PluggedModel([(0, 1, 8, 8), (0, 1, 8, 8)]), "two attention layers have the index 0"),
        (PluggedModel([(0, 1, 8, 8), (2, 1, 8, 8)]), r"interface: \[0, 2\]"),
        (PluggedModel(LAYERS, position_bias=torch.ones(1)), "needs 'position_bias'"),
    ],
    ids=["none", "one absent", "twice", "gap", "keyword"],
)
def test_attention_that_is_not_understood_is_refused(model, words):
    with pytest.raises(ConfigError, match=words) as caught:
        discover_layers(model)

    assert caught.value.field == "model"


def test_a_model_that_does_not_run_is_refused_with_its_own_words():
    model = PluggedModel(LAYERS)
    model.config.num_hidden_layers = 2
    model._layers = [(0, 2, 16, "no width")]

    with pytest.raises(ConfigError, match="PluggedModel cannot run packed tokens: ") as caught:
        discover_layers(model)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_shows_all_of_its_layers(family):
    layers = discover_layers(make_model(family))

    assert len(layers) == 3
    assert all(layer.num_kv_heads in (2, 4) and layer.key_width == 16 for layer in layers)


def test_a_model_whose_values_are_narrower_than_its_keys_shows_both_widths():
    mla = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    }
    layers = discover_layers(make_model(Family("minicpm3", "minicpm3", mla)))

    assert layers == [LayerShape(num_kv_heads=4, key_width=24, value_width=12)] * 3
