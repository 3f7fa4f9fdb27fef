"""Adapters over real HTTP, against PEFT's own forward."""

import concurrent.futures
import dataclasses
import shutil
import time
import warnings

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import ADMIN_KEY
from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

PROMPT = "Once upon a time there was a prompt that was longer than two blocks"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TOKENS = 12
LIMIT_S = 30
VERSION = "x-medley-adapter-version"
# Two of the ids have an owner.
ADAPTERS = {"red": 1, "team/blue": 2, "team/red": 3}


@dataclasses.dataclass
class Workshop:
    """Makes adapters of the tiny model, and says what they should answer."""

    model_folder: object

    def __post_init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        self.allowed = self.tokenizer(LETTERS).input_ids

    def load_base(self):
        return AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32).eval()

    def make(self, folder, seed):
        """Save an adapter; return what it answers."""
        torch.manual_seed(seed)
        config = LoraConfig(
            r=2 + seed, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(self.load_base(), config).eval()
            model.save_pretrained(folder)
        return self.answer(model)

    @torch.no_grad()
    def answer(self, model):
        """Recompute the whole sequence for each token."""
        ids = self.tokenizer(PROMPT).input_ids
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(max(self.allowed, key=lambda token: logits[token].item()))
        return self.tokenizer.decode(ids[-NUM_TOKENS:])


@pytest.fixture(scope="module")
def workshop(service):
    return Workshop(service.model_folder)


@pytest.fixture(scope="module")
def answers(service, workshop):
    """What the base model (None) and each adapter should answer; the adapters are in place."""
    expected = {None: workshop.answer(workshop.load_base())}
    for name, seed in ADAPTERS.items():
        expected[name] = workshop.make(service.adapter_folder / name, seed)
    assert len(set(expected.values())) == len(expected)
    yield expected
    for name in ADAPTERS:
        shutil.rmtree(service.adapter_folder / name)


@pytest.fixture(scope="module")
def client(service):
    with httpx.Client(base_url=service.url, timeout=LIMIT_S) as opened:
        yield opened


def complete(client, workshop, **fields):
    body = {
        "model": TINY_ID,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "allowed_token_ids": workshop.allowed,
        **fields,
    }
    return client.post("/v1/completions", json=body)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def wait_for(condition, limit_s=15):
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    return value


def admin(client, method, path, **body):
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return client.request(method, path, headers=headers, json=body or None)


def test_base_and_adapters_in_turn_give_what_peft_gives(client, workshop, answers):
    names = [None, "red", "team/blue", "red", None, "team/red", "team/blue", "red"]

    texts = [text_of(complete(client, workshop, peft=name)) for name in names]

    assert texts == [answers[name] for name in names]


def test_base_and_adapters_at_once_give_what_peft_gives(client, workshop, answers):
    names = [*answers] * 4

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda name: text_of(complete(client, workshop, peft=name)), names))

    assert texts == [answers[name] for name in names]


def test_every_way_to_name_an_adapter_gives_the_same(client, workshop, answers):
    for fields in (
        {"adapter_id": "team/blue"},
        {"model": f"{TINY_ID}:team/blue"},
        {"model": "team/blue"},
    ):
        response = complete(client, workshop, **fields)

        assert text_of(response) == answers["team/blue"]
        assert response.json()["model"] == fields.get("model", TINY_ID)
        assert response.headers[VERSION]


def test_a_stream_has_the_same_text_and_header(client, workshop, answers):
    whole = complete(client, workshop, peft="red")

    stream = complete(client, workshop, peft="red", stream=True)

    assert stream.headers[VERSION] == whole.headers[VERSION]
    assert stream.text.rstrip().endswith("data: [DONE]")
    assert VERSION not in complete(client, workshop).headers


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["nobody", "Red", "team", "blue", "team/nobody"])
def test_an_unknown_adapter_is_a_404_and_never_the_base_model(client, workshop, name, is_stream):
    response = complete(client, workshop, peft=name, stream=is_stream)

    assert response.status_code == 404
    assert response.json()["error"]["param"] == "peft"


@pytest.mark.parametrize("name", ["../adapters/red", "/etc/passwd", "a%2f..", "red\0", "."])
def test_what_is_no_adapter_id_is_a_400(client, workshop, answers, name):
    response = complete(client, workshop, peft=name)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "peft"


def test_adapters_are_listed_with_their_base_model(client, answers):
    def read():
        data = client.get("/v1/models").json()["data"]
        listed = {model["id"]: model["parent"] for model in data if model["parent"]}
        return listed if listed.keys() >= ADAPTERS.keys() else None

    listed = wait_for(read)

    assert {listed[name] for name in ADAPTERS} == {TINY_ID}
    assert client.get("/v1/models/team/blue").json()["parent"] == TINY_ID
    assert client.get(f"/v1/models/{TINY_ID}:red").json()["root"] == "red"
    assert client.get("/v1/models/nobody").status_code == 404


def test_a_folder_that_is_dropped_in_is_found_at_its_first_request(
    client, service, workshop, answers, tmp_path
):
    expected = workshop.make(tmp_path / "made", 5)
    shutil.copytree(tmp_path / "made", service.adapter_folder / "dropped")

    assert text_of(complete(client, workshop, peft="dropped")) == expected
    shutil.rmtree(service.adapter_folder / "dropped")


def test_a_folder_that_was_asked_for_too_early_is_found_soon(
    client, service, workshop, answers, tmp_path
):
    assert complete(client, workshop, peft="late").status_code == 404
    expected = workshop.make(tmp_path / "made", 4)
    shutil.copytree(tmp_path / "made", service.adapter_folder / "late")

    def ask():
        response = complete(client, workshop, peft="late")
        return response if response.status_code == 200 else None

    assert text_of(wait_for(ask)) == expected
    shutil.rmtree(service.adapter_folder / "late")


def test_changed_files_are_a_new_version(client, service, workshop, answers, tmp_path):
    folder = service.adapter_folder / "changing"
    old_text = workshop.make(folder, 6)
    old = complete(client, workshop, peft="changing")
    new_text = workshop.make(tmp_path / "made", 7)
    for file in (tmp_path / "made").iterdir():
        shutil.copy(file, folder)

    def ask():
        response = complete(client, workshop, peft="changing")
        # never a mixture of both
        is_old = response.headers[VERSION] == old.headers[VERSION]
        assert text_of(response) == (old_text if is_old else new_text)
        return not is_old

    assert text_of(old) == old_text != new_text
    wait_for(ask)
    shutil.rmtree(folder)


def test_operators_see_and_steer_adapters(client, service, workshop, answers):
    def find(name):
        (entry,) = admin(client, "GET", "/admin/adapters").json()["data"]
        (replica,) = entry["replicas"]
        assert entry["model"] == TINY_ID
        assert replica["replica_id"]
        return next((a for a in replica["adapters"] if a["adapter_id"] == name), None)

    body = {"model": TINY_ID, "adapter_id": "team/red"}
    loaded = admin(client, "POST", "/admin/adapters/load", **body).json()
    version = complete(client, workshop, peft="team/red").headers[VERSION]
    pinned = admin(client, "POST", "/admin/adapters/pin", **body)

    assert [replica["version"] for replica in loaded["replicas"]] == [version]
    assert pinned.status_code == 200
    state = wait_for(lambda: (s := find("team/red")) and s["num_in_flight"] == 0 and s)
    assert state["version"] == version
    assert state["is_pinned"]
    assert state["num_bytes"] > 0
    assert state["num_hits"] >= 1
    assert admin(client, "POST", "/admin/adapters/unpin", **body).status_code == 200
    unloaded = admin(client, "POST", "/v1/unload_lora_adapter", lora_name="team/red")
    assert unloaded.text.startswith("Success")
    wait_for(lambda: find("team/red") is None)
    again = admin(client, "POST", "/v1/load_lora_adapter", lora_name="team/red")
    assert again.text.startswith("Success")
    assert text_of(complete(client, workshop, peft="team/red")) == answers["team/red"]


def test_an_operator_is_told_of_an_adapter_that_is_not_there(client):
    missing = admin(client, "POST", "/v1/load_lora_adapter", lora_name="nobody")
    keyless = client.get("/admin/adapters")

    assert missing.status_code == 404
    assert keyless.status_code == 401


def test_what_adapters_were_used_for_is_exported_as_metrics(client, workshop, answers):
    import ray

    complete(client, workshop, peft="red")
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def read(name, adapter):
        """Return the sum over replicas; 0 while there is none."""
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in httpx.get(url, timeout=LIMIT_S).text.splitlines()
            if line.startswith(f"ray_medley_adapter_{name}_total{{")
            and f'adapter="{adapter}"' in line
            and f'model="{TINY_ID}"' in line
        )

    # A replica, and Ray behind it, tell their metrics every few seconds.
    wait_for(lambda: read("requests", "red") > 0, limit_s=60)
    assert read("generated_tokens", "red") >= NUM_TOKENS
    assert read("loads", "red") >= 1
    assert read("load_seconds", "red") > 0
    assert read("requests", "nobody") == 0
