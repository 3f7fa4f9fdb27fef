"""Streamed and whole answers say the same, over a generated set of requests."""

import asyncio
import json
import random

import httpx
import pytest

from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

LIMIT_S = 120
NUM_REQUESTS = 60
MOST_AT_ONCE = 6
PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


def generate(number):
    """Return (is_chat, body): what a caller might send, the same for the same number."""
    draw = random.Random(number)
    is_chat = draw.random() < 0.6
    text = "".join(draw.choices("abc xyzäß€😀", k=draw.randint(1, 60)))
    optional = {
        "n": draw.randint(1, 3),
        "temperature": draw.choice([0, 0.5, 1.0, 1.7]),
        "top_p": draw.choice([0, 0.5, 0.9]),
        "top_k": draw.choice([-1, 1, 20]),
        "min_p": draw.choice([0.0, 0.2]),
        "typical_p": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "stop": draw.choice([["e"], ["th", "x"], [" "]]),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "logit_bias": {str(draw.randrange(256)): 5.0},
        "skip_special_tokens": False,
    }
    body = {name: value for name, value in optional.items() if draw.random() < 0.4}
    body |= {"model": TINY_ID, "seed": number, "max_tokens": draw.randint(2, 40)}
    if is_chat:
        body["messages"] = [{"role": "user", "content": text}]
        if draw.random() < 0.5:
            body |= {"logprobs": True, "top_logprobs": draw.randint(0, 3)}
    else:
        body["prompt"] = draw.choice([text, [text, "b"], [3, 4, 5]])
        if draw.random() < 0.5:
            body["logprobs"] = draw.randint(0, 3)
        # Log probabilities of an echoed prompt do not go with a stream.
        elif draw.random() < 0.3:
            body["echo"] = True
    return is_chat, body


def merge(events):
    """Put a stream together into the choices of a whole answer."""
    choices = {}
    for event in events:
        for choice in event["choices"]:
            told = choices.setdefault(
                choice["index"], {"text": "", "logprobs": None, "finish_reason": None, "ends": 0}
            )
            told["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice["logprobs"] is not None:
                told["logprobs"] = add_lists(told["logprobs"], choice["logprobs"])
            if choice["finish_reason"] is not None:
                told |= {"finish_reason": choice["finish_reason"], "ends": told["ends"] + 1}
    return choices


def add_lists(first, second):
    if first is None:
        return second
    return {
        name: value if value is None else [*first[name], *value] for name, value in second.items()
    }


def choices_of(answer):
    return {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            "ends": 1,
        }
        for choice in answer["choices"]
    }


async def ask_both(client, number):
    is_chat, body = generate(number)
    whole = await client.post(PATHS[is_chat], json=body)
    assert whole.status_code == 200, (body, whole.text)
    streamed = await client.post(
        PATHS[is_chat],
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert streamed.status_code == 200, (body, streamed.text)
    lines = [line for line in streamed.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    return body, whole.json(), events


def without_offsets(choices):
    """Leave out what counts from a stream's own pieces; they are compared in unit tests."""
    for choice in choices.values():
        if choice["logprobs"]:
            choice["logprobs"].pop("text_offset", None)
    return choices


def test_text_logprobs_finish_reasons_and_usage_are_the_same_streamed_or_not(service):
    async def ask_all():
        room = asyncio.Semaphore(MOST_AT_ONCE)

        async def ask(client, number):
            async with room:
                return await ask_both(client, number)

        async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(NUM_REQUESTS)))

    finish_reasons = set()
    for body, whole, events in asyncio.run(ask_all()):
        expected = without_offsets(choices_of(whole))
        assert without_offsets(merge(events)) == expected, body
        *_, last = events
        assert last["choices"] == []
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][count] == whole["usage"][count], body
        assert len({event["id"] for event in events}) == 1
        finish_reasons |= {choice["finish_reason"] for choice in expected.values()}
    assert finish_reasons == {"stop", "length"}
