"""PackedForward: which rows of logits come back, and what the model is called with."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models.runner.packed_forward import PackedForward
from models.runner.row_stability import RowPolicy
from models.scheduling.step_plan import ScheduledSequence

NULL_BLOCK = 99
POOL = SimpleNamespace(plan=SimpleNamespace(block_size_tokens=4), null_block_id=NULL_BLOCK)


class WholeModel(nn.Module):
    """Logits of a row are (token, position), for all rows."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, input_ids, position_ids, use_cache):
        self.calls.append((input_ids, position_ids, use_cache))
        return SimpleNamespace(logits=torch.stack([input_ids, position_ids], dim=-1).float())


class SlicingModel(WholeModel):
    """The same, for the rows that are asked for only, as most of transformers' models do."""

    def forward(self, input_ids, position_ids, use_cache, logits_to_keep=0):
        whole = super().forward(input_ids, position_ids, use_cache)
        self.kept = logits_to_keep
        return SimpleNamespace(logits=whole.logits[:, logits_to_keep])


class LayoutRecorder:
    """An attention backend that nobody calls."""

    def __init__(self):
        self.layouts = []

    def begin_step(self, layout):
        self.layouts.append(layout)


def make_forward(model, *, multiple=8):
    backend = LayoutRecorder()
    policy = RowPolicy(multiple, max_forward_rows=0, smallest_tile_rows=0)
    return PackedForward(model, POOL, backend, policy), backend


PARTS = (
    ScheduledSequence(0, (10, 11, 12), 0, (0, 1), True),
    ScheduledSequence(1, (20,), 6, (2, 3), True),
    ScheduledSequence(2, (30, 31), 2, (4,), True),
)


@pytest.mark.parametrize("model_class", [WholeModel, SlicingModel])
@pytest.mark.parametrize("multiple", [1, 8])
def test_the_wanted_rows_come_back_in_the_order_asked_for(model_class, multiple):
    forward, _ = make_forward(model_class(), multiple=multiple)
    inputs = forward.pack(PARTS)

    logits = forward.run(inputs, [inputs.last_rows[index] for index in (2, 0, 1)])

    assert logits.tolist() == [[31, 3], [12, 2], [20, 6]]


@pytest.mark.parametrize("model_class", [WholeModel, SlicingModel])
def test_every_row_may_be_asked_for(model_class):
    forward, _ = make_forward(model_class())
    inputs = forward.pack(PARTS)

    logits = forward.run(inputs, range(6))

    assert sorted(logits[:, 0].tolist()) == [10, 11, 12, 20, 30, 31]


@pytest.mark.parametrize("model_class", [WholeModel, SlicingModel])
def test_a_pass_without_wanted_rows_runs_and_returns_none(model_class):
    model = model_class()
    forward, backend = make_forward(model)
    inputs = forward.pack(PARTS)

    assert forward.run(inputs, []) is None
    assert len(model.calls) == 1
    assert backend.layouts == [inputs.layout]


@pytest.mark.parametrize("num_wanted", [0, 1, 8, 9])
def test_the_head_multiplies_a_whole_multiple_of_rows(num_wanted):
    model = SlicingModel()
    forward, _ = make_forward(model)
    inputs = forward.pack([ScheduledSequence(0, tuple(range(12)), 0, (0, 1, 2), True)])

    forward.run(inputs, range(num_wanted))

    assert len(model.kept) % 8 == 0
    assert len(model.kept) - num_wanted <= 8
    assert model.kept[:num_wanted].tolist() == list(range(num_wanted))


def test_the_model_gets_padded_rows_their_positions_and_no_cache():
    model = WholeModel()
    forward, _ = make_forward(model)

    forward.run(forward.pack(PARTS), [0])

    ((tokens, positions, use_cache),) = model.calls
    assert tokens.tolist() == [[20, 10, 11, 12, 30, 31, 0, 0]]
    assert positions.tolist() == [[6, 0, 1, 2, 2, 3, 0, 0]]
    assert use_cache is False


def test_block_tables_are_padded_with_the_null_block_of_the_pool():
    forward, _ = make_forward(WholeModel())

    (group,) = forward.pack(PARTS).layout.decodes

    assert group.block_ids[0].tolist() == [2, 3, *[NULL_BLOCK] * 14]


def test_the_backend_has_the_layout_before_the_model_runs():
    model = WholeModel()
    forward, backend = make_forward(model)
    num_layouts = []
    model.register_forward_pre_hook(lambda *_: num_layouts.append(len(backend.layouts)))

    forward.run(forward.pack(PARTS), [0])

    assert num_layouts == [1]
