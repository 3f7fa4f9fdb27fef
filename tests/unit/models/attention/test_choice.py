"""Which backend is chosen, and why another one is not."""

from types import SimpleNamespace

import pytest
import torch

from models.attention.choice import AttentionChoice, choose_attention
from models.config import AUTO, MATMUL, REFERENCE, VARLEN
from models.errors import ConfigError
from models.kv_cache.store import LayerShape

GPU = torch.device("cuda", 0)
LAYERS = [LayerShape(2, 64, 64)]
ON_VARLEN = AttentionChoice(VARLEN, is_asked_for=False, block_multiple_tokens=256)
ON_MATMUL = AttentionChoice(MATMUL, is_asked_for=False, block_multiple_tokens=1)


def fake_model(device=GPU, *, softcap=None, parameters=("model.embed.weight",)):
    config = SimpleNamespace(attn_logit_softcapping=softcap)
    return SimpleNamespace(
        device=device,
        config=SimpleNamespace(get_text_config=lambda: config),
        named_parameters=lambda: [(name, None) for name in parameters],
    )


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    """A GPU of that compute capability, as far as anybody asks."""
    found = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(found))
    return found


def test_a_gpu_takes_varlen_and_its_blocks():
    choice = choose_attention(AUTO, fake_model(), LAYERS, torch.bfloat16)

    assert choice == ON_VARLEN
    assert [choice.block_size_tokens(wanted) for wanted in (1, 16, 256, 257, 512)] == [
        256,
        256,
        256,
        512,
        512,
    ]


def test_the_cpu_takes_matmul_and_any_block():
    choice = choose_attention(AUTO, fake_model(torch.device("cpu")), LAYERS, torch.bfloat16)

    assert choice == ON_MATMUL
    assert choice.block_size_tokens(3) == 3


OBSTACLES = {
    "cuda": ({"model": fake_model(torch.device("cpu"))}, "needs a CUDA device, not 'cpu'"),
    "dtype": ({"dtype": torch.float32}, "half precision, not float32"),
    "widths": ({"layers": [*LAYERS, LayerShape(2, 64, 32)]}, "not equally wide"),
    "wide": ({"layers": [LayerShape(2, 264, 264)]}, "264 wide; it takes multiples of 8 up to 256"),
    "odd": ({"layers": [LayerShape(2, 20, 20)]}, "20 wide"),
    "softcap": ({"model": fake_model(softcap=50.0)}, "soft cap"),
    "sinks": ({"model": fake_model(parameters=["layers.0.self_attn.sinks"])}, "sinks"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_varlen_cannot_serve_goes_to_matmul_or_is_refused_if_it_was_asked_for(obstacle):
    changes, words = OBSTACLES[obstacle]
    arguments = {"model": fake_model(), "layers": LAYERS, "dtype": torch.float16, **changes}

    assert choose_attention(AUTO, **arguments) == ON_MATMUL
    with pytest.raises(ConfigError, match=words) as caught:
        choose_attention(VARLEN, **arguments)
    assert caught.value.field == "attention_backend"


def test_an_old_gpu_goes_to_matmul(capability):
    capability[:] = [7, 5]

    assert choose_attention(AUTO, fake_model(), LAYERS, torch.float16) == ON_MATMUL
    with pytest.raises(ConfigError, match=r"compute capability 8\.0"):
        choose_attention(VARLEN, fake_model(), LAYERS, torch.float16)


@pytest.mark.parametrize("name", [MATMUL, REFERENCE])
def test_others_that_are_asked_for_by_name_run_anywhere(name):
    choice = choose_attention(name, fake_model(softcap=1.0), LAYERS, torch.float32)

    assert choice == AttentionChoice(name, is_asked_for=True, block_multiple_tokens=1)
