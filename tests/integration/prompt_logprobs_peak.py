"""Run by test_prompt_logprobs_memory in a process of its own: tells the peak of a long prompt.

Prints by how many bytes the process's largest resident memory grew while a prompt of
NUM_PROMPT_TOKENS was scored, beyond what a short one with the same step size had taken.
"""

import dataclasses
import resource
import sys

import torch

from tests.harness import make_parts, make_request, run
from tests.tiny_models import FAMILIES, make_model

VOCABULARY_SIZE = 50_000
NUM_PROMPT_TOKENS = 3_000
NUM_SCORED_POSITIONS = 32


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    torch.set_num_threads(1)
    family = FAMILIES[0]
    sizes = {
        "vocab_size": VOCABULARY_SIZE,
        "num_hidden_layers": 1,
        "max_position_embeddings": NUM_PROMPT_TOKENS + 1,
    }
    model = make_model(dataclasses.replace(family, extra={**family.extra, **sizes}))
    parts = make_parts(
        model,
        num_blocks=256,
        block_size=16,
        max_num_batched_tokens=64,
        max_num_scored_positions=NUM_SCORED_POSITIONS,
    )
    prompt = torch.arange(NUM_PROMPT_TOKENS).tolist()
    run(parts, [(make_request("short", max_tokens=0, num_prompt_logprobs=5), prompt[:200])])
    before_bytes = peak_bytes()

    outputs = run(parts, [(make_request("long", max_tokens=0, num_prompt_logprobs=5), prompt)])

    assert len(outputs["long", 0].prompt_logprobs) == NUM_PROMPT_TOKENS - 1
    sys.stdout.write(f"{peak_bytes() - before_bytes}\n")


if __name__ == "__main__":
    main()
