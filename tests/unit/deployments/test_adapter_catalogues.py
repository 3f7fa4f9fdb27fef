"""Which adapters the base models have, as far as an ingress knows."""

import asyncio

import pytest

from deployments.adapter_catalogues import MAX_AGE_S, AdapterCatalogues
from models.errors import EngineDeadError

pytestmark = pytest.mark.anyio


class Model:
    """Lists its adapters when the test lets it."""

    def __init__(self, *ids):
        self.ids = list(ids)
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def remote(self):
        self.num_asked += 1
        await self.may_answer.wait()
        if isinstance(self.ids, Exception):
            raise self.ids
        return list(self.ids)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def make(**models):
    clock = Clock()
    return AdapterCatalogues(models, clock), clock


async def test_an_answer_is_kept_for_a_second_and_no_longer():
    model = Model("a")
    catalogues, clock = make(tiny=model)

    for _ in range(3):
        assert await catalogues.read() == {"tiny": ("a",)}
    model.ids = ["b"]
    clock.now_s += MAX_AGE_S
    assert await catalogues.read() == {"tiny": ("a",)}
    clock.now_s += 0.01

    assert await catalogues.read() == {"tiny": ("b",)}
    assert model.num_asked == 2


async def test_an_adapter_that_is_known_is_found_without_asking_again():
    tiny, other = Model("a"), Model("b")
    catalogues, _ = make(tiny=tiny, other=other)

    for _ in range(3):
        assert await catalogues.find_models("a") == ("tiny",)

    assert (tiny.num_asked, other.num_asked) == (1, 1)


async def test_a_miss_asks_each_model_once_more():
    tiny, other = Model("a"), Model("b")
    catalogues, _ = make(tiny=tiny, other=other)
    await catalogues.read()
    other.ids.append("new")

    assert await catalogues.find_models("new") == ("other",)
    assert await catalogues.find_models("none") == ()

    assert (tiny.num_asked, other.num_asked) == (3, 3)


async def test_a_miss_does_not_ask_twice_who_was_asked_for_it():
    tiny = Model("a")
    catalogues, _ = make(tiny=tiny)

    assert await catalogues.find_models("none") == ()

    assert tiny.num_asked == 1


async def test_many_who_miss_at_once_share_one_question():
    tiny = Model("a")
    catalogues, _ = make(tiny=tiny)
    await catalogues.read()

    found = await asyncio.gather(*(catalogues.find_models(f"x{i}") for i in range(50)))

    assert set(found) == {()}
    assert tiny.num_asked == 2


async def test_one_who_leaves_does_not_end_the_question_of_the_others():
    tiny = Model("a")
    tiny.may_answer.clear()
    catalogues, _ = make(tiny=tiny)
    leaving, staying = (asyncio.create_task(catalogues.find_models("a")) for _ in range(2))
    await asyncio.sleep(0.01)

    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    tiny.may_answer.set()

    assert await staying == ("tiny",)


async def test_a_model_that_fails_keeps_what_it_said_last():
    tiny, other = Model("a"), Model("b")
    catalogues, clock = make(tiny=tiny, other=other)
    await catalogues.read()
    tiny.ids = RuntimeError("gone")
    clock.now_s += 2 * MAX_AGE_S

    assert await catalogues.read() == {"tiny": ("a",), "other": ("b",)}
    assert await catalogues.find_models("a") == ("tiny",)


async def test_nothing_found_is_no_answer_while_a_model_is_silent():
    tiny = Model()
    tiny.ids = RuntimeError("gone")
    catalogues, _ = make(tiny=tiny, other=Model("b"))

    assert await catalogues.find_models("b") == ("other",)
    with pytest.raises(EngineDeadError, match="tiny"):
        await catalogues.find_models("a")


async def test_a_model_that_hangs_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr("deployments.adapter_catalogues._ANSWER_TIMEOUT_S", 0.05)
    hanging = Model("a")
    hanging.may_answer.clear()
    catalogues, _ = make(tiny=hanging, other=Model("b"))

    async with asyncio.timeout(5):
        assert await catalogues.read() == {"tiny": (), "other": ("b",)}


async def test_without_models_that_have_adapters_nothing_is_found():
    catalogues, _ = make()

    assert await catalogues.find_models("a") == ()
    assert await catalogues.read() == {}
