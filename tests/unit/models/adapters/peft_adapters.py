"""Adapters that PEFT itself makes on tiny models, and what they do, applied the slow way."""

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from models.adapters.reading import parse_adapter, read_adapter
from models.adapters.source import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterContents,
    AdapterFiles,
    VersionDigest,
)
from models.adapters.weights import ModelFacts, ModuleShape
from models.errors import AdapterIncompatibleError
from models.loading.loader import discover_layers
from models.requests import AdapterRef
from models.runner.virtual_rows import virtual_facts_of
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model

MODELS = {family.name: make_model(family) for family in FAMILIES if family.name != "phi3"}
IDS = torch.randint(0, VOCABULARY_SIZE, (1, 11), generator=torch.Generator().manual_seed(3))
MAX_RANK = 64


def facts_of(
    model, *, base_names=("tiny",), max_rank=MAX_RANK, max_virtual_tokens=256
) -> ModelFacts:
    shapes = (_shape_of(name, module) for name, module in model.named_modules())
    head = model.get_output_embeddings()
    return ModelFacts(
        base_names=base_names,
        modules={shape.name: shape for shape in shapes if shape is not None},
        output_head=next(name for name, module in model.named_modules() if module is head),
        max_rank=max_rank,
        virtual_tokens=virtual_facts_of(
            model, tuple(discover_layers(model)), max_num_tokens=max_virtual_tokens
        ),
        weight=lambda name: _weight_of(model.get_submodule(name)),
        bias=lambda name: model.get_submodule(name).bias.detach().float(),
        input_embedding=next(
            name for name, module in model.named_modules() if module is model.get_input_embeddings()
        ),
        is_head_tied=model.config.tie_word_embeddings,
    )


def _shape_of(name, module):
    has_bias = getattr(module, "bias", None) is not None
    if isinstance(module, Conv1D):
        num_inputs, num_outputs = module.weight.shape
        form = {"is_transposed": True}
    elif isinstance(module, nn.Linear):
        num_outputs, num_inputs = module.weight.shape
        form = {}
    elif isinstance(module, nn.Embedding):
        num_inputs, num_outputs = module.weight.shape
        scale = float(getattr(module, "embed_scale", 1.0))
        form = {"is_embedding": True, "output_scale": scale}
    elif isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm"):
        num_inputs = num_outputs = module.weight.shape[0]
        form = {"is_norm": True}
    else:
        return None
    return ModuleShape(
        name=name, num_inputs=num_inputs, num_outputs=num_outputs, has_bias=has_bias, **form
    )


def _weight_of(module):
    weight = module.weight.detach().float()
    return weight.t() if isinstance(module, Conv1D | nn.Embedding) else weight


class SavedAdapter:
    """An adapter that PEFT made with random weights and saved.

    Attributes:
        folder: where it lies.
        adapter_id: under which it is read.
        logits: [1, T, V] of PEFT's own forward, float32.
    """

    def __init__(self, folder, base, config, *, dtype=torch.float32, adapter_id="tests/one"):
        self.folder = folder
        self.adapter_id = adapter_id
        with quiet():
            peft_model = get_peft_model(copy.deepcopy(base), config).eval()
            randomise_(peft_model, dtype)
            peft_model.save_pretrained(folder)
        if dtype != torch.float32:
            self.edit_tensors(lambda name, tensor: tensor.to(dtype))
        with torch.no_grad():
            self.logits = peft_model(IDS, use_cache=False).logits

    def edit_config(self, **changes):
        path = self.folder / CONFIG_NAME
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(config))

    def edit_tensors(self, edit: Callable):
        """Replace each tensor by ``edit(name, tensor)``; None drops it."""
        path = self.folder / WEIGHTS_NAME
        edited = {name: edit(name, tensor) for name, tensor in load_file(path).items()}
        kept = {name: tensor for name, tensor in edited.items() if tensor is not None}
        save_file(kept, path, metadata={"format": "pt"})

    def add_tensor(self, name, tensor):
        path = self.folder / WEIGHTS_NAME
        save_file(load_file(path) | {name: tensor.contiguous()}, path)

    @property
    def files(self):
        """The version that lies there now."""
        digest = VersionDigest()
        contents = [(self.folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)]
        for content in contents:
            digest.add_file(len(content), [content])
        return AdapterFiles(
            adapter_id=self.adapter_id,
            folder=self.folder,
            version=digest.version,
            num_bytes=sum(map(len, contents)),
        )

    def read(self, facts):
        return read_adapter(self.files, facts)


QUERY_CONFIG = json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], "r": 2}).encode()


def tensors_of(config_rank=2):
    """The tensors that QUERY_CONFIG asks for, all ones."""
    model_tensors = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        model_tensors[f"{name}.lora_A.weight"] = torch.ones(config_rank, 64)
        model_tensors[f"{name}.lora_B.weight"] = torch.ones(64, config_rank)
    return model_tensors


def parse(weights, config=QUERY_CONFIG):
    """Parse an adapter of the tiny llama that lies nowhere."""
    contents = AdapterContents(config=config, weights=weights)
    return parse_adapter(AdapterRef("tests/one", "v1"), contents, facts_of(MODELS["llama"]))


def refusal(read):
    """Return the reason; it must be one readable line."""
    with pytest.raises(AdapterIncompatibleError) as caught:
        read()
    assert caught.value.adapter_id == "tests/one"
    reason = caught.value.reason
    assert "\n" not in reason
    assert len(reason) < 600
    return reason


@contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def randomise_(peft_model, dtype):
    """Redraw everything that PEFT would have trained, so that each part shows in the logits."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in peft_model.named_parameters():
        if not parameter.requires_grad and "lora_B" not in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name or "ia3" in name:
            parameter.mul_(1 + 0.3 * noise)
        elif name.endswith("bias"):
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(0.15 * noise)
        parameter.copy_(parameter.to(dtype).float())


@torch.no_grad()
def apply_slowly(base, weights):
    """Logits [1, T, V] of the base model with the formula of ModuleDelta at each module."""
    handles = []
    for name, delta in weights.modules.items():
        module = base.get_submodule(name)
        hooks = _Hooks(delta)
        handles.append(module.register_forward_pre_hook(hooks.before))
        handles.append(module.register_forward_hook(hooks.after))
    try:
        return base(IDS, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()


class _Hooks:
    """The formula of one ModuleDelta, around a module of the base model."""

    def __init__(self, delta):
        self.delta = delta
        self.x = None

    def before(self, module, args):
        self.x = args[0]
        gain, rotation = self.delta.input_gain, self.delta.input_rotation
        changed = self.x
        if rotation is not None:
            num_blocks = self.x.shape[-1] // rotation.shape[-1]
            changed = changed @ torch.block_diag(*rotation.expand(num_blocks, -1, -1))
        return (changed if gain is None else changed * gain, *args[1:])

    def after(self, module, args, output):
        delta = self.delta
        base_bias = getattr(module, "bias", None)
        output = output if base_bias is None else output - base_bias
        if delta.lora_a is not None:
            lora_a = delta.lora_a.float().t()
            low = lora_a[self.x] if isinstance(module, nn.Embedding) else self.x @ lora_a
            output = output + low @ delta.lora_b.t()
        if delta.output_gain is not None:
            output = output * delta.output_gain
        for bias in (base_bias, delta.bias):
            output = output if bias is None else output + bias
        return output
