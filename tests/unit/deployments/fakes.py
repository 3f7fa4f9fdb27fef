"""Models without an engine, handles without Ray, and an ASGI client that sees every message."""

import asyncio
import contextlib
import json

import httpx
from ray.serve.exceptions import RequestCancelledError

from deployments.admin_key import AdminKey
from deployments.ingress import Ingress
from deployments.service import ServiceLimits
from models.errors import InvalidRequestError

MODEL_ID = "tiny"
NOW_S = 1_700_000_000
SEED = 42

LIMITS = ServiceLimits(
    probed_model_ids=(MODEL_ID,),
    adapter_model_ids=(MODEL_ID,),
    max_body_bytes=20_000,
    header_wait_s=5.0,
    keepalive_s=5.0,
)


def admission(**fields):
    return {
        "kind": "admission",
        "seed": 1,
        "adapter_version": None,
        "numerics": "fake/float32",
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        **fields,
    }


def delta(text, choice=0, finish=None, stop_reason=None, logprobs=()):
    return {
        "kind": "delta",
        "choice": choice,
        "token_ids": [1],
        "text": text,
        "logprobs": list(logprobs),
        "finish_reason": finish,
        "stop_reason": stop_reason,
    }


def end(prompt=3, completion=2, cached=0):
    return {
        "kind": "end",
        "usage": {
            "num_prompt_tokens": prompt,
            "num_completion_tokens": completion,
            "num_cached_tokens": cached,
        },
    }


def logprob(token, value=-0.5, top=None):
    record = {
        "token_id": 7,
        "token": token,
        "bytes": list(token.encode()),
        "logprob": value,
    }
    if top is not None:
        record["top"] = [
            {"token_id": 8, "token": text, "bytes": list(text.encode()), "logprob": lp}
            for text, lp in top
        ]
    return record


def prompt_logprobs(start, *logprobs):
    return {"kind": "prompt_logprobs", "start": start, "logprobs": list(logprobs)}


async def hello(call):
    """Answers every choice with "Hello world"."""
    yield [admission()]
    choices = range(call["num_choices"])
    yield [delta("Hello", choice) for choice in choices]
    yield [
        *(delta(" world", choice, finish="stop") for choice in choices),
        end(completion=2 * call["num_choices"]),
    ]


def refuse_with(error):
    """A model that refuses everything."""

    async def script(call):
        raise error
        yield

    return script


def fail_with(error):
    """A model that fails behind the first text."""

    async def script(call):
        yield [admission()]
        yield [delta("Hello")]
        raise error

    return script


class EndlessModel:
    """Admits, sends one text, and then waits; knows whether it was ended."""

    def __init__(self, is_admitting=True):
        self.is_admitting = is_admitting
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()

    async def __call__(self, call):
        self.has_begun.set()
        try:
            if self.is_admitting:
                yield [admission()]
                yield [delta("Hello")]
            await asyncio.sleep(3600)
        finally:
            self.has_ended.set()


class FakeStream:
    """A streaming response of Serve: cancelled, it raises to whoever waits."""

    def __init__(self, generator):
        self._generator = generator
        self._pending = None
        self.is_cancelled = False

    async def __anext__(self):
        if self.is_cancelled:
            raise RequestCancelledError("fake")
        self._pending = asyncio.ensure_future(self._generator.__anext__())
        try:
            return await self._pending
        except asyncio.CancelledError:
            if self.is_cancelled:
                raise RequestCancelledError("fake") from None
            self._pending.cancel()
            raise

    def cancel(self):
        self.is_cancelled = True
        if self._pending is not None:
            self._pending.cancel()


class FakeHandle:
    """A model's handle: plays a script for each call and remembers the calls.

    ``adapters`` are the ids that its replicas list, or the error that they raise instead;
    ``replicas`` are what they answer to a broadcast: a value, or an error.
    """

    def __init__(self, script=hello, adapters=()):
        self.script = script
        self.adapters = adapters
        self.num_listings = 0
        self.replicas = [{"replica_id": "one"}]
        self.broadcasts = []
        self.calls = []
        self.streams = []
        self.ping_error = None
        self.tokenizer_calls = []
        self.tokenizer_error = None
        self.all_options = []

    def options(self, **options):
        self.all_options.append(options)
        handles = {"ping": _PingHandle, "list_adapters": _ListHandle}
        method = options["method_name"]
        if method in ("tokenize", "detokenize"):
            return _TokenizerHandle(self, method)
        return self if method == "generate" else handles[method](self)

    def broadcast(self, method, *args):
        self.broadcasts.append((method, *args))
        return _BroadcastResponse(self.replicas)

    def remote(self, call):
        self.calls.append(call)
        stream = FakeStream(self.script(call))
        self.streams.append(stream)
        return stream


class _PingHandle:
    def __init__(self, model):
        self._model = model

    async def remote(self):
        if self._model.ping_error is not None:
            raise self._model.ping_error


class _TokenizerHandle:
    """Tokens are the bytes of a text; a chat is the texts of its messages."""

    def __init__(self, model, method):
        self._model = model
        self._method = method

    async def remote(self, call):
        self._model.tokenizer_calls.append(call)
        if self._model.tokenizer_error is not None:
            raise self._model.tokenizer_error
        if self._method == "detokenize":
            if max(call["token_ids"], default=0) > 255:
                raise InvalidRequestError("prompt", "a token id is not in [0, 256)")
            return bytes(call["token_ids"]).decode(errors="replace")
        prompt = call["prompt"]
        text = prompt["text"] if prompt["kind"] == "text" else _join(prompt["messages"])
        token_ids = list(text.encode())
        texts = [chr(token_id) for token_id in token_ids] if call["has_texts"] else None
        return {"token_ids": token_ids, "texts": texts}


def _join(messages):
    return "".join(message["content"] for message in messages)


class _ListHandle:
    def __init__(self, model):
        self._model = model

    async def remote(self):
        self._model.num_listings += 1
        await asyncio.sleep(0)
        if isinstance(self._model.adapters, Exception):
            raise self._model.adapters
        return list(self._model.adapters)


class _BroadcastResponse:
    def __init__(self, replicas):
        self._replicas = replicas

    async def results_async(self, *, timeout_s, return_exceptions):
        assert return_exceptions
        if isinstance(self._replicas, Exception):
            raise self._replicas
        return list(self._replicas)


def make_ingress(script=hello, *, limits=LIMITS, handles=None, admin_key=None):
    """An ingress over one fake model, and that model's handle."""
    handle = FakeHandle(script)
    ingress = Ingress(
        limits,
        handles or {MODEL_ID: handle},
        admin_key=None if admin_key is None else AdminKey.of(admin_key),
        draw_seed=lambda: SEED,
        now_s=lambda: NOW_S,
    )
    return ingress, handle


@contextlib.asynccontextmanager
async def open_client(ingress):
    """An HTTP client of an ingress; it sees an answer when that is complete."""
    transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://medley") as client:
        yield client


def chat_body(**fields):
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}], **fields}


def completion_body(**fields):
    return {"model": MODEL_ID, "prompt": "Hi", **fields}


def read_events(text):
    """The events of a complete stream; checks its framing."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    lines = [block for block in blocks if not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def read_json_events(text):
    """The objects of a stream, and whether it says that it is complete."""
    events = read_events(text)
    is_complete = events[-1:] == ["[DONE]"]
    return [json.loads(event) for event in events if event != "[DONE]"], is_complete


class AsgiCall:
    """One request whose messages are seen as they come, and whose client can leave."""

    def __init__(self, ingress, path, body, headers=()):
        self._app = ingress.__serve_build_asgi_app__()
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                *((name.encode(), value.encode()) for name, value in dict(headers).items()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._inbox = asyncio.Queue()
        self._inbox.put_nowait(
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        )
        self.sent = asyncio.Queue()
        self.task = asyncio.ensure_future(self._app(self._scope, self._inbox.get, self.sent.put))

    def leave(self):
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def next_message(self):
        async with asyncio.timeout(5):
            return await self.sent.get()

    async def read_until(self, text):
        """Read bodies until one holds the text; return all that was read."""
        read = b""
        while text.encode() not in read:
            read += (await self.next_message()).get("body", b"")
        return read.decode()

    async def read_rest(self):
        """Wait for the end; return what was still sent."""
        async with asyncio.timeout(5):
            await self.task
        read = b""
        while not self.sent.empty():
            read += self.sent.get_nowait().get("body", b"")
        return read.decode()
