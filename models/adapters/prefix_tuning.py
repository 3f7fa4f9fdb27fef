"""Prefix tuning: keys and values of virtual tokens before every prompt, in each layer.

PEFT saves what its encoder gives, with a projection or without: [v, 2 * layers * heads * width],
per layer all heads' keys, then all heads' values. Attention meets the keys as they are: the model
neither rotates nor normalises them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.prompt_tuning import PROMPT_EMBEDDINGS, check_num_tokens, read_num_tokens
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.virtual_tokens import KeyValueShape, VirtualKeyValues
from models.adapters.weights import ModelFacts

_OF_TRAINING = ("encoder_hidden_size", "init_weights", "prefix_projection")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTuningSpec:
    """What a configuration of prefix tuning says.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        num_tokens: virtual tokens.
        num_layers: attention layers of the base model.
        num_heads: heads of its keys and values.
        layer_width: elements of the keys of one token in one layer, all heads together.
    """

    base_name: str
    num_tokens: int
    num_layers: int
    num_heads: int
    layer_width: int

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:  # noqa: ARG002 - of the protocol
        """Return nothing: it has no targets."""
        return ()

    def plan(
        self,
        model: ModelFacts,
        matcher: PatternMatcher,  # noqa: ARG002 - of the protocol
    ) -> PrefixTuningPlan:
        """Apply it to a base model.

        Raises:
            AdapterFaultError: it has more virtual tokens than are served, is made for keys and
                values of another form, or the model's layers have no common one.
        """
        check_num_tokens(self.num_tokens, model)
        shape = model.virtual_tokens.key_values
        if shape is None:
            raise AdapterFaultError(
                "prefix tuning cannot work on this model: its layers do not keep keys and values "
                "of one form, as attention meets them"
            )
        own = (self.num_layers, self.num_heads, self.layer_width)
        if own != (shape.num_layers, shape.num_heads, shape.num_heads * shape.width):
            raise AdapterFaultError(
                f"it has keys for {self.num_layers} layers of {self.num_heads} heads, "
                f"{self.layer_width} elements in all (num_layers, num_attention_heads, token_dim); "
                f"this model has {shape.num_layers} layers of {shape.num_heads} heads, "
                f"{shape.num_heads * shape.width} elements in all"
            )
        return PrefixTuningPlan(self.num_tokens, shape)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixTuningPlan:
    """A configuration of prefix tuning, applied to a base model.

    Attributes:
        num_tokens: virtual tokens, v.
        shape: of the model's keys and values.
    """

    num_tokens: int
    shape: KeyValueShape

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """What the file must hold."""
        num_vectors = 2 * self.shape.num_layers * self.shape.num_heads
        width = num_vectors * self.shape.width
        return (PlannedTensor("", PROMPT_EMBEDDINGS, (self.num_tokens, width)),)

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return the virtual tokens.

        Args:
            tensors: by key, as planned.
        """
        shape = self.shape
        stored = tensors[PROMPT_EMBEDDINGS].view(
            self.num_tokens, shape.num_layers, 2, shape.num_heads, shape.width
        )
        keys, values = stored.permute(2, 1, 3, 0, 4).contiguous()
        return AdapterChanges(modules={}, virtual_tokens=VirtualKeyValues(keys=keys, values=values))


def read_prefix_tuning_spec(fields: ConfigFields) -> PrefixTuningSpec:
    """Take the options of prefix tuning.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    fields.ignore(*_OF_TRAINING)
    # PEFT fills them in from the base model before it saves.
    for name in ("num_layers", "num_attention_heads", "token_dim"):
        if not fields.is_given(name):
            raise AdapterFaultError(f"its {name} is not given")
    spec = PrefixTuningSpec(
        base_name=fields.text("base_model_name_or_path"),
        num_tokens=read_num_tokens(fields),
        num_layers=fields.count("num_layers", default=1),
        num_heads=fields.count("num_attention_heads", default=1),
        layer_width=fields.count("token_dim", default=1),
    )
    fields.finish()
    return spec
