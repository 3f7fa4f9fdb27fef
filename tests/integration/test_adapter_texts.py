"""Adapters with tokenizer files of their own, and adapters behind a URL, through a whole engine."""

import asyncio
import contextlib
import dataclasses

import fsspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.config import AdapterConfig, EngineConfig, KVCacheConfig, ModelConfig
from models.engine.build import build_engine
from models.errors import AdapterIncompatibleError, ChatTemplateError
from models.requests import Admission, ChatPrompt, GenerationRequest, TextPrompt, TokenDelta
from sampling.params import SamplingParams
from tests.integration.adapter_fleet import Fleet

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

TEMPLATE = "{% for m in messages %}((hello {{ m.role }})){{ m.content }}{% endfor %}"
CHAT = ChatPrompt(messages=({"role": "user", "content": "tell me"},))


@pytest.fixture
async def fleet(tmp_path):
    fleet = Fleet(tmp_path, 3, max_num_slots=4, num_host_adapters=12)
    yield fleet
    await fleet.engine.shutdown(drain_timeout_s=0.0)


@dataclasses.dataclass
class Answer:
    prompt_token_ids: tuple = ()
    token_ids: tuple = ()
    text: str = ""
    version: str = ""


async def ask(engine, adapter_id, prompt, **fields):
    sampling = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **fields}
    answer, texts = Answer(), []
    request = GenerationRequest(
        request_id=f"{adapter_id}-{id(answer)}",
        prompt=prompt,
        sampling=SamplingParams(**sampling),
        is_max_tokens_explicit=True,
        seed=0,
        adapter_id=adapter_id,
        is_prompt_reported=True,
    )
    async for events in engine.generate(request, tell_text=texts.append):
        for event in events:
            if isinstance(event, Admission):
                answer.prompt_token_ids = event.prompt_token_ids
                answer.version = event.adapter_version
            elif isinstance(event, TokenDelta):
                answer.token_ids += event.token_ids
                answer.text += event.text
    assert len(texts) == 1
    return answer


async def test_a_chat_template_applies_to_its_adapters_rows_only(fleet, tmp_path):
    (fleet.root / "a0" / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    own, other, base, plain = await asyncio.gather(
        ask(fleet.engine, "a0", CHAT),
        ask(fleet.engine, "a1", CHAT),
        ask(fleet.engine, None, CHAT),
        ask(fleet.engine, "a0", TextPrompt(text="tell me")),
    )

    assert tokenizer.decode(own.prompt_token_ids) == "((hello user))tell me"
    assert other.prompt_token_ids == base.prompt_token_ids != own.prompt_token_ids
    assert tokenizer.decode(plain.prompt_token_ids) == "tell me"
    # The answer is the adapter's own, whichever way its prompt came about.
    assert (
        await ask(fleet.engine, "a0", TextPrompt(text="((hello user))tell me"))
    ).token_ids == own.token_ids


async def test_a_changed_template_is_a_new_version(fleet):
    first = await ask(fleet.engine, "a0", CHAT)
    (fleet.root / "a0" / "chat_template.jinja").write_text(TEMPLATE)

    async with asyncio.timeout(60):
        while (second := await ask(fleet.engine, "a0", CHAT)).version == first.version:
            assert second == first

    assert second.prompt_token_ids != first.prompt_token_ids


async def test_an_adapter_with_another_vocabulary_is_refused_and_a_failing_template_is_a_400(
    fleet, tmp_path
):
    backend = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    written = backend.to_str().replace('"!":', '"?!":')
    (fleet.root / "a0" / "tokenizer.json").write_text(written)
    (fleet.root / "a1" / "chat_template.jinja").write_text("{{ raise_exception('not so') }}")

    refused, failed, served = await asyncio.gather(
        ask(fleet.engine, "a0", CHAT),
        ask(fleet.engine, "a1", CHAT),
        ask(fleet.engine, "a1", TextPrompt(text="tell me")),
        return_exceptions=True,
    )

    assert isinstance(refused, AdapterIncompatibleError)
    assert "another vocabulary" in str(refused)
    assert isinstance(failed, ChatTemplateError)
    assert "not so" in str(failed)
    assert "'a1'" in str(failed)
    assert served.token_ids


async def test_the_files_that_training_saves_beside_an_adapter_change_nothing(fleet, tmp_path):
    before = await ask(fleet.engine, "a0", CHAT)
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(fleet.root / "a0")

    async with asyncio.timeout(60):
        while (after := await ask(fleet.engine, "a0", CHAT)).version == before.version:
            assert after == before

    assert (after.prompt_token_ids, after.token_ids) == (before.prompt_token_ids, before.token_ids)


@contextlib.asynccontextmanager
async def engine_over(url, tmp_path):
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(
                path=str(tmp_path / "model"), model_id="tiny", dtype="float32", num_threads=1
            ),
            kv_cache=KVCacheConfig(budget_bytes=8 << 20),
            adapters=AdapterConfig(path=url, max_rank=8),
        ),
        cache_folder=tmp_path / "cache",
        progress=lambda _: None,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown(drain_timeout_s=0.0)


async def test_adapters_behind_a_url_answer_as_those_in_a_folder_do(fleet, tmp_path):
    (fleet.root / "a0" / "chat_template.jinja").write_text(TEMPLATE)
    memory = fsspec.filesystem("memory")
    memory.put(str(fleet.root), "/adapter-texts-test", recursive=True)

    async with engine_over("memory://adapter-texts-test", tmp_path) as engine:
        for adapter_id in ("a0", "a1", None):
            expected = await ask(fleet.engine, adapter_id, CHAT)
            assert await ask(engine, adapter_id, CHAT) == expected
        assert await engine.adapters.list_ids() == ("a0", "a1", "a2")
        totals = engine.adapters.totals()

    assert totals["a0"].num_loads == totals["a0"].num_requests == 1
    assert totals["a0"].num_generated_tokens == 6
    memory.rm("/adapter-texts-test", recursive=True)
