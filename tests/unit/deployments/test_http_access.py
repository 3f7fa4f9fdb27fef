"""Who may ask over HTTP: keys, what they allow, and what others of it see."""

import asyncio
import dataclasses

import pytest
import yaml

from deployments import key_file
from models.errors import ConfigError
from tests.unit.deployments.access_setup import (
    ADMIN_KEY,
    bearer,
    open_gate,
    read_error,
    record,
)
from tests.unit.deployments.fakes import (
    LIMITS,
    MODEL_ID,
    FakeHandle,
    chat_body,
    completion_body,
    make_ingress,
    open_client,
)

pytestmark = pytest.mark.anyio

OTHER_ID = "other"
BODIES = {
    "/v1/chat/completions": chat_body(),
    "/chat/completions": chat_body(),
    "/api/v1/chat/completions": chat_body(),
    "/v1/completions": completion_body(),
    "/tokenize": {"model": MODEL_ID, "prompt": "Hi"},
    "/detokenize": {"model": MODEL_ID, "tokens": [72]},
}
OPEN = ("/health", "/version", "/openapi.json", "/docs")


def two_models(adapters=("team-a/one", "team-b/two")):
    return {MODEL_ID: FakeHandle(adapters=adapters), OTHER_ID: FakeHandle(adapters=["solo"])}


def open_two(monkeypatch, tmp_path, *records):
    handles = two_models()
    limits = dataclasses.replace(
        LIMITS, probed_model_ids=tuple(handles), adapter_model_ids=tuple(handles)
    )
    return open_gate(monkeypatch, tmp_path, *records, handles=handles, limits=limits)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", "Basic alice-key", "alice-key", "Bearer alice-key2"]
)
async def test_every_route_but_the_open_ones_wants_a_key(monkeypatch, tmp_path, header):
    headers = {} if header is None else {"authorization": header}
    async with open_gate(monkeypatch, tmp_path, record("alice")) as gate:
        answers = [
            await gate.client.post(path, json=body, headers=headers)
            for path, body in BODIES.items()
        ]
        answers += [
            await gate.client.get(path, headers=headers)
            for path in ("/v1/models", f"/v1/models/{MODEL_ID}", "/nowhere", "/", "//health")
        ]

        assert gate.calls == []
    for answer in answers:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["openai-version"]
        error = read_error(answer)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert answer.json()["id"] == "unauthorized"
        assert "alice-key" not in answer.text


async def test_the_application_has_no_route_that_was_forgotten_here(monkeypatch, tmp_path):
    """A key that allows nothing gets nothing of any route that exists."""
    nothing = record("nobody", models=[], adapters=[])
    async with open_two(monkeypatch, tmp_path, nothing) as gate:
        app = gate.ingress.__serve_build_asgi_app__()
        tried = set()
        for route in app.router.routes:
            path = route.path.replace("{model_id:path}", MODEL_ID)
            if path.rstrip("/") in OPEN or "adapter" in path:
                continue
            for method in route.methods - {"HEAD"}:
                body = BODIES.get(path.rstrip("/")) if method == "POST" else None
                answer = await gate.client.request(
                    method, path, json=body, headers=bearer("nobody")
                )
                tried.add(path.rstrip("/"))
                if path.rstrip("/") == "/v1/models":
                    assert answer.json()["data"] == []
                else:
                    assert answer.status_code == 403, path
        assert tried == {*BODIES, "/v1/models", f"/v1/models/{MODEL_ID}"}
        assert all(not h.calls and not h.tokenizer_calls for h in gate.handles.values())


@pytest.mark.parametrize("path", OPEN)
async def test_probes_and_descriptions_need_no_key(monkeypatch, tmp_path, path):
    async with open_gate(monkeypatch, tmp_path, record("alice")) as gate:
        assert (await gate.client.get(path)).status_code == 200
        assert (await gate.client.get(f"{path}/")).status_code == 200
        # What follows an open path is not open.
        assert (await gate.client.get(f"{path}/more")).status_code == 401


async def test_the_right_key_is_served_on_every_route(monkeypatch, tmp_path):
    async with open_gate(monkeypatch, tmp_path, record("alice")) as gate:
        for path, body in BODIES.items():
            answer = await gate.post(path, body)
            assert answer.status_code == 200, answer.text
            assert not [name for name in answer.headers if "ratelimit" in name]
        assert gate.budgets.num_connected == 0


async def test_without_keys_everybody_is_served():
    ingress, _ = make_ingress()
    async with open_client(ingress) as client:
        assert (await client.post("/v1/completions", json=completion_body())).status_code == 200


async def test_the_admin_routes_keep_their_own_key(monkeypatch, tmp_path):
    async with open_gate(monkeypatch, tmp_path, record("alice")) as gate:
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}

        assert (await gate.client.get("/admin/adapters", headers=admin)).status_code == 200
        assert (await gate.get("/admin/adapters")).status_code == 401
        assert (await gate.client.get("/v1/models", headers=admin)).status_code == 401


async def test_what_a_key_does_not_allow_is_a_403_and_no_model_hears_of_it(monkeypatch, tmp_path):
    key = record("alice", models=[MODEL_ID], adapters=["team-a/*"])
    forbidden = [
        (completion_body(model=OTHER_ID), "model_not_allowed", "model"),
        (completion_body(model="solo"), "adapter_not_allowed", "model"),
        (completion_body(model="team-b/two"), "adapter_not_allowed", "model"),
        (completion_body(model=f"{MODEL_ID}:team-b/two"), "adapter_not_allowed", "model"),
        (completion_body(model=f"{OTHER_ID}:team-a/one"), "model_not_allowed", "model"),
        (completion_body(peft="team-b/two"), "adapter_not_allowed", "peft"),
        (completion_body(adapter_id="team-b/two"), "adapter_not_allowed", "adapter_id"),
    ]
    async with open_two(monkeypatch, tmp_path, key) as gate:
        for body, code, param in forbidden:
            answer = await gate.post("/v1/completions", body)
            error = read_error(answer)
            assert answer.status_code == 403, body
            assert (error["type"], error["code"], error["param"]) == (
                "permission_error",
                code,
                param,
            )
            assert answer.json()["id"] == "forbidden"
        assert gate.calls == []

        for body in (completion_body(), completion_body(model="team-a/one")):
            assert (await gate.post("/v1/completions", body)).status_code == 200
        peft = await gate.post("/v1/completions", completion_body(peft="team-a/one"))
        assert peft.status_code == 200


async def test_a_key_cannot_tell_adapters_of_others_from_none(monkeypatch, tmp_path):
    async with open_two(monkeypatch, tmp_path, record("alice", adapters=["team-a/*"])) as gate:
        answers = []
        for name in ("team-b/two", "team-b/not-there"):
            answers.append(await gate.post("/v1/completions", completion_body(model=name)))
            answers.append(await gate.get(f"/v1/models/{name}"))
            answers.append(await gate.get(f"/v1/models/{MODEL_ID}:{name}"))

    assert {answer.status_code for answer in answers} == {403}
    texts = {
        answer.json()["error"]["message"].replace("two", "").replace("not-there", "")
        for answer in answers
    }
    assert len(texts) == 1


async def test_an_agents_request_for_no_model_means_the_default_only_if_that_is_allowed(
    monkeypatch, tmp_path
):
    path = "/api/v1/chat/completions"
    keys = [record("alice", models=[MODEL_ID], adapters=[]), record("bob", models=[OTHER_ID])]
    async with open_two(monkeypatch, tmp_path, *keys) as gate:
        allowed = await gate.post(path, chat_body(model="ignored"), "alice")
        adapter = await gate.post(path, chat_body(model="ignored", peft="team-a/one"), "alice")
        refused = await gate.post(path, chat_body(model="ignored"), "bob")

    assert allowed.status_code == 200
    assert (adapter.status_code, read_error(adapter)["code"]) == (403, "adapter_not_allowed")
    assert (refused.status_code, read_error(refused)["code"]) == (403, "model_not_allowed")


@pytest.mark.parametrize(
    ("grants", "listed"),
    [
        ({}, [MODEL_ID, OTHER_ID, "team-a/one", "team-b/two", "solo"]),
        ({"adapters": ["team-a/*"]}, [MODEL_ID, OTHER_ID, "team-a/one"]),
        ({"models": [OTHER_ID]}, [OTHER_ID, "solo"]),
        ({"models": [OTHER_ID], "adapters": []}, [OTHER_ID]),
        ({"models": []}, []),
    ],
)
async def test_the_list_of_models_has_what_the_key_allows(monkeypatch, tmp_path, grants, listed):
    async with open_two(monkeypatch, tmp_path, record("alice", **grants)) as gate:
        models = (await gate.get("/v1/models")).json()["data"]
        one_by_one = [
            (await gate.get(f"/v1/models/{name}")).status_code
            for name in (MODEL_ID, OTHER_ID, "team-a/one", "team-b/two", "solo")
        ]

    assert [model["id"] for model in models] == listed
    assert one_by_one.count(200) == len(listed)
    assert set(one_by_one) <= {200, 403}


async def test_new_keys_hold_and_old_ones_do_not_without_a_restart(monkeypatch, tmp_path):
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.02)
    async with open_gate(monkeypatch, tmp_path, record("alice")) as gate:
        assert (await gate.get("/v1/models", "alice")).status_code == 200

        gate.path.write_text("- broken: [")
        await asyncio.sleep(0.2)
        assert (await gate.get("/v1/models", "alice")).status_code == 200

        gate.path.write_text(yaml.safe_dump([record("bob")]))
        async with asyncio.timeout(5):
            while (await gate.get("/v1/models", "bob")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await gate.get("/v1/models", "alice")).status_code == 401


async def test_keys_that_are_broken_at_the_start_stop_it(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"api_keys_file: .*sha256"):
        async with open_gate(monkeypatch, tmp_path, {"name": "alice", "sha256": "short"}):
            pass


async def test_handles_need_no_key(monkeypatch, tmp_path):
    async with open_gate(monkeypatch, tmp_path, record("alice", models=[])) as gate:
        answer = await gate.ingress.complete(completion_body())

    assert answer["object"] == "text_completion"


async def test_a_page_may_call_only_from_the_configured_origins(monkeypatch, tmp_path):
    origin, other = "https://chat.example.org", "https://evil.example.org"
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    path = "/v1/completions"
    async with open_gate(monkeypatch, tmp_path, record("alice"), cors_origins=(origin,)) as gate:
        allowed = await gate.client.options(path, headers={"origin": origin, **preflight})
        refused = await gate.client.options(path, headers={"origin": other, **preflight})
        answer = await gate.post(path, completion_body(), origin=origin)
        foreign = await gate.post(path, completion_body(), origin=other)
        keyless = await gate.client.get("/v1/models", headers={"origin": origin})

    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == origin
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    assert "access-control-allow-origin" not in refused.headers
    assert answer.headers["access-control-allow-origin"] == origin
    assert "retry-after" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in foreign.headers
    # A page can read why it was refused.
    assert keyless.status_code == 401
    assert keyless.headers["access-control-allow-origin"] == origin


async def test_by_default_no_page_may_call(monkeypatch, tmp_path):
    headers = {"origin": "https://x.org", "access-control-request-method": "POST"}
    async with open_gate(monkeypatch, tmp_path) as gate:
        preflight = await gate.client.options("/v1/completions", headers=headers)
        answer = await gate.post("/v1/completions", completion_body(), origin="https://x.org")

    assert preflight.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]
