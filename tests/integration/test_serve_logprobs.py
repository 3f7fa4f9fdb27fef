"""Log probabilities of prompts and the fields around them, over real HTTP."""

import math

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.tiny_service_model import TINY_ID, save_tiny_model

pytestmark = pytest.mark.integration

LIMIT_S = 60
NUM_TOP = 3
# Longer than a step takes tokens (256), so that it is scored in several stretches.
LONG_PROMPT = "".join(f"{number} naïve cafés, " for number in range(20))


@pytest.fixture
def client(service):
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The served model and its tokenizer, as transformers runs them."""
    folder = tmp_path_factory.mktemp("reference")
    save_tiny_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def score(reference, token_ids):
    """What transformers says of each token but the first: its log probability, and the best."""
    model, _ = reference
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].double()
    distributions = logits.log_softmax(dim=-1)
    own = distributions.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    top = distributions.topk(NUM_TOP)
    ranks = 1 + (distributions > own[:, None]).sum(dim=1)
    return own.tolist(), top.values.tolist(), top.indices.tolist(), ranks.tolist()


def complete(service, **fields):
    body = {"model": TINY_ID, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=LIMIT_S)
    assert response.status_code == 200, response.text
    return response.json()


def test_three_ways_to_score_a_prompt_tell_the_numbers_of_transformers(service, client, reference):
    token_ids = reference[1](LONG_PROMPT)["input_ids"]
    assert len(token_ids) > 256
    own, top_values, top_ids, ranks = score(reference, token_ids)

    octo = complete(service, prompt=LONG_PROMPT, loglikelihood=True, logprobs=NUM_TOP)
    vllm = complete(service, prompt=LONG_PROMPT, prompt_logprobs=NUM_TOP)
    echo = client.completions.create(
        model=TINY_ID, prompt=LONG_PROMPT, echo=True, logprobs=NUM_TOP, max_tokens=0
    )

    content = octo["choices"][0]["logprobs"]["content"]
    listed = vllm["prompt_logprobs"]
    legacy = echo.choices[0].logprobs
    assert (listed[0], legacy.token_logprobs[0], legacy.top_logprobs[0]) == (None, None, None)
    told = [entry["logprob"] for entry in content]
    assert told == pytest.approx(own, abs=1e-4)
    # the same float from all three, not only nearly
    assert [
        entry[str(token_id)]["logprob"]
        for entry, token_id in zip(listed[1:], token_ids[1:], strict=True)
    ] == told
    assert legacy.token_logprobs[1:] == told
    for place, entry in enumerate(content):
        best = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert best == pytest.approx(top_values[place], abs=1e-4)
        ranked = {item["rank"]: int(key) for key, item in listed[1 + place].items()}
        assert [ranked[rank] for rank in range(1, NUM_TOP + 1)] == top_ids[place]
        assert listed[1 + place][str(token_ids[1 + place])]["rank"] == ranks[place]
    assert echo.choices[0].text == LONG_PROMPT
    assert echo.choices[0].finish_reason == "length"
    assert echo.usage.completion_tokens == 0
    assert octo["usage"]["completion_tokens"] == vllm["usage"]["completion_tokens"] == 4


def test_offsets_and_tokens_of_an_echo_point_into_its_text(client):
    answer = client.completions.create(
        model=TINY_ID, prompt="a café", echo=True, logprobs=0, max_tokens=3, temperature=0
    )

    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text.startswith("a café")
    # a token is a byte here; the character of two bytes has two tokens
    assert logprobs.text_offset[:7] == [0, 1, 2, 3, 4, 5, 5]
    assert logprobs.text_offset[7] == len("a café")
    assert len(logprobs.tokens) == 7 + answer.usage.completion_tokens
    assert all(math.isfinite(value) for value in logprobs.token_logprobs[1:])


def test_a_prompt_that_is_cached_and_one_of_token_ids_are_scored_the_same(service, reference):
    token_ids = reference[1](LONG_PROMPT)["input_ids"]
    complete(service, prompt=LONG_PROMPT)  # now the prefix cache has it

    scored = [
        complete(service, prompt=prompt, echo=True, logprobs=1, n=2)["choices"]
        for prompt in (LONG_PROMPT, token_ids)
    ]

    assert scored[0] == scored[1]
    first, second = scored[0]
    num_prompt_tokens = len(token_ids)
    prompt_part = first["logprobs"]["token_logprobs"][:num_prompt_tokens]
    assert second["logprobs"]["token_logprobs"][:num_prompt_tokens] == prompt_part
    assert first["text"].startswith(LONG_PROMPT)


def test_a_chat_is_scored_through_the_official_client(client, reference):
    _, tokenizer = reference
    messages = [{"role": "user", "content": "Hi there"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    own, *_ = score(reference, tokenizer(prompt)["input_ids"])

    answer = client.chat.completions.create(
        model=TINY_ID,
        messages=messages,
        max_tokens=1,
        logprobs=True,
        top_logprobs=1,
        extra_body={"loglikelihood": True, "prompt_logprobs": 0},
    )

    (choice,) = answer.choices
    told = [entry.logprob for entry in choice.logprobs.content]
    assert told == pytest.approx(own, abs=1e-4)
    assert all(len(entry.top_logprobs) == 1 for entry in choice.logprobs.content)
    listed = answer.model_extra["prompt_logprobs"]
    assert [next(iter(entry.values()))["logprob"] for entry in listed[1:]] == told
    assert choice.message.content is not None
    assert answer.usage.completion_tokens == 1


def test_a_streamed_echo_equals_the_whole_one(client):
    body = {
        "model": TINY_ID,
        "prompt": ["one é", [66, 67]],
        "echo": True,
        "max_tokens": 5,
        "temperature": 0,
        "n": 2,
    }
    whole = client.completions.create(**body)

    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(stream=True, **body):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert texts[0].startswith("one é")
    assert texts[1].startswith("one é")


def test_the_best_of_several_is_the_one_with_the_highest_mean(service):
    body = {"prompt": "x", "temperature": 1, "seed": 5, "max_tokens": 8, "ignore_eos": False}
    candidates = complete(service, n=6, logprobs=0, **body)
    best = complete(service, n=2, best_of=6, **body)

    def mean(choice):
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    expected = sorted(candidates["choices"], key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"] == candidates["usage"]


def test_words_and_ids_that_are_not_wanted_do_not_come(service, reference):
    _, tokenizer = reference
    allowed = tokenizer("ab c")["input_ids"]

    def draw(**fields):
        answer = complete(service, prompt="y", allowed_token_ids=allowed, max_tokens=40, **fields)
        return answer["choices"][0]["text"]

    free = draw(temperature=1, seed=3)
    banned = draw(temperature=1, seed=3, bad_words=["a", "bc"])

    assert set(free) == set("ab c")
    assert "bc" in free
    assert set(banned) == set("b c")
    assert "bc" not in banned


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"stop_token_ids": [100_000]}, "stop_token_ids"),
        ({"loglikelihood": True, "stream": True}, "loglikelihood"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_its_field(service, fields, param):
    response = httpx.post(
        f"{service.url}/v1/completions",
        json={"model": TINY_ID, "prompt": "a", **fields},
        timeout=LIMIT_S,
    )

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
