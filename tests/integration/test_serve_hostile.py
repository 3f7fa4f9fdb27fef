"""Two hundred hostile requests beside ten healthy streams: each gets its 4xx, no stream changes."""

import asyncio
import json
import random
import socket

import httpx
import psutil
import pytest

from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

LIMIT_S = 120
NUM_HOSTILE = 200
NUM_STREAMS = 10
MOST_AT_ONCE = 8
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# What ends somewhere in it: a whole body is refused for its size from 100,000 bytes on.
MAX_GROWTH_BYTES = 64 << 20


def stream_body(number):
    return {
        "model": TINY_ID,
        "messages": [{"role": "user", "content": f"stream {number}"}],
        "temperature": 0.8,
        "seed": number,
        "max_tokens": 120,
        "ignore_eos": True,
        "stream": True,
    }


def chat(**fields):
    return {"model": TINY_ID, "messages": [{"role": "user", "content": "x"}], **fields}


def complete(**fields):
    return {"model": TINY_ID, "prompt": "x", **fields}


KINDS = [
    (CHAT, chat(n=5_000_000)),
    (CHAT, chat(n=True)),
    (CHAT, chat(n=1.5)),
    (CHAT, chat(max_tokens=2**63)),
    (CHAT, chat(max_tokens=-1)),
    (CHAT, chat(top_logprobs=10**9, logprobs=True)),
    (CHAT, chat(top_logprobs=5)),
    (CHAT, chat(temperature="hot")),
    (CHAT, chat(temperature=1e308)),
    (CHAT, chat(stop=["a"] * 10_000)),
    (CHAT, chat(stop="a" * 50_000)),
    (CHAT, chat(logit_bias={str(number): 1 for number in range(5000)})),
    (CHAT, chat(logit_bias={"999999999": 5})),
    (CHAT, chat(logit_bias={"-1": 5})),
    (CHAT, chat(logit_bias={"AI": -100})),
    (CHAT, chat(messages=[])),
    (CHAT, chat(messages=[{"role": "foo", "content": "x"}])),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
    (CHAT, chat(chat_template="{% for a in range(9999) %}{% endfor %}")),
    (CHAT, chat(chat_template_kwargs={"tokenize": False})),
    (CHAT, chat(metadata={"k" * 100: "v"})),
    (CHAT, chat(peft="../../etc/passwd")),
    (CHAT, chat(peft="a\0b")),
    (CHAT, chat(peft="a" * 4000)),
    (CHAT, chat(model="nobody")),
    (CHAT, chat(min_tokens=9, max_tokens=2)),
    (CHAT, chat(seed=2**64)),
    (CHAT, chat(stream_options={"include_usage": True})),
    (CHAT, chat(response_format={"type": "json_object"})),
    (COMPLETIONS, complete(prompt=[-1])),
    (COMPLETIONS, complete(prompt=[2**32 - 1])),
    (COMPLETIONS, complete(prompt=[[]])),
    (COMPLETIONS, complete(prompt=[])),
    (COMPLETIONS, complete(prompt=[1.5])),
    (COMPLETIONS, complete(prompt="x" * 90_000)),
    (COMPLETIONS, complete(prompt=["x"] * 1000)),
    (COMPLETIONS, complete(best_of=1, n=2)),
    (COMPLETIONS, complete(logprobs=6)),
    (COMPLETIONS, complete(suffix="y")),
    (COMPLETIONS, complete(bad_words=["x" * 5000])),
]
RAW = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b'{"model": NaN}',
    b'{"model": "tiny", "messages": ' + b"[" * 2000,
    b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b"x" * 150_000,
]


def hostile_requests():
    draw = random.Random(0)
    requests = [(path, json.dumps(body).encode()) for path, body in KINDS]
    requests += [(CHAT, data) for data in RAW]
    while len(requests) < NUM_HOSTILE:
        path, data = draw.choice(requests[: len(KINDS)])
        cut = bytearray(data[: draw.randrange(1, min(len(data), 2000))])
        cut[draw.randrange(len(cut))] = draw.randrange(256)
        requests.append((path, bytes(cut)))
    draw.shuffle(requests)
    return requests


async def read_stream(client, number):
    # Two of them wait for a place; all at the same moment would be more than may wait.
    await asyncio.sleep(0.2 * number)
    async with client.stream("POST", CHAT, json=stream_body(number)) as response:
        assert response.status_code == 200
        events = [line async for line in response.aiter_lines() if line]
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    return "".join(
        choice["delta"].get("content", "") for piece in pieces for choice in piece["choices"]
    )


async def read_streams(client):
    return await asyncio.gather(*(read_stream(client, number) for number in range(NUM_STREAMS)))


async def attack(client, requests):
    room = asyncio.Semaphore(MOST_AT_ONCE)

    async def send(path, data):
        async with room:
            response = await client.post(
                path, content=data, headers={"content-type": "application/json"}
            )
        return data, response

    return await asyncio.gather(*(send(path, data) for path, data in requests))


def half_open(url, data):
    """Return a connection that has promised more than it sends, or reads nothing of its answer."""
    connection = socket.create_connection((url.host, url.port))
    connection.sendall(data)
    return connection


def promise(num_bytes):
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {num_bytes}\r\n\r\n"
    ).encode()


def ingress_memory_bytes():
    sizes = [
        process.memory_info().rss
        for process in psutil.process_iter(["name", "cmdline"])
        if any("ServeReplica:medley:Ingress" in part for part in process.info["cmdline"] or ())
    ]
    assert sizes
    return max(sizes)


def test_hostile_requests_get_their_4xx_and_healthy_streams_do_not_change(service):
    url = httpx.URL(service.url)
    body = json.dumps(stream_body(0)).encode()

    async def run():
        async with httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S) as client:
            alone = await read_streams(client)
            await attack(client, hostile_requests()[:50])
            before_bytes = ingress_memory_bytes()
            waiting = [half_open(url, promise(5000) + b'{"model"') for _ in range(10)]
            waiting += [half_open(url, promise(len(body)) + body) for _ in range(3)]
            beside, answers = await asyncio.gather(
                read_streams(client), attack(client, hostile_requests())
            )
            for connection in waiting:
                connection.close()
            return alone, beside, answers, ingress_memory_bytes() - before_bytes

    alone, beside, answers, growth_bytes = asyncio.run(run())

    assert beside == alone
    assert len(set(alone)) == NUM_STREAMS
    assert len(answers) == NUM_HOSTILE
    for data, response in answers:
        assert 400 <= response.status_code < 500, (data[:200], response.text[:300])
        assert response.json()["error"]["message"]
    assert growth_bytes < MAX_GROWTH_BYTES
