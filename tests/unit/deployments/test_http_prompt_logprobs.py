"""Log probabilities of the prompt, echoes, and the best of several choices, as clients get them."""

import pytest

from deployments import service
from models.errors import SequenceFailedError
from tests.unit.deployments.fakes import (
    MODEL_ID,
    admission,
    chat_body,
    completion_body,
    delta,
    end,
    logprob,
    make_ingress,
    open_client,
    prompt_logprobs,
    read_json_events,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def post(path, body, script):
    ingress, handle = make_ingress(script)
    async with open_client(ingress) as client:
        return await client.post(path, json=body), handle


def ranked(token, token_id, value, rank, top=()):
    return {
        **logprob(token, value),
        "token_id": token_id,
        "rank": rank,
        "top": [{**logprob(text, lp), "token_id": alternative} for text, alternative, lp in top],
    }


# The prompt is "The sky is": three tokens, the last two with two alternatives each.
SKY = ranked(" sky", 11, -9999.0, 40, [(" cat", 12, -0.5), (" dog", 13, -1.5)])
IS = ranked(" is", 14, -0.25, 1, [(" is", 14, -0.25), (" was", 15, -2.0)])
BLUE = logprob(" blue", -0.75, [(" blue", -0.75), (" red", -3.0)])


async def scored(call):
    """Tells what was asked for of the prompt in two stretches, then one word."""
    facts = {"prompt_text": "The sky is", "first_prompt_token": "The"}
    yield [admission(**(facts if call["is_prompt_reported"] else {}))]
    if call["num_prompt_logprobs"] is not None:
        yield [prompt_logprobs(1, SKY)]
        yield [prompt_logprobs(2, IS)]
    has_logprobs = "num_top_logprobs" in call["sampling"]
    is_scored_only = call["sampling"].get("max_tokens") == 0
    for choice in range(call["num_choices"]):
        text = "" if is_scored_only else " blue"
        logprobs = [BLUE] if has_logprobs and text else []
        yield [delta(text, choice, finish="length", logprobs=logprobs)]
    yield [end(completion=0 if is_scored_only else call["num_choices"])]


def token_object(record, num_top):
    return {
        **{key: record[key] for key in ("token", "logprob", "bytes")},
        "top_logprobs": [
            {key: top[key] for key in ("token", "logprob", "bytes")}
            for top in record["top"][:num_top]
        ],
    }


async def test_loglikelihood_fills_the_content_of_a_chat_with_the_prompt_alone():
    body = chat_body(loglikelihood=True, logprobs=True, top_logprobs=1, n=2)
    response, handle = await post(CHAT, body, scored)

    answer = response.json()
    for choice in answer["choices"]:
        assert choice["logprobs"] == {
            "content": [token_object(SKY, 1), token_object(IS, 1)],
            "refusal": None,
        }
        assert choice["message"]["content"] == " blue"
    assert handle.calls[0]["num_prompt_logprobs"] == 1
    assert "prompt_logprobs" not in answer


async def test_loglikelihood_needs_no_logprobs_and_then_has_no_alternatives():
    response, _ = await post(CHAT, chat_body(loglikelihood=True), scored)

    content = response.json()["choices"][0]["logprobs"]["content"]
    assert content == [token_object(SKY, 0), token_object(IS, 0)]


async def test_loglikelihood_of_a_completion_is_told_in_both_shapes():
    body = completion_body(prompt="The sky is", loglikelihood=True, logprobs=1)
    response, _ = await post(COMPLETIONS, body, scored)

    (choice,) = response.json()["choices"]
    assert choice["text"] == " blue"
    assert choice["logprobs"] == {
        "content": [token_object(SKY, 1), token_object(IS, 1)],
        "refusal": None,
        "tokens": [" sky", " is"],
        "token_logprobs": [-9999.0, -0.25],
        "top_logprobs": [{" cat": -0.5}, {" is": -0.25}],
        "text_offset": [3, 7],
    }


RANKED = [
    None,
    {
        "11": {"logprob": -9999.0, "rank": 40, "decoded_token": " sky"},
        "12": {"logprob": -0.5, "rank": 1, "decoded_token": " cat"},
        "13": {"logprob": -1.5, "rank": 2, "decoded_token": " dog"},
    },
    {
        "14": {"logprob": -0.25, "rank": 1, "decoded_token": " is"},
        "15": {"logprob": -2.0, "rank": 2, "decoded_token": " was"},
    },
]


async def test_prompt_logprobs_of_a_chat_stand_at_its_top():
    response, _ = await post(CHAT, chat_body(prompt_logprobs=2), scored)

    answer = response.json()
    assert answer["prompt_logprobs"] == RANKED
    assert answer["choices"][0]["logprobs"] is None
    # the token's own entry comes first
    assert next(iter(answer["prompt_logprobs"][1])) == "11"


async def test_prompt_logprobs_of_a_completion_stand_in_each_choice_too():
    response, _ = await post(COMPLETIONS, completion_body(prompt_logprobs=2, n=2), scored)

    answer = response.json()
    assert answer["prompt_logprobs"] == RANKED
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [RANKED, RANKED]


async def test_prompt_logprobs_of_zero_tell_the_tokens_own_ones():
    response, handle = await post(CHAT, chat_body(prompt_logprobs=0), scored)

    assert [list(entry) for entry in response.json()["prompt_logprobs"][1:]] == [["11"], ["14"]]
    assert handle.calls[0]["num_prompt_logprobs"] == 0


async def test_each_field_gets_its_own_number_of_alternatives():
    body = completion_body(echo=True, logprobs=1, prompt_logprobs=2)
    response, handle = await post(COMPLETIONS, body, scored)

    (choice,) = response.json()["choices"]
    assert handle.calls[0]["num_prompt_logprobs"] == 2
    assert choice["prompt_logprobs"] == RANKED
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {" cat": -0.5},
        {" is": -0.25},
        {" blue": -0.75},
    ]


async def test_an_echo_with_log_probabilities_has_the_prompt_then_the_output():
    body = completion_body(prompt="The sky is", echo=True, logprobs=2)
    response, _ = await post(COMPLETIONS, body, scored)

    (choice,) = response.json()["choices"]
    assert choice["text"] == "The sky is blue"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["The", " sky", " is", " blue"]
    assert logprobs["token_logprobs"] == [None, -9999.0, -0.25, -0.75]
    assert logprobs["top_logprobs"] == [
        None,
        {" cat": -0.5, " dog": -1.5},
        {" is": -0.25, " was": -2.0},
        {" blue": -0.75, " red": -3.0},
    ]
    assert logprobs["text_offset"] == [0, 3, 7, 10]
    assert [entry["token"] for entry in logprobs["content"]] == [" sky", " is", " blue"]


async def test_an_echo_without_new_tokens_only_scores_the_prompt():
    body = completion_body(prompt=[1, 2, 3], echo=True, logprobs=0, max_tokens=0)
    response, handle = await post(COMPLETIONS, body, scored)

    (choice,) = response.json()["choices"]
    assert choice["text"] == "The sky is"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["The", " sky", " is"]
    assert response.json()["usage"]["completion_tokens"] == 0
    assert handle.calls[0]["sampling"]["max_tokens"] == 0


async def test_an_echo_alone_asks_for_no_log_probabilities():
    response, handle = await post(COMPLETIONS, completion_body(prompt=[1], echo=True), scored)

    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("The sky is blue", None)
    assert handle.calls[0]["num_prompt_logprobs"] is None


async def test_a_prompt_of_text_is_echoed_as_it_was_sent():
    # the tokenizer would spell it otherwise: it normalises, or puts a token before it
    response, _ = await post(COMPLETIONS, completion_body(prompt="  the SKY ", echo=True), scored)

    assert response.json()["choices"][0]["text"] == "  the SKY  blue"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_every_choice_begins_with_its_own_prompt(is_stream):
    body = completion_body(prompt=["a", [1, 2, 3], "c"], n=2, echo=True, stream=is_stream)
    response, _ = await post(COMPLETIONS, body, scored)

    texts = dict.fromkeys(range(6), "")
    events = read_json_events(response.text)[0] if is_stream else [response.json()]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [
        *("a blue", "a blue"),
        *("The sky is blue", "The sky is blue"),
        *("c blue", "c blue"),
    ]


async def test_a_streamed_echo_is_an_event_of_its_own_before_the_output():
    response, _ = await post(
        COMPLETIONS, completion_body(prompt="The sky is", echo=True, stream=True), scored
    )

    events, is_complete = read_json_events(response.text)
    assert is_complete
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["The sky is", " blue", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


async def test_a_prompt_of_which_not_every_token_was_scored_is_an_error():
    async def script(call):
        yield [admission()]
        yield [prompt_logprobs(1, SKY)]
        yield [delta("x", finish="stop"), end()]

    response, _ = await post(CHAT, chat_body(prompt_logprobs=0), script)

    assert response.status_code == 500
    assert response.json()["error"]["message"] == str(
        SequenceFailedError("log probabilities of the prompt are missing")
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat_body(prompt_logprobs=9), "messages"),
        (COMPLETIONS, completion_body(echo=True, logprobs=4, n=2), "prompt"),
    ],
)
async def test_more_log_probabilities_than_an_answer_may_hold_are_refused(
    path, body, param, monkeypatch
):
    monkeypatch.setattr(service, "MAX_PROMPT_ENTRIES", 29)

    response, handle = await post(path, body, scored)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert "30 log probabilities" in response.json()["error"]["message"]
    assert handle.streams[0].is_cancelled


async def best_candidates(call):
    """Choice c's text is its number; the means per token are -2, -1, -3, -1."""
    means = [-2.0, -1.0, -3.0, -1.0]
    yield [admission()]
    for choice in range(call["num_choices"]):
        value = means[choice]
        yield [delta(str(choice), choice, logprobs=[logprob("a", value + 0.5)])]
        # longer choices have a lower sum, which does not count
        rest = [logprob("b", value - 0.5), *[logprob("c", value)] * choice]
        yield [delta("", choice, finish="stop", logprobs=rest)]
    yield [end(completion=14)]


async def test_the_best_choices_are_told_best_first_and_all_are_counted():
    response, handle = await post(CHAT, chat_body(n=3, best_of=4, seed=3), best_candidates)

    answer = response.json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["1", "3", "0"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 14
    assert handle.calls[0]["num_choices"] == 4


async def test_each_prompt_has_its_own_best_choice_with_its_own_echo_and_log_probabilities():
    body = completion_body(prompt=["a", "b"], best_of=4, echo=True, prompt_logprobs=None)
    response, _ = await post(COMPLETIONS, body, best_candidates)
    with_logprobs, _ = await post(
        COMPLETIONS, completion_body(prompt=["a", "b"], best_of=4, logprobs=0), best_candidates
    )

    assert [choice["text"] for choice in response.json()["choices"]] == ["a1", "b1"]
    for choice in with_logprobs.json()["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [-0.5, -1.5, -1.0]


async def test_handles_tell_the_same():
    ingress, _ = make_ingress(scored)

    answer = await ingress.complete(
        {"model": MODEL_ID, "prompt": "The sky is", "echo": True, "logprobs": 1}
    )
    events = [event async for event in ingress.stream_complete(completion_body(echo=True))]

    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -9999.0, -0.25, -0.75]
    assert events[0]["choices"][0]["text"] == "Hi"
