"""One seeded request through the whole service: equal answers whatever happens around it.

The law of row independence as a caller sees it: text and log probabilities, in bfloat16 on the CPU.
"""

import asyncio
import json

import httpx
import pytest

from tests.conftest import CACHE_FOLDER
from tests.integration.conftest import BUNDLED_ID
from tests.integration.serving import run_serving_process

pytestmark = pytest.mark.integration

LIMIT_S = 300
NUM_NEIGHBOURS = 31
# With blocks this small every few tokens need another one; a handful of requests fill the pool.
SCARCE_BLOCK_TOKENS = 2
SCARCE_BLOCK_BYTES = 23040 * SCARCE_BLOCK_TOKENS
NUM_SCARCE_BLOCKS = 200
REQUEST = {
    "model": BUNDLED_ID,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "seed": 7,
    "temperature": 1,
    "max_tokens": 24,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 3,
}


def neighbour(index):
    """Return a request unlike the others: length, parameters, form of the answer."""
    fields = {
        "model": BUNDLED_ID,
        "messages": [{"role": "user", "content": f"Write {'very ' * (index % 7)}short: {index}"}],
        "temperature": (0, 0.7, 1.5)[index % 3],
        "max_tokens": 12 + index % 9,
        "ignore_eos": True,
        "stream": index % 2 == 0,
    }
    if index % 4 == 0:
        fields |= {"top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {"260": -5}}
    if index % 5 == 0:
        fields |= {"seed": index, "logprobs": True, "top_logprobs": 5}
    return fields


def read_stream(body):
    """Return text and log probabilities of a streamed answer."""
    events = [
        line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    logprobs = [
        entry
        for choice in choices
        if choice.get("logprobs")
        for entry in choice["logprobs"]["content"]
    ]
    return text, logprobs


def read_answer(answer):
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"], choice["logprobs"]["content"]


class Caller:
    """Asks one service."""

    def __init__(self, url):
        self._url = f"{url}/v1/chat/completions"

    def alone(self, **fields):
        answer = httpx.post(self._url, json={**REQUEST, **fields}, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        return answer

    def among_others(self):
        """Return the answer, asked for in the middle of a crowd."""

        async def ask_all():
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as client:
                bodies = [neighbour(index) for index in range(NUM_NEIGHBOURS)]
                bodies.insert(NUM_NEIGHBOURS // 2, REQUEST)
                return await asyncio.gather(*(client.post(self._url, json=body) for body in bodies))

        answers = asyncio.run(ask_all())
        assert [answer.status_code for answer in answers] == [200] * (NUM_NEIGHBOURS + 1)
        return answers[NUM_NEIGHBOURS // 2]


@pytest.fixture(scope="module")
def expected(service):
    """Text and log probabilities of the request alone, with nothing cached."""
    answer = Caller(service.url).alone(cache_salt="nobody else's")
    assert not answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return read_answer(answer)


def test_the_answer_has_a_log_probability_for_each_token(expected):
    text, logprobs = expected

    assert text
    assert len(logprobs) == REQUEST["max_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in logprobs)


def test_a_prefix_hit_changes_nothing(service, expected):
    caller = Caller(service.url)
    caller.alone()

    hit = caller.alone()

    assert hit.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert read_answer(hit) == expected


def test_a_stream_says_the_same(service, expected):
    assert read_stream(Caller(service.url).alone(stream=True).text) == expected


def test_another_seed_says_something_else(service, expected):
    assert read_answer(Caller(service.url).alone(seed=8)) != expected


def test_neighbours_change_nothing(service, expected):
    assert read_answer(Caller(service.url).among_others()) == expected


def test_a_restarted_service_with_other_chunks_and_preemption_says_the_same(expected):
    arguments = {
        "cache_folder": str(CACHE_FOLDER),
        "shutdown_grace_s": 2.0,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 40,
        "block_size_tokens": SCARCE_BLOCK_TOKENS,
        "kv_budget_bytes": SCARCE_BLOCK_BYTES * (NUM_SCARCE_BLOCKS + 1),
    }
    with run_serving_process(arguments) as process:
        caller = Caller(process.url)
        alone = read_answer(caller.alone())
        crowded = read_answer(caller.among_others())
        stats = process.stats(BUNDLED_ID)

    assert alone == expected
    assert crowded == expected
    assert stats["num_preemptions"] > 0
