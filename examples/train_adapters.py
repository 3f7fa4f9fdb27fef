"""Trains small LoRA adapters on the bundled model: ``python -m examples.train_adapters``.

Serves nothing. Needs no GPU and no network: the lessons are in ``examples/lessons.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from cluster.settings import read_settings
from examples.lessons import LESSONS, STYLES, Lesson
from models.config import ModelConfig
from models.engine.build import resolve_model_path
from models.errors import ConfigError

# What cross_entropy leaves out.
_NOT_LEARNT = -100
_REPORT_EVERY_STEPS = 4
_INTERRUPTED_STATUS = 130


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How an adapter is trained.

    Attributes:
        num_steps: updates of the weights.
        batch_size: lessons of one step.
        learning_rate: at its highest; it rises over the first steps, then falls to nothing.
        num_warmup_steps: steps in which the learning rate rises.
        rank: of the LoRA products.
        seed: of the weights' start and of the order of lessons.
    """

    num_steps: int = 36
    batch_size: int = 4
    learning_rate: float = 2e-3
    num_warmup_steps: int = 3
    rank: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TokenisedLesson:
    """A lesson in tokens.

    Attributes:
        prompt_ids: all up to where the assistant begins, as the server renders it.
        answer_ids: the assistant's tokens, with the one that ends its turn. Only these are learnt.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Lessons side by side, filled up behind their ends.

    Attributes:
        input_ids: [B, T] int64. Attention is causal, so what fills up a row changes nothing in it.
        targets: [B, T - first_position] int64: the token behind each position, or _NOT_LEARNT.
        first_position: the first one that any row learns from.
    """

    input_ids: Tensor
    targets: Tensor
    first_position: int


def tokenise(tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> TokenisedLesson:
    """Return a lesson in tokens, rendered with the model's own chat template."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": lesson.question}], add_generation_prompt=True, tokenize=False
    )
    # Apart, since the server also reads the prompt before there is an answer.
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    answer_ids = tokenizer(lesson.answer, add_special_tokens=False).input_ids
    return TokenisedLesson(tuple(prompt_ids), (*answer_ids, tokenizer.eos_token_id))


def train_adapter(
    model: PreTrainedModel,
    lessons: Sequence[TokenisedLesson],
    plan: TrainingPlan,
    report: Callable[[int, float], None],
) -> PeftModel:
    """Put a LoRA adapter on the products of all layers of a model and train it.

    Args:
        model: the base, float32. Its own weights stay; the adapter's layers are put in.
        lessons: what is learnt.
        plan: how.
        report: told the number of steps done and the step's loss, in nats a token.
    """
    torch.manual_seed(plan.seed)
    config = LoraConfig(
        r=plan.rank,
        lora_alpha=2 * plan.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # PEFT asks for an attribute that transformers gives a new name.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config).train()
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=plan.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, plan)
    )
    for step, batch in enumerate(_draw_batches(lessons, plan), start=1):
        loss = _compute_loss(adapted, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    return adapted


def save_adapter(adapted: PeftModel, folder: Path) -> None:
    """Write an adapter as PEFT does, in place of an earlier one. It is never there in part."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        written = Path(scratch) / folder.name
        adapted.save_pretrained(str(written), save_embedding_layers=False)
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)


def make_batch(lessons: Sequence[TokenisedLesson]) -> Batch:
    """Put lessons side by side."""
    width = max(len(lesson.prompt_ids) + len(lesson.answer_ids) for lesson in lessons)
    input_ids = torch.zeros(len(lessons), width, dtype=torch.int64)
    targets = torch.full((len(lessons), width), _NOT_LEARNT)
    for row, lesson in enumerate(lessons):
        start, num_answer_tokens = len(lesson.prompt_ids), len(lesson.answer_ids)
        ids = torch.tensor((*lesson.prompt_ids, *lesson.answer_ids))
        input_ids[row, : len(ids)] = ids
        targets[row, start - 1 : start - 1 + num_answer_tokens] = ids[start:]
    first_position = min(len(lesson.prompt_ids) for lesson in lessons) - 1
    return Batch(input_ids, targets[:, first_position:], first_position)


def _draw_batches(lessons: Sequence[TokenisedLesson], plan: TrainingPlan) -> Iterator[Batch]:
    """Yield a batch for each step; every lesson comes once before one comes again."""
    order = random.Random(plan.seed)
    deck: list[TokenisedLesson] = []
    for _ in range(plan.num_steps):
        while len(deck) < plan.batch_size:
            deck += order.sample(lessons, len(lessons))
        yield make_batch(deck[: plan.batch_size])
        del deck[: plan.batch_size]


def _compute_loss(adapted: PeftModel, batch: Batch) -> Tensor:
    """Return the mean loss of the learnt tokens: a scalar, float32, with its graph."""
    num_positions = batch.targets.shape[1]
    # The vocabulary is a quarter of this model's work: only positions that count go through it.
    logits = adapted(
        input_ids=batch.input_ids, use_cache=False, logits_to_keep=num_positions
    ).logits
    return functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=_NOT_LEARNT
    )


def _learning_rate_factor(step: int, plan: TrainingPlan) -> float:
    rising = (step + 1) / (plan.num_warmup_steps + 1)
    falling = (plan.num_steps - step) / max(plan.num_steps - plan.num_warmup_steps, 1)
    return min(rising, falling, 1.0)


def _train_one(adapter_id: str, base_folder: str, out: Path, plan: TrainingPlan) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    style = STYLES[adapter_id]
    lessons = [
        tokenise(tokenizer, Lesson(lesson.question, style(lesson.answer))) for lesson in LESSONS
    ]
    start_s = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step % _REPORT_EVERY_STEPS == 0 or step in (1, plan.num_steps):
            seconds = time.monotonic() - start_s
            _say(
                f"{adapter_id}: step {step:2}/{plan.num_steps}  loss {loss:6.3f}  {seconds:5.1f} s"
            )

    save_adapter(train_adapter(model, lessons, plan, report), out / adapter_id)
    _say(f"{adapter_id}: kept in {out / adapter_id}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the adapters that are named, all of them by default.

    Args:
        argv: words after the program's name; those of this process by default.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="train_adapters", description=__doc__.partition("\n")[0])
    parser.add_argument("adapter_ids", nargs="*", metavar="ID", help=", ".join(STYLES))
    parser.add_argument("--out", type=Path, help="folder of adapters; by default in the cache")
    options = parser.parse_args(argv)
    if unknown := set(options.adapter_ids) - STYLES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(STYLES)}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        cache_folder = read_settings().cache_folder
        base_folder = resolve_model_path(ModelConfig(), cache_folder, _say)
        for adapter_id in options.adapter_ids or STYLES:
            out = options.out or cache_folder / "adapters"
            _train_one(adapter_id, base_folder, out, TrainingPlan())
    except ConfigError as error:
        _say(f"train_adapters: {error}")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
