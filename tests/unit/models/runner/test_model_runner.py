"""ModelRunner: sampling state, failing rows, cut steps, over a tiny model."""

import dataclasses
import itertools

import pytest
import torch

from models.runner.model_runner import ModelRunner
from models.scheduling.step_plan import JoiningSequence, ScheduledSequence, StepPlan
from sampling.params import SamplingParams
from sampling.sampler import Sampler
from tests.harness import make_parts
from tests.tiny_models import FAMILIES, VOCABULARY_SIZE, greedy_reference, make_model

BLOCK_SIZE = 4
TABLE_BLOCKS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
PROMPT = (5, 17, 99, 4, 23, 42, 108)
NEIGHBOUR = (61, 7, 150, 33, 2)
POISON = 77


def reference(prompt, num_tokens):
    """Return what transformers' own ``generate`` draws."""
    return greedy_reference(make_model(FAMILIES[0]), list(prompt), num_tokens)


class Driver:
    """Runs sequences by hand-made plans; sequence i owns blocks [8 i, 8 i + 8)."""

    def __init__(self, *, max_forward_rows=0):
        self.model = make_model(FAMILIES[0])
        parts = make_parts(self.model, num_blocks=64, block_size=BLOCK_SIZE)
        forward = parts.runner._forward
        forward.policy = dataclasses.replace(forward.policy, max_forward_rows=max_forward_rows)
        self.runner = ModelRunner(forward, Sampler(VOCABULARY_SIZE, frozenset()))
        self.tokens = {}
        self.num_computed = {}
        # seq_id -> the prompt's last position, which is not scored
        self.scoring = {}
        # what the last step told of prompts
        self.scored = ()
        self._step_ids = itertools.count()

    def step(self, *, join=None, leave=(), run=(), chunk=1000, table=None):
        """Run the next tokens of some sequences; return what they drew.

        Whoever joined with ``num_prompt_logprobs`` scores its prompt; see ``scored``.

        Args:
            join: prompts or JoiningSequence by seq_id.
            leave: seq_ids.
            run: seq_ids, in the order of the plan.
            chunk: most tokens of one sequence.
            table: seq_id -> the sequence whose blocks it uses.
        """
        joining = []
        for seq_id, prompt in (join or {}).items():
            if not isinstance(prompt, JoiningSequence):
                prompt = joining_sequence(seq_id, prompt)
            joining.append(prompt)
            self.tokens[seq_id] = [*prompt.prompt_token_ids, *prompt.output_token_ids]
            self.num_computed[seq_id] = 0
            if prompt.num_prompt_logprobs is not None:
                self.scoring[seq_id] = len(prompt.prompt_token_ids) - 1
        scheduled = []
        for seq_id in run:
            start = self.num_computed[seq_id]
            taken = tuple(self.tokens[seq_id][start : start + chunk])
            first_block = TABLE_BLOCKS * (table or {}).get(seq_id, seq_id)
            blocks = tuple(range(first_block, first_block + TABLE_BLOCKS))
            is_last = start + len(taken) == len(self.tokens[seq_id])
            scored = range(start, min(start + len(taken), self.scoring.get(seq_id, 0)))
            scheduled.append(ScheduledSequence(seq_id, taken, start, blocks, is_last, scored))
            self.num_computed[seq_id] += len(taken)
        plan = StepPlan(next(self._step_ids), tuple(scheduled), tuple(joining), tuple(leave))
        result = self.runner.execute(plan)
        assert result.step_id == plan.step_id
        wanted = [part.seq_id for part in scheduled if part.is_sampled]
        assert [token.seq_id for token in result.sampled] == wanted
        wanted = [(part.seq_id, part.start + 1) for part in scheduled if part.scored_positions]
        assert [(each.seq_id, each.start) for each in result.scored] == wanted
        self.scored = result.scored
        for token in result.sampled:
            if token.error is None:
                self.tokens[token.seq_id].append(token.token_id)
        return result.sampled

    def continue_alone(self, seq_id, prompt, num_tokens, **options):
        """Run one sequence from its start; return its tokens."""
        self.step(join={seq_id: prompt}, run=[seq_id], **options)
        for _ in range(num_tokens - 1):
            self.step(run=[seq_id], **options)
        self.step(leave=[seq_id])
        return self.tokens[seq_id][len(prompt) :]


def joining_sequence(seq_id, prompt, *, sampling=GREEDY, seed=0, output=(), num_top=None):
    return JoiningSequence(
        seq_id, sampling, seed, tuple(prompt), tuple(output), num_prompt_logprobs=num_top
    )


@torch.inference_mode()
def reference_logprobs(prompt):
    """Return what transformers' own forward pass says of every prompt token but the first."""
    logits = make_model(FAMILIES[0])(torch.tensor([list(prompt)])).logits[0]
    rows = logits.float().log_softmax(dim=1)
    return [float(rows[at, token]) for at, token in enumerate(prompt[1:])], rows


def test_a_sequence_draws_what_generate_draws():
    tokens = Driver().continue_alone(1, PROMPT, 6)

    assert tokens == reference(PROMPT, 6)


def test_state_is_held_for_those_that_have_joined_and_not_left():
    driver = Driver()
    assert driver.runner.num_sequences == 0

    driver.step(join={0: PROMPT, 1: NEIGHBOUR}, run=[0])
    assert driver.runner.num_sequences == 2

    driver.step(join={2: PROMPT}, leave=[0], run=[1, 2])
    assert driver.runner.num_sequences == 2

    driver.step(leave=[1, 2, 0])
    assert driver.runner.num_sequences == 0


def test_a_sequence_that_leaves_and_joins_in_one_plan_goes_on_where_it_was():
    sampled = SamplingParams(temperature=1.0, max_tokens=100, frequency_penalty=1.5)
    driver = Driver()
    driver.step(join={0: joining_sequence(0, PROMPT, sampling=sampled, seed=9)}, run=[0])
    for _ in range(7):
        driver.step(run=[0])
    undisturbed = driver.tokens[0][len(PROMPT) :]
    again = joining_sequence(0, PROMPT, sampling=sampled, seed=9, output=undisturbed[:3])

    driver.step(leave=[0], join={0: again}, run=[0])
    for _ in range(4):
        driver.step(run=[0])

    assert driver.runner.num_sequences == 1
    assert driver.tokens[0][len(PROMPT) :] == undisturbed


def test_a_chunk_that_does_not_end_the_prompt_draws_nothing():
    driver = Driver()

    assert driver.step(join={0: PROMPT}, run=[0], chunk=4) == ()
    (token,) = driver.step(run=[0], chunk=4)

    assert [token.token_id] == reference(PROMPT, 1)


def test_log_probabilities_come_only_to_those_who_asked():
    asked = SamplingParams(temperature=0.0, max_tokens=100, num_top_logprobs=3)
    driver = Driver()
    join = {0: PROMPT, 1: joining_sequence(1, PROMPT, sampling=asked)}

    silent, told = driver.step(join=join, run=[0, 1])

    assert silent.logprob is None
    assert silent.token_id == told.token_id == told.logprob.token_id
    assert told.logprob.top[0] == (told.token_id, told.logprob.logprob)
    assert len(told.logprob.top) == 3


def test_prompt_tokens_get_the_log_probabilities_of_a_forward_pass_and_the_rest_draws_the_same():
    driver = Driver()
    join = {
        0: joining_sequence(0, PROMPT, num_top=3),
        1: NEIGHBOUR,
        2: joining_sequence(2, NEIGHBOUR, num_top=0),
    }

    drawn = driver.step(join=join, run=[1, 0, 2])

    expected = [reference(prompt, 1)[0] for prompt in (NEIGHBOUR, PROMPT, NEIGHBOUR)]
    assert [token.token_id for token in drawn] == expected
    for told, prompt, num_top in zip(driver.scored, (PROMPT, NEIGHBOUR), (3, 0), strict=True):
        logprobs, rows = reference_logprobs(prompt)
        assert tuple(each.token_id for each in told.logprobs) == prompt[1:]
        assert [each.logprob for each in told.logprobs] == pytest.approx(logprobs, abs=1e-4)
        for row, each in zip(rows, told.logprobs, strict=False):
            assert each.rank == 1 + int((row > row[each.token_id]).sum())
            assert [token_id for token_id, _ in each.top] == row.topk(num_top).indices.tolist()


def test_the_token_behind_a_chunk_is_told_with_it():
    driver = Driver()
    whole = Driver()
    whole.step(join={0: joining_sequence(0, PROMPT, num_top=1)}, run=[0])

    driver.step(join={0: joining_sequence(0, PROMPT, num_top=1)}, run=[0], chunk=4)
    (first,) = driver.scored
    driver.step(run=[0], chunk=4)
    (second,) = driver.scored

    assert [each.token_id for each in first.logprobs] == list(PROMPT[1:5])
    told = (*first.logprobs, *second.logprobs)
    assert [each.logprob for each in told] == pytest.approx(
        [each.logprob for each in whole.scored[0].logprobs], abs=1e-5
    )
    assert second.start == 5


@pytest.mark.parametrize("max_forward_rows", [1, 3, 8])
def test_a_step_cut_into_forward_passes_tells_the_same_of_prompts(max_forward_rows):
    told = []
    for driver in (Driver(), Driver(max_forward_rows=max_forward_rows)):
        driver.step(
            join={
                0: joining_sequence(0, PROMPT * 2, num_top=2),
                1: NEIGHBOUR,
                2: joining_sequence(2, PROMPT, num_top=0),
            },
            run=[0, 1, 2],
        )
        told.append(driver.scored)

    for whole, cut in zip(*told, strict=True):
        assert (whole.seq_id, whole.start, len(whole.logprobs)) == (
            cut.seq_id,
            cut.start,
            len(cut.logprobs),
        )
        assert [each.logprob for each in cut.logprobs] == pytest.approx(
            [each.logprob for each in whole.logprobs], abs=1e-5
        )
        assert [each.rank for each in cut.logprobs] == [each.rank for each in whole.logprobs]


def test_a_prompt_that_is_not_a_number_fails_alone():
    driver = Driver()
    driver.model.get_input_embeddings().weight.data[POISON] = float("nan")
    poisoned = (*PROMPT[:3], POISON, *PROMPT[3:])
    join = {
        0: joining_sequence(0, poisoned, num_top=1),
        1: joining_sequence(1, NEIGHBOUR, num_top=1),
    }

    driver.step(join=join, run=[0, 1])

    failed, neighbour = driver.scored
    assert failed.logprobs == ()
    assert "not numbers" in failed.error
    assert neighbour.error is None
    expected, _ = reference_logprobs(NEIGHBOUR)
    assert [each.logprob for each in neighbour.logprobs] == pytest.approx(expected, abs=1e-4)


def test_only_the_wanted_rows_have_logits_computed():
    driver = Driver()
    heights = []
    driver.model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: heights.append(output.shape[-2])
    )

    driver.step(join={0: joining_sequence(0, PROMPT * 4, num_top=1), 1: PROMPT * 4}, run=[0, 1])

    # 27 scored and 2 sampled of 56, padded to a multiple of 8
    assert heights == [32]


def test_a_row_that_is_not_a_number_fails_alone():
    driver = Driver()
    expected = driver.continue_alone(0, NEIGHBOUR, 6)
    driver.model.get_input_embeddings().weight.data[POISON] = float("nan")

    failed, neighbour = driver.step(join={0: NEIGHBOUR, 1: (*PROMPT, POISON)}, run=[1, 0])
    for _ in range(5):
        driver.step(run=[0])

    assert (failed.token_id, failed.logprob) == (-1, None)
    assert "not numbers" in failed.error
    assert neighbour.error is None
    assert driver.tokens[0][len(NEIGHBOUR) :] == expected


def test_the_blocks_of_a_failed_sequence_do_no_harm_to_their_next_owner():
    driver = Driver()
    expected = driver.continue_alone(0, NEIGHBOUR, 8)
    driver.model.get_input_embeddings().weight.data[POISON] = float("nan")
    (token,) = driver.step(join={1: (POISON,) * 30}, run=[1])
    assert token.error is not None
    pool = driver.runner._forward._pool
    assert pool.values[0][:, TABLE_BLOCKS : 2 * TABLE_BLOCKS].isnan().any()

    tokens = driver.continue_alone(2, NEIGHBOUR, 8, table={2: 1})

    assert tokens == expected


@pytest.mark.parametrize("max_forward_rows", [1, 5, 8])
def test_a_step_cut_into_forward_passes_draws_the_same(max_forward_rows):
    tokens = []
    for driver in (Driver(), Driver(max_forward_rows=max_forward_rows)):
        heights = []
        driver.model.register_forward_pre_hook(
            lambda module, args, keywords, heights=heights: heights.append(
                keywords["input_ids"].shape[1]
            ),
            with_kwargs=True,
        )
        driver.step(join={0: PROMPT}, run=[0])
        driver.step(join={1: NEIGHBOUR, 2: PROMPT * 3}, run=[0, 1, 2])
        for _ in range(4):
            driver.step(run=[2, 0, 1])
        tokens.append(driver.tokens)

    assert tokens[0] == tokens[1]
    assert max(heights) == 8  # padded; 32 when nothing is cut


def test_a_cut_chunk_draws_once():
    driver = Driver(max_forward_rows=2)

    tokens = driver.step(join={0: PROMPT, 1: NEIGHBOUR}, run=[0, 1])

    assert [token.seq_id for token in tokens] == [0, 1]
    assert [token.token_id for token in tokens] == [
        *reference(PROMPT, 1),
        *reference(NEIGHBOUR, 1),
    ]


def test_a_plan_that_only_says_who_leaves_runs_nothing():
    driver = Driver()
    driver.step(join={0: PROMPT}, run=[0])
    calls = []
    handle = driver.model.register_forward_pre_hook(lambda *_: calls.append(1))

    driver.step(leave=[0])
    handle.remove()

    assert not calls
    assert driver.runner.num_sequences == 0


def test_the_model_keeps_no_gradients():
    driver = Driver()
    grad_modes = []
    handle = driver.model.register_forward_pre_hook(
        lambda *_: grad_modes.append(torch.is_grad_enabled())
    )

    driver.step(join={0: PROMPT}, run=[0])
    handle.remove()

    assert grad_modes == [False]
