"""What a client gets for a request that is refused before the first byte of an answer."""

import dataclasses

import httpx
import orjson
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError

from models.errors import (
    AdapterLoadFailedError,
    ChatTemplateError,
    ContextLengthExceededError,
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SequenceFailedError,
)
from tests.unit.deployments.fakes import (
    LIMITS,
    MODEL_ID,
    chat_body,
    completion_body,
    make_ingress,
    open_client,
    refuse_with,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def send(method, path, script=None, limits=LIMITS, **options):
    ingress, handle = make_ingress(script, limits=limits) if script else make_ingress(limits=limits)
    async with open_client(ingress) as client:
        response = await client.request(method, path, **options)
    return response, handle


def assert_problem(response, status, code, param=None):
    body = response.json()
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    # the same for the clients of other APIs
    assert body["object"] == "error"
    assert body["message"] == body["error"]["message"]
    assert body["type"] == body["error"]["type"]
    assert isinstance(body["id"], str)
    assert "Traceback" not in response.text
    return body


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"model": "tiny", "messages": NaN}', "JSON"),
        (b'{"model": "\xff"}', "JSON"),
        (b'{"model": "\\ud800"}', "JSON"),
        (b"[" * 9_000, "depth"),
        (b'{"a":' * 3_000, "depth"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(content, word):
    response, handle = await send(
        "POST", CHAT, content=content, headers={"content-type": "application/json"}
    )

    body = assert_problem(response, 400, "invalid_value")
    assert word in body["message"]
    assert handle.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"n": 0}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": "1"}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"logit_bias": {str(key): 1 for key in range(1100)}}, "logit_bias"),
        ({"top_logprobs": 10**9, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 2**64}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": 1}, "stream"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -1.5}, "timeout_s"),
        ({"timeout_s": 86_401}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": True}, "timeout_s"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"loglikelihood": 1}, "loglikelihood"),
        ({"loglikelihood": True, "stream": True}, "loglikelihood"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"typical_p": 0}, "typical_p"),
        ({"typical_p": 1.1}, "typical_p"),
        ({"typical_p": True}, "typical_p"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids.0"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"bad_words": [5]}, "bad_words.0"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words.0"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"peft": 3}, "peft"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
    ],
)
async def test_a_bad_field_of_a_chat_is_a_400_that_names_it(fields, param):
    response, handle = await send("POST", CHAT, json=chat_body(**fields))

    body = assert_problem(response, 400, "invalid_value", param)
    assert param in body["message"]
    assert body["detail"][0]["loc"][0] == "body"
    assert handle.calls == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 65, "best_of": 2}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 0, "loglikelihood": True}, "loglikelihood"),
        ({"loglikelihood": True, "stream": True}, "loglikelihood"),
        ({"prompt_logprobs": 3, "stream": True}, "prompt_logprobs"),
        ({"suffix": "b", "echo": True}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "loglikelihood": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ],
)
async def test_a_bad_field_of_a_completion_is_a_400_that_names_it(fields, param):
    response, handle = await send("POST", COMPLETIONS, json=completion_body(**fields))

    assert_problem(response, 400, "invalid_value", param)
    assert handle.calls == []


async def test_an_unknown_model_is_a_404():
    response, _ = await send("POST", CHAT, json=chat_body(model="other"))

    assert "other" in assert_problem(response, 404, "model_not_found", "model")["message"]


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequestError("prompt", "empty"), 400, "invalid_value", "prompt"),
        (PromptTooLongError(900, 512), 400, "context_length_exceeded", "messages"),
        (ContextLengthExceededError(9, 600, 512), 400, "context_length_exceeded", "max_tokens"),
        (ChatTemplateError("roles must alternate"), 400, "chat_template_error", "messages"),
        (QueueFullError(512, 512), 429, "queue_full", None),
        (DrainingError(), 503, "draining", None),
        (EngineDeadError("step failed"), 503, "engine_unavailable", None),
        (SequenceFailedError("NaN"), 500, "generation_failed", None),
        (DeadlineExceededError(2.0), 408, "deadline_exceeded", None),
        (BackPressureError(5, 4), 429, "queue_full", None),
        (ActorDiedError(), 503, "engine_unavailable", None),
        (ActorUnavailableError("gone", None), 503, "engine_unavailable", None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refusal_by_the_replica_is_a_status_also_for_a_stream(
    error, status, code, param, is_stream
):
    response, handle = await send(
        "POST", CHAT, refuse_with(error), json=chat_body(stream=is_stream)
    )

    assert_problem(response, status, code, param)
    assert handle.streams[0].is_cancelled
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_too_many_candidates_are_refused_by_the_name_that_the_request_has_for_them():
    refused = refuse_with(InvalidRequestError("n", "9 is not in [1, 8]"))

    response, _ = await send("POST", COMPLETIONS, refused, json=completion_body(best_of=9))

    assert_problem(response, 400, "invalid_value", "best_of")


async def test_a_wrong_value_is_a_422_for_clients_of_octoai_and_nothing_else_is():
    limits = dataclasses.replace(LIMITS, validation_status=422)
    ingress, _ = make_ingress(refuse_with(InvalidRequestError("n", "9 is too many")), limits=limits)
    async with open_client(ingress) as client:
        wrong = await client.post(CHAT, json=chat_body(temperature=9))
        late = await client.post(CHAT, json=chat_body(n=9))
        unknown = await client.post(CHAT, json=chat_body(model="nobody"))

    assert (wrong.status_code, late.status_code, unknown.status_code) == (422, 422, 404)
    assert wrong.json()["detail"][0]["loc"] == ["body", "temperature"]
    assert wrong.json()["id"] == "unprocessable_entity"


async def test_both_numbers_of_a_prompt_that_is_too_long_are_told():
    response, _ = await send(
        "POST", CHAT, refuse_with(PromptTooLongError(9001, 512)), json=chat_body()
    )

    assert "9001" in response.json()["message"]
    assert "512" in response.json()["message"]


async def test_an_error_that_ray_has_wrapped_is_told_in_its_own_words():
    cause = ChatTemplateError("only one system message")
    wrapped = RayTaskError("generate", "Traceback: secret", cause).as_instanceof_cause()

    response, _ = await send("POST", CHAT, refuse_with(wrapped), json=chat_body())

    body = assert_problem(response, 400, "chat_template_error", "messages")
    assert body["message"] == str(cause)


async def test_an_unknown_error_is_a_500_that_tells_nothing_of_its_cause(caplog):
    response, _ = await send("POST", CHAT, refuse_with(KeyError("secret")), json=chat_body())

    assert_problem(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_a_failing_prompt_of_several_cancels_the_others():
    async def script(call):
        if call["prompt"]["text"] == "bad":
            raise QueueFullError(1, 1)
        yield [{"kind": "admission", "numerics": ""}]
        yield []

    response, handle = await send(
        "POST", COMPLETIONS, script, json=completion_body(prompt=["good", "bad", "good"])
    )

    assert_problem(response, 429, "queue_full")
    assert [stream.is_cancelled for stream in handle.streams] == [True] * 3


async def test_repeats_that_cannot_help_are_discouraged():
    response, _ = await send(
        "POST", CHAT, refuse_with(DeadlineExceededError(1.0)), json=chat_body()
    )

    assert response.headers["x-should-retry"] == "false"


async def test_an_error_knows_when_a_repeat_may_help():
    error = AdapterLoadFailedError("a", "broken file", 29.2)

    response, _ = await send("POST", CHAT, refuse_with(error), json=chat_body())

    assert response.headers["retry-after"] == "30"


async def test_a_body_over_the_limit_is_a_413_by_its_declared_size():
    limits = dataclasses.replace(LIMITS, max_body_bytes=100)

    response, _ = await send("POST", CHAT, limits=limits, json=chat_body(user="x" * 200))

    assert_problem(response, 413, "body_too_large")


async def test_a_body_over_the_limit_is_a_413_while_it_is_read():
    num_chunks_taken = 0

    async def chunks():
        nonlocal num_chunks_taken
        for _ in range(1000):
            num_chunks_taken += 1
            yield b"x" * 100

    limits = dataclasses.replace(LIMITS, max_body_bytes=1000)
    response, _ = await send(
        "POST", CHAT, limits=limits, content=chunks(), headers={"content-type": "application/json"}
    )

    assert_problem(response, 413, "body_too_large")
    assert num_chunks_taken <= 12


async def test_a_body_of_exactly_the_limit_is_read():
    content = orjson.dumps(chat_body())
    limits = dataclasses.replace(LIMITS, max_body_bytes=len(content))

    response, _ = await send(
        "POST", CHAT, limits=limits, content=content, headers={"content-type": "application/json"}
    )

    assert response.status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_is_declared_to_be_no_json_is_a_415(content_type):
    response, _ = await send(
        "POST", CHAT, content=orjson.dumps(chat_body()), headers={"content-type": content_type}
    )

    assert_problem(response, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
async def test_every_spelling_of_json_is_read(content_type):
    response, _ = await send(
        "POST", CHAT, content=orjson.dumps(chat_body()), headers={"content-type": content_type}
    )

    assert response.status_code == 200


async def test_an_unknown_path_is_a_404_in_the_shape_of_all_errors():
    response, _ = await send("GET", "/v1/nothing")

    assert_problem(response, 404, "not_found")


async def test_a_wrong_method_is_a_405_that_names_the_right_one():
    response, _ = await send("GET", CHAT)

    assert_problem(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"]


async def test_an_unknown_model_id_in_the_path_is_a_404():
    response, _ = await send("GET", "/v1/models/some/other")

    assert_problem(response, 404, "model_not_found", "model")


async def test_the_request_id_is_told_in_an_error():
    response, _ = await send(
        "POST", CHAT, json=chat_body(model="other"), headers={"x-request-id": "abc"}
    )

    assert response.json()["request_id"] == "abc"


async def test_one_bad_request_leaves_the_next_ones_alone():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        bad = await client.post(CHAT, json=chat_body(n=0))
        good = await client.post(CHAT, json=chat_body())

    assert (bad.status_code, good.status_code) == (400, 200)
    assert isinstance(good, httpx.Response)
    assert good.json()["model"] == MODEL_ID


async def test_a_call_that_cannot_be_made_cancels_the_ones_before_it():
    ingress, handle = make_ingress()
    make_stream = handle.remote

    def remote(call):
        if handle.streams:
            raise ActorDiedError
        return make_stream(call)

    handle.remote = remote
    async with open_client(ingress) as client:
        response = await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"]))

    assert response.status_code >= 500
    assert [stream.is_cancelled for stream in handle.streams] == [True]
