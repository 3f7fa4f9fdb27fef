"""Times transformers' own logits processors, row by row: the yardstick of sampling."""

from __future__ import annotations

import torch
import transformers

from sampling.params import SamplingParams
from tests.benchmarks.sampling_speed import EOS, MIXES, PROMPT_TOKEN_IDS, Workload, median_ms


def time_transformers_ms(workload: Workload) -> float:
    """Return the median milliseconds of one step's sampling.

    A row has the list that ``generate`` makes of its parameters, then softmax and a draw. There
    are no frequency and presence penalties in transformers, and no log probabilities here.
    """
    params = MIXES[workload.mix]
    processors = _processors(params)
    logits = workload.logits()
    prompt = torch.tensor([workload.prompt()])
    generators = [torch.Generator().manual_seed(index) for index in range(workload.num_rows)]

    @torch.inference_mode()
    def step() -> list[int]:
        tokens = []
        for index in range(workload.num_rows):
            scores = processors(prompt, logits[index : index + 1])
            if params.is_greedy:
                tokens.append(int(scores.argmax(dim=1)))
            else:
                probabilities = scores.softmax(dim=1)
                drawn = torch.multinomial(probabilities, 1, generator=generators[index])
                tokens.append(int(drawn))
        return tokens

    return median_ms(step)


def _processors(params: SamplingParams) -> transformers.LogitsProcessorList:
    biases = [[[token_id], bias] for token_id, bias in params.logit_bias]
    words = [list(word) for word in params.bad_words_token_ids]
    makers = [
        (
            params.repetition_penalty != 1.0,
            lambda: transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        ),
        (bool(biases), lambda: transformers.SequenceBiasLogitsProcessor(biases)),
        (bool(words), lambda: transformers.NoBadWordsLogitsProcessor(words, eos_token_id=EOS)),
        (
            params.min_tokens > 0,
            lambda: transformers.MinNewTokensLengthLogitsProcessor(
                len(PROMPT_TOKEN_IDS), params.min_tokens, EOS, device="cpu"
            ),
        ),
        (
            params.temperature not in (0.0, 1.0),
            lambda: transformers.TemperatureLogitsWarper(params.temperature),
        ),
        (params.top_k > 0, lambda: transformers.TopKLogitsWarper(params.top_k)),
        (params.top_p < 1.0, lambda: transformers.TopPLogitsWarper(params.top_p)),
        (params.min_p > 0.0, lambda: transformers.MinPLogitsWarper(params.min_p)),
        (params.typical_p < 1.0, lambda: transformers.TypicalLogitsWarper(params.typical_p)),
    ]
    return transformers.LogitsProcessorList(make() for is_on, make in makers if is_on)
