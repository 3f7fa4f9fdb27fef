"""Requests alone and in company, on engines that should give both the same bits."""

from collections.abc import Callable, Sequence

from models.adapters.weights import AdapterWeights
from models.engine.build import EngineParts
from tests.benchmarks.adapter_workload import AdapterShelf, Choice
from tests.harness import Job, Output, make_request, run

NUM_TOKENS = 8
# Both are more than the rows of one forward pass, where these are fixed.
BUDGETS_TOKENS = (256, 140)


def make_jobs(prompts: Sequence[Sequence[int]]) -> list[Job]:
    """Return half of them greedy, half seeded, all with log probabilities, also of the prompt."""
    return [
        (
            make_request(
                f"r{index}",
                seed=index,
                temperature=0.0 if index % 2 else 0.8,
                max_tokens=NUM_TOKENS,
                num_top_logprobs=2,
                num_prompt_logprobs=0,
                ignore_eos=True,
            ),
            prompt,
        )
        for index, prompt in enumerate(prompts)
    ]


def told(output: Output) -> object:
    """Return all that a request is told."""
    return (
        output.token_ids,
        [(each.token_id, each.logprob, each.top) for each in output.logprobs],
        [each.logprob for each in output.prompt_logprobs],
    )


def assert_company_changes_nothing(
    make_engine: Callable[[int], EngineParts], prompts: Sequence[Sequence[int]]
) -> None:
    """Run each request alone, then all at once, then one after another with less room a step.

    Two of three requests use one of two adapters, if the engine has any.

    Args:
        make_engine: makes an engine of a budget of tokens a step, without a prefix cache.
        prompts: of the requests.
    """
    jobs = make_jobs(prompts)
    large, small = map(make_engine, BUDGETS_TOKENS)
    adapters: dict[str, AdapterWeights] = {}
    if large.adapters is not None:
        shelf = AdapterShelf(large.adapters.modules)
        for index, (request, _) in enumerate(jobs):
            if number := index % 3:
                adapters[request.request_id] = shelf.get(Choice(number=number, rank=8 * number))
    alone: dict[tuple[str, int], Output] = {}
    for job in jobs:
        alone.update(run(large, [job], adapters=adapters))
    late = {request.request_id: 3 * index for index, (request, _) in enumerate(jobs)}
    for outputs in (
        run(large, jobs, adapters=adapters),
        run(small, jobs[::-1], arrivals=late, adapters=adapters),
    ):
        assert {key: told(output) for key, output in outputs.items()} == {
            key: told(output) for key, output in alone.items()
        }
