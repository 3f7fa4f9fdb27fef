"""Which paths and methods there are, and what is the same at all of them."""

import base64
import dataclasses
import hashlib
import importlib.metadata
import re

import httpx
import pytest

from deployments.paths import AGENT_PATHS, CHAT_PATHS
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

CHAT = "/v1/chat/completions"
POSTS = (*CHAT_PATHS, "/v1/completions", "/tokenize", "/detokenize")
GETS = ("/v1/models", f"/v1/models/{MODEL_ID}", "/health", "/version", "/openapi.json", "/docs")


async def send(method, path, ingress=None, **options):
    ingress = ingress or make_ingress()[0]
    async with open_client(ingress) as client:
        return await client.request(method, path, **options)


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("path", CHAT_PATHS)
async def test_every_chat_path_answers_alike(path, slash):
    response = await send("POST", path + slash, json=chat_body())

    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "Hello world"


@pytest.mark.parametrize("path", CHAT_PATHS)
async def test_every_chat_path_streams(path):
    response = await send("POST", path, json=chat_body(stream=True))

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "query", "is_agents"),
    [
        (CHAT, "", False),
        (CHAT, "?agent=true", True),
        (CHAT, "?agent=TRUE", True),
        (CHAT, "?agent=1", True),
        (CHAT, "?agent=false", False),
        *((path, "", True) for path in AGENT_PATHS),
        *((path, "?agent=true", True) for path in AGENT_PATHS),
        *((path, "?agent=false", False) for path in AGENT_PATHS),
        *((path, "/?agent=0", False) for path in AGENT_PATHS),
    ],
)
async def test_an_agent_takes_any_model_and_nobody_else_does(path, query, is_agents):
    response = await send("POST", path + query, json=chat_body(model="ignored"))

    assert response.status_code == (200 if is_agents else 404)
    if is_agents:
        assert response.json()["model"] == MODEL_ID


@pytest.mark.parametrize("value", ["", "2", "maybe", "true,false"])
async def test_another_value_of_agent_is_a_400(value):
    response = await send("POST", CHAT, json=chat_body(), params={"agent": value})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "agent"


async def test_a_completion_is_never_an_agents():
    response = await send(
        "POST", "/v1/completions?agent=true", json=completion_body(model="ignored")
    )

    assert response.status_code == 404


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("path", GETS)
async def test_what_is_read_may_end_with_a_slash(path, slash):
    response = await send("GET", path + slash)

    assert response.status_code == 200
    assert response.history == []


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize(
    ("paths", "method", "allowed"),
    [
        (POSTS, "GET", {"POST"}),
        (POSTS, "DELETE", {"POST"}),
        (GETS, "POST", {"GET", "HEAD"}),
        (GETS, "PATCH", {"GET", "HEAD"}),
    ],
)
async def test_another_method_is_a_405_that_tells_the_right_one(paths, method, allowed, slash):
    for path in paths:
        response = await send(method, path + slash)

        assert response.status_code == 405, path
        assert set(re.split(r",\s*", response.headers["allow"])) == allowed
        assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v2/models",
        "/V1/models",
        "/v1/chat",
        "//v1/models",
        "/v1/completions//",
        "/doc",
    ],
)
async def test_another_path_is_a_404_in_the_shape_of_every_error(path):
    response = await send("GET", f"http://medley{path}")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/model:7b", "org/model:7b"),
        ("org%2Fmodel%3A7b", "org/model:7b"),
        ("org/model:7b/", "org/model:7b"),
        ("org/model:7b:team/tune.v1", "org/model:7b:team/tune.v1"),
        ("team%2Ftune.v1", "team/tune.v1"),
    ],
)
async def test_a_models_name_may_have_slashes_and_colons(path, name):
    base = "org/model:7b"
    limits = dataclasses.replace(LIMITS, probed_model_ids=(base,), adapter_model_ids=(base,))
    handles = {base: FakeHandle(adapters=["team/tune.v1"])}
    ingress, _ = make_ingress(limits=limits, handles=handles)

    response = await send("GET", f"/v1/models/{path}", ingress)

    assert response.status_code == 200
    assert response.json()["id"] == name
    assert response.json()["parent"] == (base if "tune" in name else None)


async def test_the_version_is_that_of_the_installed_package():
    response = await send("GET", "/version")

    assert response.json() == {"version": importlib.metadata.version("medley")}


async def test_the_page_of_the_api_fetches_nothing_from_elsewhere():
    response = await send("GET", "/docs")

    assert response.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|//[a-z]+\.|src=|@import|url\(", response.text)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


async def test_the_pages_policy_lets_its_own_script_and_style_through():
    response = await send("GET", "/docs")

    policy = response.headers["content-security-policy"]
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


async def test_the_description_names_where_the_application_is_mounted():
    ingress, _ = make_ingress()
    transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__(), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://medley") as client:
        mounted = await client.get("/llm/openapi.json")

    assert mounted.json()["servers"] == [{"url": "/llm"}]
    assert (await send("GET", "/openapi.json")).json()["servers"] == [{"url": "/"}]
