"""From a validated request to the calls that its prompts make. Pure; sends nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from deployments.answer_form import AnswerForm
from deployments.calls import ChatPromptRecord, GenerationCall, PromptRecord
from deployments.http_errors import PROMPT_PARAM
from deployments.model_directory import Selection
from deployments.wire import ChatRequest, CompletionRequest, GenerationFields
from deployments.wire_values import PromptItem
from sampling.params import SamplingParams

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one request wants done, and how its answer is told.

    Attributes:
        response_id: id of the answer.
        model_name: as the request names what it wants; the answer repeats it.
        model_id: which base model.
        calls: one per prompt.
        form: how the answer is told.
        is_stream: answer as a stream of events.
        param_names: what the request calls fields that the engine knows by other names.
        extras: further fields of the answer, as the request brought or asked for them.
        is_prompt_logged: the caller agrees to have prompt and answer written to a log.
        ignored_fields: fields of the request that have no effect, as they are told.
    """

    response_id: str
    model_name: str
    model_id: str
    calls: tuple[GenerationCall, ...]
    form: AnswerForm
    is_stream: bool
    param_names: Mapping[str, str]
    extras: Mapping[str, Any]
    is_prompt_logged: bool
    ignored_fields: tuple[str, ...]


def make_chat_job(
    request: ChatRequest, selection: Selection, key: str, draw_seed: Callable[[], int]
) -> Job:
    """Return the job of a chat request.

    Args:
        request: validated.
        selection: the model and the adapter that it means.
        key: makes ids that are unique in this service.
        draw_seed: gives a seed in [0, 2**63) when the request has none.

    Raises:
        InvalidSamplingParamsError: a sampling parameter is out of range.
    """
    prompt = ChatPromptRecord(
        kind="chat",
        messages=[message.to_template() for message in request.messages],
        add_generation_prompt=request.opens_new_turn,
        continue_final_message=request.continue_final_message,
        template_variables=dict(request.chat_template_kwargs),
        template=request.chat_template,
    )
    job = _make_job(request, selection, f"chatcmpl-{key}", draw_seed, [prompt])
    return dataclasses.replace(job, extras={**job.extras, **request.agent_reports})


def make_completion_job(
    request: CompletionRequest, selection: Selection, key: str, draw_seed: Callable[[], int]
) -> Job:
    """Return the job of a completion request.

    Args:
        request: validated.
        selection: the model and the adapter that it means.
        key: makes ids that are unique in this service.
        draw_seed: gives a seed in [0, 2**63) for each prompt when the request has none.

    Raises:
        InvalidSamplingParamsError: a sampling parameter is out of range.
    """
    prompts = [_to_prompt_record(item, request) for item in request.prompt]
    return _make_job(request, selection, f"cmpl-{key}", draw_seed, prompts)


def _make_job(
    request: GenerationFields,
    selection: Selection,
    response_id: str,
    draw_seed: Callable[[], int],
    prompts: list[PromptRecord],
) -> Job:
    max_tokens = (
        request.max_tokens
        if request.max_completion_tokens is None
        else request.max_completion_tokens
    )
    form = _form(request)
    sampling = _sampling(request, max_tokens, form.num_output_alternatives)
    calls = tuple(
        GenerationCall(
            request_id=f"{response_id}-{index}",
            prompt=prompt,
            sampling=sampling,
            is_max_tokens_explicit=max_tokens is not None,
            seed=draw_seed() if request.seed is None else request.seed,
            num_choices=form.num_candidates,
            stop=list(request.stop),
            is_stop_included=request.include_stop_str_in_output,
            is_special_token_skipped=request.skip_special_tokens,
            bad_words=list(request.bad_words),
            cache_salt=request.cache_salt,
            timeout_s=request.timeout_s,
            num_prompt_logprobs=form.num_prompt_alternatives,
            is_prompt_reported=form.is_prompt_reported,
            adapter_id=selection.adapter_id,
        )
        for index, prompt in enumerate(prompts)
    )
    return Job(
        response_id=response_id,
        model_name=selection.model_id if selection.is_default else request.model,
        model_id=selection.model_id,
        calls=calls,
        form=form,
        is_stream=request.stream,
        param_names={
            PROMPT_PARAM: request.prompt_param,
            "n": "n" if form.num_candidates == form.num_choices else "best_of",
        },
        extras={} if request.metadata is None else {"metadata": dict(request.metadata)},
        is_prompt_logged=request.log_prompt,
        ignored_fields=request.ignored_fields,
    )


def _form(request: GenerationFields) -> AnswerForm:
    return AnswerForm(
        is_chat=isinstance(request, ChatRequest),
        has_stream_usage=request.has_stream_usage,
        num_candidates=request.num_candidates,
        num_choices=request.n,
        logprobs=request.logprob_scope,
        num_top_logprobs=request.num_top_logprobs or 0,
        is_prompt_echoed=request.is_prompt_echoed,
        num_prompt_logprobs=request.prompt_logprobs,
    )


def _sampling(
    request: GenerationFields, max_tokens: int | None, num_top_logprobs: int | None
) -> dict[str, Any]:
    """Return the sampling fields that the request sets, checked for their ranges."""
    values: dict[str, Any] = {
        name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None
    }
    if num_top_logprobs is not None:
        values["num_top_logprobs"] = num_top_logprobs
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    elif request.min_tokens is not None:
        # The limit that will be in force is the engine's to know; it checks min_tokens again.
        values["max_tokens"] = max(SamplingParams().max_tokens, request.min_tokens)
    SamplingParams(**values)
    return values


def _to_prompt_record(item: PromptItem, request: CompletionRequest) -> PromptRecord:
    if isinstance(item, str):
        return {
            "kind": "text",
            "text": item,
            "add_special_tokens": request.add_special_tokens,
            "suffix": request.suffix,
        }
    return {"kind": "tokens", "token_ids": list(item)}
