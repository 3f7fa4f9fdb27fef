"""The attention backend's interface, and how it is plugged into a transformers model."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from models.attention.layout import StepLayout
from models.errors import ConfigError

# Passed on by models through **kwargs; they change nothing here.
IGNORED_KEYWORDS = frozenset(
    {
        "dropout",
        "is_causal",
        "layer_type",
        "output_attentions",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "cache",
        "cache_position",
        "past_key_values",
        "logits_to_keep",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "head_mask",
    }
)
UNDERSTOOD_KEYWORDS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})

_names = (f"medley_{number}" for number in itertools.count())


class AttentionBackend(Protocol):
    """Attention over the KV pool, called by every layer of the model. Owner: the step thread.

    Attributes:
        is_row_independent: a row's operations have the same shapes in any company, so that no
            library can take another kernel for it.
    """

    is_row_independent: bool

    def begin_step(self, layout: StepLayout) -> None:
        """Take the layout of the step whose forward pass follows."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Store ``key`` and ``value``, attend, and return ``([1, T, H, Dv], None)``.

        Args:
            module: the attention module; ``module.layer_idx`` names the layer.
            query: [1, H, T, Dk].
            key: [1, Hkv, T, Dk].
            value: [1, Hkv, T, Dv].
            attention_mask: None.
            keywords: see UNDERSTOOD_KEYWORDS and IGNORED_KEYWORDS.
        """


def check_keywords(keywords: dict[str, Any]) -> None:
    """Refuse an attention keyword that would change the result and is not understood.

    Raises:
        ConfigError: naming the keyword.
    """
    for name, value in keywords.items():
        if name in UNDERSTOOD_KEYWORDS or name in IGNORED_KEYWORDS or value is None:
            continue
        raise ConfigError("model", f"its attention needs '{name}', which is not supported")


def layer_index(module: nn.Module) -> int:
    """Return the index that transformers gave an attention module."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


@contextmanager
def attention_of(model: PreTrainedModel, backend: AttentionBackend) -> Iterator[None]:
    """Route the model's attention through ``backend`` inside of the block."""
    before = model.config._attn_implementation
    attach(model, backend)
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model attend by its own code, whole sequences at a time, inside of the block."""
    attached = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        model.config._attn_implementation = attached


def attach(model: PreTrainedModel, backend: AttentionBackend) -> None:
    """Route the model's attention through ``backend`` from now on.

    Each use has a registered name of its own, so that several models may live in one process.
    No mask function is registered under the name: the masks of transformers are then None, and
    the backend makes its own from the layout.

    The registry is global to the process and only refers to the backend: whoever made that keeps
    it, and when it is gone, KV pool and all, its name goes too.
    """
    name = next(_names)
    reference = weakref.ref(backend)

    def attend(*arguments: Any, **keywords: Any) -> tuple[Tensor, None]:
        attached = reference()
        assert attached is not None
        return attached(*arguments, **keywords)

    AttentionInterface.register(name, attend)
    weakref.finalize(backend, AttentionInterface._global_mapping.pop, name, None)
    model.config._attn_implementation = name
