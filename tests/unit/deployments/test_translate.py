"""From requests to calls, and from calls to what the engine reads."""

import pytest

from deployments.answer_form import LogprobScope
from deployments.calls import to_generation_request
from deployments.http_errors import PROMPT_PARAM
from deployments.model_directory import Selection
from deployments.translate import make_chat_job, make_completion_job
from deployments.wire import parse_chat_request, parse_completion_request
from models.requests import ChatPrompt, TextPrompt, TokenPrompt
from sampling.errors import InvalidSamplingParamsError
from sampling.params import SamplingParams
from tests.unit.deployments.fakes import MODEL_ID, chat_body, completion_body

BASE = Selection(model_id=MODEL_ID, adapter_id=None)


def chat_job(**fields):
    request = parse_chat_request(chat_body(**fields))
    return make_chat_job(request, BASE, "key", lambda: 5)


def completion_job(**fields):
    seeds = iter(range(100))
    request = parse_completion_request(completion_body(**fields))
    return make_completion_job(request, BASE, "key", lambda: next(seeds))


def engine_request(**fields):
    return to_generation_request(chat_job(**fields).calls[0])


def test_a_bare_request_takes_every_default_of_the_engine():
    request = engine_request()

    assert request.sampling == SamplingParams()
    assert not request.is_max_tokens_explicit
    assert request.num_choices == 1
    assert request.seed == 5
    assert request.stop == ()
    assert request.is_special_token_skipped
    assert not request.is_stop_included
    assert request.cache_salt is None
    assert request.timeout_s is None
    assert request.adapter_id is None
    assert request.adapter is None


def test_every_sampling_field_reaches_the_engine():
    request = engine_request(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        typical_p=0.7,
        allowed_token_ids=[9, 7, 5],
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        logit_bias={"5": -1.5, "7": 3},
        min_tokens=2,
        max_tokens=9,
        stop_token_ids=[4, 6],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )

    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        typical_p=0.7,
        allowed_token_ids=(9, 7, 5),
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        logit_bias=((5, -1.5), (7, 3.0)),
        min_tokens=2,
        max_tokens=9,
        stop_token_ids=(4, 6),
        ignore_eos=True,
        num_top_logprobs=3,
    )
    assert request.is_max_tokens_explicit


def test_every_other_field_reaches_the_engine():
    request = engine_request(
        n=4,
        seed=-1,
        stop=["a", "b"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        cache_salt="tenant",
        timeout_s=2.5,
    )

    assert request.num_choices == 4
    assert request.seed == -1
    assert request.stop == ("a", "b")
    assert request.is_stop_included
    assert not request.is_special_token_skipped
    assert request.cache_salt == "tenant"
    assert request.timeout_s == 2.5


def test_every_prompt_of_a_completion_gets_the_time_limit():
    job = completion_job(prompt=["a", "b"], timeout_s=60)

    assert [call["timeout_s"] for call in job.calls] == [60.0, 60.0]


def test_a_default_time_limit_counts_only_for_a_request_without_one():
    (bare,), (own,) = chat_job().calls, chat_job(timeout_s=9).calls

    assert to_generation_request(bare, default_timeout_s=3.0).timeout_s == 3.0
    assert to_generation_request(own, default_timeout_s=3.0).timeout_s == 9.0


def test_messages_keep_what_templates_read():
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "boss", "colour": "red"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]

    prompt = engine_request(messages=messages).prompt

    assert prompt == ChatPrompt(
        messages=(
            {"role": "developer", "content": "Be brief.", "name": "boss"},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        )
    )


def test_each_prompt_of_a_completion_is_a_call():
    job = completion_job(prompt=["text", [1, 2]], n=2)

    prompts = [to_generation_request(call).prompt for call in job.calls]
    assert prompts == [TextPrompt(text="text"), TokenPrompt(token_ids=(1, 2))]
    assert job.form.num_choices == 2
    assert len({call["request_id"] for call in job.calls}) == 2


def test_prompts_without_a_seed_draw_one_each_and_a_given_one_is_shared():
    drawn = completion_job(prompt=["a", "b"])
    given = completion_job(prompt=["a", "b"], seed=9)

    assert [call["seed"] for call in drawn.calls] == [0, 1]
    assert [call["seed"] for call in given.calls] == [9, 9]


def test_max_completion_tokens_goes_before_max_tokens():
    assert engine_request(max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7
    assert engine_request(max_completion_tokens=7).is_max_tokens_explicit


def test_min_tokens_may_exceed_the_default_of_max_tokens():
    request = engine_request(min_tokens=10_000)

    assert request.sampling.min_tokens == 10_000
    assert not request.is_max_tokens_explicit


def test_top_p_of_zero_is_accepted():
    assert engine_request(top_p=0).sampling.top_p == 0.0


def test_a_range_that_sampling_knows_is_checked_before_anything_is_called():
    with pytest.raises(InvalidSamplingParamsError) as caught:
        chat_job(top_p=1.5)

    assert caught.value.param == "top_p"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_of_a_chat_are_a_switch_and_a_number(fields, expected):
    job = chat_job(**fields)

    assert to_generation_request(job.calls[0]).sampling.num_top_logprobs == expected
    assert job.form.logprobs is (LogprobScope.NONE if expected is None else LogprobScope.OUTPUT)
    assert job.form.num_top_logprobs == (expected or 0)


def test_log_probabilities_of_a_completion_are_a_number():
    assert completion_job(logprobs=0).form.logprobs is LogprobScope.OUTPUT
    assert completion_job().form.logprobs is LogprobScope.NONE


@pytest.mark.parametrize(
    ("fields", "scope", "num_output", "num_prompt", "is_prompt_reported"),
    [
        ({}, LogprobScope.NONE, None, None, False),
        ({"logprobs": 2}, LogprobScope.OUTPUT, 2, None, False),
        ({"echo": True}, LogprobScope.NONE, None, None, True),
        ({"echo": True, "logprobs": 0}, LogprobScope.ALL, 0, 0, True),
        ({"echo": True, "logprobs": 3}, LogprobScope.ALL, 3, 3, True),
        ({"loglikelihood": True}, LogprobScope.PROMPT, None, 0, True),
        ({"loglikelihood": True, "logprobs": 1}, LogprobScope.PROMPT, None, 1, True),
        ({"loglikelihood": True, "echo": True}, LogprobScope.PROMPT, None, 0, True),
        ({"prompt_logprobs": 0}, LogprobScope.NONE, None, 0, False),
        ({"prompt_logprobs": 7, "logprobs": 2}, LogprobScope.OUTPUT, 2, 7, False),
        ({"prompt_logprobs": 2, "echo": True, "logprobs": 4}, LogprobScope.ALL, 4, 4, True),
        ({"best_of": 3}, LogprobScope.NONE, 0, None, False),
        ({"best_of": 3, "logprobs": 2}, LogprobScope.OUTPUT, 2, None, False),
        ({"best_of": 3, "loglikelihood": True, "logprobs": 2}, LogprobScope.PROMPT, 0, 2, True),
        ({"best_of": 1}, LogprobScope.NONE, None, None, False),
    ],
)
def test_the_engine_reports_no_more_than_the_answer_tells(
    fields, scope, num_output, num_prompt, is_prompt_reported
):
    job = completion_job(**fields)

    request = to_generation_request(job.calls[0])
    assert job.form.logprobs is scope
    assert request.sampling.num_top_logprobs == num_output
    assert request.num_prompt_logprobs == num_prompt
    assert request.is_prompt_reported == is_prompt_reported


def test_a_chat_that_is_scored_needs_no_text_of_its_prompt():
    request = engine_request(loglikelihood=True, logprobs=True, top_logprobs=6)

    assert request.num_prompt_logprobs == 6
    assert not request.is_prompt_reported


def test_more_choices_are_made_than_told_if_the_best_are_wanted():
    job = completion_job(n=2, best_of=5)

    assert to_generation_request(job.calls[0]).num_choices == 5
    assert (job.form.num_candidates, job.form.num_choices) == (5, 2)


def test_bad_words_go_as_texts_and_arrive_as_tokens():
    (call,) = chat_job(bad_words=["no", " never"]).calls

    request = to_generation_request(call, bad_words_token_ids=[(1,), (2, 3)])

    assert call["bad_words"] == ["no", " never"]
    assert request.sampling.bad_words_token_ids == ((1,), (2, 3))


def test_an_echo_may_come_without_a_new_token():
    request = to_generation_request(completion_job(echo=True, max_tokens=0).calls[0])

    assert request.sampling.max_tokens == 0
    assert request.is_max_tokens_explicit


def test_the_job_knows_how_to_answer():
    job = chat_job(stream=True, stream_options={"include_usage": True}, frobnicate=1)

    assert job.response_id == "chatcmpl-key"
    assert job.model_id == MODEL_ID
    assert (job.form.is_chat, job.is_stream, job.form.has_stream_usage) == (True, True, True)
    assert job.param_names[PROMPT_PARAM] == "messages"
    assert job.ignored_fields == ("frobnicate",)
    assert completion_job().response_id == "cmpl-key"
    assert completion_job().param_names == {PROMPT_PARAM: "prompt", "n": "n"}
    assert completion_job(n=2, best_of=3).param_names["n"] == "best_of"


def test_an_adapter_reaches_the_engine_with_every_prompt_and_the_answer_keeps_its_name():
    request = parse_completion_request(completion_body(model="mine", prompt=["a", "b"]))
    selection = Selection(model_id=MODEL_ID, adapter_id="org/mine")

    job = make_completion_job(request, selection, "key", lambda: 1)

    engine_requests = [to_generation_request(call) for call in job.calls]
    assert [request.adapter_id for request in engine_requests] == ["org/mine"] * 2
    assert (job.model_name, job.model_id) == ("mine", MODEL_ID)


def test_a_call_of_a_version_that_knew_no_adapters_runs_the_base_model():
    call = dict(chat_job().calls[0])
    del call["adapter_id"]

    assert to_generation_request(call).adapter_id is None
