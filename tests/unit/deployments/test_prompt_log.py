"""The log of requests with ``log_prompt``: what stands in it, and that nothing else does."""

import asyncio
import json
import stat

import pytest

from deployments.ingress import Ingress
from deployments.prompt_log import PromptLogConfig
from models.errors import SequenceFailedError
from tests.unit.deployments.fakes import (
    LIMITS,
    MODEL_ID,
    NOW_S,
    SEED,
    EndlessModel,
    FakeHandle,
    chat_body,
    completion_body,
    fail_with,
    hello,
    refuse_with,
)

pytestmark = pytest.mark.anyio


class Logged:
    """An ingress with a log in a folder of its own."""

    def __init__(self, folder, script=hello, max_bytes=1 << 20):
        self._folder = folder / "log"
        self.ingress = Ingress(
            LIMITS,
            {MODEL_ID: FakeHandle(script)},
            prompt_log=PromptLogConfig(folder=self._folder, max_bytes=max_bytes, num_kept=2),
            draw_seed=lambda: SEED,
            now_s=lambda: NOW_S,
        )

    async def lines(self):
        await self.ingress.begin_shutdown(0)
        return [json.loads(line) for path in self.paths() for line in path.read_text().splitlines()]

    def paths(self):
        return sorted(self._folder.glob("*")) if self._folder.exists() else []


async def test_only_requests_that_agree_are_logged(tmp_path):
    log = Logged(tmp_path)

    await log.ingress.chat(chat_body())
    await log.ingress.chat(chat_body(log_prompt=False))
    await log.ingress.complete(completion_body(log_prompt=None))

    assert await log.lines() == []
    assert log.paths() == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_prompt_and_answer_of_a_request_are_one_line(tmp_path, is_stream):
    log = Logged(tmp_path)
    body = chat_body(log_prompt=True, n=2, metadata={"ticket": "7"}, temperature=0.5)

    if is_stream:
        events = [event async for event in log.ingress.stream_chat(body)]
        answer_id = events[0]["id"]
    else:
        answer_id = (await log.ingress.chat(body))["id"]

    (line,) = await log.lines()
    assert line["id"] == answer_id
    assert line["model"] == MODEL_ID
    assert line["outcome"] == "complete"
    assert line["metadata"] == {"ticket": "7"}
    assert line["sampling"] == {"temperature": 0.5}
    assert line["prompts"][0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert line["prompts"][0]["seed"] == SEED
    assert [choice["text"] for choice in line["choices"]] == ["Hello world"] * 2
    assert [choice["token_ids"] for choice in line["choices"]] == [[1, 1]] * 2
    assert [choice["finish_reason"] for choice in line["choices"]] == ["stop"] * 2


async def test_what_ended_a_request_early_is_told_with_what_it_had_said(tmp_path):
    log = Logged(tmp_path, fail_with(SequenceFailedError("NaN")))

    with pytest.raises(SequenceFailedError):
        await log.ingress.complete(completion_body(log_prompt=True))

    (line,) = await log.lines()
    assert line["outcome"] == "SequenceFailedError"
    assert line["choices"][0]["text"] == "Hello"
    assert line["prompts"][0]["text"] == "Hi"


async def test_a_caller_who_leaves_is_logged_too(tmp_path):
    model = EndlessModel()
    log = Logged(tmp_path, model)
    task = asyncio.create_task(log.ingress.chat(chat_body(log_prompt=True)))
    await model.has_begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    (line,) = await log.lines()

    assert line["outcome"] == "CancelledError"


async def test_a_refused_request_is_logged_without_an_answer(tmp_path):
    log = Logged(tmp_path, refuse_with(SequenceFailedError("x")))

    with pytest.raises(SequenceFailedError):
        await log.ingress.chat(chat_body(log_prompt=True))

    (line,) = await log.lines()
    assert line["choices"] == []


async def test_files_are_rotated_and_readable_by_their_owner_only(tmp_path):
    log = Logged(tmp_path, max_bytes=2000)
    for index in range(40):
        await log.ingress.chat(chat_body(log_prompt=True, metadata={"index": str(index)}))

    lines = await log.lines()

    assert len(log.paths()) == 3
    assert all(path.stat().st_size <= 2000 for path in log.paths())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in log.paths())
    kept = sorted(int(line["metadata"]["index"]) for line in lines)
    assert kept == list(range(kept[0], 40))


async def test_a_disk_that_fails_costs_the_line_and_not_the_request(tmp_path, caplog):
    (tmp_path / "log").write_text("a file where the folder should be")
    log = Logged(tmp_path)

    answer = await log.ingress.chat(chat_body(log_prompt=True))
    await log.ingress.begin_shutdown(0)

    assert answer["choices"][0]["message"]["content"] == "Hello world"
    assert "Hello world" not in caplog.text
