"""How a request names an adapter, over HTTP and over a handle."""

import asyncio
import dataclasses

import pytest

from models.errors import AdapterNotFoundError, EngineDeadError
from tests.unit.deployments.adapter_ids import NO_IDS
from tests.unit.deployments.fakes import (
    LIMITS,
    MODEL_ID,
    NOW_S,
    AsgiCall,
    FakeHandle,
    admission,
    chat_body,
    completion_body,
    delta,
    end,
    make_ingress,
    open_client,
    read_json_events,
    refuse_with,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OTHER_ID = "other"
SELECTORS = ("peft", "adapter_id", "lora_path")


class Models:
    """An ingress over two base models with adapters of their own."""

    def __init__(self, tiny=(), other=(), script=None):
        options = {} if script is None else {"script": script}
        self.tiny = FakeHandle(adapters=tiny, **options)
        self.other = FakeHandle(adapters=other, **options)
        ids = (MODEL_ID, OTHER_ID)
        self.ingress, _ = make_ingress(
            limits=dataclasses.replace(LIMITS, probed_model_ids=ids, adapter_model_ids=ids),
            handles={MODEL_ID: self.tiny, OTHER_ID: self.other},
        )

    async def post(self, path=CHAT, **fields):
        body = chat_body(**fields) if path == CHAT else completion_body(**fields)
        async with open_client(self.ingress) as client:
            return await client.post(path, json=body)

    async def get(self, path):
        async with open_client(self.ingress) as client:
            return await client.get(path)

    @property
    def num_calls(self):
        return len(self.tiny.calls) + len(self.other.calls)

    @property
    def num_listings(self):
        return self.tiny.num_listings + self.other.num_listings


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


async def versioned(call):
    """Tells which adapter it was asked for as the version."""
    adapter_id = call["adapter_id"]
    yield [admission(adapter_version=adapter_id and f"v-{adapter_id}")]
    yield [delta("Hello", finish="stop"), end()]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        *({selector: "org/mine"} for selector in SELECTORS),
        {"model": f"{MODEL_ID}:org/mine"},
        {"model": "org/mine"},
        {"peft": "org/mine", "adapter_id": "org/mine", "lora_path": "org/mine"},
        {"peft": "org/mine", "model": f"{MODEL_ID}:org/mine"},
        {"peft": "org/mine", "model": "org/mine"},
        {"peft": "", "adapter_id": None, "model": "org/mine"},
    ],
)
async def test_every_way_to_name_an_adapter_reaches_the_replica(path, fields):
    models = Models(tiny=["org/mine"])

    response = await models.post(path, **fields)

    assert response.status_code == 200, response.text
    assert [call["adapter_id"] for call in models.tiny.calls] == ["org/mine"]
    assert models.other.calls == []
    assert response.json()["model"] == fields.get("model", MODEL_ID)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("value", [None, ""])
async def test_null_absent_and_empty_are_the_base_model(selector, value):
    models = Models(tiny=["mine"])

    response = await models.post(**{selector: value})
    await models.post()

    assert response.status_code == 200
    assert "x-medley-adapter-version" not in response.headers
    assert [call["adapter_id"] for call in models.tiny.calls] == [None, None]
    assert models.num_listings == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"peft": "one", "adapter_id": "two"}, "adapter_id"),
        ({"peft": "one", "lora_path": "two"}, "lora_path"),
        ({"adapter_id": "one", "lora_path": "two"}, "lora_path"),
        ({"peft": "one", "model": f"{MODEL_ID}:two"}, "model"),
        ({"adapter_id": "one", "model": "two"}, "model"),
        ({"peft": "one", "model": f"{MODEL_ID}:One"}, "model"),
    ],
)
async def test_two_selectors_that_disagree_are_a_400_that_names_both(fields, param):
    models = Models(tiny=["one", "two"])

    error = error_of(await models.post(**fields), 400)

    assert error["param"] == param
    assert "one" in error["message"]
    assert "two" in error["message"] or "One" in error["message"]
    assert models.num_calls == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("adapter_id", NO_IDS)
async def test_what_is_no_adapter_id_is_refused_before_anybody_is_asked(path, selector, adapter_id):
    models = Models()

    error = error_of(await models.post(path, **{selector: adapter_id}), 400)

    assert error["param"] == selector
    assert len(error["message"]) < 400
    assert models.num_calls == models.num_listings == 0


@pytest.mark.parametrize("adapter_id", [text for text in NO_IDS if len(text) < 400])
async def test_what_is_no_adapter_id_is_refused_in_the_model_too(adapter_id):
    models = Models(tiny=[adapter_id])

    bare = error_of(await models.post(model=adapter_id), 404)
    pair = error_of(
        await models.post(model=f"{MODEL_ID}:{adapter_id}"), 400 + 4 * (":" in adapter_id)
    )

    assert bare["code"] == "model_not_found"
    assert bare["param"] == pair["param"] == "model"
    assert models.num_calls == models.num_listings == 0


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("value", [3, True, ["a"], {"id": "a"}])
async def test_an_adapter_is_named_by_a_string(selector, value):
    assert error_of(await Models().post(**{selector: value}), 400)["param"] == selector


@pytest.mark.parametrize("model", [f"{MODEL_ID}:", f"{MODEL_ID}: "])
async def test_a_model_with_an_empty_adapter_is_no_base_model(model):
    assert error_of(await Models().post(model=model), 400)["param"] == "model"


@pytest.mark.parametrize("model", ["nobody", "nobody:mine", "Mine", "mine:tiny", "tiny:a:b", ""])
async def test_a_model_that_is_neither_a_base_nor_an_adapter_is_a_404(model):
    models = Models(tiny=["mine"])

    error = error_of(await models.post(model=model), 404)

    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert models.num_calls == 0


async def test_an_unknown_adapter_is_the_404_of_the_replica():
    models = Models(script=refuse_with(AdapterNotFoundError("nobody")))

    for fields in ({"peft": "nobody"}, {"model": f"{MODEL_ID}:nobody"}):
        for is_stream in (False, True):
            error = error_of(await models.post(**fields, stream=is_stream), 404)

            assert (error["code"], error["param"]) == ("adapter_not_found", "peft")


async def test_a_bare_id_of_two_models_is_a_400_that_names_both():
    models = Models(tiny=["mine"], other=["mine"])

    error = error_of(await models.post(model="mine"), 400)

    assert error["param"] == "model"
    assert "'tiny:mine'" in error["message"]
    assert "'other:mine'" in error["message"]
    assert (await models.post(model="other:mine")).status_code == 200
    assert [call["adapter_id"] for call in models.other.calls] == ["mine"]


async def test_a_base_model_goes_before_an_adapter_of_its_name():
    models = Models(tiny=[OTHER_ID])

    await models.post(model=OTHER_ID)

    assert [call["adapter_id"] for call in models.other.calls] == [None]
    assert models.num_listings == 0


async def test_a_bare_id_that_nobody_lists_is_a_503_while_a_model_is_silent():
    models = Models(tiny=["mine"], other=EngineDeadError("gone"))

    response = await models.post(model="theirs")

    assert error_of(response, 503)["code"] == "engine_unavailable"
    assert (await models.post(model="mine")).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_header_tells_the_version_of_the_adapter(is_stream):
    response = await Models(script=versioned).post(peft="mine", stream=is_stream)

    assert response.headers["x-medley-adapter-version"] == "v-mine"
    assert "adapter_version" not in response.text


async def test_prompts_that_got_different_versions_tell_both():
    versions = iter(["v1", "v2", "v2"])

    async def script(call):
        yield [admission(adapter_version=next(versions))]
        yield [delta("Hello", finish="stop"), end()]

    response = await Models(script=script).post(COMPLETIONS, peft="mine", prompt=["a", "b", "c"])

    assert response.headers["x-medley-adapter-version"] == "v1, v2"


async def test_headers_that_do_not_wait_for_the_adapter_tell_no_version():
    loaded = asyncio.Event()

    async def script(call):
        await loaded.wait()
        yield [admission(adapter_version="v1")]
        yield [delta("Hello", finish="stop"), end()]

    ingress, _ = make_ingress(script, limits=dataclasses.replace(LIMITS, header_wait_s=0.0))
    call = AsgiCall(ingress, CHAT, chat_body(peft="mine", stream=True))
    start = await call.next_message()
    loaded.set()
    rest = await call.read_rest()

    assert b"x-medley-adapter-version" not in dict(start["headers"])
    assert read_json_events(rest)[1]


async def test_a_handle_tells_the_version_in_the_answer():
    ingress = Models(script=versioned).ingress

    whole = await ingress.chat(chat_body(peft="mine"))
    first, *rest = [event async for event in ingress.stream_complete(completion_body(peft="mine"))]
    base = await ingress.chat(chat_body())

    assert whole["adapter_version"] == first["adapter_version"] == "v-mine"
    assert all("adapter_version" not in event for event in [base, *rest])


async def test_models_are_listed_with_their_adapters():
    models = Models(tiny=["a", "org/b"], other=["c"])

    listed = (await models.get("/v1/models")).json()

    assert listed["object"] == "list"
    assert [(m["id"], m["parent"], m["root"]) for m in listed["data"]] == [
        ("tiny", None, "tiny"),
        ("other", None, "other"),
        ("a", "tiny", "a"),
        ("org/b", "tiny", "org/b"),
        ("c", "other", "c"),
    ]
    assert {(m["object"], m["created"], m["owned_by"]) for m in listed["data"]} == {
        ("model", NOW_S, "medley")
    }


async def test_every_listed_name_selects_what_it_is_listed_as():
    models = Models(tiny=["both", "other", "a"], other=["both"])

    for model in (await models.get("/v1/models")).json()["data"]:
        assert (await models.get(f"/v1/models/{model['id']}")).json() == model
        assert (await models.post(model=model["id"])).status_code == 200
        parent = model["parent"] or model["id"]
        handle = models.tiny if parent == MODEL_ID else models.other
        adapter_id = model["root"] if model["parent"] else None
        assert handle.calls.pop()["adapter_id"] == adapter_id


async def test_a_list_of_models_is_bounded():
    models = Models(tiny=[f"a{i}" for i in range(9_000)], other=[f"b{i}" for i in range(9_000)])

    assert len((await models.get("/v1/models")).json()["data"]) == 2 + 10_000


@pytest.mark.parametrize(
    ("name", "parent", "root"),
    [
        ("tiny:org/b", "tiny", "org/b"),
        ("org/b", "tiny", "org/b"),
        ("org%2Fb", "tiny", "org/b"),
        ("tiny:both", "tiny", "both"),
    ],
)
async def test_one_adapter_is_found_by_every_name(name, parent, root):
    models = Models(tiny=["org/b", "both"], other=["both"])

    model = (await models.get(f"/v1/models/{name}")).json()

    assert (model["parent"], model["root"]) == (parent, root)
    assert model["id"] == name.replace("%2F", "/")


@pytest.mark.parametrize(
    ("name", "status"),
    [("nobody", 404), ("tiny:nobody", 404), ("other:a", 404), ("A", 404), ("both", 400)],
)
async def test_a_name_that_means_nothing_or_two_things_is_no_model(name, status):
    models = Models(tiny=["a", "both"], other=["both"])

    assert error_of(await models.get(f"/v1/models/{name}"), status)["param"] == "model"


@pytest.mark.parametrize(
    "path", ["a/../../x", "a%2f..", "a%5C..%5Cb", "a%00b", "..", "x" * 4000, "x%20", "tiny:..%2fx"]
)
async def test_a_path_that_is_no_adapter_id_is_no_model(path):
    models = Models()

    response = await models.get(f"/v1/models/{path}")

    assert response.status_code in (400, 404)
    assert models.num_listings == 0


async def test_a_model_that_may_sleep_is_not_woken_for_a_list():
    handle = FakeHandle(adapters=["mine"])
    limits = dataclasses.replace(LIMITS, probed_model_ids=())
    ingress, _ = make_ingress(limits=limits, handles={MODEL_ID: handle})
    async with open_client(ingress) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        bare = await client.post(CHAT, json=chat_body(model="mine"))
        named = await client.post(CHAT, json=chat_body(peft="mine"))

    assert [model["id"] for model in listed] == [MODEL_ID]
    assert (bare.status_code, named.status_code) == (404, 200)
    assert handle.num_listings == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("merged_adapters", {"ids": ["a", "b"], "weights": [1, 1]}),
        ("adapter_source", "hub"),
        ("lora", [{"id": 0, "scale": 1.0}]),
    ],
)
async def test_more_than_one_id_of_an_adapter_is_refused_by_name(field, value):
    assert error_of(await Models().post(**{field: value}), 400)["param"] == field
