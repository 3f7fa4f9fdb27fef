"""Without a GPU nothing of this folder runs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here, or torch was built without CUDA")
    return torch.device("cuda")
