"""DigitalOcean's agents: ``agent=true``, its zeros, its model that does not count, its reports."""

import pytest

from deployments.agent_fields import AgentFields
from deployments.wire import parse_chat_request
from models.errors import InvalidRequestError, ModelNotFoundError
from tests.unit.deployments.fakes import MODEL_ID, FakeHandle, chat_body, make_ingress

pytestmark = pytest.mark.anyio

FIELDS = {
    "k": 5,
    "retrieval_method": "rewrite",
    "kb_filters": [{"index": "2f1c", "path": "/a"}],
    "filter_kb_content_by_query_metadata": True,
    "instruction_override": "Be brief.",
    "include_retrieval_info": True,
    "include_functions_info": True,
    "include_guardrails_info": True,
    "provide_citations": True,
}


def service_of(**handles):
    made = {name: FakeHandle(adapters=adapters) for name, adapters in handles.items()}
    ingress, handle = make_ingress(handles=made or None)
    return ingress._service, (made or {MODEL_ID: handle})


def test_every_field_of_a_live_agent_is_read():
    assert FIELDS.keys() == AgentFields.model_fields.keys()
    request = parse_chat_request(chat_body(**FIELDS))

    assert request.agent_reports == {
        "retrieval": {"retrieved_data": []},
        "functions": {"called_functions": []},
        "guardrails": {"triggered_guardrails": []},
    }
    assert set(request.ignored_fields) == {
        name for name in FIELDS if not name.startswith("include_")
    }


def test_fields_that_ask_for_nothing_are_not_told():
    zeros = {"k": 0, "retrieval_method": "none", "kb_filters": [], "provide_citations": False}

    assert parse_chat_request(chat_body(**zeros)).ignored_fields == ()


@pytest.mark.parametrize(
    "fields",
    [{"k": -1}, {"k": "1"}, {"retrieval_method": "guess"}, {"kb_filters": {}}],
)
def test_wrong_values_are_refused_by_name(fields):
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat_request(chat_body(**fields))

    assert caught.value.param.startswith(next(iter(fields)))


async def test_for_an_agent_the_zeros_of_the_filled_in_example_count_as_absent():
    service, _ = service_of()
    body = chat_body(max_tokens=0, max_completion_tokens=0, k=0)

    job = await service.make_job(body, is_chat=True, is_agent=True)

    assert not job.calls[0]["is_max_tokens_explicit"]
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        await service.make_job(body, is_chat=True)


@pytest.mark.parametrize("model", ["ignored", None, "", "no:such"])
async def test_an_agent_has_one_model_whatever_the_request_says(model):
    service, _ = service_of()
    body = {**chat_body(), "model": model}

    job = await service.make_job(body, is_chat=True, is_agent=True)

    assert (job.model_id, job.model_name) == (MODEL_ID, MODEL_ID)
    with pytest.raises((ModelNotFoundError, InvalidRequestError)):
        await service.make_job(body, is_chat=True)


async def test_an_agents_request_still_selects_what_there_is():
    service, _ = service_of(tiny=["mine"])

    for fields in ({"model": "mine"}, {"model": "tiny:mine"}, {"model": "x", "peft": "mine"}):
        job = await service.make_job(chat_body(**fields), is_chat=True, is_agent=True)
        assert job.calls[0]["adapter_id"] == "mine"


async def test_reports_stand_at_the_top_of_an_answer_and_in_a_streams_first_event():
    ingress, _ = make_ingress()
    body = chat_body(include_retrieval_info=True, metadata={"a": "b"})

    whole = await ingress.chat(body)
    events = [event async for event in ingress.stream_chat({**body, "n": 2})]

    for told in (whole, events[0]):
        assert told["retrieval"] == {"retrieved_data": []}
        assert told["metadata"] == {"a": "b"}
        assert "functions" not in told
    assert not any("retrieval" in event for event in events[1:])
