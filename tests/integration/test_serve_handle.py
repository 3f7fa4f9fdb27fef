"""The service through Python handles: in this process, and from a driver of its own."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from models.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    ModelNotFoundError,
)
from tests.integration.conftest import BUNDLED_ID
from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 60


def body(**fields):
    return {
        "model": TINY_ID,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        **fields,
    }


def stream(service, method, request):
    return list(service.handle.options(stream=True, method_name=method).remote(request))


def test_the_bundled_model_says_paris_through_a_handle(service):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    request = {"model": BUNDLED_ID, "messages": question, "temperature": 0, "max_tokens": 24}

    answer = service.handle.chat.remote(request).result(timeout_s=LIMIT_S)

    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_call_returns_the_answer_and_a_stream_its_events(service):
    whole = service.handle.chat.remote(body()).result(timeout_s=LIMIT_S)

    events = stream(service, "stream_chat", body(stream_options={"include_usage": True}))

    text = "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )
    assert text == whole["choices"][0]["message"]["content"]
    for usage in (events[-1]["usage"], whole["usage"]):
        assert usage["completion_tokens"] == 12
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_completion_call_does_the_same(service):
    request = {"model": TINY_ID, "prompt": ["a", [1, 2]], "max_tokens": 6, "temperature": 0}

    whole = service.handle.complete.remote(request).result(timeout_s=LIMIT_S)
    events = stream(service, "stream_complete", request)

    for index in range(2):
        text = "".join(
            choice["text"]
            for event in events
            for choice in event["choices"]
            if choice["index"] == index
        )
        assert text == whole["choices"][index]["text"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"messages": []}, InvalidRequestError),
        ({"model": "nobody"}, ModelNotFoundError),
        ({"max_tokens": 1_000_000}, ContextLengthExceededError),
    ],
)
def test_errors_arrive_as_our_classes(service, fields, error):
    with pytest.raises(error) as caught:
        service.handle.chat.remote(body(**fields)).result(timeout_s=LIMIT_S)
    with pytest.raises(error):
        stream(service, "stream_chat", body(**fields))

    assert type(caught.value.cause) is error


def test_a_caller_that_cancels_its_stream_frees_the_engine(service):
    call = service.handle.options(stream=True, method_name="stream_chat").remote(
        body(max_tokens=3000)
    )
    next(call)
    next(call)

    call.cancel()

    end_s = time.monotonic() + 10
    while service.stats(TINY_ID)["num_running"]:
        assert time.monotonic() < end_s
        time.sleep(0.02)


DRIVER = textwrap.dedent(
    """
    import ray
    from ray import serve

    ray.init(address="auto", log_to_driver=False)
    handle = serve.get_app_handle("medley")

    def get_text(choice):
        said = choice.get("message") or choice.get("delta") or {}
        return choice.get("text") or said.get("content") or ""

    def compare(name, **fields):
        body = {"model": "tiny", "temperature": 0, "max_tokens": 9, "ignore_eos": True, **fields}
        whole = handle.options(method_name=name).remote(body).result(timeout_s=60)
        events = handle.options(stream=True, method_name=f"stream_{name}").remote(body)
        streamed = "".join(get_text(choice) for event in events for choice in event["choices"])
        print(whole["object"], whole["usage"]["completion_tokens"])
        print("same text:", bool(streamed) and streamed == get_text(whole["choices"][0]))

    compare("chat", messages=[{"role": "user", "content": "Hi"}])
    compare("complete", prompt="Hi")
    try:
        handle.chat.remote({"model": "nobody", "messages": []}).result(timeout_s=60)
    except ValueError:
        raise
    except Exception as error:
        print("error:", type(error.cause).__name__, error.cause)
    """
)
DRIVER_OUTPUT = [
    "chat.completion 9",
    "same text: True",
    "text_completion 9",
    "same text: True",
]


def run_driver(service, **environment):
    # "auto" finds the one Ray of this machine; where there are more, it must be told which.
    num_rays = sum(process.name() == "gcs_server" for process in psutil.process_iter())
    address = {"RAY_ADDRESS": service.ray_address} if num_rays > 1 else {}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER],
        cwd=ROOT,
        env={**os.environ, **address, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S * 2,
        check=False,
    )


def test_a_driver_in_another_process_calls_the_service(service):
    result = run_driver(service)

    assert result.returncode == 0, result.stderr
    *output, error = result.stdout.splitlines()
    assert output == DRIVER_OUTPUT
    assert error.startswith("error: InvalidRequestError messages:")


def test_a_driver_under_another_home_needs_rays_token(service, tmp_path):
    token = Path.home() / ".ray" / "auth_token"

    without_token = run_driver(service, HOME=str(tmp_path))
    with_token = run_driver(service, HOME=str(tmp_path), RAY_AUTH_TOKEN_PATH=str(token))

    assert without_token.returncode != 0
    assert without_token.stdout == ""
    assert with_token.returncode == 0, with_token.stderr
    assert with_token.stdout.splitlines()[:-1] == DRIVER_OUTPUT
