"""How a backend is plugged into a model."""

import gc
import weakref

import pytest
import torch
from transformers import AttentionInterface

from models.attention.backend import attach, attention_of, check_keywords
from models.errors import ConfigError
from tests.harness import make_parts
from tests.tiny_models import FAMILIES, make_model


class Refusing:
    """A backend that shows that it was called."""

    def begin_step(self, layout):
        pass

    def __call__(self, module, *tensors, **keywords):
        raise LookupError(f"layer {module.layer_idx}")


def _forward(model):
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    return model(input_ids=tokens, position_ids=tokens, use_cache=False)


def test_an_attached_backend_is_called_by_the_model():
    model = make_model(FAMILIES[0])
    backend = Refusing()

    attach(model, backend)

    with pytest.raises(LookupError, match="layer 0"):
        _forward(model)


def test_outside_of_the_block_the_model_has_its_own_attention_again():
    model = make_model(FAMILIES[0])
    expected = _forward(model).logits

    with attention_of(model, Refusing()):
        pass

    assert torch.equal(_forward(model).logits, expected)


def test_two_models_keep_their_own_backends():
    first, second = make_model(FAMILIES[0]), make_model(FAMILIES[0])
    backend = Refusing()
    attach(first, backend)

    _forward(second)

    with pytest.raises(LookupError):
        _forward(first)


def test_an_engine_that_is_dropped_gives_its_kv_pool_back():
    gc.collect()  # engines of other tests
    names = set(AttentionInterface._global_mapping)
    model = make_model(FAMILIES[0])
    parts = make_parts(model)
    backend = weakref.ref(parts.runner._forward._backend)
    assert set(AttentionInterface._global_mapping) != names

    del parts
    gc.collect()

    assert backend() is None
    assert set(AttentionInterface._global_mapping) == names


def test_a_keyword_without_a_value_is_no_reason_to_refuse():
    check_keywords({"alibi": None, "scaling": 0.1, "use_cache": False})

    with pytest.raises(ConfigError, match="alibi"):
        check_keywords({"alibi": torch.zeros(1)})
