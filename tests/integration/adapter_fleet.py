"""An engine with a folder of many small adapters on disk, and requests in random order."""

import asyncio
import random
import shutil

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.config import AdapterConfig, EngineConfig, KVCacheConfig, ModelConfig
from models.engine.build import build_engine
from models.requests import Admission, GenerationRequest, TextPrompt, TokenDelta
from sampling.params import SamplingParams
from tests.integration.tiny_service_model import save_tiny_model
from tests.unit.models.adapters.peft_adapters import SavedAdapter

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj"]
NUM_TOKENS = 8


class Fleet:
    """A tiny model with ``num_adapters`` adapters on disk, behind a started AsyncEngine."""

    def __init__(self, folder, num_adapters, *, max_num_slots, num_host_adapters):
        self.root = folder / "adapters"
        model_folder = folder / "model"
        save_tiny_model(model_folder)
        base = AutoModelForCausalLM.from_pretrained(model_folder).eval()
        config = LoraConfig(r=4, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        SavedAdapter(folder / "pattern", base, config)
        self._pattern = folder / "pattern"
        for number in range(num_adapters):
            self.write(number)
        num_bytes = sum(path.stat().st_size for path in (self.root / "a0").iterdir())
        self.host_budget_bytes = num_host_adapters * num_bytes
        self.engine = build_engine(
            EngineConfig(
                model=ModelConfig(
                    path=str(model_folder), model_id="tiny", dtype="float32", num_threads=1
                ),
                kv_cache=KVCacheConfig(budget_bytes=8 << 20),
                adapters=AdapterConfig(
                    path=str(self.root),
                    max_rank=8,
                    max_num_slots=max_num_slots,
                    host_budget_bytes=self.host_budget_bytes,
                ),
            ),
            cache_folder=folder,
            progress=lambda _: None,
        )
        self.engine.start()
        self._num_requests = 0

    def write(self, number, *, seed=None):
        """Write an adapter, or another version of it, as a deployment would: file by file."""
        target = self.root / f"a{number}"
        target.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(number if seed is None else seed)
        tensors = load_file(self._pattern / "adapter_model.safetensors")
        drawn = {
            name: 0.2 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in tensors.items()
        }
        save_file(drawn, target / "new.safetensors", metadata={"format": "pt"})
        (target / "new.safetensors").replace(target / "adapter_model.safetensors")
        shutil.copy(self._pattern / "adapter_config.json", target / "adapter_config.json")

    async def ask(self, number, *, num_tokens=NUM_TOKENS):
        """Return (version, tokens) of a greedy answer with an adapter, None for the base model."""
        self._num_requests += 1
        request = GenerationRequest(
            request_id=f"r{self._num_requests}",
            prompt=TextPrompt(text="Once upon a time, in a small town by the sea"),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            is_max_tokens_explicit=True,
            seed=0,
            adapter_id=None if number is None else f"a{number}",
        )
        version, tokens = None, []
        async for events in self.engine.generate(request):
            for event in events:
                if isinstance(event, Admission):
                    version = event.adapter_version
                elif isinstance(event, TokenDelta):
                    tokens.extend(event.token_ids)
        return version, tuple(tokens)

    async def ask_in_random_order(self, numbers, num_requests, *, num_clients=8, seed=0):
        """Ask for adapters drawn from ``numbers``; return the answers of each as a set."""
        drawn = random.Random(seed).choices(list(numbers), k=num_requests)
        answers = {}

        async def client():
            while drawn:
                number = drawn.pop()
                answers.setdefault(number, set()).add(await self.ask(number))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return answers
