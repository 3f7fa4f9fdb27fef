"""A replica's tokenizers for whoever wants no generation."""

import asyncio
import threading
import types

import pytest

from deployments.tokenizer_desk import MAX_NUM_CALLS, TokenizerDesk
from models.errors import AdapterNotFoundError, InvalidRequestError, QueueFullError
from models.requests import ChatPrompt, TextPrompt, TokenPrompt
from tests.unit.models.engine.fakes import SPECIAL, ByteText

pytestmark = pytest.mark.anyio


class Text(ByteText):
    """Bytes, with a shift for an adapter's own."""

    def __init__(self, shift=0, gate=None):
        self.shift = shift
        self.gate = gate
        self.threads = set()
        self.prompts = []

    def encode(self, prompt):
        self.threads.add(threading.current_thread().name)
        self.prompts.append(prompt)
        if self.gate is not None:
            assert self.gate.wait(20)
        if isinstance(prompt, TokenPrompt):
            if max(prompt.token_ids) > SPECIAL:
                raise InvalidRequestError("prompt", "is outside of the vocabulary")
            return prompt.token_ids
        if isinstance(prompt, ChatPrompt):
            return (SPECIAL, *prompt.messages[0]["content"].encode())
        return tuple(byte + self.shift for byte in prompt.text.encode())

    def token_text(self, token_id):
        return f"<{token_id}>", b""


class Adapters:
    """Has "plain", which brings nothing, and those with a text of their own."""

    def __init__(self, **texts):
        self._texts = {"plain": None, **texts}
        self.num_leases = 0

    async def lease(self, adapter_id):
        if adapter_id not in self._texts:
            raise AdapterNotFoundError(adapter_id)
        self.num_leases += 1
        weights = types.SimpleNamespace(text=self._texts[adapter_id])
        return types.SimpleNamespace(weights=weights, release=self._release)

    def _release(self):
        self.num_leases -= 1


@pytest.fixture
async def make_desk():
    desks = []

    def make(text=None, adapters=None):
        desks.append(TokenizerDesk(text or Text(), adapters or Adapters()))
        return desks[-1]

    yield make
    for desk in desks:
        desk.close()


def text_call(text="ab", adapter_id=None, *, has_texts=False, **fields):
    prompt = {"kind": "text", "text": text, **fields}
    return {"prompt": prompt, "adapter_id": adapter_id, "has_texts": has_texts}


async def test_a_text_becomes_tokens(make_desk):
    text = Text()

    record = await make_desk(text).tokenize(text_call("ab", add_special_tokens=False))

    assert record == {"token_ids": [97, 98], "texts": None}
    assert text.prompts == [TextPrompt(text="ab", add_special_tokens=False)]


async def test_tokens_are_spelled_if_asked_for(make_desk):
    record = await make_desk().tokenize(text_call("ab", has_texts=True))

    assert record["texts"] == ["<97>", "<98>"]


async def test_a_chat_goes_through_the_template(make_desk):
    text = Text()
    prompt = {
        "kind": "chat",
        "messages": [{"role": "user", "content": "a"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "template_variables": {"x": 1},
    }

    record = await make_desk(text).tokenize(
        {"prompt": prompt, "adapter_id": None, "has_texts": False}
    )

    assert record["token_ids"] == [SPECIAL, 97]
    (rendered,) = text.prompts
    assert rendered.continue_final_message
    assert not rendered.add_generation_prompt
    assert rendered.template_variables == {"x": 1}


async def test_tokens_become_text_with_special_ones_and_whole_characters(make_desk):
    token_ids = [*"é".encode(), SPECIAL, 97]

    text = await make_desk().detokenize({"token_ids": token_ids, "adapter_id": None})

    assert text == "é<special>a"


async def test_an_unfinished_character_is_told_as_one_that_is_unknown(make_desk):
    text = await make_desk().detokenize({"token_ids": [0xC3], "adapter_id": None})

    assert text == "\ufffd"


async def test_no_tokens_are_no_text(make_desk):
    assert await make_desk().detokenize({"token_ids": [], "adapter_id": None}) == ""


async def test_a_token_that_there_is_not_is_refused(make_desk):
    with pytest.raises(InvalidRequestError):
        await make_desk().detokenize({"token_ids": [97, 9999], "adapter_id": None})


async def test_an_adapters_own_tokenizer_is_used_and_its_lease_given_back(make_desk):
    adapters = Adapters(own=Text(shift=1))
    desk = make_desk(adapters=adapters)

    own = await desk.tokenize(text_call(adapter_id="own"))
    plain = await desk.tokenize(text_call(adapter_id="plain"))

    assert own["token_ids"] == [98, 99]
    assert plain["token_ids"] == [97, 98]
    assert adapters.num_leases == 0


async def test_an_adapter_that_there_is_not_is_refused(make_desk):
    desk = make_desk()
    for _ in range(MAX_NUM_CALLS + 1):
        with pytest.raises(AdapterNotFoundError):
            await desk.tokenize(text_call(adapter_id="other"))


async def test_a_slow_tokenizer_holds_up_neither_the_loop_nor_the_other_kind(make_desk):
    gate = threading.Event()
    desk = make_desk(adapters=Adapters(own=Text(gate=gate)))
    slow = asyncio.create_task(desk.tokenize(text_call(adapter_id="own")))
    try:
        async with asyncio.timeout(5):
            record = await desk.tokenize(text_call())
        assert record["token_ids"] == [97, 98]
        assert not slow.done()
    finally:
        gate.set()
    assert (await slow)["token_ids"] == [97, 98]


async def test_more_calls_than_may_wait_are_refused_and_places_come_back(make_desk):
    gate = threading.Event()
    desk = make_desk(Text(gate=gate))
    calls = [asyncio.create_task(desk.tokenize(text_call())) for _ in range(MAX_NUM_CALLS)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await desk.tokenize(text_call())
        # One that nobody waits for any more gives its place back.
        calls[-1].cancel()
        await asyncio.gather(calls[-1], return_exceptions=True)
        calls[-1] = asyncio.create_task(desk.tokenize(text_call()))
        await asyncio.sleep(0)
        assert not calls[-1].done()
    finally:
        gate.set()
    await asyncio.gather(*calls)
    await desk.tokenize(text_call())
