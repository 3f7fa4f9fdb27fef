"""In which dtype matrices are multiplied."""

import pytest
import torch

from models.loading.arithmetic import matrix_unit, product_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_multiplied_in_float32_where_the_processor_cannot(dtype):
    assert product_dtype(dtype, CPU, {"avx2": True, "avx512_f": True}) == torch.float32


@pytest.mark.parametrize("unit", ["amx_bf16", "avx512_bf16", "bf16"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_stays_where_the_processor_can(dtype, unit):
    assert product_dtype(dtype, CPU, {unit: True}) == dtype


@pytest.mark.parametrize("dtype", HALF)
def test_a_gpu_multiplies_what_it_stores(dtype):
    assert product_dtype(dtype, CUDA, {}) == dtype


def test_float32_is_never_changed():
    assert product_dtype(torch.float32, CPU, {}) == torch.float32


def test_the_fastest_unit_gives_the_name():
    assert matrix_unit({"avx512_bf16": True, "amx_bf16": True}) == "amx_bf16"
    assert matrix_unit({"amx_bf16": False}) == "vector"


def test_the_processor_at_hand_is_asked_by_default():
    assert matrix_unit() == matrix_unit(torch.cpu.get_capabilities())
