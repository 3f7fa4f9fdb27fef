"""Times ``Sampler.sample`` by itself, on logits like those of a model."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from unittest import mock

import torch
from torch import Tensor

import sampling.sampler
import sampling.step_results
from sampling.params import SamplingParams
from sampling.sampler import Sampler, SamplingRow

EOS = 2
PROMPT_TOKEN_IDS = tuple(range(100, 258))
_EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias=((5, 1.0), (50, -3.0)),
    bad_words_token_ids=((5, 6), (9,)),
    min_tokens=10_000,
    max_tokens=10_000,
    num_top_logprobs=5,
)
GREEDY, TOP_P, EVERYTHING, WIDE = (
    "all greedy",
    "top_p 0.9, every row its seed",
    "everything on",
    "top_p 0.9, wide nucleus",
)
MIXES: Mapping[str, SamplingParams] = MappingProxyType(
    {
        GREEDY: SamplingParams(temperature=0.0),
        "temperature 0.8": SamplingParams(temperature=0.8),
        "top_p 0.9, one seed": SamplingParams(top_p=0.9),
        TOP_P: SamplingParams(top_p=0.9),
        EVERYTHING: _EVERYTHING,
        "greedy, logprobs 5": SamplingParams(temperature=0.0, num_top_logprobs=5),
        WIDE: SamplingParams(top_p=0.9),
    }
)
_NUM_LIKELY_TOKENS = 200
_NUM_WARM_UP_CALLS = 2
_MIN_CALLS = 5
_MAX_CALLS = 200
_MAX_SECONDS_PER_FIGURE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One cell of the table.

    Attributes:
        mix: a key of MIXES.
        vocabulary_size: width of the logits.
        num_rows: sequences of a step.
    """

    mix: str
    vocabulary_size: int
    num_rows: int

    def logits(self) -> Tensor:
        """Return [num_rows, vocabulary_size] float32."""
        make = wide_logits if self.mix == WIDE else peaked_logits
        return make(self.num_rows, self.vocabulary_size)

    def rows(self, sampler: Sampler) -> list[SamplingRow]:
        """Return fresh rows behind a prompt of 158 tokens."""
        is_seed_shared = self.mix == "top_p 0.9, one seed"
        return [
            sampler.make_row(MIXES[self.mix], 7 if is_seed_shared else index, self.prompt())
            for index in range(self.num_rows)
        ]

    def prompt(self) -> list[int]:
        """Return the ids of the prompt that the vocabulary has."""
        return [token_id % self.vocabulary_size for token_id in PROMPT_TOKEN_IDS]


def peaked_logits(num_rows: int, vocabulary_size: int) -> Tensor:
    """Return logits like those of a model that knows what it says: entropies of 1 to 4 nats.

    A few tokens fall off by rank as a power law does, the steeper the higher the row; the rest is
    noise that holds nearly no mass.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((num_rows, vocabulary_size), generator=generator).mul_(2.0)
    num_likely = min(_NUM_LIKELY_TOKENS, vocabulary_size)
    ranks = torch.arange(1, num_likely + 1, dtype=torch.float32)
    for row in range(num_rows):
        steepness = 1.2 + 1.2 * (row + 1) / num_rows
        token_ids = torch.randperm(vocabulary_size, generator=generator)[:num_likely]
        noise = torch.randn(num_likely, generator=generator) * 0.3
        logits[row, token_ids] = 22.0 - steepness * ranks.log() + noise
    return logits


def wide_logits(num_rows: int, vocabulary_size: int) -> Tensor:
    """Return logits of a model that knows nothing: thousands of tokens in a nucleus of 0.9."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((num_rows, vocabulary_size), generator=generator).mul_(1.5)


def entropy_range(logits: Tensor) -> tuple[float, float]:
    """Return the lowest and the highest entropy of the rows, in nats."""
    log_probabilities = logits.log_softmax(dim=1)
    entropies = -(log_probabilities.exp() * log_probabilities).sum(dim=1)
    return float(entropies.min()), float(entropies.max())


def time_sampler_ms(workload: Workload) -> float:
    """Return the median milliseconds of one step's sampling."""
    sampler = Sampler(workload.vocabulary_size, frozenset({EOS}))
    logits, rows = workload.logits(), workload.rows(sampler)
    return median_ms(lambda: sampler.sample(logits, rows))


def time_row_us(mix: str, num_rows: int) -> float:
    """Return the microseconds of Python that one more row costs.

    All that is Python runs as ever, the processors with their tensors too, behind a prompt of
    two tokens over a vocabulary of 64. The draw and the sums of log probabilities, which are
    nothing but tensor work, give back what is there already.

    Args:
        mix: a key of MIXES.
        num_rows: of the larger of two batches; the smaller one has an eighth.
    """
    few_us, many_us = _time_host_us(mix, num_rows // 8), _time_host_us(mix, num_rows)
    return (many_us - few_us) / (num_rows - num_rows // 8)


def _time_host_us(mix: str, num_rows: int) -> float:
    workload = Workload(mix, 64, num_rows)
    sampler, logits = Sampler(workload.vocabulary_size, frozenset({EOS})), workload.logits()
    rows = [sampler.make_row(MIXES[mix], index, (10, 11)) for index in range(num_rows)]
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    num_top = MIXES[mix].num_top_logprobs or 0
    values = [1.0] * (num_rows * (3 + 2 + 2 * num_top))
    with (
        mock.patch.object(sampling.sampler, "draw_plain", return_value=tokens),
        mock.patch.object(sampling.sampler, "draw_filtered", return_value=tokens),
        mock.patch.object(sampling.step_results, "_reported", return_value=[]),
        mock.patch.object(sampling.step_results, "copy_to_host", return_value=values),
    ):
        return 1000 * median_ms(lambda: sampler.sample(logits, rows))


def median_ms(call: Callable[[], object]) -> float:
    """Return the median milliseconds of a call, over as many as fit into a part of a second."""
    for _ in range(_NUM_WARM_UP_CALLS):
        call()
    seconds: list[float] = []
    while len(seconds) < _MIN_CALLS or (
        len(seconds) < _MAX_CALLS and sum(seconds) < _MAX_SECONDS_PER_FIGURE
    ):
        began_at_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began_at_s)
    return 1000 * statistics.median(seconds)
