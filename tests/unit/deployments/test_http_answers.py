"""What a client gets for a request that is served."""

import asyncio

import pytest

from tests.unit.deployments.fakes import (
    MODEL_ID,
    NOW_S,
    SEED,
    AsgiCall,
    admission,
    chat_body,
    completion_body,
    delta,
    end,
    hello,
    logprob,
    make_ingress,
    open_client,
    read_events,
    read_json_events,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def post(path, body, script=hello, **options):
    ingress, handle = make_ingress(script)
    async with open_client(ingress) as client:
        return await client.post(path, json=body, **options), handle


async def test_a_chat_answer_has_every_key_that_clients_require():
    response, _ = await post(CHAT, chat_body())

    answer = response.json()
    assert response.status_code == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["created"] == NOW_S
    assert answer["model"] == MODEL_ID
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello world",
                "refusal": None,
                "reasoning_content": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cache_created_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    }


async def test_a_completion_answer_has_text_choices():
    response, _ = await post(COMPLETIONS, completion_body())

    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_a_chat_stream_opens_continues_finishes_and_is_done():
    response, _ = await post(CHAT, chat_body(stream=True))

    events, is_complete = read_json_events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert is_complete
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all("usage" not in event for event in events)


async def test_a_completion_stream_has_no_role_event():
    response, _ = await post(COMPLETIONS, completion_body(stream=True))

    events, is_complete = read_json_events(response.text)
    assert is_complete
    assert [event["choices"][0]["text"] for event in events] == ["Hello", " world", ""]
    assert {event["object"] for event in events} == {"text_completion"}


async def test_a_stream_with_usage_ends_with_it_and_says_null_before():
    body = chat_body(stream=True, stream_options={"include_usage": True}, n=2)
    response, _ = await post(CHAT, body)

    events, is_complete = read_json_events(response.text)
    assert is_complete
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["usage"]["prompt_tokens"] == 3


async def test_each_of_several_choices_opens_once_and_finishes_once():
    response, handle = await post(CHAT, chat_body(stream=True, n=3))

    events, _ = read_json_events(response.text)
    choices = [event["choices"][0] for event in events]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello world"
        assert [choice["finish_reason"] for choice in own].count("stop") == 1
        assert own[-1]["finish_reason"] == "stop"
    assert handle.calls[0]["num_choices"] == 3


async def test_streamed_text_equals_the_whole_text():
    whole, _ = await post(CHAT, chat_body())
    streamed, _ = await post(CHAT, chat_body(stream=True))

    events, _ = read_json_events(streamed.text)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole.json()["choices"][0]["message"]["content"]


async def test_several_prompts_make_choices_in_their_order_and_add_up():
    async def script(call):
        yield [admission()]
        yield [delta(call["prompt"]["text"], 0), delta("-", 1)]
        yield [delta("", 0, "stop"), delta("", 1, "length"), end(prompt=5, completion=4, cached=2)]

    response, handle = await post(COMPLETIONS, completion_body(prompt=["a", "b"], n=2), script)

    answer = response.json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "-", "b", "-"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert len({call["request_id"] for call in handle.calls}) == 2


async def test_several_prompts_stream_side_by_side():
    body = completion_body(prompt=["a", "b"], stream=True, stream_options={"include_usage": True})
    response, _ = await post(COMPLETIONS, body)

    events, is_complete = read_json_events(response.text)
    assert is_complete
    for index in range(2):
        texts = [
            choice["text"]
            for event in events
            for choice in event["choices"]
            if choice["index"] == index
        ]
        assert "".join(texts) == "Hello world"
    assert events[-1]["usage"]["prompt_tokens"] == 6


async def test_log_probabilities_of_a_chat_have_tokens_bytes_and_alternatives():
    async def script(call):
        yield [admission()]
        yield [delta("é", logprobs=[logprob("é", -0.25, [("é", -0.25), ("x", -9999.0)])])]
        yield [delta("", finish="stop"), end()]

    body = chat_body(logprobs=True, top_logprobs=2)
    response, handle = await post(CHAT, body, script)
    streamed, _ = await post(CHAT, {**body, "stream": True}, script)

    expected = [
        {
            "token": "é",
            "logprob": -0.25,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.25, "bytes": [195, 169]},
                {"token": "x", "logprob": -9999.0, "bytes": [120]},
            ],
        }
    ]
    assert response.json()["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    events, _ = read_json_events(streamed.text)
    assert events[1]["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    assert handle.calls[0]["sampling"]["num_top_logprobs"] == 2


async def test_log_probabilities_of_a_completion_have_both_shapes_at_once():
    async def script(call):
        yield [admission()]
        first = logprob("caf", -1.0, [("caf", -1.0)])
        half = {"token_id": 5, "token": "�", "bytes": [0xC3], "logprob": -2.0}
        other_half = {"token_id": 6, "token": "�", "bytes": [0xA9], "logprob": -3.0}
        yield [delta("caf", logprobs=[first])]
        yield [delta("é!", logprobs=[half, other_half, logprob("!")])]
        yield [delta("", finish="stop"), end()]

    whole, _ = await post(COMPLETIONS, completion_body(logprobs=1), script)
    streamed, _ = await post(COMPLETIONS, completion_body(logprobs=1, stream=True), script)

    logprobs = whole.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["caf", "�", "�", "!"]
    assert logprobs["token_logprobs"] == [-1.0, -2.0, -3.0, -0.5]
    assert logprobs["top_logprobs"] == [{"caf": -1.0}, {}, {}, {}]
    assert logprobs["text_offset"] == [0, 3, 3, 4]
    assert [entry["token"] for entry in logprobs["content"]] == logprobs["tokens"]
    events, _ = read_json_events(streamed.text)
    pieces = [event["choices"][0]["logprobs"] for event in events]
    offsets = [offset for piece in pieces if piece for offset in piece["text_offset"]]
    assert offsets == [0, 3, 3, 4]


async def test_log_probabilities_without_text_are_not_lost():
    async def script(call):
        yield [admission()]
        yield [delta("", logprobs=[logprob("a")])]
        yield [delta("ab", logprobs=[logprob("b")])]
        yield [delta("", finish="stop"), end()]

    response, _ = await post(CHAT, chat_body(logprobs=True, stream=True), script)

    events, _ = read_json_events(response.text)
    entries = [event["choices"][0]["logprobs"] for event in events]
    tokens = [entry["token"] for group in entries if group for entry in group["content"]]
    assert tokens == ["a", "b"]


async def test_the_stop_string_that_ended_a_choice_is_told():
    async def script(call):
        yield [admission()]
        yield [delta("x", finish="stop", stop_reason="END"), end()]

    whole, handle = await post(CHAT, chat_body(stop="END"), script)
    streamed, _ = await post(CHAT, chat_body(stop=["END"], stream=True), script)

    assert whole.json()["choices"][0]["stop_reason"] == "END"
    events, _ = read_json_events(streamed.text)
    assert events[-1]["choices"][0]["stop_reason"] == "END"
    assert handle.calls[0]["stop"] == ["END"]


async def test_text_is_escaped_as_json():
    text = 'quote " backslash \\ newline \n snowman ☃ nul \x00'

    async def script(call):
        yield [admission()]
        yield [delta(text), delta("", finish="stop"), end()]

    response, _ = await post(CHAT, chat_body(stream=True), script)

    events, _ = read_json_events(response.text)
    assert events[1]["choices"][0]["delta"]["content"] == text


async def test_a_request_without_a_seed_gets_a_drawn_one_and_a_seed_is_kept():
    _, drawn = await post(CHAT, chat_body())
    _, kept = await post(CHAT, chat_body(seed=-7))

    assert drawn.calls[0]["seed"] == SEED
    assert kept.calls[0]["seed"] == -7


async def test_fields_without_effect_are_named_in_a_header():
    response, _ = await post(CHAT, chat_body(frobnicate=1, store=True, tools=[], k=3, user="u"))

    assert response.headers["x-medley-ignored-fields"] == "k, frobnicate, store"


async def test_the_header_of_ignored_fields_is_bounded_and_harmless():
    names = {f"field_{index:02}": 1 for index in range(40)}
    body = chat_body(**names, **{"a\r\nset-cookie: x": 1, "ü": 1, "x" * 200: 1}, stream=True)

    response, _ = await post(CHAT, body)

    named = response.headers["x-medley-ignored-fields"].split(", ")
    assert named == [f"field_{index:02}" for index in range(16)]
    assert "set-cookie" not in response.headers


async def test_a_request_whose_fields_all_count_has_no_such_header():
    response, _ = await post(CHAT, chat_body(temperature=0.5, user="u", metadata={"a": "b"}))

    assert "x-medley-ignored-fields" not in response.headers


async def test_null_is_the_same_as_absent_for_every_optional_field():
    fields = [
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n"),
        *("stop", "seed", "stream", "stream_options", "logit_bias", "logprobs", "top_logprobs"),
        *("user", "metadata", "peft", "tools", "tool_choice", "response_format", "cache_salt"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "ignore_eos"),
        *("min_tokens", "stop_token_ids", "loglikelihood", "log_prompt", "timeout_s"),
        *("typical_p", "allowed_token_ids", "bad_words", "best_of", "prompt_logprobs", "echo"),
    ]

    response, with_nulls = await post(CHAT, chat_body(**dict.fromkeys(fields)))
    _, without = await post(CHAT, chat_body())

    assert response.status_code == 200
    ignored = {"request_id": None}
    assert {**with_nulls.calls[0], **ignored} == {**without.calls[0], **ignored}


async def test_a_body_without_a_content_type_is_read_as_json():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        request = client.build_request("POST", CHAT, content=b'{"model": "tiny", "messages": []}')
        request.headers.pop("content-type", None)
        response = await client.send(request)

    assert response.json()["error"]["param"] == "messages"


async def test_models_are_listed_and_found_by_name():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        models = (await client.get("/v1/models")).json()
        model = (await client.get(f"/v1/models/{MODEL_ID}")).json()

    assert models == {"object": "list", "data": [model]}
    assert model["id"] == MODEL_ID
    assert model["object"] == "model"
    assert model["created"] == NOW_S
    assert model["owned_by"] == "medley"


async def test_health_is_ok_while_every_model_answers_and_503_else():
    ingress, handle = make_ingress()
    async with open_client(ingress) as client:
        well = await client.get("/health")
        handle.ping_error = RuntimeError("dead")
        ill = await client.get("/health")

    assert (well.status_code, well.json()) == (200, {"status": "ok"})
    assert ill.status_code == 503
    assert MODEL_ID in ill.json()["error"]["message"]
    assert "retry-after" in ill.headers


async def test_the_first_text_is_sent_before_the_second_is_made():
    async def script(call):
        yield [admission()]
        yield [delta("first")]
        await second.wait()
        yield [delta("second", finish="stop"), end()]

    second = asyncio.Event()
    ingress, _ = make_ingress(script)
    call = AsgiCall(ingress, CHAT, chat_body(stream=True))

    before = await call.read_until("first")
    second.set()
    after = await call.read_rest()

    assert "second" not in before
    assert read_events(before + after)[-1] == "[DONE]"


async def test_the_handle_is_asked_for_cheap_messages_once():
    ingress, handle = make_ingress()
    async with open_client(ingress) as client:
        await client.post(CHAT, json=chat_body())
        await client.post(CHAT, json=chat_body())

    generate = [options for options in handle.all_options if options["method_name"] == "generate"]
    assert generate == [
        {
            "method_name": "generate",
            "stream": True,
            "_by_reference": False,
            "response_serialization": "pickle",
        }
    ]
