"""Requests with adapters through the engine's front: leases, waits, errors, no model."""

import asyncio
import dataclasses

import pytest

from models.adapters.catalogue import AdapterCatalogue, CatalogueConfig
from models.adapters.ledger import AdapterCost, AdapterLedger
from models.adapters.meter import AdapterMeter
from models.adapters.source import AdapterFiles
from models.config import SchedulerConfig
from models.engine.adapter_desk import AdapterDesk
from models.engine.adapter_uses import AdapterUses
from models.engine.async_engine import AsyncEngine
from models.engine.engine import Engine
from models.engine.intake import EngineLimits
from models.errors import (
    AdapterIncompatibleError,
    AdapterNotFoundError,
    AdapterSlotTimeoutError,
    ContextLengthExceededError,
    InvalidAdapterIdError,
    PromptTooLongError,
)
from models.kv_cache.ledger import BlockManager
from models.requests import (
    AdapterRef,
    FinishReason,
    GenerationRequest,
    TextPrompt,
    TokenDelta,
)
from models.scheduling.adapter_seats import AdapterSeats
from models.scheduling.scheduler import Scheduler
from sampling.params import SamplingParams
from tests.fakes import FakeClock
from tests.unit.models.engine.fakes import VOCABULARY_SIZE, ByteText, EchoRunner, eventually

pytestmark = pytest.mark.anyio

MAX_WAIT_S = 5.0


@dataclasses.dataclass(eq=False)
class Weights:
    """All that is looked at of an adapter's weights here."""

    ref: AdapterRef
    num_bytes: int = 10
    num_virtual_tokens: int = 0
    num_added_tokens: int = 0
    text: object = None


class Source:
    """Adapters by name; files are made of nothing."""

    def __init__(self, *names):
        self.names = names
        self.is_closed = False

    def find(self, adapter_id):
        if adapter_id not in self.names:
            raise AdapterNotFoundError(adapter_id)
        return AdapterFiles(adapter_id=adapter_id, folder=None, version="v1", num_bytes=10)

    def recall(self, adapter_id):
        return self.find(adapter_id) if adapter_id in self.names else None

    def forget(self, adapter_id):
        pass

    def list_ids(self):
        return self.names

    def close(self):
        self.is_closed = True


class AdapterRunner(EchoRunner):
    """Knows which adapter is in which slot, and who holds weights."""

    def __init__(self, cost_bytes=10):
        super().__init__()
        self.held = {}
        self.tenants = {}
        self.used = []
        self._cost_bytes = cost_bytes

    def adapter_cost(self, weights):
        return AdapterCost(8, self._cost_bytes)

    def hold_adapter(self, weights):
        self.held[weights.ref] = weights

    def drop_adapter(self, ref):
        del self.held[ref]

    def execute(self, plan):
        for placement in plan.placements:
            self.tenants[placement.slot] = self.held[placement.ref].ref.id
        self.used.append([self.tenants.get(each.slot) for each in plan.sequences])
        return super().execute(plan)


class Setting:
    """A front over a scripted runner with adapters."""

    def __init__(self, *names, max_num_slots=2, cost_bytes=10, has_adapters=True, **weights):
        self.clock = FakeClock()
        self.runner = AdapterRunner(cost_bytes)
        blocks = BlockManager(256, 4, is_prefix_caching_enabled=True)
        self.seats = AdapterSeats(
            AdapterLedger(budget_bytes=100, max_num_slots=max_num_slots, bucket_ranks=(8,))
        )
        self.engine = Engine(
            Scheduler(SchedulerConfig(), blocks, 1000, self.seats),
            blocks,
            self.runner,
            ByteText(),
            EngineLimits(
                model_id="m",
                numerics="none",
                vocabulary_size=VOCABULARY_SIZE,
                max_model_len_tokens=512,
                default_max_tokens=16,
                max_num_choices=8,
                max_slot_wait_s=MAX_WAIT_S,
            ),
            self.clock,
            AdapterUses(self.runner, self.seats, 100),
        )
        self.source = Source(*names)
        self.loads = []

        def load(files):
            self.loads.append(files.adapter_id)
            return Weights(AdapterRef(files.adapter_id, files.version), **weights)

        meter = AdapterMeter(10)
        catalogue = AdapterCatalogue(
            self.source, load, CatalogueConfig(budget_bytes=1000), self.clock, meter
        )
        self.closed = []
        self.desk = AdapterDesk(
            self.source, catalogue, self.clock, meter, lambda: self.closed.append(True)
        )
        self.front = AsyncEngine(
            self.engine,
            ByteText(),
            clock=self.clock,
            adapters=self.desk if has_adapters else None,
        )

    async def ask(self, adapter_id, prompt="abc", tell_text=lambda _: None, **fields):
        request = GenerationRequest(
            request_id=f"{adapter_id}-{prompt}-{id(fields)}",
            prompt=TextPrompt(text=prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=len(prompt) + 1),
            is_max_tokens_explicit=True,
            seed=0,
            adapter_id=adapter_id,
            **fields,
        )
        batches = self.front.generate(request, tell_text=tell_text)
        return [event async for events in batches for event in events]


@pytest.fixture
async def setting():
    opened = []

    def make(*names, **options):
        made = Setting(*names, **options)
        made.front.start()
        opened.append(made)
        return made

    yield make
    for made in opened:
        await made.front.shutdown(drain_timeout_s=0.0)


async def test_a_request_gets_its_adapter_and_the_admission_tells_the_version(setting):
    made = setting("a", "b")

    answers = await asyncio.gather(made.ask("a"), made.ask(None), made.ask("b"), made.ask("a", "x"))

    versions = [events[0].adapter_version for events in answers]
    assert versions == ["v1", None, "v1", "v1"]
    assert {name for step in made.runner.used for name in step} == {"a", "b", None}
    assert sorted(made.loads) == ["a", "b"]
    assert made.runner.held == {}
    assert made.desk.status()[0].num_in_flight == 0


async def test_without_adapters_every_id_is_unknown(setting):
    made = setting(has_adapters=False)

    with pytest.raises(AdapterNotFoundError):
        await made.ask("a")
    with pytest.raises(InvalidAdapterIdError):
        await made.ask("../a")
    assert await made.front.adapters.list_ids() == ()


async def test_an_unknown_adapter_costs_the_others_nothing(setting):
    made = setting("a")

    results = await asyncio.gather(made.ask("b"), made.ask("a"), return_exceptions=True)

    assert isinstance(results[0], AdapterNotFoundError)
    assert results[1][0].adapter_version == "v1"


async def test_virtual_tokens_of_an_adapter_take_room_in_the_window(setting):
    made = setting("a", num_virtual_tokens=506)

    assert (await made.ask(None))[0].num_prompt_tokens == 3
    with pytest.raises(ContextLengthExceededError) as caught:
        await made.ask("a")
    assert caught.value.args == (3, 4, 512, 506)
    with pytest.raises(PromptTooLongError) as too_long:
        await made.ask("a", "abcdef")
    assert too_long.value.args == (6, 512, 506)
    assert made.desk.status()[0].num_in_flight == 0


async def test_an_adapter_larger_than_all_slots_is_refused(setting):
    made = setting("a", cost_bytes=101)

    with pytest.raises(AdapterIncompatibleError, match="101 bytes"):
        await made.ask("a")
    assert made.runner.held == {}


async def test_a_wait_for_a_slot_is_bounded(setting):
    made = setting("a", "b", max_num_slots=1)
    await made.ask("a")
    made.desk.pin("a")
    asked = asyncio.create_task(made.ask("b"))
    await eventually(lambda: made.front.stats().num_waiting > 0)

    made.clock.advance(MAX_WAIT_S + 1)
    await made.ask("a", "y")  # a step, so that the clock is looked at

    with pytest.raises(AdapterSlotTimeoutError):
        await asked
    assert set(made.runner.held) <= {AdapterRef("a", "v1")}


async def test_a_client_that_leaves_lets_go_of_its_adapter(setting):
    made = setting("a")
    stream = made.front.generate(
        GenerationRequest(
            request_id="r",
            prompt=TextPrompt(text="abc"),
            sampling=SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True),
            is_max_tokens_explicit=True,
            seed=0,
            adapter_id="a",
        )
    )
    await anext(stream)

    await stream.aclose()

    assert made.desk.status()[0].num_in_flight == 0
    await eventually(lambda: not (made.runner.held or made.front.stats().num_running))


async def test_operators_see_tiers_and_can_prefetch_and_unload(setting):
    made = setting("a", "b")
    await made.ask("a")
    await made.desk.prefetch("b")
    await eventually(lambda: bool(made.front.stats().resident_adapters))
    tiers = {each.adapter_id: each.tier for each in made.desk.status()}

    made.desk.unload("a")
    await made.ask(None)

    assert tiers == {"a": "device", "b": "host"}
    assert [each.adapter_id for each in made.desk.status()] == ["b"]
    await eventually(lambda: not made.front.stats().resident_adapters)
    assert await made.desk.list_ids() == ("a", "b")


async def test_shutting_down_ends_the_sources_threads(setting):
    made = setting("a")

    await made.front.shutdown(drain_timeout_s=0.0)

    assert made.source.is_closed
    assert made.closed


class LoudText(ByteText):
    """Reads every text in capitals, and ends an answer at "C" too."""

    eos_token_ids = ByteText.eos_token_ids | {ord("C")}

    def encode(self, prompt):
        return super().encode(TextPrompt(text=prompt.text.upper()))


async def test_an_adapters_own_text_reads_and_ends_its_answers_only(setting):
    made = setting("a", text=LoudText())
    told = []

    own, base = await asyncio.gather(
        made.ask("a", "abcd", told.append), made.ask(None, "abcd", told.append)
    )

    def text_of(events):
        return "".join(event.text for event in events if isinstance(event, TokenDelta))

    assert text_of(own) == "AB"
    assert own[-2].finish_reason is FinishReason.STOP
    assert text_of(base) == "abcd"
    assert {type(each) for each in told} == {LoudText, ByteText}


async def test_min_tokens_holds_an_adapters_own_end_back_too(setting):
    made = setting("a", text=LoudText())
    for adapter_id, expected in (("a", (7, ord("C"))), (None, (7,))):
        request = GenerationRequest(
            request_id=f"r{adapter_id}",
            prompt=TextPrompt(text="xyz"),
            sampling=SamplingParams(min_tokens=2, stop_token_ids=(7,)),
            seed=0,
            adapter_id=adapter_id,
        )

        [_ async for _ in made.front.generate(request)]

        assert made.runner.joined[-1].sampling.stop_token_ids == expected


async def test_what_an_adapter_is_used_for_is_counted(setting):
    made = setting("a")

    await made.ask("a", "abc")
    await made.ask("a", "x")
    await made.ask(None, "abc")

    totals = made.desk.totals()["a"]
    assert (totals.num_requests, totals.num_loads, totals.num_hits) == (2, 1, 1)
    # With the end of each answer.
    assert totals.num_generated_tokens == 4 + 2
    assert made.desk.host_bytes == 10
