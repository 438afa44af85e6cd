"""What is put back of modules and generators after a call that is to leave nothing behind."""

import random
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyg_accel.runtime.module_state import ModuleState, as_it_was, modules_in, tensors_of

CPU = torch.device("cpu")


class Holder(nn.Module):
    """A module with an attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.lists, self.queue = [[1], 2], deque([1, 2])
        self.names, self.ordered = {"a": {"b": 1}}, OrderedDict(x=1, y=2)
        self.chosen, self.kept = {1, 2}, torch.zeros(2)


def forget_a_name(m: Holder) -> None:
    del m.ordered["x"]
    m.ordered["x"] = 1


CHANGES = {
    "an attribute": lambda m: setattr(m, "new", 1),
    "one that goes": lambda m: delattr(m, "queue"),
    "a list in a list": lambda m: m.lists[0].append(2),
    "a dictionary in one": lambda m: m.names["a"].update(c=2),
    "the order of names": forget_a_name,
    "a queue": lambda m: m.queue.rotate(),
    "a set": lambda m: m.chosen.symmetric_difference_update({2, 3}),
    "a mode": lambda m: m.eval(),
    "statistics": lambda m: m.inner(torch.randn(3, 2)),
    "a buffer": lambda m: m.inner.register_buffer("running_mean", torch.ones(2)),
    "a parameter": lambda m: setattr(m.inner, "weight", nn.Parameter(torch.zeros(2))),
}


def shown(module: nn.Module) -> list[str]:
    return [
        str({name: str(value) for name, value in vars(m).items() if name != "_modules"})
        for m in module.modules()
    ]


@pytest.mark.parametrize("device", [None, CPU])
@pytest.mark.parametrize("name", CHANGES)
def test_modules_are_as_they_were(name, device):
    module = Holder()
    before, lists = shown(module), module.lists
    state = ModuleState(modules_in(module), device)
    assert not state.changed()
    CHANGES[name](module)
    assert shown(module) != before
    state.restore()
    assert shown(module) == before and module.lists is lists


def test_changes_are_named():
    module = Holder()
    for change, text in (
        (lambda: setattr(module, "new", 1), "it changes new"),
        (lambda: module.queue.append(3), "it changes a list or set"),
        (lambda: module.kept.add_(1), "it changes a tensor in place that it did not make"),
        (lambda: random.random(), "it draws random numbers, or sets the seed"),
    ):
        with as_it_was(module.modules()) as state:
            change()
            assert state.changed() == text
        assert not ModuleState(module.modules()).changed()
    assert module.kept.sum() == 0 and not hasattr(module, "new")


def test_generators_are_put_back():
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    with as_it_was([]):
        first = draw()
    assert draw() == first
    state = ModuleState([], CPU)
    number = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), number)


def test_tensors_in_attributes_are_copied_where_no_device_is_named():
    module = Holder()
    state = ModuleState([module], CPU)
    module.kept.add_(1)
    state.restore()
    assert module.kept.sum() == 2  # a trace refuses to change it


def test_modules_without_sizes_are_left_to_their_first_call():
    module = nn.LazyLinear(3)
    with as_it_was([module]):
        module(torch.ones(2, 5))
    assert type(module) is nn.Linear and module.in_features == 5


def test_the_tensors_of_a_module_are_those_that_are_not_put_back():
    module, extra = Holder(), torch.ones(1)
    module.lists.append({"deep": extra})
    actual = tensors_of(module)

    def has(tensor: Tensor) -> bool:
        return any(tensor is other for other in actual)

    assert has(extra) and has(module.kept) and has(module.inner.weight)
    assert not has(module.inner.running_mean)
