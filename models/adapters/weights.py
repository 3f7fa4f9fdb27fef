"""What adapters and base models are to each other: shapes in, tensors out. Reads no files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from models.adapters.virtual_tokens import VirtualTokenFacts, VirtualTokens
from models.requests import AdapterRef
from models.text_front import TextFront

# A gain this close to 1 is a rounding error of training or of the norm.
_GAIN_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShape:
    """A module of the base model that an adapter may change.

    Attributes:
        name: as in ``model.named_modules()``, such as "model.layers.0.self_attn.q_proj".
        num_inputs: width of its input; for an embedding the number of its rows.
        num_outputs: width of its output.
        is_transposed: the weight is stored as [inputs, outputs] (Conv1D of GPT-2).
        is_embedding: looks rows up; as a product its input is one-hot.
        is_norm: neither a product nor a table: its weight is a vector.
        has_bias: adds a bias to its output.
        output_scale: factor that the module itself puts on its output (Gemma's embeddings).
        weight_dtype: in which the base holds its weight.
    """

    name: str
    num_inputs: int
    num_outputs: int
    is_transposed: bool = False
    is_embedding: bool = False
    is_norm: bool = False
    has_bias: bool = False
    output_scale: float = 1.0
    weight_dtype: torch.dtype = torch.float32

    @property
    def table_shape(self) -> tuple[int, ...]:
        """The shape in which the weight is stored."""
        if self.is_norm:
            return (self.num_outputs,)
        if self.is_transposed or self.is_embedding:
            return self.num_inputs, self.num_outputs
        return self.num_outputs, self.num_inputs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """The base model as adapters see it.

    Attributes:
        base_names: names under which the base model is known (served id, path, hub id); only a
            warning depends on them.
        modules: all modules that an adapter may change, by name.
        output_head: name of the module that makes the logits, which "all-linear" leaves out.
        max_rank: largest rank that is served.
        virtual_tokens: what virtual tokens must look like.
        input_embedding: name of the module that looks token ids up; None if no adapter may change
            it.
        is_head_tied: ``output_head`` and ``input_embedding`` have one weight.
        weight: gives a module's base weight by name: [num_outputs, num_inputs] whatever its
            stored form (of a norm [num_outputs]), float32, unmerged and dequantised, without
            ``output_scale``.
        bias: gives a module's base bias by name: [num_outputs], float32. Asked only of modules
            that have one.
    """

    base_names: tuple[str, ...]
    modules: Mapping[str, ModuleShape]
    output_head: str | None
    max_rank: int
    virtual_tokens: VirtualTokenFacts
    weight: Callable[[str], Tensor]
    bias: Callable[[str], Tensor]
    input_embedding: str | None = None
    is_head_tied: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """Rows of a table of tokens that take the place of the base's.

    Attributes:
        ids: [k] int64, rising; the rows' token ids.
        rows: [k, width]. Of an embedding: what the module gives of these tokens, with its
            ``output_scale``. Of the output head: the weights of these tokens' logits. The file's
            dtype, or float32 where it was scaled.
    """

    ids: Tensor
    rows: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of both."""
        return self.ids.nbytes + self.rows.nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleDelta:
    """The parts of the one formula that covers LoRA, DoRA and IA3.

    For a row x of this adapter, with the base weight W and the base bias:

        y = (W (x R * input_gain) + lora_b (lora_a x)) * output_gain + base bias + bias

    R has the blocks of ``input_rotation`` on its diagonal. ``weight`` stands in for W where it is
    given, and ``token_rows`` for rows of W.

    A part that is None is left out. For an embedding x is one-hot, so that ``lora_a x`` is a
    column of ``lora_a``. All tensors are on the host; those named float32 carry arithmetic of
    this reader, the others have the file's dtype.

    Attributes:
        lora_a: [rank, num_inputs], the file's dtype, or float32 where it was computed.
        lora_b: [num_outputs, rank], float32, with the adapter's scale in it.
        bias: [num_outputs], float32.
        output_gain: [num_outputs], float32.
        input_gain: [num_inputs], float32.
        input_rotation: [num_blocks, b, b], float32, for the blocks of b inputs one after the
            other; [1, b, b] turns all of them alike.
        weight: in the base's stored form (``ModuleShape.table_shape``), the file's dtype; comes
            with a bias at most.
        token_rows: of the input embedding or the output head; come alone.
    """

    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    bias: Tensor | None = None
    output_gain: Tensor | None = None
    input_gain: Tensor | None = None
    input_rotation: Tensor | None = None
    weight: Tensor | None = None
    token_rows: TokenRows | None = None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The parts that are there."""
        parts = (
            self.lora_a,
            self.lora_b,
            self.bias,
            self.output_gain,
            self.input_gain,
            self.input_rotation,
            self.weight,
            None if self.token_rows is None else self.token_rows.rows,
        )
        return (part for part in parts if part is not None)

    @property
    def rank(self) -> int:
        """Rank of the product, 0 without one."""
        return 0 if self.lora_a is None else self.lora_a.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        num_bytes = sum(part.nbytes for part in self.tensors)
        return num_bytes + (0 if self.token_rows is None else self.token_rows.ids.nbytes)

    @property
    def is_finite(self) -> bool:
        """Whether no part holds NaN or infinity."""
        return all(map(is_finite, self.tensors))

    @property
    def changes_nothing(self) -> bool:
        """Whether the module answers as the base model's does."""
        if self.weight is not None or self.token_rows is not None:
            return False
        factors = (self.lora_a, self.lora_b)
        has_product = all(factor is not None and bool(factor.any()) for factor in factors)
        has_bias = self.bias is not None and bool(self.bias.any())
        is_turned = self.input_rotation is not None and not _is_identity(self.input_rotation)
        is_scaled = not all(map(_is_one, self._gains))
        return not has_product and not has_bias and not is_turned and not is_scaled

    @property
    def _gains(self) -> Iterator[Tensor]:
        return (gain for gain in (self.output_gain, self.input_gain) if gain is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterWeights:
    """One version of an adapter, read whole and checked against the base model.

    Attributes:
        ref: the adapter and its version.
        modules: what happens to each module that it changes.
        rank: the largest rank of a module, 0 where there is none (IA3).
        num_bytes: memory of all tensors.
        virtual_tokens: what stands before every prompt; None is nothing.
        num_added_tokens: tokens behind the base's vocabulary that its requests may have.
        text: how its prompts and answers are spelled; None is as the base model's are.
        warnings: sentences for the operator; the adapter is served all the same.
    """

    ref: AdapterRef
    modules: Mapping[str, ModuleDelta]
    rank: int
    num_bytes: int
    virtual_tokens: VirtualTokens | None = None
    num_added_tokens: int = 0
    text: TextFront | None = None
    warnings: tuple[str, ...] = ()

    @property
    def num_virtual_tokens(self) -> int:
        """Positions before every prompt that its virtual tokens take."""
        return 0 if self.virtual_tokens is None else self.virtual_tokens.num_tokens


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor infinity."""
    # One bad element makes the sum bad, and a sum takes a tenth of the time. Finite elements may
    # overflow it, so only a good one decides.
    if math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return True
    return bool(tensor.isfinite().all())


def _is_one(gain: Tensor) -> bool:
    return torch.allclose(gain, torch.ones_like(gain), rtol=0, atol=_GAIN_TOLERANCE)


def _is_identity(rotations: Tensor) -> bool:
    identity = torch.eye(rotations.shape[-1]).expand_as(rotations)
    return torch.allclose(rotations, identity, rtol=0, atol=_GAIN_TOLERANCE)
