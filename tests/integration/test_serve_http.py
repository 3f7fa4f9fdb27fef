"""The service over real HTTP, mostly through the official client."""

import concurrent.futures
import json
import socket
import time

import httpx
import openai
import pytest

from models.config import KVCacheConfig
from tests.integration.conftest import BUNDLED_ID
from tests.integration.tiny_service_model import TINY_ID, TINY_WINDOW_TOKENS

pytestmark = pytest.mark.integration

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Ends within this time or is broken; nothing here is about speed.
LIMIT_S = 60
BLOCK_SIZE_TOKENS = KVCacheConfig().block_size_tokens


@pytest.fixture
def client(service):
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as opened:
        yield opened


def wait_until_idle(service, model_id=TINY_ID, limit_s=10):
    """Wait until an engine runs nothing and holds no block."""
    end_s = time.monotonic() + limit_s
    while True:
        stats = service.stats(model_id)
        is_idle = stats["num_running"] == stats["num_waiting"] == 0
        if is_idle and stats["num_free_blocks"] == stats["num_blocks"]:
            return
        assert time.monotonic() < end_s, stats
        time.sleep(0.05)


def wait_until_running(service, num_running, model_id=TINY_ID, limit_s=10):
    end_s = time.monotonic() + limit_s
    while service.stats(model_id)["num_running"] < num_running:
        assert time.monotonic() < end_s
        time.sleep(0.02)


def num_held_blocks(stats):
    return stats["num_blocks"] - stats["num_free_blocks"]


def chat(client, **fields):
    return client.chat.completions.create(
        **{"model": TINY_ID, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    )


def join_text(chunks, index=0):
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_the_bundled_model_knows_the_capital_of_france(client):
    answer = chat(client, model=BUNDLED_ID)

    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 24


def test_the_official_client_streams_what_it_gets_whole(client):
    body = {"extra_body": {"ignore_eos": True}, "logprobs": True, "top_logprobs": 2}
    whole = chat(client, **body)

    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **body))

    assert join_text(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    expected = whole.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [entry.token for entry in expected]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in expected], abs=1e-5
    )


def test_two_clients_at_once_get_what_each_gets_alone(client):
    bodies = [{"seed": seed, "temperature": 1, "max_tokens": 40} for seed in range(4)]
    alone = [chat(client, **body).choices[0].message.content for body in bodies]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: join_text(chat(client, stream=True, **body)), bodies))

    assert together == alone
    assert len(set(alone)) == 4


def test_several_choices_equal_single_runs_with_derived_seeds(client):
    from sampling.params import derive_seed

    body = {"temperature": 1, "max_tokens": 16}
    several = chat(client, n=4, seed=11, **body)

    single = [
        chat(client, seed=derive_seed(11, choice), **body).choices[0].message.content
        for choice in range(4)
    ]

    assert [choice.message.content for choice in several.choices] == single


def test_prompts_of_every_form_are_completed(client):
    def complete(prompt):
        return client.completions.create(
            model=TINY_ID, prompt=prompt, max_tokens=5, temperature=0, logprobs=1
        )

    text, batch = complete("ab"), complete(["ab", "xyz"])

    assert batch.choices[0].text == text.choices[0].text
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.usage.prompt_tokens == 2 + 3
    assert len(text.choices[0].logprobs.token_logprobs) == text.usage.completion_tokens
    ids = complete([10, 11, 12])
    assert complete([[10, 11, 12], [10]]).choices[0].text == ids.choices[0].text


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_stop_string_ends_the_text_before_it(client, is_stream):
    body = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    whole = chat(client, **body).choices[0].message.content
    pairs = [whole[start : start + 2] for start in range(10, len(whole) - 1)]
    stop = next(pair for pair in pairs if pair.isascii())
    expected = whole[: whole.index(stop)]

    answer = chat(client, stop=stop, stream=is_stream, **body)

    text = join_text(answer) if is_stream else answer.choices[0].message.content
    assert text == expected


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 1000}, 400, "n"),
        ({"stop": ["x"] * 50}, 400, "stop"),
        ({"logit_bias": {"999999": 5}}, 400, "logit_bias"),
        ({"max_tokens": TINY_WINDOW_TOKENS}, 400, "max_tokens"),
        ({"model": "nobody"}, 404, "model"),
        ({"extra_body": {"peft": "nobody"}}, 404, "peft"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
        ({"messages": [*QUESTION, {"role": "system", "content": "x"}]}, 400, "messages"),
    ],
)
def test_bad_input_is_an_error_of_the_official_client_that_names_the_field(
    client, fields, status, param
):
    with pytest.raises(openai.APIStatusError) as caught:
        chat(client, **fields)

    assert caught.value.status_code == status
    assert caught.value.body["param"] == param
    assert caught.value.body["message"]


def test_the_words_of_the_template_and_both_numbers_are_told(client):
    with pytest.raises(openai.BadRequestError, match="system message must come first"):
        chat(client, messages=[*QUESTION, {"role": "system", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "x" * 5000}])
    # A byte is a token, and so the template's marks count too.
    num_prompt_tokens = len("<user>" + "x" * 5000 + "<assistant>")
    assert str(num_prompt_tokens) in caught.value.body["message"]
    assert str(TINY_WINDOW_TOKENS) in caught.value.body["message"]
    assert caught.value.body["code"] == "context_length_exceeded"


def test_bad_bodies_are_refused_and_the_connection_goes_on(service):
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=LIMIT_S) as connection:
        path = "/v1/chat/completions"
        assert connection.post(path, content=b"{").status_code == 400
        assert connection.post(path, content=b"[" * 50_000).status_code == 400
        assert connection.post(path, content=b" " * 200_000).status_code == 413
        assert connection.get(path).status_code == 405
        assert connection.get("/nothing").json()["error"]["code"] == "not_found"
        response = connection.post("/v1/completions", json={"model": TINY_ID, "prompt": "a"})
        assert response.status_code == 200
        assert len(response.headers.get_list("x-request-id")) == 1


def test_bad_requests_leave_a_running_stream_alone(client):
    body = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
    alone = chat(client, **body).choices[0].message.content
    stream = iter(chat(client, stream=True, **body))
    chunks = [next(stream) for _ in range(3)]

    for fields in ({"logit_bias": {"999999": 5}}, {"n": 0}, {"model": "nobody"}):
        with pytest.raises(openai.APIStatusError):
            chat(client, **fields)
    chunks.extend(stream)

    assert join_text(chunks) == alone


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_place_while_others_go_on(service, client, is_stream):
    wait_until_idle(service)
    num_tokens = 1000
    other = iter(chat(client, stream=True, max_tokens=num_tokens, extra_body={"ignore_eos": True}))
    next(other)
    most_blocks_of_other = (num_tokens + 100) // BLOCK_SIZE_TOKENS + 1
    body = json.dumps(
        {
            "model": TINY_ID,
            "prompt": "abc" * num_tokens,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": is_stream,
            "n": 2,
        }
    ).encode()
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until_running(service, 3)
        assert num_held_blocks(service.stats(TINY_ID)) > 2 * most_blocks_of_other

    end_s = time.monotonic() + 10
    while (stats := service.stats(TINY_ID))["num_running"] > 1:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert stats["num_running"] == 1
    assert num_held_blocks(stats) <= most_blocks_of_other
    *_, last = other
    assert last.choices[0].finish_reason == "length"
    wait_until_idle(service)


def test_more_requests_than_places_are_refused_with_a_429(service):
    wait_until_idle(service)

    body = {
        "model": TINY_ID,
        "prompt": "abc",
        "max_tokens": 120,
        "ignore_eos": True,
    }

    def attempt(_):
        return httpx.post(f"{service.url}/v1/completions", json=body, timeout=LIMIT_S)

    with concurrent.futures.ThreadPoolExecutor(48) as pool:
        responses = list(pool.map(attempt, range(48)))

    refused = [response for response in responses if response.status_code != 200]
    assert len(responses) - len(refused) >= 8 + 8
    assert refused
    for response in refused:
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert response.headers["retry-after"]
    assert attempt(0).status_code == 200


def test_models_and_health_are_told(service, client):
    assert {model.id for model in client.models.list()} == {BUNDLED_ID, TINY_ID}
    assert client.models.retrieve(TINY_ID).owned_by == "medley"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    health = httpx.get(f"{service.url}/health", timeout=LIMIT_S)
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


@pytest.mark.anyio
async def test_the_asynchronous_client_streams(service):
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=TINY_ID, messages=QUESTION, max_tokens=8, stream=True
        )
        chunks = [chunk async for chunk in stream]

    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
