"""Tests of remembered failures."""

from models.adapters.failure_memory import FailureMemory
from models.errors import AdapterLoadFailedError


def test_a_failure_is_told_for_a_while_to_each_caller_by_itself():
    memory = FailureMemory(5.0, 10)
    error = AdapterLoadFailedError("a", "cause", 5.0)
    memory.remember("a", error, 100.0)

    first, second = memory.recall("a", 104.9), memory.recall("a", 104.9)

    assert str(first) == str(second) == str(error)
    assert len({id(first), id(second), id(error)}) == 3
    assert memory.recall("b", 104.9) is None
    assert memory.recall("a", 105.0) is None
    assert len(memory) == 0


def test_the_oldest_failures_go_first_and_a_new_one_counts_anew():
    memory = FailureMemory(5.0, 2)
    for now_s, key in ((0.0, "a"), (1.0, "b"), (2.0, "a"), (3.0, "c")):
        memory.remember(key, AdapterLoadFailedError(key, "cause", 5.0), now_s)

    assert memory.recall("b", 3.0) is None
    assert memory.recall("a", 6.0) is not None
    memory.forget("a")
    memory.forget("never")
    assert memory.recall("a", 6.0) is None
