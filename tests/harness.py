"""Runs a real engine over a tiny model, with token ids for text."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from models.adapters.weights import AdapterWeights
from models.config import AdapterConfig, EngineConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from models.engine.build import EngineParts, assemble
from models.errors import ModelServiceError
from models.loading.compatibility import fix_longrope
from models.loading.loader import LoadedModel, discover_layers, plan_max_model_len
from models.requests import (
    GenerationEnd,
    GenerationRequest,
    Prompt,
    PromptLogprobs,
    TokenDelta,
    TokenLogprob,
    TokenPrompt,
)
from sampling.params import SamplingParams


class TokenDetokenizer:
    """Writes every token as its number and a blank."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class TokenText:
    """A text front without a tokenizer."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        assert isinstance(prompt, TokenPrompt)
        return prompt.token_ids

    def detokenizer(
        self, *, is_special_token_skipped: bool = True, context_token_ids: Sequence[int] = ()
    ) -> TokenDetokenizer:
        return TokenDetokenizer()


def make_parts(
    model: PreTrainedModel,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 32,
    is_prefix_caching_enabled: bool = True,
    max_model_len_tokens: int = 0,
    max_num_scored_positions: int = 1000,
    text: TokenText | None = None,
    adapters: AdapterConfig | None = None,
    **model_settings: Any,
) -> EngineParts:
    """Assemble an engine over ``model`` with ``num_blocks`` usable KV blocks.

    ``model_settings`` are further fields of ModelConfig.
    """
    window = plan_max_model_len(model.config, max_model_len_tokens)
    fix_longrope(model, window)
    layers = tuple(discover_layers(model))
    elements = sum(layer.num_kv_heads * (layer.key_width + layer.value_width) for layer in layers)
    vocabulary_size = model.get_output_embeddings().weight.shape[0]
    bytes_per_block = elements * model.dtype.itemsize * block_size
    return assemble(
        LoadedModel(
            model=model,
            layers=layers,
            vocabulary_size=vocabulary_size,
            max_model_len_tokens=window,
            dtype=model.dtype,
        ),
        text or TokenText(),
        EngineConfig(
            model=ModelConfig(
                model_id="tiny",
                dtype=str(model.dtype).removeprefix("torch."),
                **model_settings,
            ),
            kv_cache=KVCacheConfig(
                budget_bytes=bytes_per_block * (num_blocks + 1),
                block_size_tokens=block_size,
                is_prefix_caching_enabled=is_prefix_caching_enabled,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            adapters=adapters or AdapterConfig(),
            prompt_logprobs_budget_bytes=max_num_scored_positions * 4 * vocabulary_size,
        ),
    )


def make_request(
    request_id: str,
    *,
    seed: int = 0,
    num_choices: int = 1,
    num_prompt_logprobs: int | None = None,
    **sampling: object,
) -> GenerationRequest:
    """Return a request; its prompt is given to ``run`` as token ids."""
    return GenerationRequest(
        request_id=request_id,
        prompt=TokenPrompt(token_ids=()),
        sampling=SamplingParams(**sampling),
        is_max_tokens_explicit=True,
        seed=seed,
        num_choices=num_choices,
        num_prompt_logprobs=num_prompt_logprobs,
    )


@dataclasses.dataclass
class Output:
    """All that came of one choice; what is told of the prompt is choice 0's."""

    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    is_finished: bool = False


Job = tuple[GenerationRequest, Sequence[int]]


def run(
    parts: EngineParts,
    jobs: Iterable[Job],
    *,
    arrivals: Mapping[str, int] | None = None,
    adapters: Mapping[str, AdapterWeights] | None = None,
) -> dict[tuple[str, int], Output]:
    """Run requests to their ends, each added before the step that ``arrivals`` names.

    ``adapters`` has the weights of requests that use one, by request id.

    Returns:
        By (request id, choice). The engine's invariants are checked after every step.
    """
    engine = parts.engine
    waiting = list(jobs)
    steps = dict(arrivals or {})
    outputs: dict[tuple[str, int], Output] = {}
    step = 0
    while waiting or engine.has_work:
        due = [job for job in waiting if steps.get(job[0].request_id, 0) <= step]
        waiting = [job for job in waiting if job not in due]
        for request, prompt in due:
            weights = (adapters or {}).get(request.request_id)
            if weights is not None:
                request = dataclasses.replace(request, adapter=weights.ref)
            prepared = engine.prepare(request, tuple(prompt), time.monotonic(), weights)
            engine.admit(prepared, weights)
        for request_id, event in engine.step():
            if isinstance(event, ModelServiceError):
                raise event
            if isinstance(event, TokenDelta):
                output = outputs.setdefault((request_id, event.choice), Output())
                output.token_ids.extend(event.token_ids)
                output.logprobs.extend(event.logprobs)
                output.is_finished = event.finish_reason is not None
            elif isinstance(event, PromptLogprobs):
                output = outputs.setdefault((request_id, 0), Output())
                assert event.start == 1 + len(output.prompt_logprobs)
                assert not output.token_ids
                output.prompt_logprobs.extend(event.logprobs)
            else:
                assert isinstance(event, GenerationEnd)
        engine.check_invariants()
        step += 1
    assert all(output.is_finished for output in outputs.values())
    return outputs


def random_prompts(count: int, *, vocabulary_size: int, seed: int, longest: int) -> list[list[int]]:
    """Return prompts of 1 to ``longest`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        torch.randint(vocabulary_size, (length,), generator=generator).tolist()
        for length in lengths
    ]
