"""/tokenize and /detokenize over HTTP."""

import dataclasses

import pytest
from ray.exceptions import RayTaskError

from deployments.limits import RequestLimits
from models.errors import (
    AdapterNotFoundError,
    ChatTemplateError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from tests.unit.deployments.fakes import LIMITS, MODEL_ID, FakeHandle, make_ingress, open_client

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "Hi"}]


async def send(path, body, handle=None, limits=LIMITS):
    handle = handle or FakeHandle()
    ingress, _ = make_ingress(handles={MODEL_ID: handle}, limits=limits)
    async with open_client(ingress) as client:
        return await client.post(path, json=body), handle


async def test_a_text_becomes_tokens():
    response, handle = await send("/tokenize", {"model": MODEL_ID, "prompt": "Hi"})

    assert response.json() == {"count": 2, "tokens": [72, 105], "token_strs": None}
    assert handle.tokenizer_calls == [
        {
            "prompt": {"kind": "text", "text": "Hi", "add_special_tokens": True},
            "adapter_id": None,
            "has_texts": False,
        }
    ]


async def test_tokens_are_spelled_if_asked_for():
    response, _ = await send("/tokenize", {"prompt": "Hi", "return_token_strs": True})

    assert response.json()["token_strs"] == ["H", "i"]


async def test_a_chat_becomes_tokens_as_a_chat_request_would():
    body = {
        "messages": HELLO,
        "continue_final_message": True,
        "chat_template_kwargs": {"tools_first": True},
    }
    response, handle = await send("/tokenize", body)

    assert response.json()["count"] == 2
    assert handle.tokenizer_calls[0]["prompt"] == {
        "kind": "chat",
        "messages": HELLO,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "template_variables": {"tools_first": True},
    }


@pytest.mark.parametrize("body", [{"messages": HELLO}, {"prompt": "Hi"}, {"tokens": [72]}])
@pytest.mark.parametrize(
    "naming",
    [
        {"model": MODEL_ID, "peft": "tune"},
        {"peft": "tune"},
        {"adapter_id": "tune"},
        {"lora_path": "tune"},
        {"model": f"{MODEL_ID}:tune"},
        {"model": "tune"},
    ],
)
async def test_an_adapter_is_named_as_in_other_requests(body, naming):
    path = "/detokenize" if "tokens" in body else "/tokenize"
    response, handle = await send(path, {**body, **naming}, FakeHandle(adapters=["tune"]))

    assert response.status_code == 200
    assert [call["adapter_id"] for call in handle.tokenizer_calls] == ["tune"]


async def test_tokens_become_text():
    response, _ = await send("/detokenize", {"model": MODEL_ID, "tokens": [72, 105]})

    assert response.json() == {"prompt": "Hi"}


async def test_null_is_absent():
    body = {"prompt": "Hi", "messages": None, "model": None, "peft": None}
    body |= {"add_special_tokens": None, "return_token_strs": None, "chat_template": None}
    response, _ = await send("/tokenize", body)

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "Hi", "continue_final_message": True}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "chat_template_kwargs": {"a": 1}}, "prompt"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}, "tools"),
        (
            "/tokenize",
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "Hi", "peft": "a", "adapter_id": "b"}, "adapter_id"),
        ("/tokenize", {"prompt": "Hi", "peft": "../a"}, "peft"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "12"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [2**31]}, "tokens.0"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", [1], None),
    ],
)
async def test_what_is_wrong_is_named_and_no_replica_asked(path, body, param):
    response, handle = await send(path, body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert handle.tokenizer_calls == []


async def test_an_unknown_model_is_a_404():
    response, handle = await send("/tokenize", {"model": "other", "prompt": "Hi"})

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert handle.tokenizer_calls == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_body_that_is_too_large_is_a_413(path):
    response, handle = await send(path, {"prompt": "x" * 30_000, "tokens": [1] * 30_000})

    assert response.status_code == 413
    assert handle.tokenizer_calls == []


async def test_an_operators_limits_hold_here_too():
    limits = dataclasses.replace(LIMITS, request=RequestLimits(max_messages=1, max_json_depth=3))
    many, _ = await send("/tokenize", {"messages": HELLO * 2}, limits=limits)
    deep, _ = await send("/tokenize", {"prompt": "Hi", "x": [[[1]]]}, limits=limits)

    assert (many.status_code, many.json()["error"]["param"]) == (400, "messages")
    assert deep.status_code == 400


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ChatTemplateError("no such role"), 400, "chat_template_error"),
        (AdapterNotFoundError("tune"), 404, "adapter_not_found"),
        (QueueFullError(32, 32), 429, "queue_full"),
        (EngineDeadError("gone"), 503, "engine_unavailable"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_what_a_replica_raises_is_told_by_its_status(error, status, code, is_wrapped):
    handle = FakeHandle()
    handle.tokenizer_error = RayTaskError("f", "", error) if is_wrapped else error

    response, _ = await send("/tokenize", {"prompt": "Hi"}, handle)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text


async def test_a_token_outside_of_the_vocabulary_is_told_of_the_field_that_has_it():
    handle = FakeHandle()
    handle.tokenizer_error = InvalidRequestError("prompt", "token id 9999 is not in [0, 300)")

    response, _ = await send("/detokenize", {"tokens": [9999]}, handle)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"
    assert "9999" in response.json()["message"]
