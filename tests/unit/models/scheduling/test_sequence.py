import itertools

import pytest

from models.requests import AdapterRef, PrefixNamespace
from models.scheduling.sequence import LEGAL_TRANSITIONS, Sequence, SequenceStatus
from sampling.params import SamplingParams


def make(output=()):
    return Sequence(
        seq_id=3,
        request_id="r",
        params=SamplingParams(),
        seed=0,
        namespace=PrefixNamespace("m", AdapterRef("a", "1")),
        prompt_token_ids=(1, 2),
        output_token_ids=output,
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
