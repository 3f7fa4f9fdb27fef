"""Prompt tuning and P-tuning: embeddings of virtual tokens before every prompt.

The two differ in training only: PEFT saves what the encoder of P-tuning gives, not the encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.virtual_tokens import VirtualEmbeddings
from models.adapters.weights import ModelFacts

# The only tensor of a file; it belongs to no module.
PROMPT_EMBEDDINGS = "prompt_embeddings"

# PEFT fills these in from the base model; the shape of the tensor tells whether they fit.
_OF_THE_BASE = ("num_attention_heads", "num_layers", "token_dim")
_OF_TRAINING = {
    "prompt tuning": (
        "prompt_tuning_init",
        "prompt_tuning_init_text",
        "tokenizer_kwargs",
        "tokenizer_name_or_path",
    ),
    "P-tuning": (
        "encoder_dropout",
        "encoder_hidden_size",
        "encoder_num_layers",
        "encoder_reparameterization_type",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptTuningSpec:
    """What a configuration of prompt tuning or P-tuning says.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        num_tokens: virtual tokens.
    """

    base_name: str
    num_tokens: int

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:  # noqa: ARG002 - of the protocol
        """Return nothing: it has no targets."""
        return ()

    def plan(
        self,
        model: ModelFacts,
        matcher: PatternMatcher,  # noqa: ARG002 - of the protocol
    ) -> PromptTuningPlan:
        """Apply it to a base model.

        Raises:
            AdapterFaultError: it has more virtual tokens than are served.
        """
        check_num_tokens(self.num_tokens, model)
        shape = (self.num_tokens, model.virtual_tokens.embedding_width)
        return PromptTuningPlan((PlannedTensor("", PROMPT_EMBEDDINGS, shape),))


@dataclasses.dataclass(frozen=True, slots=True)
class PromptTuningPlan:
    """A configuration of prompt tuning or P-tuning, applied to a base model.

    Attributes:
        tensors: what the file must hold.
    """

    tensors: tuple[PlannedTensor, ...]

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return the virtual tokens.

        Args:
            tensors: by key, as planned.
        """
        embeddings = tensors[PROMPT_EMBEDDINGS]
        return AdapterChanges(modules={}, virtual_tokens=VirtualEmbeddings(embeddings=embeddings))


def read_prompt_tuning_spec(fields: ConfigFields) -> PromptTuningSpec:
    """Take the options of prompt tuning.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    return _read(fields, "prompt tuning")


def read_p_tuning_spec(fields: ConfigFields) -> PromptTuningSpec:
    """Take the options of P-tuning.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    return _read(fields, "P-tuning")


def read_num_tokens(fields: ConfigFields) -> int:
    """Take the number of virtual tokens, and refuse what no decoder has.

    Raises:
        AdapterFaultError: it is not given, or the adapter is one for an encoder and a decoder or
            trains modules besides.
    """
    if not fields.is_given("num_virtual_tokens"):
        raise AdapterFaultError("its num_virtual_tokens are not given")
    num_submodules = fields.count("num_transformer_submodules", default=1)
    if num_submodules != 1:
        raise AdapterFaultError(
            f"it is made for {num_submodules} transformer submodules; a decoder has 1"
        )
    fields.refuse({"modules_to_save": "fully trained modules"})
    return fields.count("num_virtual_tokens", default=1)


def check_num_tokens(num_tokens: int, model: ModelFacts) -> None:
    """Check the number of virtual tokens.

    Raises:
        AdapterFaultError: it is over the limit.
    """
    limit = model.virtual_tokens.max_num_tokens
    if num_tokens > limit:
        raise AdapterFaultError(f"its {num_tokens} virtual tokens are over the limit of {limit}")


def _read(fields: ConfigFields, method: str) -> PromptTuningSpec:
    fields.ignore(*_OF_THE_BASE, *_OF_TRAINING[method])
    spec = PromptTuningSpec(
        base_name=fields.text("base_model_name_or_path"), num_tokens=read_num_tokens(fields)
    )
    fields.finish()
    return spec
