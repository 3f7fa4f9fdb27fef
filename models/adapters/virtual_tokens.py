"""VirtualTokens: what an adapter puts before every prompt. Holds no policy and reads no files.

Virtual tokens take positions 0 to v - 1 of every sequence of the adapter, and the text starts at
position v. They have no ids and no text, and nobody asks for their logits.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VirtualEmbeddings:
    """Virtual tokens that run through the model like any (prompt tuning, P-tuning).

    Attributes:
        embeddings: [v, E], the file's dtype; they stand in for what the model's embedding module
            gives of a token, whatever it does to its own.
    """

    embeddings: Tensor

    @property
    def num_tokens(self) -> int:
        """How many there are, v."""
        return self.embeddings.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return self.embeddings.nbytes

    def to(self, device: torch.device) -> VirtualEmbeddings:
        """Return them on a device."""
        return VirtualEmbeddings(embeddings=self.embeddings.to(device))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VirtualKeyValues:
    """Virtual tokens of which only keys and values are there (prefix tuning).

    Attributes:
        keys: [L, H, v, D], the file's dtype; as attention meets them: the model neither rotates
            nor normalises them.
        values: [L, H, v, D].
    """

    keys: Tensor
    values: Tensor

    @property
    def num_tokens(self) -> int:
        """How many there are, v."""
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return self.keys.nbytes + self.values.nbytes

    def to(self, device: torch.device) -> VirtualKeyValues:
        """Return them on a device."""
        return VirtualKeyValues(keys=self.keys.to(device), values=self.values.to(device))


VirtualTokens = VirtualEmbeddings | VirtualKeyValues


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValueShape:
    """Keys and values of a model all of whose attention layers are alike.

    Attributes:
        num_layers: L.
        num_heads: H, heads of keys and values.
        width: D, elements of a key and of a value of one head.
    """

    num_layers: int
    num_heads: int
    width: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VirtualTokenFacts:
    """The base model as virtual tokens see it.

    Attributes:
        max_num_tokens: most virtual tokens of an adapter that is served.
        embedding_width: E, elements of what the embedding module gives of a token.
        key_values: of the attention layers; None if they are not alike, if keys and values
            differ in width, or if attention gets them in another form than the model's own cache
            has.
    """

    max_num_tokens: int
    embedding_width: int
    key_values: KeyValueShape | None

    @property
    def max_num_elements(self) -> int:
        """The most elements that a file holds of them."""
        width = self.embedding_width
        if self.key_values is not None:
            shape = self.key_values
            width = max(width, 2 * shape.num_layers * shape.num_heads * shape.width)
        return self.max_num_tokens * width
