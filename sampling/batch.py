"""Per-row state of sampling, and the columns that the draw reads. Decides nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sampling.blocks import send
from sampling.errors import RowSamplingError
from sampling.host_arrays import float_rows
from sampling.params import SamplingParams
from sampling.rng import stream_start, uniform_of_stream

# Beyond these a division by the temperature leaves float32: 0 / 0, or -inf / inf. Nothing is
# lost: at 1e-30 any two different logits are infinitely far apart, at 1e30 all are equal.
MIN_TEMPERATURE = 1e-30
MAX_TEMPERATURE = 1e30
# More than any vocabulary has, and exact in float64.
_MAX_TOP_K = 2**40


@dataclasses.dataclass(slots=True, eq=False)
class SamplingRow:
    """One running sequence as sampling sees it; made by ``Sampler.make_row``.

    Owner: step thread.

    Attributes:
        params: what the request asks for.
        seed: the choice's own seed (``derive_seed`` has been applied).
        prompt_token_ids: the prompt, not changed here.
        output_token_ids: tokens drawn so far; ``Sampler.sample`` appends to it, nobody else does.
        states: one per processor of the sampler that made the row, None where it is not needed.
        is_processed: whether one of them is there.
        stream: ``stream_start`` of the seed.
        columns: what SamplingBatch has of the parameters: temperature, top_k, top_p, log_min_p,
            typical_p. Worked out once, since a step has microseconds for a row.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    states: tuple[Any, ...] = ()
    is_processed: bool = False
    stream: int = dataclasses.field(init=False)
    columns: tuple[float, float, float, float, float] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Work out what depends on seed and parameters only."""
        params = self.params
        self.stream = stream_start(self.seed)
        self.columns = (
            _clamped_temperature(params.temperature),
            min(max(params.top_k, 0), _MAX_TOP_K),
            params.top_p,
            _log(params.min_p),
            params.typical_p,
        )


@dataclasses.dataclass(slots=True)
class SampledRow:
    """What one row drew. Nobody changes it: see ``ActiveRow`` for why it is not frozen.

    Attributes:
        token_id: the token, -1 if ``error`` is set.
        logprob: natural logarithm of its raw probability, None unless the row asked for it.
        top: pairs (token id, logprob) of the best raw tokens, best first, ties by token id.
        error: why this row alone could not be sampled; nothing was appended to it then.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: RowSamplingError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Columns for n rows that draw at random, one entry per row, on the device of the logits.

    Attributes:
        temperature: [n, 1] float32, within [MIN_TEMPERATURE, MAX_TEMPERATURE].
        uniform: [n] float64, each row's number in [0, 1).
        top_k: [n] int64, 0 is off.
        top_p: [n] float64.
        log_min_p: [n] float64, logarithm of min_p; -inf is off.
        typical_p: [n] float64; 1 is off.
        params: of the rows, for what the host decides.
    """

    temperature: Tensor
    uniform: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    typical_p: Tensor
    params: tuple[SamplingParams, ...]

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingBatch:
        """Build the columns for the next token of each row."""
        columns = [
            (uniform_of_stream(row.stream, len(row.output_token_ids)), *row.columns) for row in rows
        ]
        sent = send(float_rows(columns), device)
        draws, temperature, top_k, top_p, log_min_p, typical_p = sent.unbind(dim=1)
        return cls(
            temperature=temperature[:, None].to(torch.float32),
            uniform=draws,
            top_k=top_k.to(torch.int64),
            top_p=top_p,
            log_min_p=log_min_p,
            typical_p=typical_p,
            params=tuple(row.params for row in rows),
        )

    def select(self, index: int) -> SamplingBatch:
        """Return the columns of one row as a batch of its own."""
        rows = slice(index, index + 1)
        return SamplingBatch(
            temperature=self.temperature[rows],
            uniform=self.uniform[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            log_min_p=self.log_min_p[rows],
            typical_p=self.typical_p[rows],
            params=self.params[rows],
        )


def is_filtered(params: SamplingParams) -> bool:
    """Return whether the row draws from a part of its distribution only.

    Such a row ranks its tokens by probability, the others keep the order of token ids: which of
    the two it is must depend on nothing but its own parameters.
    """
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0


def _clamped_temperature(temperature: float) -> float:
    return min(max(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0.0 else -math.inf
