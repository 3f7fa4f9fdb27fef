"""Paths, headers and tokenizers of a running service, through Serve's proxy."""

import httpx
import jsonschema
import pytest

from tests.integration.conftest import BUNDLED_ID
from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

LIMIT_S = 60
CHAT_PATHS = ("/v1/chat/completions", "/chat/completions", "/api/v1/chat/completions")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(service):
    with httpx.Client(base_url=service.url, timeout=LIMIT_S) as opened:
        yield opened


def chat_body(**fields):
    return {"model": TINY_ID, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, **fields}


def test_every_chat_path_gives_the_same_answer(client):
    texts = set()
    for path in CHAT_PATHS:
        response = client.post(path, json=chat_body())
        assert response.status_code == 200, response.text
        texts.add(response.json()["choices"][0]["message"]["content"])

    assert len(texts) == 1


def test_an_agent_has_the_first_model_whatever_is_named(client):
    agents = client.post("/api/v1/chat/completions", json=chat_body(model="ignored"))
    plain = client.post("/v1/chat/completions", json=chat_body(model="ignored"))

    assert agents.json()["model"] == BUNDLED_ID
    assert plain.status_code == 404


@pytest.mark.parametrize("body", [chat_body(), chat_body(stream=True), chat_body(n=0)])
def test_the_callers_request_id_comes_back_once(client, body):
    response = client.post(CHAT_PATHS[0], json=body, headers={"x-request-id": "mine-1"})

    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert int(response.headers["openai-processing-ms"]) >= 0
    if response.status_code == 400:
        assert response.json()["request_id"] == "mine-1"


def test_without_one_there_is_one_that_errors_tell(client):
    response = client.get("/nowhere")

    (told,) = response.headers.get_list("x-request-id")
    assert response.json()["request_id"] == told


def test_tokens_are_those_that_a_prompt_has(client):
    tokens = client.post("/tokenize", json={"model": BUNDLED_ID, "messages": MESSAGES}).json()
    usage = client.post(CHAT_PATHS[0], json=chat_body(model=BUNDLED_ID)).json()["usage"]

    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]


def test_text_becomes_tokens_and_text_again(client):
    text = "Příliš žluťoučký kůň 🇪🇺 <|im_end|>\n"
    body = {"model": BUNDLED_ID, "prompt": text, "return_token_strs": True}
    tokens = client.post("/tokenize", json=body).json()
    back = client.post("/detokenize", json={"model": BUNDLED_ID, "tokens": tokens["tokens"]})

    assert back.json() == {"prompt": text}
    assert len(tokens["token_strs"]) == tokens["count"]
    assert "<|im_end|>" in tokens["token_strs"]


def test_a_chat_that_the_template_refuses_is_a_400_with_its_words(client):
    messages = [*MESSAGES, {"role": "system", "content": "late"}]
    response = client.post("/tokenize", json={"model": TINY_ID, "messages": messages})

    assert response.status_code == 400
    assert "the system message must come first" in response.json()["message"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "code"),
    [
        ("/detokenize", {"tokens": [10**6]}, 400, "invalid_value"),
        ("/detokenize", {"tokens": [1], "peft": "nobody"}, 404, "adapter_not_found"),
        ("/tokenize", {"prompt": ""}, 400, "invalid_value"),
        ("/tokenize", {"prompt": "x" * 200_000}, 413, "body_too_large"),
    ],
)
def test_what_the_tokenizer_refuses_is_told(client, path, fields, status, code):
    response = client.post(path, json={"model": TINY_ID, **fields})

    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    if "tokens" in fields and status == 400:
        assert response.json()["error"]["param"] == "tokens"


def test_the_service_describes_its_own_answers(client):
    document = client.get("/openapi.json").json()
    answer = client.post(CHAT_PATHS[0], json=chat_body(logprobs=True, top_logprobs=2)).json()

    validator = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/ChatCompletion", "components": document["components"]}
    )
    validator.validate(answer)
    assert "/admin/adapters" in document["paths"]
    assert client.get("/docs").status_code == 200
