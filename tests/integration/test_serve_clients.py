"""The three APIs' own Python clients, pointed at a running service."""

import asyncio

import gradient
import httpx
import octoai.client
import octoai.core.api_error
import openai
import pytest
from octoai.environment import OctoAIEnvironment
from octoai.text_gen import ChatMessage, StreamOptions

from tests.integration.conftest import BUNDLED_ID
from tests.integration.tiny_service_model import TINY_ID

pytestmark = pytest.mark.integration

LIMIT_S = 60
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NUM_TOKENS = 12


@pytest.fixture
def openai_client(service):
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=2, timeout=LIMIT_S
    ) as client:
        yield client


@pytest.fixture
def octoai_client(service):
    environment = OctoAIEnvironment(
        default=service.url, image_gen=service.url, text_gen=service.url
    )
    with httpx.Client(timeout=LIMIT_S) as http:
        yield octoai.client.OctoAI(environment=environment, api_key="none", httpx_client=http)


@pytest.fixture(params=["", "/api/v1"])
def agent_client(service, request):
    """DigitalOcean's client at both of the paths that agents have."""
    with gradient.Gradient(
        base_url=f"{service.url}{request.param}",
        access_token="none",
        model_access_key="none",
        agent_access_key="none",
        max_retries=0,
        timeout=LIMIT_S,
        _strict_response_validation=True,
    ) as client:
        yield client


class TestOpenAI:
    """The official client: helpers, errors and retries."""

    def test_the_streaming_helper_puts_a_whole_answer_together(self, openai_client):
        # The helper takes an end by length for a failure.
        body = {
            "model": BUNDLED_ID,
            "messages": QUESTION,
            "temperature": 0,
            "max_tokens": 24,
            "logprobs": True,
        }
        whole = openai_client.chat.completions.create(**body)

        with openai_client.chat.completions.stream(
            **body, stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()

        assert final.choices[0].message.content == whole.choices[0].message.content
        assert final.choices[0].logprobs == whole.choices[0].logprobs
        assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        assert final.usage.completion_tokens == whole.usage.completion_tokens
        assert "content.delta" in kinds
        assert kinds.count("content.done") == 1

    def test_the_async_client_runs_several_at_once(self, service):
        async def ask():
            async with openai.AsyncOpenAI(
                base_url=f"{service.url}/v1", api_key="none", timeout=LIMIT_S
            ) as client:
                return await asyncio.gather(
                    *(
                        client.completions.create(
                            model=TINY_ID, prompt="abc", seed=seed, max_tokens=NUM_TOKENS
                        )
                        for seed in (1, 2, 1)
                    )
                )

        first, other, again = asyncio.run(ask())

        assert first.choices[0].text == again.choices[0].text != other.choices[0].text

    @pytest.mark.parametrize(
        ("fields", "error", "param", "code"),
        [
            ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
            ({"temperature": 9}, openai.BadRequestError, "temperature", "invalid_value"),
            (
                {"extra_body": {"peft": "nobody"}},
                openai.NotFoundError,
                "peft",
                "adapter_not_found",
            ),
            (
                {"max_tokens": 10**6},
                openai.BadRequestError,
                "max_tokens",
                "context_length_exceeded",
            ),
        ],
    )
    def test_errors_are_the_exceptions_that_users_catch(
        self, openai_client, fields, error, param, code
    ):
        with pytest.raises(error) as caught:
            openai_client.chat.completions.create(
                **{"model": TINY_ID, "messages": QUESTION, **fields}
            )

        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.request_id

    def test_what_a_repeat_cannot_help_is_not_repeated(self, service):
        attempts = []
        with (
            httpx.Client(timeout=LIMIT_S, event_hooks={"request": [attempts.append]}) as http,
            openai.OpenAI(
                base_url=f"{service.url}/v1", api_key="none", max_retries=2, http_client=http
            ) as client,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            client.chat.completions.create(
                model=TINY_ID,
                messages=QUESTION,
                max_tokens=4000,
                extra_body={"timeout_s": 0.001, "ignore_eos": True},
            )

        assert caught.value.status_code == httpx.codes.REQUEST_TIMEOUT
        assert len(attempts) == 1

    def test_models_are_listed_and_found(self, openai_client):
        listed = {model.id for model in openai_client.models.list()}

        assert {TINY_ID, BUNDLED_ID} <= listed
        assert openai_client.models.retrieve(TINY_ID).id == TINY_ID
        with pytest.raises(openai.NotFoundError):
            openai_client.models.retrieve("nobody")


class TestDigitalOcean:
    """``gradient``, which checks every answer against its own schema here."""

    def test_an_agent_answers_whatever_model_is_named(self, agent_client):
        answer = agent_client.agents.chat.completions.create(
            model="ignored",
            messages=QUESTION,
            temperature=0,
            max_tokens=0,
            max_completion_tokens=24,
            metadata={"ticket": "7"},
        )

        assert "Paris" in answer.choices[0].message.content
        assert answer.choices[0].message.refusal is None
        assert answer.model == BUNDLED_ID
        assert answer.usage.total_tokens > answer.usage.prompt_tokens

    def test_an_agents_stream_is_the_same_in_pieces(self, agent_client):
        body = {
            "model": TINY_ID,
            "messages": QUESTION,
            "temperature": 0,
            "max_completion_tokens": NUM_TOKENS,
            "logprobs": True,
        }
        whole = agent_client.agents.chat.completions.create(**body)

        chunks = list(
            agent_client.agents.chat.completions.create(
                **body, stream=True, stream_options={"include_usage": True}
            )
        )

        pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert "".join(piece or "" for piece in pieces) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_reports_that_are_asked_for_are_there(self, agent_client):
        answer = agent_client.agents.chat.completions.create(
            model="ignored",
            messages=QUESTION,
            max_completion_tokens=1,
            extra_body={"include_retrieval_info": True, "k": 0, "provide_citations": True},
        )

        assert answer.to_dict()["retrieval"] == {"retrieved_data": []}

    def test_errors_are_its_exceptions(self, agent_client):
        with pytest.raises(gradient.BadRequestError, match="temperature"):
            agent_client.agents.chat.completions.create(
                model="ignored", messages=QUESTION, temperature=3
            )


class TestOctoAI:
    """``octoai``, the last version that there was."""

    def test_a_chat_with_the_fields_that_only_it_has(self, octoai_client):
        answer = octoai_client.text_gen.create_chat_completion(
            model=TINY_ID,
            messages=[ChatMessage(role="user", content="Hi")],
            max_tokens=NUM_TOKENS,
            min_p=0.05,
            repetition_penalty=1.1,
            ignore_eos=True,
            log_prompt=False,
            peft=None,
            logprobs=True,
            top_logprobs=2,
        )

        assert answer.usage.completion_tokens == NUM_TOKENS
        assert len(answer.choices[0].logprobs.content) == NUM_TOKENS
        assert answer.choices[0].finish_reason == "length"

    def test_its_stream_says_what_the_whole_answer_says(self, octoai_client):
        body = {
            "model": TINY_ID,
            "messages": [ChatMessage(role="user", content="Hi")],
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
        }
        whole = octoai_client.text_gen.create_chat_completion(**body)

        chunks = list(
            octoai_client.text_gen.create_chat_completion_stream(
                **body, stream_options=StreamOptions(include_usage=True)
            )
        )

        pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        assert "".join(piece or "" for piece in pieces) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_a_completion_and_the_likelihood_of_its_prompt(self, octoai_client):
        answer = octoai_client.text_gen.create_completion(
            model=TINY_ID, prompt="abcdef", max_tokens=1, loglikelihood=True, logprobs=1
        )

        entries = answer.choices[0].logprobs.content
        assert [entry.token for entry in entries] == list("bcdef")
        assert all(entry.logprob < 0 for entry in entries)

    def test_an_unknown_fine_tune_is_its_error_and_never_the_base_model(self, octoai_client):
        with pytest.raises(octoai.core.api_error.ApiError) as caught:
            octoai_client.text_gen.create_chat_completion(
                model=TINY_ID, messages=[ChatMessage(role="user", content="Hi")], peft="nobody"
            )

        assert caught.value.status_code == httpx.codes.NOT_FOUND
        assert caught.value.body["error"]["param"] == "peft"
