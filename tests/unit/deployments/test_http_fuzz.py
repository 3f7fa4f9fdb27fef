"""Generated requests: whatever comes, the answer is one that /openapi.json describes."""

import asyncio
import contextlib
import json
import urllib.parse

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from deployments.openapi_operations import AGENT_REQUEST_NAME
from tests.unit.deployments.described import DOCUMENT, assert_described, resolve
from tests.unit.deployments.fakes import (
    MODEL_ID,
    admission,
    delta,
    end,
    logprob,
    make_ingress,
    open_client,
    prompt_logprobs,
)
from tests.unit.deployments.schema_strategies import any_bodies, valid_values

CHAT = "/v1/chat/completions"
# What is sent beside one field that is drawn. One of the two paths of agents stands for both.
LEAST_BODIES = {
    CHAT: {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]},
    "/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"model": MODEL_ID, "prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}
# No status of a fault of the server's, and none that only load or time bring.
EXPECTED = {200, 400, 404, 413}

fuzz = settings(
    max_examples=12,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


async def answer_anything(call):
    """A model that tells all that a call asks for."""
    yield [admission(prompt_text="Hi", first_prompt_token="H")]
    if call["num_prompt_logprobs"] is not None:
        yield [prompt_logprobs(1, *(logprob("i", top=[("x", -0.1)] * 20) for _ in range(2)))]
    for choice in range(call["num_choices"]):
        yield [delta("d", choice, finish="stop", logprobs=[logprob("d", top=[("z", -1.0)] * 20)])]
    yield [end()]


@contextlib.contextmanager
def open_service():
    """A function that asks one service and returns the answer."""
    ingress, _ = make_ingress(answer_anything)

    async def work(method, path, options):
        async with open_client(ingress) as client:
            return await client.request(method, path, **options)

    with asyncio.Runner() as runner:
        yield lambda method, path, **options: runner.run(work(method, path, options))


def as_json(body):
    return {
        "content": json.dumps(body).encode(),
        "headers": {"content-type": "application/json"},
    }


def body_schema(path, query=""):
    if query == "?agent=true" and path == CHAT:
        return {"$ref": f"#/components/schemas/{AGENT_REQUEST_NAME}"}
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def name_a_model(body, name):
    """A body whose model there is, so that more than its name is looked at."""
    return {**body, "model": name} if isinstance(body, dict) and "model" in body else body


@pytest.mark.parametrize("path", LEAST_BODIES)
def test_any_body_gets_an_answer_that_is_described(path):
    bodies = st.builds(
        name_a_model,
        any_bodies(body_schema(path), resolve),
        st.sampled_from([MODEL_ID, MODEL_ID, "other", 3]),
    )

    @fuzz
    @given(body=bodies, query=st.sampled_from(["", "?agent=true", "?agent=false", "?agent=x"]))
    def check(body, query):
        response = ask("POST", path + query, **as_json(body))
        assert response.status_code in EXPECTED
        assert_described("POST", path, response)
        if response.status_code == 200:
            schema = {**body_schema(path, query), "components": DOCUMENT["components"]}
            jsonschema.Draft202012Validator(schema).validate(body)

    with open_service() as ask:
        check()


@pytest.mark.parametrize("path", LEAST_BODIES)
def test_any_field_gets_an_answer_that_is_described(path):
    properties = resolve(body_schema(path))["properties"]
    statuses = set()

    @fuzz
    @given(data=st.data(), field=st.sampled_from(sorted(properties)))
    def check(data, field):
        value = data.draw(valid_values(properties[field], resolve))
        response = ask("POST", path, **as_json({**LEAST_BODIES[path], field: value}))
        assert response.status_code in EXPECTED
        assert_described("POST", path, response)
        statuses.add(response.status_code)

    with open_service() as ask:
        check()
    # Neither is everything refused.
    assert 200 in statuses


def test_any_model_gets_an_answer_that_is_described():
    @fuzz
    @given(
        name=st.text(st.characters(exclude_characters="\n"), min_size=1, max_size=8),
        method=st.sampled_from(["GET", "POST", "DELETE"]),
    )
    def check(name, method):
        response = ask(method, f"/v1/models/{urllib.parse.quote(name, safe='')}")
        assert response.status_code in ({200, 400, 404} if method == "GET" else {405})
        assert_described("GET", "/v1/models/x", response)

    with open_service() as ask:
        check()
