"""An engine without a model: the prompt says what is to be drawn, and tokens are bytes."""

import asyncio
import codecs
import threading

from models.config import SchedulerConfig
from models.engine.engine import Engine
from models.engine.intake import EngineLimits
from models.errors import ModelServiceError
from models.kv_cache.ledger import BlockManager
from models.requests import (
    GenerationEnd,
    GenerationRequest,
    TextPrompt,
    TokenDelta,
    TokenLogprob,
    TokenPrompt,
)
from models.scheduling.scheduler import Scheduler
from models.scheduling.step_plan import SampledToken, ScoredTokens, StepResult
from sampling.errors import SamplingError
from sampling.params import SamplingParams
from tests.fakes import FakeClock

EOS = 256
SPECIAL = 257
# Tokens of several characters, so that a stop string can begin or end inside of one.
PIECES = {258: "abc", 259: "DEF", 260: "GHIJK", 261: "cD"}
SPECIAL_TEXTS = {EOS: "<eos>", SPECIAL: "<special>"}
VOCABULARY_SIZE = 262


class ByteDetokenizer:
    """Joins the bytes of tokens; holds an unfinished character back."""

    def __init__(self, is_special_token_skipped, context_token_ids):
        self._is_special_token_skipped = is_special_token_skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.feed(context_token_ids)

    def feed(self, token_ids):
        return "".join(self._decoder.decode(self._bytes(token_id)) for token_id in token_ids)

    def flush(self):
        return self._decoder.decode(b"", True)

    def _bytes(self, token_id):
        if token_id in SPECIAL_TEXTS:
            return b"" if self._is_special_token_skipped else SPECIAL_TEXTS[token_id].encode()
        return PIECES[token_id].encode() if token_id in PIECES else bytes([token_id])


class ByteText:
    """Text front whose tokens are UTF-8 bytes, a few longer pieces, and two special tokens."""

    eos_token_ids = frozenset({EOS})

    def encode(self, prompt):
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        return tuple(prompt.text.encode())

    def detokenizer(self, *, is_special_token_skipped=True, context_token_ids=()):
        return ByteDetokenizer(is_special_token_skipped, context_token_ids)


class GatedText(ByteText):
    """Tokenises only once it is let."""

    def __init__(self):
        self.gate = threading.Event()

    def encode(self, prompt):
        assert self.gate.wait(20)
        return super().encode(prompt)


class EchoRunner:
    """Draws what the prompt says, then EOS for ever.

    Checks on the way that every plan feeds each sequence exactly the tokens it has.

    ``fail_at``: (step number, error) raised by ``execute``.
    ``broken_tokens``: a row that would draw one of these fails alone, and one that scores it.
    """

    def __init__(self, fail_at=None, broken_tokens=()):
        self.num_steps = 0
        self.joined = []
        self.plans = []
        self._fail_at = fail_at
        self._broken_tokens = broken_tokens
        self._rows = {}

    def execute(self, plan):
        self.num_steps += 1
        self.plans.append(plan)
        if self._fail_at is not None and self.num_steps >= self._fail_at[0]:
            raise self._fail_at[1]
        for seq_id in plan.leaving:
            del self._rows[seq_id]
        for joining in plan.joining:
            assert joining.seq_id not in self._rows
            self._rows[joining.seq_id] = (joining, list(joining.output_token_ids))
        self.joined.extend(plan.joining)
        return StepResult(
            plan.step_id,
            tuple(self._draw(s) for s in plan.sequences if self._run(s) and s.is_sampled),
            tuple(self._score(s) for s in plan.sequences if s.scored_positions),
        )

    def script(self, joining):
        """Return what a sequence is to draw."""
        return joining.prompt_token_ids

    def _run(self, scheduled):
        joining, outputs = self._rows[scheduled.seq_id]
        tokens = (*joining.prompt_token_ids, *outputs)
        assert scheduled.token_ids == tokens[scheduled.start : scheduled.end]
        is_sampled = scheduled.end == len(tokens) and joining.sampling.max_tokens > 0
        assert scheduled.is_sampled == is_sampled
        return True

    def _score(self, scheduled):
        joining, _ = self._rows[scheduled.seq_id]
        at = scheduled.scored_positions
        tokens = joining.prompt_token_ids[at.start + 1 : at.stop + 1]
        if any(token_id in self._broken_tokens for token_id in tokens):
            return ScoredTokens(scheduled.seq_id, at.start + 1, (), error="logits are not numbers")
        return ScoredTokens(
            scheduled.seq_id,
            at.start + 1,
            tuple(known_logprob(joining, at.start + 1 + i) for i in range(len(tokens))),
        )

    def _draw(self, scheduled):
        joining, outputs = self._rows[scheduled.seq_id]
        script = self.script(joining)
        token_id = script[len(outputs)] if len(outputs) < len(script) else EOS
        if token_id in self._broken_tokens:
            return SampledToken(scheduled.seq_id, -1, error="logits are not numbers")
        outputs.append(token_id)
        logprob = None
        if joining.sampling.num_top_logprobs is not None:
            logprob = TokenLogprob(token_id, -float(len(outputs)))
        return SampledToken(scheduled.seq_id, token_id, logprob)


def known_logprob(joining, position):
    """What EchoRunner says of the prompt token at a position."""
    token_id = joining.prompt_token_ids[position]
    top = ((token_id, -0.5),) * joining.num_prompt_logprobs
    return TokenLogprob(token_id, -float(position), top, rank=1)


class SeedRunner(EchoRunner):
    """Draws another number of tokens for every seed, so that choices differ in length."""

    def script(self, joining):
        return joining.prompt_token_ids * (1 + joining.seed % 5)


class GatedRunner(EchoRunner):
    """Runs a step only for each ``permit()``, and says when one has begun."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self._permits = threading.Semaphore(0)
        self.has_begun = threading.Event()

    def permit(self, num_steps=1):
        self._permits.release(num_steps)

    def execute(self, plan):
        self.has_begun.set()
        assert self._permits.acquire(timeout=20)
        return super().execute(plan)


def make_engine(
    runner=None,
    *,
    text=None,
    num_blocks=256,
    block_size_tokens=4,
    max_model_len_tokens=512,
    default_max_tokens=64,
    clock=None,
    max_num_scored_positions=1000,
    **scheduler_fields,
):
    blocks = BlockManager(num_blocks, block_size_tokens)
    config = SchedulerConfig(
        **{"max_num_seqs": 8, "max_num_batched_tokens": 32, **scheduler_fields}
    )
    limits = EngineLimits(
        model_id="fake",
        numerics="exact",
        vocabulary_size=VOCABULARY_SIZE,
        max_model_len_tokens=max_model_len_tokens,
        default_max_tokens=default_max_tokens,
        max_num_choices=config.max_num_choices,
    )
    return Engine(
        Scheduler(config, blocks, max_num_scored_positions),
        blocks,
        runner or EchoRunner(),
        text or ByteText(),
        limits,
        clock or FakeClock(),
    )


def make_request(request_id="r", prompt="hello", *, sampling=None, **fields):
    """A request that draws its own prompt; sampling fields in a dict, the rest as keywords."""
    sampling = {} if sampling is None else sampling
    return GenerationRequest(
        request_id=request_id,
        prompt=TokenPrompt(token_ids=tuple(prompt))
        if isinstance(prompt, tuple)
        else TextPrompt(text=prompt),
        sampling=SamplingParams(**sampling),
        is_max_tokens_explicit="max_tokens" in sampling,
        **{"seed": 7, **fields},
    )


def add(engine, request):
    return engine.add(request, ByteText().encode(request.prompt))


def run_to_end(engine, max_num_steps=2000):
    """Step until nothing is left; the ledgers are checked after every step."""
    outputs = []
    for _ in range(max_num_steps):
        if not engine.has_work:
            return outputs
        outputs.extend(engine.step())
        engine.check_invariants()
    raise AssertionError("the engine did not come to an end")


def run(request, **engine_fields):
    engine = make_engine(**engine_fields)
    add(engine, request)
    return events_of(run_to_end(engine), request.request_id)


def usage_of(events):
    assert isinstance(events[-1], GenerationEnd)
    return events[-1].usage


def events_of(outputs, request_id="r"):
    return [event for owner, event in outputs if owner == request_id]


def deltas_of(events, choice=0):
    return [e for e in events if isinstance(e, TokenDelta) and e.choice == choice]


def text_of(events, choice=0):
    return "".join(delta.text for delta in deltas_of(events, choice))


def tokens_of(events, choice=0):
    return tuple(t for delta in deltas_of(events, choice) for t in delta.token_ids)


def finish_of(events, choice=0):
    reasons = [d.finish_reason for d in deltas_of(events, choice) if d.finish_reason]
    assert len(reasons) == 1
    return reasons[0]


async def collect(front, request):
    """All events of a stream, in one list."""
    return [event async for batch in front.generate(request) for event in batch]


async def collect_until_error(front, request):
    """All events of a stream that breaks off, and the error that it breaks off with."""
    events = []
    try:
        async for batch in front.generate(request):
            events.extend(batch)
    except (ModelServiceError, SamplingError) as error:
        return events, error
    raise AssertionError("the stream is complete")


async def eventually(predicate):
    """Wait until something is true that another thread brings about."""
    async with asyncio.timeout(20):
        while not predicate():  # noqa: ASYNC110 - the other side is a thread
            await asyncio.sleep(0.001)


async def step_until(runner, predicate):
    """Let steps run, one at a time, until something is true."""
    while not predicate():
        num_steps = runner.num_steps
        runner.permit(1)
        await eventually(lambda: runner.num_steps > num_steps or predicate())  # noqa: B023


async def open_stream(front, request):
    """A stream whose admission has been taken, with that admission."""
    stream = front.generate(request)
    return stream, (await anext(stream))[0]
