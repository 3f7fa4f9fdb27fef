"""/openapi.json: valid, whole, and true of the answers that there are."""

import re

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.http_errors import ERROR_TABLE
from deployments.openapi import build_openapi
from deployments.openapi_operations import ADMIN_OPERATIONS, OPERATIONS
from deployments.openapi_schemas import ADAPTER_ID_PATTERN, SAMPLING_RANGES
from deployments.wire import ChatRequest, CompletionRequest
from models.adapters.ids import is_adapter_id
from models.errors import (
    DeadlineExceededError,
    EngineDeadError,
    QueueFullError,
    SequenceFailedError,
)
from sampling.errors import InvalidSamplingParamsError
from sampling.params import SamplingParams
from tests.unit.deployments.described import DOCUMENT, assert_described, resolve
from tests.unit.deployments.fakes import (
    MODEL_ID,
    admission,
    chat_body,
    completion_body,
    delta,
    end,
    fail_with,
    logprob,
    make_ingress,
    open_client,
    prompt_logprobs,
    refuse_with,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES = ("ChatRequest", "AgentChatRequest", "CompletionRequest", "TokenizeRequest")


def walk(value, path="#"):
    """Every object of the document with its place."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            yield from walk(item, f"{path}/{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}/{index}")


def operations():
    for path, methods in DOCUMENT["paths"].items():
        for method, described in methods.items():
            yield path, method, described


async def send(method, path, body=None, script=None, admin_key=None, **options):
    ingress, _ = make_ingress(script, admin_key=admin_key) if script else make_ingress()
    if admin_key is not None:
        ingress, _ = make_ingress(admin_key=admin_key)
    async with open_client(ingress) as client:
        return await client.request(method, path, json=body, **options)


async def test_it_is_served_as_it_is_built():
    served = (await send("GET", "/openapi.json")).json()

    assert served == {**build_openapi(has_admin=False), "servers": [{"url": "/"}]}


def test_every_reference_leads_somewhere():
    references = [value["$ref"] for _, value in walk(DOCUMENT) if "$ref" in value]

    assert len(references) > 100
    for reference in references:
        assert reference.startswith("#/components/")
        assert isinstance(resolve({"$ref": reference}), dict)


def test_nothing_is_described_that_nothing_uses():
    used = {value["$ref"] for _, value in walk(DOCUMENT) if "$ref" in value}

    for kind in ("schemas", "responses", "headers"):
        for name in DOCUMENT["components"][kind]:
            assert f"#/components/{kind}/{name}" in used, name


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_one(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_says_what_it_takes(name):
    notes = {"title", "description", "default"}
    vague = [
        path
        for path, value in walk(SCHEMAS[name].get("properties", {}))
        if not value.keys() - notes
    ]
    lists_of_anything = {
        "Retrieval": ["#/retrieved_data/items"],
        "Functions": ["#/called_functions/items"],
        "Guardrails": ["#/triggered_guardrails/items"],
    }

    assert vague == lists_of_anything.get(name, [])


def test_operations_have_unique_names_and_declare_their_parameters():
    names = [described["operationId"] for _, _, described in operations()]

    assert len(set(names)) == len(names)
    for path, _, described in operations():
        declared = [p["name"] for p in described.get("parameters", []) if p["in"] == "path"]
        assert declared == re.findall(r"\{(\w+)\}", path)


def test_every_operation_tells_of_the_errors_that_all_have():
    for path, method, described in operations():
        assert {"200", "405", "500"} <= described["responses"].keys(), path
        if method == "post":
            assert {"400", "401", "413", "415"} <= described["responses"].keys(), path


def test_every_code_of_the_table_stands_at_its_status():
    for row in ERROR_TABLE.values():
        response = DOCUMENT["components"]["responses"][f"Error{row.status.value}"]
        assert f"`{row.code}`" in response["description"]


def test_every_route_is_described_and_every_description_has_a_route():
    ingress, _ = make_ingress(admin_key="key")
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in ingress.__serve_build_asgi_app__().routes
        for method in route.methods - {"HEAD"}
        if not route.path.endswith("/")
    }

    assert routes == {(o.method, o.path) for o in (*OPERATIONS, *ADMIN_OPERATIONS)}


def test_admin_routes_are_described_only_where_they_are():
    paths = build_openapi(has_admin=False)["paths"]

    assert set(DOCUMENT["paths"]) - set(paths) == {o.path for o in ADMIN_OPERATIONS}


@pytest.mark.parametrize("name", BODIES)
def test_null_may_stand_for_every_optional_field(name):
    schema = SCHEMAS[name]
    for field, described in schema["properties"].items():
        validator = jsonschema.Draft202012Validator(
            {**described, "components": DOCUMENT["components"]}
        )
        assert validator.is_valid(None) == (field not in schema.get("required", [])), field


@pytest.mark.parametrize(
    ("name", "kind", "field", "value", "is_taken"),
    [
        ("ChatRequest", ChatRequest, "stop", "x", True),
        ("ChatRequest", ChatRequest, "stop", ["x"] * 16, True),
        ("ChatRequest", ChatRequest, "stop", ["x"] * 17, False),
        ("ChatRequest", ChatRequest, "stop", "", False),
        ("ChatRequest", ChatRequest, "logit_bias", {"7": -1.5}, True),
        ("ChatRequest", ChatRequest, "logit_bias", {"x": 1}, False),
        ("ChatRequest", ChatRequest, "logit_bias", {"7": 101}, False),
        ("ChatRequest", ChatRequest, "metadata", {"a": "b"}, True),
        ("ChatRequest", ChatRequest, "metadata", {"a" * 65: "b"}, False),
        ("ChatRequest", ChatRequest, "metadata", {"a": 1}, False),
        ("ChatRequest", ChatRequest, "messages", [{"role": "user", "content": ["a"]}], True),
        ("ChatRequest", ChatRequest, "messages", [{"role": "user", "content": 1}], False),
        ("ChatRequest", ChatRequest, "messages", [{"role": "robot", "content": ""}], False),
        ("CompletionRequest", CompletionRequest, "prompt", "a", True),
        ("CompletionRequest", CompletionRequest, "prompt", ["a", "b"], True),
        ("CompletionRequest", CompletionRequest, "prompt", [1, 2], True),
        ("CompletionRequest", CompletionRequest, "prompt", [[1], [2]], True),
        ("CompletionRequest", CompletionRequest, "prompt", [], False),
        ("CompletionRequest", CompletionRequest, "prompt", [[]], False),
        ("CompletionRequest", CompletionRequest, "prompt", [-1], False),
        ("CompletionRequest", CompletionRequest, "prompt", {"a": 1}, False),
    ],
)
def test_what_is_read_by_hand_is_described_as_it_is_read(name, kind, field, value, is_taken):
    body = (chat_body if kind is ChatRequest else completion_body)(**{field: value})
    validator = jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    )
    try:
        kind.model_validate(body)
    except ValueError:
        is_read = False
    else:
        is_read = True

    assert (is_read, validator.is_valid(body)) == (is_taken, is_taken)


@given(name=st.text(st.sampled_from("aZ0_.-/: é"), max_size=6))
@example("")
@example("a" * 96)
@example("a" * 97)
@example("a" * 96 + "/" + "b" * 96)
def test_adapters_are_described_as_they_are_named(name):
    is_named = name == "" or is_adapter_id(name)

    assert bool(re.search(ADAPTER_ID_PATTERN, name)) == is_named


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_ranges_of_sampling_are_described_as_they_are_checked(name):
    described = SCHEMAS["ChatRequest"]["properties"][name]
    step = 1 if name == "top_k" else 1e-9
    for bound, direction in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", -1)):
        edge = SAMPLING_RANGES[name].get(bound)
        if edge is None:
            continue
        is_open = bound.startswith("exclusive")
        inside = edge + step if is_open else edge
        outside = edge if is_open else edge + direction * step
        SamplingParams(**{name: inside})
        with pytest.raises(InvalidSamplingParamsError):
            SamplingParams(**{name: outside})
        jsonschema.validate(inside, described)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(outside, described)


async def told_logprobs(call):
    """A model that tells all there is."""
    yield [admission(prompt_text="abc", first_prompt_token="a", adapter_version="v1")]
    if call["num_prompt_logprobs"] is not None:
        yield [prompt_logprobs(1, logprob("b", top=[("x", -0.1)]), logprob("c", top=[("y", -1.0)]))]
    for choice in range(call["num_choices"]):
        yield [delta("d", choice, logprobs=[logprob("d", top=[("z", -9999.0)])])]
        yield [delta("", choice, finish="length" if choice else "stop", stop_reason=7)]
    yield [end()]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body()),
        (CHAT, chat_body(n=2, logprobs=True, top_logprobs=1)),
        (CHAT, chat_body(loglikelihood=True)),
        (CHAT, chat_body(prompt_logprobs=1, metadata={"a": "b"})),
        (CHAT, chat_body(stream=True)),
        (CHAT, chat_body(stream=True, n=2, logprobs=True, metadata={"a": "b"})),
        (CHAT, chat_body(stream=True, stream_options={"include_usage": True})),
        (CHAT, chat_body(unknown_field=1)),
        ("/chat/completions", chat_body(model="any", include_retrieval_info=True)),
        (
            "/api/v1/chat/completions",
            chat_body(
                stream=True, include_functions_info=True, include_guardrails_info=True, max_tokens=0
            ),
        ),
        (COMPLETIONS, completion_body(prompt="abc")),
        (COMPLETIONS, completion_body(prompt="abc", n=2, best_of=2, logprobs=1)),
        (COMPLETIONS, completion_body(prompt=["abc", "abc"], prompt_logprobs=1)),
        (COMPLETIONS, completion_body(prompt="abc", echo=True, logprobs=1, max_tokens=0)),
        (COMPLETIONS, completion_body(prompt=[1, 2, 3], loglikelihood=True, logprobs=1)),
        (COMPLETIONS, completion_body(prompt="abc", stream=True, logprobs=0)),
        (
            COMPLETIONS,
            completion_body(prompt="abc", stream=True, stream_options={"include_usage": True}),
        ),
        ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/detokenize", {"tokens": [72]}),
    ],
)
async def test_every_answer_is_as_described(path, body):
    response = await send("POST", path, body, told_logprobs)

    assert response.status_code == 200, response.text
    assert_described("POST", path, response)


@pytest.mark.parametrize(
    "path", ["/v1/models", f"/v1/models/{MODEL_ID}", "/health", "/version", "/docs"]
)
async def test_everything_that_is_read_is_as_described(path):
    response = await send("GET", path)

    assert response.status_code == 200
    assert_described("GET", path, response)


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "script"),
    [
        (400, "POST", CHAT, chat_body(n=0), None),
        (400, "POST", COMPLETIONS, [], None),
        (404, "POST", CHAT, chat_body(model="other"), None),
        (404, "GET", "/v1/models/other", None, None),
        (405, "GET", CHAT, None, None),
        (408, "POST", CHAT, chat_body(), refuse_with(DeadlineExceededError(1.0))),
        (413, "POST", CHAT, chat_body(user="x" * 30_000), None),
        (429, "POST", CHAT, chat_body(), refuse_with(QueueFullError(8, 8))),
        (500, "POST", CHAT, chat_body(), refuse_with(SequenceFailedError("broken"))),
        (500, "POST", COMPLETIONS, completion_body(), refuse_with(RuntimeError("bug"))),
        (503, "POST", CHAT, chat_body(), refuse_with(EngineDeadError("gone"))),
        (200, "POST", CHAT, chat_body(stream=True), fail_with(EngineDeadError("gone"))),
    ],
)
async def test_every_error_is_as_described(status, method, path, body, script):
    response = await send(method, path, body, script)

    assert response.status_code == status, response.text
    assert_described("POST" if status == 405 else method, path, response)


async def test_a_body_of_another_type_is_answered_as_described():
    response = await send("POST", CHAT, headers={"content-type": "text/plain"})

    assert response.status_code == 415
    assert_described("POST", CHAT, response)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/admin/adapters", None),
        ("POST", "/admin/adapters/pin", {"model": MODEL_ID, "adapter_id": "a"}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a", "model": None}),
    ],
)
@pytest.mark.parametrize("key", ["right", "wrong"])
async def test_admin_routes_answer_as_described(method, path, body, key):
    headers = {"authorization": f"Bearer {key}"}
    response = await send(method, path, body, admin_key="right", headers=headers)

    assert response.status_code == (200 if key == "right" else 401)
    assert_described(method, path, response)
