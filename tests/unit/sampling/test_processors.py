import pytest
import torch

from sampling.errors import InvalidSamplingParamsError, NonFiniteLogitsError
from sampling.masks import LogitBiasProcessor
from sampling.params import SamplingParams
from sampling.processors import LogitsProcessor, load_processor
from sampling.sampler import Sampler
from tests.unit.sampling.example_processors import Flatten, OnlyEvenTokens

EXAMPLES = "tests.unit.sampling.example_processors"
RISING = torch.arange(8.0)[None]


def test_a_processor_is_made_from_its_dotted_path():
    processor = load_processor(f"{EXAMPLES}:OnlyEvenTokens")

    assert type(processor).__name__ == "OnlyEvenTokens"
    assert isinstance(processor, LogitsProcessor)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "form"),
        ("OnlyEvenTokens", "form"),
        (f"{EXAMPLES}.OnlyEvenTokens", "form"),
        (f"{EXAMPLES}:", "form"),
        (":OnlyEvenTokens", "form"),
        (f"{EXAMPLES}:Absent", "imported"),
        ("no_such_package.module:Name", "imported"),
        (f"{EXAMPLES}:NeedsAnArgument", "arguments"),
        (f"{EXAMPLES}:NotAProcessor", "does not make"),
        (f"{EXAMPLES}:__doc__", "arguments"),
    ],
)
def test_a_path_that_makes_no_processor_is_refused_with_the_reason(path, reason):
    with pytest.raises(InvalidSamplingParamsError, match=reason):
        load_processor(path)


def test_a_further_processor_changes_only_the_rows_it_has_a_state_for():
    processor = OnlyEvenTokens()
    sampler = Sampler(8, frozenset(), [processor])
    rows = [sampler.make_row(SamplingParams(temperature=0.0), seed, [1]) for seed in (2, 3, 4)]

    tokens = [each.token_id for each in sampler.sample(RISING.expand(3, -1), rows)]

    assert tokens == [6, 7, 6]
    assert processor.applied_to == [[2, 4]]


def test_a_further_processor_runs_after_the_built_in_ones():
    sampler = Sampler(8, frozenset(), [OnlyEvenTokens()])
    params = SamplingParams(temperature=0.0, logit_bias=((3, 100.0), (2, 50.0)))

    assert sampler.sample(RISING, [sampler.make_row(params, 0, [1])])[0].token_id == 2


def test_a_greedy_row_skips_what_cannot_change_its_best_token():
    processor = Flatten()
    sampler = Sampler(8, frozenset(), [processor])

    sampler.sample(RISING, [sampler.make_row(SamplingParams(temperature=0.0), 0, [1])])
    assert processor.num_calls == 0

    sampler.sample(RISING, [sampler.make_row(SamplingParams(temperature=1.0), 0, [1])])
    assert processor.num_calls == 1


def test_a_processor_that_makes_nan_fails_its_row_alone():
    class MakesNan(OnlyEvenTokens):
        def apply_(self, logits, active):
            for each in active:
                logits[each.index, 3] = torch.nan

    sampler = Sampler(8, frozenset(), [MakesNan()])
    rows = [sampler.make_row(SamplingParams(temperature=0.0), seed, [1]) for seed in (1, 2)]

    results = sampler.sample(RISING.expand(2, -1), rows)

    assert results[0].token_id == 7
    assert isinstance(results[1].error, NonFiniteLogitsError)


def test_the_built_in_operations_use_the_same_protocol():
    assert isinstance(LogitBiasProcessor(), LogitsProcessor)
