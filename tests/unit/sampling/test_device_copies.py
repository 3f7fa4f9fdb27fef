"""How often the host waits for the device in one call of ``Sampler.sample``.

No GPU is needed: the logits are tensors of torch's meta device, which have a device, a shape and
no values. torch refuses every operation that would have to look at values there: copies to the
CPU, ``item`` and ``tolist``, ``nonzero``, indexing by a mask. It refuses as well to mix devices in
most operations. The one place that reads the results is replaced, since there is nothing to read,
and its calls are counted. Copies from the host to the device are not: nothing waits for those.
"""

import pytest
import torch

from sampling import step_results
from sampling.params import SamplingParams
from sampling.sampler import Sampler

NUM_ROWS = 6
VOCABULARY_SIZE = 4099

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.1,
    logit_bias=((5, 1.0),),
    allowed_token_ids=tuple(range(100)),
    bad_words_token_ids=((5,), (1, 6)),
    min_tokens=4,
    num_top_logprobs=5,
)
MIXES = {
    "greedy": [SamplingParams(temperature=0.0)],
    "plain": [SamplingParams()],
    "top_p": [SamplingParams(top_p=0.9)],
    "top_k": [SamplingParams(top_k=40)],
    "typical": [SamplingParams(typical_p=0.5)],
    "logprobs": [SamplingParams(temperature=0.0, num_top_logprobs=20)],
    "everything": [EVERYTHING],
    "all kinds": [
        EVERYTHING,
        SamplingParams(),
        SamplingParams(temperature=0.0, num_top_logprobs=0),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(top_p=0.9),
        SamplingParams(typical_p=0.5, num_top_logprobs=3),
    ],
}


@pytest.fixture
def reads(monkeypatch):
    devices = []

    def read(values):
        devices.append(values.device.type)
        return [1.0] * len(values)

    monkeypatch.setattr(step_results, "copy_to_host", read)
    return devices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_waits_for_the_device_once(mix, dtype, reads):
    sampler = Sampler(VOCABULARY_SIZE, frozenset({2}))
    params = [MIXES[mix][i % len(MIXES[mix])] for i in range(NUM_ROWS)]
    rows = [sampler.make_row(each, i, [1, 2, 3]) for i, each in enumerate(params)]
    logits = torch.empty((NUM_ROWS, VOCABULARY_SIZE), dtype=dtype, device="meta")

    results = sampler.sample(logits, rows)

    assert reads == ["meta"]
    assert len(results) == NUM_ROWS


@pytest.mark.parametrize(
    "look",
    [
        torch.Tensor.cpu,
        torch.Tensor.tolist,
        lambda tensor: tensor[0].item(),
        lambda tensor: int(tensor[0]),
        lambda tensor: bool(tensor.any()),
        lambda tensor: tensor[tensor > 0],
        torch.nonzero,
        torch.unique,
        lambda tensor: torch.bincount(tensor.long()),
        lambda tensor: tensor + torch.ones(8),
        lambda tensor: tensor.index_copy(0, torch.arange(8), tensor),
    ],
)
def test_a_look_at_values_and_a_mix_of_devices_are_refused(look):
    with pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.zeros(8, device="meta"))
