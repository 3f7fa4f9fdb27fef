"""The admin routes: who may, what they do, and that there are none without a key."""

import dataclasses

import pytest
from ray.exceptions import RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.admin_key import AdminKey
from models.errors import AdapterIncompatibleError, AdapterNotFoundError
from tests.unit.deployments.adapter_ids import NO_IDS
from tests.unit.deployments.fakes import (
    LIMITS,
    MODEL_ID,
    FakeHandle,
    make_ingress,
    open_client,
)

pytestmark = pytest.mark.anyio

KEY = "s3cret-key"
ACTIONS = ("load", "pin", "unpin", "unload")
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"model": MODEL_ID, "adapter_id": "org/mine"}
ROUTES = [
    *(("POST", f"/admin/adapters/{action}", BODY) for action in ACTIONS),
    ("GET", "/admin/adapters", None),
    ("POST", LOAD_LORA, {"lora_name": "org/mine"}),
    ("POST", UNLOAD_LORA, {"lora_name": "org/mine"}),
]


async def send(
    path, body=None, *, method="POST", key=KEY, headers=None, handle=None, others=(), **options
):
    """An answer, and the handle of the model that was asked."""
    handle = handle or FakeHandle()
    handles = {MODEL_ID: handle, **dict(others)}
    limits = dataclasses.replace(
        LIMITS, probed_model_ids=tuple(handles), adapter_model_ids=tuple(handles)
    )
    ingress, _ = make_ingress(handles=handles, admin_key=key, limits=limits)
    if headers is None:
        headers = {"authorization": f"Bearer {KEY}"}
    async with open_client(ingress) as client:
        response = await client.request(method, path, json=body, headers=headers, **options)
    return response, handle


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_without_a_key_in_the_configuration_there_are_no_such_routes(method, path, body):
    response, handle = await send(path, body, method=method, key=None)

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert handle.broadcasts == []


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
@pytest.mark.parametrize(
    "authorization",
    [None, "", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer ", "Bearer", f"Basic {KEY}"],
)
async def test_a_missing_or_wrong_key_is_a_401(method, path, body, authorization):
    headers = {} if authorization is None else {"authorization": authorization}

    response, handle = await send(path, body, method=method, headers=headers)

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert KEY not in response.text
    assert handle.broadcasts == []


async def test_without_the_key_a_body_is_not_read():
    response, _ = await send("/admin/adapters/load", headers={}, method="POST")

    assert response.status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_right_key_opens(scheme):
    headers = {"authorization": f"{scheme} {KEY}"}

    response, _ = await send("/admin/adapters", method="GET", headers=headers)

    assert response.status_code == 200


def test_a_key_is_not_shown():
    assert KEY not in f"{AdminKey.of(KEY)!r}"
    assert AdminKey.of(KEY).digest.hex() not in f"{AdminKey.of(KEY)!r}"


@pytest.mark.parametrize("action", ACTIONS)
async def test_an_action_reaches_every_replica(action):
    handle = FakeHandle()
    handle.replicas = [
        {"replica_id": "one", "version": "v1"},
        {"replica_id": "two", "version": "v1"},
    ]

    response, _ = await send(f"/admin/adapters/{action}", BODY, handle=handle)

    assert response.status_code == 200
    assert handle.broadcasts == [("act_on_adapter", action, "org/mine")]
    assert response.json() == {"action": action, **BODY, "replicas": handle.replicas}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("adapter_id", [*NO_IDS, ""])
async def test_an_action_on_what_is_no_adapter_id_reaches_nobody(action, adapter_id):
    response, handle = await send(
        f"/admin/adapters/{action}", {"model": MODEL_ID, "adapter_id": adapter_id}
    )

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "adapter_id"
    assert handle.broadcasts == []


@pytest.mark.parametrize("path", [LOAD_LORA, UNLOAD_LORA])
@pytest.mark.parametrize("name", [*NO_IDS, ""])
async def test_a_lora_name_that_is_no_adapter_id_reaches_nobody(path, name):
    response, handle = await send(path, {"lora_name": name})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_name"
    assert handle.broadcasts == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": MODEL_ID}, "adapter_id"),
        ({"model": MODEL_ID, "adapter_id": None}, "adapter_id"),
        ({"model": MODEL_ID, "adapter_id": 3}, "adapter_id"),
        ({**BODY, "force": True}, "force"),
        ({"model": "x" * 600, "adapter_id": "a"}, "model"),
        ([], None),
        ("text", None),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(body, param):
    response, handle = await send("/admin/adapters/load", body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert handle.broadcasts == []


async def test_an_action_on_an_unknown_model_is_a_404():
    response, _ = await send("/admin/adapters/pin", {"model": "nobody", "adapter_id": "a"})

    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("replicas", "status", "code"),
    [
        ([AdapterNotFoundError("a")], 404, "adapter_not_found"),
        ([{"replica_id": "one"}, AdapterIncompatibleError("a", "x")], 400, "adapter_incompatible"),
        (
            [RayTaskError("f", "Traceback", AdapterNotFoundError("a"))],
            404,
            "adapter_not_found",
        ),
        ([], 503, "engine_unavailable"),
        (TimeoutError(), 503, "engine_unavailable"),
        (DeploymentUnavailableError("x"), 503, "engine_unavailable"),
        ([KeyError("unforeseen")], 500, "internal_error"),
    ],
)
async def test_what_one_replica_cannot_do_is_the_answer(replicas, status, code):
    handle = FakeHandle()
    handle.replicas = replicas

    response, _ = await send("/admin/adapters/load", BODY, handle=handle)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "unforeseen" not in response.text
    assert "Traceback" not in response.text


async def test_the_state_of_every_replica_of_every_model_is_told():
    tiny, other = FakeHandle(), FakeHandle()
    tiny.replicas = [{"replica_id": "r1", "adapters": [{"adapter_id": "a", "tier": "device"}]}]
    other.replicas = TimeoutError()

    response, _ = await send("/admin/adapters", method="GET", handle=tiny, others={"other": other})

    first, second = response.json()["data"]
    assert first == {"model": MODEL_ID, "replicas": tiny.replicas, "error": None}
    assert (second["model"], second["replicas"]) == ("other", [])
    assert "other" in second["error"]


@pytest.mark.parametrize(
    ("path", "action", "word"), [(LOAD_LORA, "load", "added"), (UNLOAD_LORA, "unload", "removed")]
)
async def test_the_names_of_vllm_do_the_same_and_answer_in_text(path, action, word):
    response, handle = await send(path, {"lora_name": "org/mine"})

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert response.text == f"Success: LoRA adapter 'org/mine' {word} successfully."
    assert handle.broadcasts == [("act_on_adapter", action, "org/mine")]


@pytest.mark.parametrize("fields", [{"lora_path": ""}, {"lora_path": None}, {"lora_path": "a"}])
async def test_a_lora_path_may_say_the_name_again(fields):
    response, _ = await send(LOAD_LORA, {"lora_name": "a", "load_inplace": True, **fields})

    assert response.status_code == 200


@pytest.mark.parametrize("lora_path", ["/etc/x", "b", "../a", "s3://bucket/a", "A"])
async def test_a_lora_path_of_ones_own_is_refused_by_name(lora_path):
    response, handle = await send(LOAD_LORA, {"lora_name": "a", "lora_path": lora_path})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "lora_path"
    assert handle.broadcasts == []


async def test_of_several_models_the_one_that_has_the_adapter_is_meant():
    tiny, other = FakeHandle(adapters=["a", "both"]), FakeHandle(adapters=["b", "both"])
    options = {"handle": tiny, "others": {"other": other}}

    found, _ = await send(LOAD_LORA, {"lora_name": "b"}, **options)
    missing, _ = await send(LOAD_LORA, {"lora_name": "c"}, **options)
    unclear, _ = await send(UNLOAD_LORA, {"lora_name": "both"}, **options)
    named, _ = await send(UNLOAD_LORA, {"lora_name": "both", "model": MODEL_ID}, **options)

    assert [r.status_code for r in (found, missing, unclear, named)] == [200, 404, 400, 200]
    assert missing.json()["error"]["code"] == "adapter_not_found"
    assert other.broadcasts == [("act_on_adapter", "load", "b")]
    assert tiny.broadcasts == [("act_on_adapter", "unload", "both")]


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/adapters/load"), ("POST", "/admin")])
async def test_other_methods_and_paths_are_refused_as_everywhere(method, path):
    response, _ = await send(path, method=method)

    assert response.status_code in (404, 405)
    assert response.json()["object"] == "error"
