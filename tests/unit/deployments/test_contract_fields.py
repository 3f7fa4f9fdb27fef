"""What becomes of every field that clients of other servers know: the rows of docs/api.md."""

import itertools

import pytest

from deployments.unsupported import _NEUTRAL_VALUES
from deployments.wire import ChatRequest, CompletionRequest, GenerationFields
from tests.unit.deployments.fakes import (
    chat_body,
    completion_body,
    hello,
    logprob,
    make_ingress,
    open_client,
    prompt_logprobs,
    read_json_events,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
REQUESTS = ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest))
USER = {"role": "user", "content": "Hi"}

# Fields of both operations that the engine hears of, each with a value that is not its default.
REACHING_THE_ENGINE = {
    "peft": "mine",
    "adapter_id": "mine",
    "lora_path": "mine",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "seed": 7,
    "n": 2,
    "best_of": 2,
    "stop": ["x"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "ignore_eos": True,
    "loglikelihood": True,
    "prompt_logprobs": 2,
    "cache_salt": "tenant",
    "timeout_s": 3.0,
}
# Those that tell how to answer, and those that nothing is done with.
NOT_FOR_THE_ENGINE = {"model", "stream", "stream_options", "log_prompt", "user", "metadata"}

WITHOUT_EFFECT = {
    # OpenAI
    "service_tier": "flex",
    "store": True,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "safety_identifier": "u1",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    # vLLM and SGLang
    "length_penalty": 0.5,
    "truncation_side": "left",
    "request_id": "r1",
    "rid": "r1",
    "session_id": "s1",
    "extra_key": "x",
    "kv_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "stream_interval": 4,
    # LoRAX
    "api_token": "t",
    # llama.cpp
    "id_slot": 0,
    "cache_prompt": False,
    "repeat_last_n": 32,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["x"],
    "xtc_threshold": 0.2,
    "timings_per_token": True,
    "return_progress": True,
}

REFUSED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= 'a'",
    "json_schema": {"type": "object"},
    "regex": "a+",
    "ebnf": "root ::= 'a'",
    "grammar": "root ::= 'a'",
    "guideline": "be kind",
    "merged_adapters": {"ids": ["a", "b"], "weights": [1, 1]},
    "adapter_source": "hub",
    "lora": [{"id": 0, "scale": 0.5}],
    "octoai": {"loras": ["a"]},
    "echo": True,
    "suffix": "x",
    "input_ids": [1, 2],
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": True},
    "documents": [{"text": "x"}],
    "tool_prompt": "Use these:",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "truncate_prompt_tokens": -1,
    "truncate": 10,
    "use_beam_search": True,
    "stop_regex": "a+",
    "repetition_detection": {"max_pattern_size": 3},
    "repeat_penalty": 1.1,
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "samplers": ["top_k"],
    "watermark": True,
    "do_sample": False,
    "ignore_eos_token": True,
    "n_predict": 7,
    "max_new_tokens": 7,
    "t_max_predict_ms": 100,
    "reasoning_effort": "low",
    "thinking_token_budget": 64,
    "include_reasoning": False,
    "separate_reasoning": True,
    "stream_reasoning": False,
    "reasoning_format": "deepseek",
    "n_probs": 3,
    "logprob_token_ids": [5],
    "details": True,
    "response_fields": ["content"],
    "no_stop_trim": True,
    "verbosity": "low",
    "moderation": {"model": "omni"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_full_text": True,
    "spaces_between_special_tokens": False,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "priority": -1,
}


def body_of(path, **fields):
    return chat_body(**fields) if path == CHAT else completion_body(**fields)


async def answer_all(call):
    """Says hello, and scores a prompt of three tokens if that is asked for."""
    async for message in hello(call):
        yield message
        if message[0]["kind"] == "admission" and call["num_prompt_logprobs"] is not None:
            yield [prompt_logprobs(1, logprob("b"), logprob("c"))]


async def post(path, body):
    ingress, handle = make_ingress(answer_all)
    async with open_client(ingress) as client:
        return await client.post(path, json=body), handle


async def call_of(path, **fields):
    """What the engine hears of a request that is served, but for what names it."""
    response, handle = await post(path, body_of(path, **fields))
    assert response.status_code == 200, response.text
    (call,) = handle.calls
    return {
        name: value for name, value in call.items() if name not in ("request_id", "prompt")
    }, response


async def refusal_of(path, **fields):
    response, handle = await post(path, body_of(path, **fields))
    assert response.status_code == 400, response.text
    assert handle.calls == []
    return response.json()["error"]


@pytest.mark.parametrize("field", REACHING_THE_ENGINE)
async def test_a_field_of_both_operations_reaches_the_engine_alike(field):
    changes = []
    for path in (CHAT, COMPLETIONS):
        bare, _ = await call_of(path)
        told, response = await call_of(path, **{field: REACHING_THE_ENGINE[field]})
        assert "x-medley-ignored-fields" not in response.headers
        # The text of a prompt is only of use to a completion.
        changes.append(
            {n: v for n, v in told.items() if v != bare[n] and n != "is_prompt_reported"}
        )

    assert changes[0]
    assert changes[0] == changes[1]


def test_every_field_of_both_operations_is_among_these():
    assert GenerationFields.model_fields.keys() == {*REACHING_THE_ENGINE, *NOT_FOR_THE_ENGINE}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", WITHOUT_EFFECT)
async def test_a_field_without_effect_is_named_and_changes_nothing(path, field):
    bare, _ = await call_of(path)
    told, response = await call_of(path, **{field: WITHOUT_EFFECT[field]})

    assert told == bare
    assert response.headers["x-medley-ignored-fields"] == field


def test_every_field_that_is_known_and_not_served_is_among_the_refused():
    assert REFUSED.keys() == _NEUTRAL_VALUES.keys()


@pytest.mark.parametrize("field", REFUSED)
async def test_a_value_that_would_change_the_answer_is_refused_by_name(field):
    paths = [path for path, kind in REQUESTS if field not in kind.model_fields]
    assert paths

    for path in paths:
        error = await refusal_of(path, **{field: REFUSED[field]})

        assert (error["code"], error["param"]) == ("invalid_value", field)
        assert field in error["message"]


@pytest.mark.parametrize("field", REFUSED)
async def test_a_value_that_asks_for_nothing_is_accepted(field):
    for path, kind in REQUESTS:
        if field in kind.model_fields:
            continue
        bare, _ = await call_of(path)
        for value in (None, *_NEUTRAL_VALUES[field]):
            told, response = await call_of(path, **{field: value})

            assert told == bare
            assert "x-medley-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "refusal", "refusal": "No."},
        {"type": "video_url", "video_url": {"url": "https://example.org/v"}},
    ],
)
async def test_a_part_that_is_no_text_is_refused_by_its_place(part):
    content = [{"type": "text", "text": "What is this?"}, part]

    error = await refusal_of(CHAT, messages=[{"role": "user", "content": content}])

    assert error["param"] == "messages.0.content.1.type"
    assert part["type"] in error["message"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
async def test_every_role_reaches_the_template(role):
    messages = [USER, {"role": role, "content": "x"}, USER]
    _, handle = await post(CHAT, chat_body(messages=messages))

    assert [message["role"] for message in handle.calls[0]["prompt"]["messages"]] == [
        "user",
        role,
        "user",
    ]


@pytest.mark.parametrize("field", ["refusal", "frobnicate"])
async def test_a_field_of_a_message_that_is_not_read_is_left_out_of_the_prompt(field):
    answered = {"role": "assistant", "content": "x"}
    response, handle = await post(CHAT, chat_body(messages=[USER, {**answered, field: "y"}, USER]))

    assert response.status_code == 200
    assert handle.calls[0]["prompt"]["messages"] == [USER, answered, USER]


async def test_a_refusal_takes_the_place_of_the_content_and_reasoning_has_two_names():
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    thought = {"role": "assistant", "content": "x", "reasoning": "because"}
    response, handle = await post(CHAT, chat_body(messages=[USER, refused, USER, thought, USER]))

    assert response.status_code == 200
    told = handle.calls[0]["prompt"]["messages"]
    assert told[1] == {"role": "assistant", "content": "No."}
    assert told[3] == {"role": "assistant", "content": "x", "reasoning_content": "because"}
    disagreeing = {**thought, "reasoning_content": "for no reason"}
    error = await refusal_of(CHAT, messages=[USER, disagreeing, USER])
    assert error["param"] == "messages.1.reasoning"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_user_is_checked_and_nothing_is_done_with_it(path):
    bare, _ = await call_of(path)
    told, _ = await call_of(path, user="u1")

    assert told == bare
    assert (await refusal_of(path, user=7))["param"] == "user"


@pytest.mark.parametrize(
    ("path", "is_stream"), list(itertools.product([CHAT, COMPLETIONS], [False, True]))
)
async def test_metadata_is_told_again_in_the_answer(path, is_stream):
    response, _ = await post(path, body_of(path, metadata={"ticket": "7"}, stream=is_stream))

    first = read_json_events(response.text)[0][0] if is_stream else response.json()
    assert first["metadata"] == {"ticket": "7"}


async def test_metadata_has_at_most_sixteen_pairs():
    pairs = {str(index): "x" for index in range(17)}

    assert (await refusal_of(CHAT, metadata=pairs))["param"] == "metadata"
    pairs.popitem()
    await call_of(CHAT, metadata=pairs)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_nothing_obfuscates_a_stream_and_its_usage_comes_at_its_end_only(path):
    options = {"include_obfuscation": True, "continuous_usage_stats": False}
    response, _ = await post(path, body_of(path, stream=True, stream_options=options))

    events, is_complete = read_json_events(response.text)
    assert is_complete
    assert "obfuscation" not in response.text
    assert all("usage" not in event for event in events)
    error = await refusal_of(path, stream=True, stream_options={"continuous_usage_stats": True})
    assert error["param"] == "stream_options.continuous_usage_stats"


async def test_a_seed_of_zero_is_a_seed():
    assert (await call_of(COMPLETIONS, seed=0))[0]["seed"] == 0


async def test_several_greedy_choices_may_be_asked_for():
    response, _ = await post(CHAT, chat_body(temperature=0, n=3))

    assert len(response.json()["choices"]) == 3


async def test_a_logit_bias_as_pairs_is_refused():
    assert (await refusal_of(CHAT, logit_bias=[[5, 1.0]]))["param"] == "logit_bias"


async def test_a_prompt_without_a_beginning_token_is_asked_for_by_a_completion():
    for value in (True, False):
        _, handle = await post(COMPLETIONS, completion_body(add_special_tokens=value))
        assert handle.calls[0]["prompt"]["add_special_tokens"] is value


async def test_a_suffix_reaches_the_engine_with_its_prompt():
    _, handle = await post(COMPLETIONS, completion_body(suffix=" end"))

    assert handle.calls[0]["prompt"]["suffix"] == " end"


@pytest.mark.parametrize("path", ["/v1/assets", "/v1/embeddings", "/v1/responses", "/metrics"])
async def test_routes_of_others_that_are_not_served_are_a_404(path):
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        for method in ("GET", "POST"):
            response = await client.request(method, path)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "not_found"
