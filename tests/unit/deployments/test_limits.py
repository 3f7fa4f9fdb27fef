"""Limits that an operator may lower: each names its field, before anything runs."""

import dataclasses

import pytest

from deployments.config import ServiceConfig
from deployments.limits import RequestLimits
from models.errors import InvalidRequestError
from tests.unit.deployments.fakes import (
    LIMITS,
    chat_body,
    completion_body,
    make_ingress,
    open_client,
)

pytestmark = pytest.mark.anyio

LOW = RequestLimits(
    max_json_depth=4,
    max_messages=2,
    max_stop_strings=1,
    max_stop_characters=3,
    max_logit_biases=1,
    max_metadata_pairs=1,
    max_request_tokens=100,
)
USER = {"role": "user", "content": "Hi"}


def nested(depth):
    return [nested(depth - 1)] if depth > 1 else []


async def answer(body, is_chat=True):
    ingress, handle = make_ingress(limits=dataclasses.replace(LIMITS, request=LOW))
    async with open_client(ingress) as client:
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        return await client.post(path, json=body), handle


@pytest.mark.parametrize(
    ("allowed", "refused", "param"),
    [
        ({"messages": [USER] * 2}, {"messages": [USER] * 3}, "messages"),
        ({"stop": ["a"]}, {"stop": ["a", "b"]}, "stop"),
        ({"stop": "abc"}, {"stop": "abcd"}, "stop"),
        ({"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ({"metadata": {"a": "b"}}, {"metadata": {"a": "b", "c": "d"}}, "metadata"),
        ({"max_tokens": 50, "n": 2}, {"max_tokens": 51, "n": 2}, "max_tokens"),
        (
            {"max_completion_tokens": 50, "max_tokens": 200, "n": 2},
            {"max_completion_tokens": 51, "n": 2},
            "max_completion_tokens",
        ),
        ({"max_tokens": 1000}, {"max_tokens": 101, "n": 3}, "max_tokens"),
        ({"unknown": nested(3)}, {"unknown": nested(4)}, None),
        ({"messages": [USER]}, {"messages": [{**USER, "x": {"y": []}}]}, None),
    ],
)
async def test_one_more_than_the_limit_is_refused_by_name(allowed, refused, param):
    accepted, _ = await answer(chat_body(**allowed))
    response, handle = await answer(chat_body(**refused))

    assert accepted.status_code == 200
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert handle.calls == []


async def test_tokens_of_all_prompts_and_candidates_count():
    fits = completion_body(prompt=["a", "b"], best_of=2, max_tokens=25)

    assert (await answer(fits, is_chat=False))[0].status_code == 200
    refused, _ = await answer({**fits, "max_tokens": 26}, is_chat=False)
    assert refused.json()["error"]["param"] == "max_tokens"
    assert "104" in refused.json()["error"]["message"]


async def test_a_handles_caller_has_the_same_limits():
    ingress, _ = make_ingress(limits=dataclasses.replace(LIMITS, request=LOW))

    with pytest.raises(InvalidRequestError, match="nested"):
        await ingress.chat(chat_body(unknown=nested(9)))


def test_every_limit_is_a_setting_that_cannot_be_above_the_schemas_own():
    assert ServiceConfig(allow_request_chat_template=True).request_limits.is_template_allowed
    assert not ServiceConfig().request_limits.is_template_allowed
    for field in dataclasses.fields(RequestLimits):
        if not field.name.startswith("max_"):
            continue
        config = ServiceConfig(**{field.name: 1})
        assert getattr(config.request_limits, field.name) == 1
    with pytest.raises(ValueError, match="max_messages"):
        ServiceConfig(max_messages=10**6)
