"""Tensors of graphs are joined, and taken of those of a dataset, as PyG does it."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader

import pyg_accel
from pyg_accel import loader
from pyg_accel.loader import collate, selected
from pyg_accel.runtime.native import cpu_library, cuda_library
from tests.loader.batches import CASES, Items, assert_same, parts


class Ten(Data):
    """It says itself how many nodes it has."""

    @property
    def num_nodes(self) -> int:
        return 10

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        pass


class Incremented(Data):
    """Its increments are what a function says."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.by(self) if "index" in key or key == "tri" else 0


def incremented(by: Callable[[Any], Any], **more: Any) -> Incremented:
    data = Incremented(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]]), **more)
    object.__setattr__(data, "by", by)
    return data


def two_types(index: Tensor) -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(3, 1), torch.ones(2, 1)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [0, 1]])
    data["a", "to", "b"].index_map = index
    return data


ODD: dict[str, Callable[[int], Any]] = {
    "own num_nodes": lambda i: Ten(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [1]])),
    "a vector": lambda i: incremented(lambda d: torch.tensor([d.x.size(0)])),
    "a float": lambda i: incremented(lambda d: 3.0),
    "a float tensor": lambda i: incremented(lambda d: d.x.max()),
    "a row": lambda i: incremented(
        lambda d: torch.tensor([[3, 1]]), tri=torch.zeros(2, 2, dtype=torch.long)
    ),
    "an index of a relation": lambda i: two_types(torch.tensor([0, 1])),
    "one of three dimensions": lambda i: two_types(torch.zeros(3, 2, 2, dtype=torch.long)),
    "uint8 among int64": lambda i: Data(
        num_nodes=200, index=torch.tensor([1], dtype=torch.uint8 if i else torch.long)
    ),
    "features by another name": lambda i: Data(feat=torch.ones(2 + i, 1)),
}


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("name", ODD)
def test_odd_increments_are_those_of_pyg(name):
    def run() -> tuple[str, Any]:
        try:
            return "", parts(Batch.from_data_list([ODD[name](i) for i in range(3)]))
        except (RuntimeError, IndexError, TypeError) as error:
            return type(error).__name__, None

    theirs = run()
    with pyg_accel.patched():
        ours = run()
    assert_same(ours, theirs)


TENSORS: dict[str, Callable[[int], Tensor]] = {
    "bool": lambda n: torch.rand(n, 2) > 0.5,
    "uint8": lambda n: torch.randint(9, (n,), dtype=torch.uint8),
    "int16": lambda n: torch.randint(9, (n, 1, 2), dtype=torch.int16),
    "float8": lambda n: torch.rand(n, 3).to(torch.float8_e4m3fn).view(torch.uint8),
    "complex": lambda n: torch.randn(n, 2, dtype=torch.complex64),
    "conjugated": lambda n: torch.randn(n, 2, dtype=torch.complex64).conj(),
    "negated": lambda n: torch.randn(1, 1, dtype=torch.complex64).conj().imag,
    "strided": lambda n: torch.randn(n, 4)[:, ::2],
    "turned": lambda n: torch.randn(3, n).t(),
    "rows of a view": lambda n: torch.randn(9, 4)[n:],
    "stacks of a view": lambda n: torch.randn(9, 9, 3)[n : 2 * n, 2:5],
    "columns of rows": lambda n: torch.randn(2 * n, 4)[::2],
    "backwards": lambda n: torch.randn(3, n, 2).transpose(0, 1),
    "empty": lambda n: torch.randn(0, 3),
    "some empty": lambda n: torch.randn(n % 2, 3),
    "no columns": lambda n: torch.randn(n, 0),
    "expanded": lambda n: torch.randn(1, 3).expand(n, 3),
    "parts of one": lambda n: torch.arange(40.0)[n : 2 * n],
    "parameters": lambda n: torch.nn.Parameter(torch.randn(n, 2)),
    "a gradient": lambda n: torch.randn(n, 2, requires_grad=n == 3),
}


@pytest.mark.parametrize("dim", [0, 1, -1, 2, None])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_joined_along_every_dimension(name, dim):
    class Along(Data):
        def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return dim if key == "value" else super().__cat_dim__(key, value)

    items = [Along(x=torch.ones(n, 1), value=TENSORS[name](n)) for n in (3, 3, 3)]

    def run() -> Any:
        try:
            return parts(Batch.from_data_list(items))
        except (RuntimeError, IndexError) as error:
            return type(error).__name__

    theirs = run()
    with pyg_accel.patched():
        assert_same(run(), theirs)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_all_kinds_are_joined(name, library, monkeypatch):
    items = [Data(x=torch.ones(n, 1), value=TENSORS[name](n)) for n in (3, 1, 2, 4)]
    theirs = parts(Batch.from_data_list(items))
    if not library:
        for module in (collate, selected):
            monkeypatch.setattr(module, "library_of", lambda device: None)
    with pyg_accel.patched():
        batch = Batch.from_data_list(items)
    assert_same(parts(batch), theirs)
    assert batch.value.requires_grad == theirs["stores"]["None"][0]["value"].requires_grad
    dataset = Items(items)
    (theirs_of_it,) = (parts(batch) for batch in DataLoader(dataset, batch_size=4))
    (ours,) = (parts(batch) for batch in loader.DataLoader(dataset, batch_size=4))
    assert_same(ours, theirs_of_it)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"batches"}))
def test_batches_do_not_depend_on_the_library(name, monkeypatch):
    items = [CASES[name]() for _ in range(5)]
    with pyg_accel.patched():
        with_it = parts(Batch.from_data_list(items, follow_batch=["x"]))
        monkeypatch.setattr(collate, "library_of", lambda device: None)
        assert_same(with_it, parts(Batch.from_data_list(items, follow_batch=["x"])))


Take = Callable[..., list[Tensor]]


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]),
        pytest.param("cuda on cpu", marks=[
            pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
            pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]),
    ]
)  # fmt: skip
def take(request: pytest.FixtureRequest) -> Take:
    """What takes parts of a tensor, in each library."""

    def on_gpu(value: Tensor, *args: Any) -> list[Tensor]:
        return [t.cpu() for t in cuda_library().take_parts(value.cuda(), *args)]

    if request.param == "cpu":
        return cpu_library().take_parts
    if request.param == "cuda":
        return on_gpu
    return request.getfixturevalue("cuda_on_cpu").take_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool,
                                   torch.bfloat16, torch.complex128], ids=str)  # fmt: skip
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_a_tensor_are_taken(take: Take, dim: int, dtype: torch.dtype):
    where = torch.tensor([0, 3, 3, 3, 10, 11, 40])
    index = torch.tensor([5, 1, 0, 0, 2, 4, 3])
    for shape in ([40, 3], [2, 40], [40], [3, 40, 1], [40, 40, 2], [40, 0]):
        if shape[dim if len(shape) > 1 else 0] != 40:
            continue
        at = dim % len(shape) if len(shape) > 1 else 0
        value = (torch.rand(shape) * 9).to(dtype)
        chosen = [value.narrow(at, int(where[i]), int(where[i + 1] - where[i])) for i in index]
        sizes = [part.size(at) for part in chosen]
        shifts: list[Any] = [None]
        if dtype == torch.int64:
            shifts += [torch.randint(9, (7,))]
        for shift in shifts:
            out, slices = take(value, at, where, index, shift)
            added = [0] * 7 if shift is None else shift.view(7, -1, *[1] * len(shape[1:]))
            right = [p + a if shift is not None else p for p, a in zip(chosen, added, strict=True)]
            assert torch.equal(out, torch.cat(right, at))
            assert slices.diff().tolist() == sizes


def test_no_parts_are_taken(take: Take):
    out, slices = take(torch.ones(4, 2), 0, torch.tensor([0, 4]), torch.tensor([]).long(), None)
    assert out.shape == (0, 2)
    assert slices.tolist() == [0]


@pytest.mark.parametrize(
    "bad", ["an index beyond", "a negative index", "slices beyond", "descending"]
)
def test_what_is_outside_of_a_tensor_is_not_read(take: Take, bad: str):
    value, where, index = torch.ones(5), torch.tensor([0, 2, 5]), torch.tensor([0, 1])
    if "index" in bad:
        index[1] = 2 if bad == "an index beyond" else -1
    else:
        where[1 if bad == "descending" else 2] = 6
    with pytest.raises(RuntimeError, match="expected"):
        take(value, 0, where, index, None)


@pytest.mark.parametrize("groups", [0, 1, 3, 128, 129, 300])
def test_parts_of_many_graphs_are_taken(take: Take, groups: int):
    """Kernels take 128 parts at a time."""
    sizes = torch.randint(3, (2 * groups,))
    where = torch.cat([torch.zeros(1).long(), sizes.cumsum(0)])
    index, value = torch.randperm(2 * groups)[:groups], torch.randint(99, (2, int(where[-1])))
    shift = torch.arange(groups)
    out, slices = take(value, 1, where, index, shift if groups else None)
    chosen = [value[:, where[i] : where[i + 1]] + n for n, i in enumerate(index)]
    assert torch.equal(out, torch.cat([value[:, :0], *chosen], 1))
    assert torch.equal(slices.diff(), sizes[index])
