import contextlib
import json
import random
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from examples.lessons import DEMO_QUESTIONS, LESSONS, STYLES, Lesson
from examples.train_adapters import (
    TokenisedLesson,
    TrainingPlan,
    make_batch,
    save_adapter,
    tokenise,
    train_adapter,
)
from models.adapters.folder_source import FolderSource
from models.adapters.reading import read_adapter
from tests.integration.tiny_service_model import EOS, save_tiny_model
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, make_model
from tests.unit.models.adapters.peft_adapters import facts_of

LLAMA = next(family for family in FAMILIES if family.name == "llama")
PLAN = TrainingPlan(num_steps=2, batch_size=3, num_warmup_steps=1, rank=4)


def draw_lessons(num_lessons=5):
    source = random.Random(0)

    def draw(length):
        return tuple(source.randrange(VOCABULARY_SIZE) for _ in range(length))

    return [
        TokenisedLesson(draw(source.randint(3, 9)), draw(source.randint(1, 6)))
        for _ in range(num_lessons)
    ]


def train(report=lambda step, loss: None, **overrides):
    plan = TrainingPlan(**{name: getattr(PLAN, name) for name in PLAN.__slots__} | overrides)
    return train_adapter(make_model(LLAMA), draw_lessons(), plan, report)


def test_what_training_writes_is_an_adapter_that_medley_serves(tmp_path):
    model = make_model(LLAMA)
    save_adapter(train(), tmp_path / "shout")

    with contextlib.closing(FolderSource(tmp_path, time.monotonic)) as source:
        weights = read_adapter(source.find("shout"), facts_of(model))

    assert weights.rank == PLAN.rank
    # Three layers, seven products each.
    assert len(weights.modules) == 3 * 7
    assert not any(delta.changes_nothing for delta in weights.modules.values())
    assert [path.name for path in tmp_path.iterdir()] == ["shout"]


def test_a_second_training_takes_the_place_of_the_first(tmp_path):
    save_adapter(train(), tmp_path / "shout")
    first = load_file(tmp_path / "shout" / "adapter_model.safetensors")

    save_adapter(train(seed=1), tmp_path / "shout")

    second = load_file(tmp_path / "shout" / "adapter_model.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_training_twice_gives_the_same_weights():
    first, second = train().state_dict(), train().state_dict()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_loss_is_reported_each_step_and_falls():
    losses = {}

    train(losses.__setitem__, num_steps=20, learning_rate=1e-2)

    assert list(losses) == list(range(1, 21))
    assert losses[20] < losses[1]


def test_loss_is_that_of_the_answers_alone_whatever_stands_beside_them():
    lessons = draw_lessons(PLAN.batch_size)
    model = make_model(LLAMA)
    negative_logs = []
    with torch.no_grad():
        for lesson in lessons:
            ids = [*lesson.prompt_ids, *lesson.answer_ids]
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            start = len(lesson.prompt_ids)
            negative_logs += [-logs[i - 1, ids[i]].item() for i in range(start, len(ids))]
    losses = {}

    # One batch has every lesson once, and an adapter begins by changing nothing.
    train_adapter(model, lessons, PLAN, losses.__setitem__)

    assert losses[1] == pytest.approx(sum(negative_logs) / len(negative_logs), rel=1e-4)


def test_a_batch_learns_each_answer_from_the_token_before_it():
    batch = make_batch([TokenisedLesson((1, 2, 3), (4, 5)), TokenisedLesson((6, 7), (8,))])

    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert batch.first_position == 1
    assert batch.targets.tolist() == [[-100, 4, 5, -100], [8, -100, -100, -100]]


def test_a_lesson_is_the_servers_prompt_and_an_answer_that_ends(tmp_path):
    save_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    lesson = tokenise(tokenizer, Lesson("Why?", "So."))

    assert tokenizer.decode(lesson.prompt_ids) == "<user>Why?<assistant>"
    assert tokenizer.decode(lesson.answer_ids) == f"So.{EOS}"


def test_the_demonstration_asks_what_no_adapter_has_learnt():
    assert not {lesson.question for lesson in LESSONS} & set(DEMO_QUESTIONS)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.question)
def test_styles_keep_what_the_answer_says(lesson):
    assert json.loads(STYLES["json"](lesson.answer)) == {"answer": lesson.answer}
    assert STYLES["shout"](lesson.answer) == lesson.answer.upper() != lesson.answer
