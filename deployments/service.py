"""The service behind every route and handle method: from a body to an answer. No transport."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from deployments.adapter_catalogues import AdapterCatalogues
from deployments.answers import AnswerCollector, AnswerEvents
from deployments.api_keys import EVERYTHING, Grants
from deployments.calls import PromptRecord
from deployments.generation import GenerateHandle, ObservedGeneration, OpenGeneration
from deployments.http_errors import PROMPT_PARAM
from deployments.limits import RequestLimits
from deployments.logprob_objects import PromptResult
from deployments.metering import Meter
from deployments.model_directory import ModelDirectory
from deployments.open_requests import OpenRequests
from deployments.prompt_log import LoggedRequest, PromptLog
from deployments.records import AdmissionRecord
from deployments.responses import Event, Reply, ReplyHead, make_fingerprint, make_reply
from deployments.translate import Job, make_chat_job, make_completion_job
from deployments.wire import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from models.errors import EngineDeadError, InvalidRequestError

_HEALTH_TIMEOUT_S = 5.0
# Log probabilities of prompt tokens (with their alternatives) in one answer: up to 50 MB of JSON.
MAX_PROMPT_ENTRIES = 500_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The ingress's part of the configuration.

    Attributes:
        probed_model_ids: models whose replicas a health check asks. One that may scale to none is
            not among them, since asking would keep it up.
        adapter_model_ids: models that have a folder of adapters.
        max_body_bytes: largest request body.
        header_wait_s: seconds to wait for a stream's admission before headers go out.
        keepalive_s: seconds of silence after which a stream gets a comment.
        validation_status: HTTP status of a request with a wrong value.
        request: what one request may ask for.
    """

    probed_model_ids: tuple[str, ...]
    adapter_model_ids: tuple[str, ...]
    max_body_bytes: int
    header_wait_s: float
    keepalive_s: float
    validation_status: int = 400
    request: RequestLimits = dataclasses.field(default_factory=RequestLimits)


class ModelHandle(Protocol):
    """What is used of a Serve handle."""

    def options(self, **options: Any) -> Any:
        """Return the handle with other options."""
        ...

    def broadcast(self, method_name: str, *args: Any) -> Any:
        """Call every replica; the response's ``results_async`` gives what each said."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer.

    Attributes:
        body: the object.
        adapter_version: version of the adapter's weights; "" if none is named.
    """

    body: Event
    adapter_version: str


class GenerationService:
    """Validates requests, opens their generations, builds their answers.

    Owner: the ingress replica's event loop.
    """

    def __init__(
        self,
        limits: ServiceLimits,
        handles: Mapping[str, ModelHandle],
        draw_seed: Callable[[], int],
        now_s: Callable[[], int],
        prompt_log: PromptLog | None = None,
    ) -> None:
        """Prepare the handles.

        Args:
            limits: of requests.
            handles: model id -> handle of its deployment.
            draw_seed: gives seeds in [0, 2**63) to requests without one.
            now_s: Unix time in seconds.
            prompt_log: for requests that agree to it; None writes nothing.
        """
        self.limits = limits
        self._prompt_log = prompt_log
        # Options make a new handle each time, so each is made once. By value over gRPC, a message
        # costs less than half of one that goes through Ray's object store.
        self._generate: dict[str, GenerateHandle] = {
            model_id: handle.options(
                method_name="generate",
                stream=True,
                _by_reference=False,
                response_serialization="pickle",
            )
            for model_id, handle in handles.items()
        }
        self._ping = {
            model_id: handles[model_id].options(method_name="ping")
            for model_id in limits.probed_model_ids
        }
        self._draw_seed = draw_seed
        self._now_s = now_s
        # A model that may scale to none is not asked: that would keep it up.
        catalogues = AdapterCatalogues(
            {
                model_id: handles[model_id].options(method_name="list_adapters")
                for model_id in limits.adapter_model_ids
                if model_id in limits.probed_model_ids
            }
        )
        self.directory = ModelDirectory(tuple(handles), catalogues, now_s())
        self._open_requests = OpenRequests()

    async def make_job(
        self,
        body: object,
        *,
        is_chat: bool,
        is_agent: bool = False,
        grants: Grants = EVERYTHING,
    ) -> Job:
        """Validate a request.

        Args:
            body: its JSON as Python objects.
            is_chat: a chat request, else a completion request.
            is_agent: a chat request for an agent (DigitalOcean's ``agent=true``): see
                ``ModelDirectory.select``, and some zeros count as absent.
            grants: what the caller may name.

        Raises:
            InvalidRequestError, InvalidSamplingParamsError: naming the field.
            ModelNotFoundError: ``model`` names nothing that is served.
            EngineDeadError: ``model`` names an adapter, and a model does not tell which it has.
            ModelNotAllowedError, AdapterNotAllowedError: it is not for this caller.
        """
        key = uuid.uuid4().hex
        if is_chat:
            chat = parse_chat_request(body, is_agent=is_agent)
            self._check_limits(chat, body)
            selection = await self.directory.select(
                chat.model, chat.adapter_selector, is_agent=is_agent, grants=grants
            )
            return make_chat_job(chat, selection, key, self._draw_seed)
        completion = parse_completion_request(body)
        self._check_limits(completion, body)
        selection = await self.directory.select(
            completion.model, completion.adapter_selector, grants=grants
        )
        return make_completion_job(completion, selection, key, self._draw_seed)

    def _check_limits(self, request: ChatRequest | CompletionRequest, body: object) -> None:
        self.limits.request.check(request)
        self.limits.request.check_depth(body)

    @contextlib.contextmanager
    def open(self, job: Job, meter: Meter | None = None) -> Iterator[OpenGeneration]:
        """Prepare the calls of a job; they are cancelled when the context is left.

        Args:
            job: of the request.
            meter: counts its tokens, if anybody wants that.

        Raises:
            DrainingError: this replica stops.
        """
        meters = [] if meter is None else [meter]
        with self._open_requests.open(self._generate[job.model_id], job.calls) as generation:
            if self._prompt_log is None or not job.is_prompt_logged:
                yield ObservedGeneration(generation, meters) if meters else generation
                return
            logged = LoggedRequest(job)
            outcome = "complete"
            try:
                yield ObservedGeneration(generation, [*meters, logged])
            except BaseException as error:
                outcome = type(error).__name__
                raise
            finally:
                self._prompt_log.write(logged, outcome)

    def make_reply(self, job: Job, admission: AdmissionRecord) -> Reply:
        """Return the builder of the answer of an admitted job."""
        head = ReplyHead(
            id=job.response_id,
            created=self._now_s(),
            model=job.model_name,
            system_fingerprint=make_fingerprint(admission["numerics"]),
            extras=job.extras,
        )
        return make_reply(head, job.form)

    async def collect(self, job: Job, meter: Meter | None = None) -> Answer:
        """Return the whole answer.

        Args:
            job: of the request.
            meter: see ``open``.

        Raises:
            ModelServiceError, SamplingError: whatever ended the generation.
        """
        with self.open(job, meter) as generation:
            admissions = await generation.admit()
            reply = self.make_reply(job, admissions[0])
            collector = AnswerCollector(reply, job.form, begin_prompts(job, admissions))
            async with contextlib.aclosing(generation.messages()) as messages:
                async for prompt_index, message in messages:
                    collector.add(prompt_index, message)
            if job.form.num_prompt_alternatives is None:
                body = collector.finish()
            else:
                # Up to two seconds of work (measured), in which nobody else may wait for this loop.
                body = await asyncio.to_thread(collector.finish)
            return Answer(body=body, adapter_version=join_adapter_versions(admissions))

    async def stream(self, job: Job) -> AsyncGenerator[Event, None]:
        """Yield the events of the answer; the first one tells the ``adapter_version`` besides.

        Raises:
            ModelServiceError, SamplingError: whatever ended the generation.
        """
        with self.open(job) as generation:
            admissions = await generation.admit()
            reply = self.make_reply(job, admissions[0])
            events = AnswerEvents[Event](reply, job.form, begin_prompts(job, admissions))
            version = join_adapter_versions(admissions)
            untold = {"adapter_version": version} if version else {}
            for event in events.open():
                yield {**event, **untold}
                untold = {}
            async with contextlib.aclosing(generation.messages()) as messages:
                async for prompt_index, message in messages:
                    for event in events.add(prompt_index, message):
                        yield {**event, **untold}
                        untold = {}
            for event in events.finish():
                yield event

    async def check_health(self) -> None:
        """Check that requests would be served.

        Raises:
            DrainingError: this replica stops.
            EngineDeadError: no replica of some model answers in time.
        """
        self._open_requests.check_open()
        answers = await asyncio.gather(
            *(asyncio.wait_for(_ask(handle), _HEALTH_TIMEOUT_S) for handle in self._ping.values()),
            return_exceptions=True,
        )
        unreachable = [
            model_id
            for model_id, answer in zip(self._ping, answers, strict=True)
            if isinstance(answer, Exception)
        ]
        if unreachable:
            raise EngineDeadError(f"no replica answers for {', '.join(unreachable)}")

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests and end the open ones in order; return how many were cut."""
        num_cut = await self._open_requests.drain(grace_s)
        if self._prompt_log is not None:
            await asyncio.to_thread(self._prompt_log.close)
        return num_cut


def begin_prompts(job: Job, admissions: Sequence[AdmissionRecord]) -> list[PromptResult]:
    """Return what is known of the prompts of an admitted job.

    A prompt that came as text is echoed as it came, one of token ids as the tokenizer spells it.

    Raises:
        InvalidRequestError: the answer would hold too many log probabilities.
    """
    num_entries = sum(
        job.form.count_prompt_entries(admission["num_prompt_tokens"]) for admission in admissions
    )
    if num_entries > MAX_PROMPT_ENTRIES:
        raise InvalidRequestError(
            job.param_names[PROMPT_PARAM],
            f"the answer would hold {num_entries} log probabilities of prompt tokens; at most "
            f"{MAX_PROMPT_ENTRIES} are allowed",
        )
    return [
        PromptResult(
            num_tokens=admission["num_prompt_tokens"],
            text=_echo(call["prompt"], admission) if job.form.is_prompt_reported else "",
            first_token=admission.get("first_prompt_token", ""),
        )
        for call, admission in zip(job.calls, admissions, strict=True)
    ]


def join_adapter_versions(admissions: Sequence[AdmissionRecord]) -> str:
    """Return the adapter's version as an answer tells it; "" without an adapter.

    Prompts of one request that were admitted around a change have two.
    """
    versions = (admission["adapter_version"] for admission in admissions)
    return ", ".join(dict.fromkeys(version for version in versions if version))


def _echo(prompt: PromptRecord, admission: AdmissionRecord) -> str:
    return prompt["text"] if prompt["kind"] == "text" else admission.get("prompt_text", "")


async def _ask(handle: Any) -> None:
    await handle.remote()
