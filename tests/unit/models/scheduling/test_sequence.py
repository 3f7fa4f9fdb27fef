import itertools

import pytest

from models.requests import AdapterRef, PrefixNamespace
from models.scheduling.sequence import LEGAL_TRANSITIONS, Sequence, SequenceStatus
from sampling.params import SamplingParams


def make(output=(), **fields):
    return Sequence(
        seq_id=3,
        request_id="r",
        params=SamplingParams(),
        seed=0,
        namespace=PrefixNamespace("m", AdapterRef("a", "1")),
        prompt_token_ids=(1, 2),
        output_token_ids=output,
        **fields,
    )


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(SequenceStatus, SequenceStatus))
)
def test_only_transitions_of_the_table_are_taken(before, after):
    sequence = make()
    sequence.status = before

    if after in LEGAL_TRANSITIONS[before]:
        sequence.transition_to(after)
        assert sequence.status is after
    else:
        with pytest.raises(RuntimeError, match="sequence 3 cannot go"):
            sequence.transition_to(after)
        assert sequence.status is before


def test_the_table_is_what_the_life_of_a_sequence_allows():
    pairs = {(a.value, b.value) for a, targets in LEGAL_TRANSITIONS.items() for b in targets}

    assert pairs == {
        ("waiting", "running"),
        ("waiting", "finished"),
        ("running", "preempted"),
        ("running", "finished"),
        ("preempted", "running"),
        ("preempted", "finished"),
    }


def test_a_preempted_sequence_keeps_its_tokens_and_loses_its_computed_ones():
    sequence = make()
    sequence.transition_to(SequenceStatus.RUNNING)
    sequence.num_computed_tokens = 2
    sequence.append(9)

    sequence.transition_to(SequenceStatus.PREEMPTED)

    assert sequence.token_ids == [1, 2, 9]
    assert sequence.num_computed_tokens == 0
    assert sequence.num_uncomputed_tokens == 3


def test_appended_tokens_are_output_and_part_of_all_tokens():
    sequence = make(output=[5])

    sequence.append(6)

    assert sequence.output_token_ids == [5, 6]
    assert sequence.token_ids == [1, 2, 5, 6]
    assert sequence.num_tokens == 4
    assert sequence.num_prompt_tokens == 2


def test_the_callers_list_of_emitted_tokens_is_not_changed():
    emitted = [5]

    make(output=emitted).append(6)

    assert emitted == [5]


def test_the_adapter_is_the_one_of_the_namespace():
    assert make().adapter == AdapterRef("a", "1")


def test_virtual_tokens_are_positions_but_no_tokens_of_the_prompt():
    sequence = make(output=[5], num_virtual_tokens=3)

    assert len(sequence.token_ids) == sequence.num_tokens == 6
    assert sequence.token_ids[3:] == [1, 2, 5]
    assert sequence.prompt_token_ids == (1, 2)
    assert sequence.num_prompt_tokens == 2
    assert sequence.num_prompt_positions == 5
    assert sequence.num_uncomputed_tokens == 6


@pytest.mark.parametrize(("num_reused", "num_cached"), [(0, 0), (2, 0), (3, 0), (4, 1), (6, 2)])
def test_cached_tokens_are_those_of_the_prompt_alone(num_reused, num_cached):
    sequence = make(output=[5, 6], num_virtual_tokens=3)

    sequence.note_cached(num_reused)

    assert sequence.num_cached_tokens == num_cached


def test_logits_of_virtual_tokens_are_never_wanted_and_their_kv_may_be_taken():
    sequence = make(num_virtual_tokens=3, num_prompt_logprobs=1)

    assert sequence.unscored_positions == range(3, 4)
    assert sequence.num_reusable_tokens == 3
    sequence.num_scored_positions = 4
    assert not sequence.unscored_positions
    assert sequence.num_reusable_tokens == 5
