"""Fixtures of the engine's tests."""

import pytest

from models.engine.async_engine import AsyncEngine, AsyncEngineConfig
from tests.fakes import FakeClock
from tests.unit.models.engine.fakes import ByteText, GatedRunner, make_engine


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def start():
    """Starts async engines; all of them are shut down at the end, whatever has happened."""
    opened = []

    def start(runner=None, *, text=None, config=None, clock=None, **engine_fields):
        clock = clock or FakeClock()
        engine = make_engine(runner, clock=clock, **engine_fields)
        front = AsyncEngine(engine, text or ByteText(), AsyncEngineConfig(**(config or {})), clock)
        front.start()
        opened.append((front, runner))
        return front

    yield start

    for front, runner in opened:
        if isinstance(runner, GatedRunner):
            runner.permit(10_000)
        await front.shutdown(drain_timeout_s=0.0)
