"""The same service where HAProxy stands in for Serve's own proxy."""

import json
import socket
import time

import httpx
import openai
import pytest

from tests.integration.serving import run_serving_process
from tests.integration.tiny_service_model import TINY_ID, save_tiny_model

pytestmark = pytest.mark.integration

LIMIT_S = 60


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    arguments = {
        "model": str(folder),
        "model_id": TINY_ID,
        "dtype": "float32",
        "kv_budget_bytes": 16 << 20,
        "num_threads": 1,
        "shutdown_grace_s": 1.0,
    }
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    with run_serving_process(arguments, environment) as process:
        yield process


@pytest.fixture
def client(serving):
    with openai.OpenAI(
        base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as opened:
        yield opened


def wait_for_running(serving, num_running):
    end_s = time.monotonic() + LIMIT_S
    while (stats := serving.stats(TINY_ID))["num_running"] != num_running:
        assert time.monotonic() < end_s, stats
        time.sleep(0.02)


def complete(client, **fields):
    return client.completions.create(
        model=TINY_ID,
        prompt="abc",
        temperature=0,
        extra_body={"ignore_eos": True},
        **{"max_tokens": 30, **fields},
    )


def test_haproxy_and_nobody_else_listens_on_the_port(serving):
    assert serving.listeners() == {"haproxy"}


def test_a_stream_has_the_text_of_the_whole_answer(client):
    whole = complete(client)

    chunks = list(complete(client, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_keep_their_status_and_shape(serving, client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, max_tokens=10**6)
    assert caught.value.body["code"] == "context_length_exceeded"
    missing = httpx.get(f"{serving.url}/nothing", timeout=LIMIT_S)
    assert missing.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_place(serving, is_stream):
    body = {
        "model": TINY_ID,
        "prompt": "abc",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": is_stream,
    }
    # Whoever leaves before HAProxy has passed the request on is not noticed: it has to run first.
    url = httpx.URL(f"{serving.url}/v1/completions")
    data = json.dumps(body).encode()
    head = (
        f"POST {url.path} HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), timeout=LIMIT_S) as leaving:
        leaving.sendall(head.encode() + data)
        if is_stream:
            assert leaving.recv(1)
        wait_for_running(serving, 1)

    wait_for_running(serving, 0)
