"""Trainable tokens as a method of its own: rows of the tables of tokens, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from models.adapters.config_fields import ConfigFields
from models.adapters.faults import AdapterFaultError
from models.adapters.method import AdapterChanges
from models.adapters.patterns import PatternMatcher
from models.adapters.targets import TargetRules, read_targets
from models.adapters.tensor_plan import PlannedTensor
from models.adapters.trained_tokens import TRAINED_ROWS, TrainedTokenPlan, as_token_ids
from models.adapters.weights import ModelFacts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainableTokensSpec:
    """What a configuration of trainable tokens says.

    Attributes:
        base_name: the base model it was trained on, "" if the file does not tell.
        targets: the tables.
        token_ids: whose rows were trained.
    """

    base_name: str
    targets: TargetRules
    token_ids: tuple[int, ...]

    def unmatched(self, model: ModelFacts) -> tuple[str, ...]:
        """Return the listed targets that mean no module of the model, sorted."""
        return self.targets.unmatched(model)

    def plan(self, model: ModelFacts, matcher: PatternMatcher) -> TrainableTokensPlan:
        """Apply it to a base model.

        Raises:
            AdapterFaultError: a target is no table of tokens, or too many tokens were added.
        """
        names = [shape.name for shape in self.targets.select(model, matcher)]
        is_embedding_trained = model.input_embedding in names
        return TrainableTokensPlan(
            TrainedTokenPlan(
                dict.fromkeys(names, self.token_ids),
                model,
                part=TRAINED_ROWS,
                is_head_the_embedding=is_embedding_trained
                and model.is_head_tied
                and model.output_head not in names,
            )
        )


class TrainableTokensPlan:
    """A configuration of trainable tokens, applied to a base model.

    Attributes:
        tensors: what the file must hold.
        num_added_tokens: behind the base's vocabulary.
    """

    def __init__(self, tokens: TrainedTokenPlan) -> None:
        """Wrap the plan of the tables."""
        self._tokens = tokens
        self.tensors: tuple[PlannedTensor, ...] = tokens.tensors
        self.num_added_tokens = tokens.num_added_tokens

    def build(self, tensors: Mapping[str, Tensor]) -> AdapterChanges:
        """Return the rows.

        Args:
            tensors: by key, as planned.
        """
        return AdapterChanges(modules=self._tokens.build(tensors))


def read_trainable_tokens_spec(fields: ConfigFields) -> TrainableTokensSpec:
    """Take the options of trainable tokens.

    Raises:
        AdapterFaultError: one is wrong or not supported.
    """
    # The rows of the file are what they are.
    fields.ignore("init_weights")
    spec = TrainableTokensSpec(
        base_name=fields.text("base_model_name_or_path"),
        # PEFT fills the name of the input embedding in.
        targets=TargetRules(targets=read_targets(fields)),
        token_ids=as_token_ids("token_indices", fields.raw("token_indices", default=[])),
    )
    fields.finish()
    if not spec.token_ids:
        raise AdapterFaultError("its token_indices are not given")
    return spec
