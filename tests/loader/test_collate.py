"""Batches that patch() makes are those of PyG, attribute for attribute."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, random_split
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.data.collate import collate as stock_collate
from torch_geometric.data.separate import separate as stock_separate
from torch_geometric.loader import DataLoader

import pyg_accel
from pyg_accel import loader
from pyg_accel.loader import collate, selected
from pyg_accel.runtime.native import cpu_library, cuda_library


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Same types, shapes, dtypes, numbers and order of names."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, Tensor):
        assert (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
        if ours.layout is torch.strided:
            assert torch.equal(ours, theirs), path
        else:
            assert torch.equal(ours.to_dense(), theirs.to_dense()), path
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for name, value in ours.items():
            assert_same(value, theirs[name], f"{path}.{name}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), path
        for place, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, right, f"{path}[{place}]")
    else:
        assert ours == theirs, path


def parts(batch: Any) -> dict[str, Any]:
    """Everything that a batch holds."""
    own = {k: v for k, v in vars(batch).items() if k in ("_num_graphs", "_slice_dict", "_inc_dict")}
    stores = {
        str(store._key): [
            dict(store.items()),
            {k: v for k, v in vars(store).items() if k not in ("_mapping", "_parent")},
        ]
        for store in batch.stores
    }
    return {"type": type(batch).__name__, "own": own, "stores": stores}


def molecule(nodes: int = 0, **more: Any) -> Data:
    nodes = nodes or int(torch.randint(1, 9, ()))
    edges = int(torch.randint(0, 3 * nodes, ()))
    return Data(
        x=torch.randn(nodes, 3), edge_index=torch.randint(nodes, (2, edges)),
        edge_attr=torch.randn(edges, 2), y=torch.randn(1), **more,
    )  # fmt: skip


class Pairs(Data):
    """Two graphs in one item, as PyG's tutorial has them."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        ends = {"edge_index_s": self.x_s, "edge_index_t": self.x_t}
        return ends[key].size(0) if key in ends else super().__inc__(key, value, *args, **kwargs)


class Stacked(Data):
    """`y` gets a dimension of its own."""

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return None if key == "y" else super().__cat_dim__(key, value, *args, **kwargs)


def pairs() -> Pairs:
    s, t = 2, int(torch.randint(1, 5, ()))
    return Pairs(x_s=torch.randn(s, 2), edge_index_s=torch.randint(s, (2, 3)),
                 x_t=torch.randn(t, 2), edge_index_t=torch.randint(t, (2, 4)))  # fmt: skip


def hetero() -> HeteroData:
    data, users, items = HeteroData(), int(torch.randint(1, 5, ())), int(torch.randint(1, 5, ()))
    data["user"].x, data["item"].x = torch.randn(users, 2), torch.randn(items, 3)
    ends = torch.stack([torch.randint(users, (6,)), torch.randint(items, (6,))])
    data["user", "likes", "item"].edge_index = ends
    data["user", "likes", "item"].edge_attr = torch.randn(6, 1)
    data.y = torch.randn(1)
    return data


def no_x() -> Data:
    return Data(edge_index=torch.randint(4, (2, 5)), num_nodes=4)


def sparse() -> Data:
    return Data(x=torch.randn(3, 2), adj=torch.eye(3).to_sparse_coo())


def later_position() -> Data:
    """Its first attribute with a row per node differs from item to item."""
    x, pos = torch.randn(3, 2), torch.randn(3, 3)
    return Data(pos=pos, x=x) if torch.rand(()) < 0.5 else Data(x=x, pos=pos)


CASES: dict[str, Callable[[], Any]] = {
    "molecules": molecule,
    "one node": lambda: molecule(1),
    "names": lambda: molecule(smiles="CCO", charge=1, mass=2.5),
    "lists of names": lambda: molecule(tags=["a", "b"]),
    "node mask": lambda: molecule(4, train_mask=torch.rand(4) > 0.5),
    "scalars": lambda: molecule(energy=torch.tensor(0.5)),
    "an index of int32": lambda: molecule(4, node_index=torch.arange(4, dtype=torch.int32)),
    "an index of rows": lambda: molecule(4, pair_index=torch.randint(4, (3, 5))),
    "faces": lambda: molecule(4, face=torch.randint(4, (3, 2))),
    "batch vectors": lambda: molecule(4, part_batch=torch.tensor([0, 0, 1, 2])),
    "nested": lambda: molecule(4, more={"a": torch.randn(4), "b": [torch.randn(2)]}),
    "bf16": lambda: molecule(4, low=torch.randn(4, 2, dtype=torch.bfloat16)),
    "gradients": lambda: molecule(4, learned=torch.randn(4, requires_grad=True)),
    "num_nodes": no_x,
    "no nodes": lambda: Data(x=torch.randn(0, 3), edge_index=torch.empty(2, 0, dtype=torch.long)),
    "only y": lambda: Data(y=torch.randn(2)),
    "sparse": sparse,
    "own increments": pairs,
    "own dimensions": lambda: Stacked(x=torch.randn(2, 2), y=torch.randn(3)),
    "typed": hetero,
    "an order of their own": later_position,
    "batches": lambda: Batch.from_data_list([molecule(), molecule()]),
}


class Items(InMemoryDataset):
    def __init__(self, items: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self.data, self.slices = self.collate(items)


@pytest.mark.parametrize("follow", [(), ("x", "edge_index", "x_s")])
@pytest.mark.parametrize("name", CASES)
def test_a_list_of_graphs_becomes_the_batch_of_pyg(name, follow):
    items = [CASES[name]() for _ in range(7)]
    options = {"follow_batch": list(follow), "exclude_keys": ["edge_attr"] if follow else []}
    theirs = parts(Batch.from_data_list(items, **options))
    with pyg_accel.patched():
        ours = parts(Batch.from_data_list(items, **options))
        one = parts(Batch.from_data_list(items[:1], **options))
    assert_same(ours, theirs)
    assert_same(one, parts(Batch.from_data_list(items[:1], **options)))


@pytest.mark.parametrize("follow", [(), ("x", "edge_index", "x_s")])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"batches"}))
def test_a_dataset_in_memory_gives_the_batches_of_pyg(name, follow):
    dataset = Items([CASES[name]() for _ in range(9)])
    options = {"batch_size": 4, "follow_batch": list(follow)}
    theirs = [parts(batch) for batch in DataLoader(dataset, **options)]
    with pyg_accel.patched():
        ours = [parts(batch) for batch in DataLoader(dataset, **options)]
    assert_same(ours, theirs)


def test_graphs_of_a_dataset_are_not_separated(monkeypatch):
    dataset = Items([molecule(smiles="C") for _ in range(40)])
    made = []
    monkeypatch.setattr(
        "torch_geometric.data.in_memory_dataset.separate",
        lambda **options: made.append(options["idx"]) or stock_separate(**options),
    )
    for _ in loader.DataLoader(dataset, batch_size=20):
        pass
    assert made == []


@pytest.mark.parametrize("which", ["shuffled", "split", "subset", "indexed", "transformed"])
def test_parts_of_a_dataset_give_the_batches_of_pyg(which):
    made = {"transform": lambda data: data.update({"z": data.x.sum()})}
    items = [molecule() for _ in range(30)]
    dataset = Items(items, **(made if which == "transformed" else {}))
    part = {
        "split": lambda: random_split(dataset, [20, 10], torch.Generator().manual_seed(0))[0],
        "subset": lambda: Subset(dataset, [5, 3, 3, 29]),
        "indexed": lambda: dataset[torch.tensor([7, 1, 28])],
    }.get(which, lambda: dataset)()
    runs = []
    for patched in (False, True):
        torch.manual_seed(3)
        batches = DataLoader(part, batch_size=3, shuffle=which == "shuffled")
        with pyg_accel.patched() if patched else torch.no_grad():
            runs.append([parts(batch) for batch in batches])
    assert_same(*runs)


def test_workers_give_the_batches_of_pyg():
    dataset = Items([molecule(smiles="C") for _ in range(12)])
    theirs = [parts(batch) for batch in DataLoader(dataset, batch_size=5)]
    with pyg_accel.patched():
        ours = [parts(batch) for batch in DataLoader(dataset, batch_size=5, num_workers=2)]
        several = [parts(batch) for batch in DataLoader([*dataset], batch_size=5, num_workers=1)]
    assert_same(ours, theirs)
    assert_same(several, theirs)


def test_a_collate_function_of_the_user_gets_the_items():
    dataset = Items([molecule() for _ in range(6)])
    with pyg_accel.patched():
        batches = torch.utils.data.DataLoader(
            dataset, batch_size=3, collate_fn=lambda items: [item.num_nodes for item in items]
        )
        assert [n for batch in batches for n in batch] == [item.num_nodes for item in dataset]


def test_graphs_of_a_batch_can_be_had_again():
    dataset = Items([molecule() for _ in range(6)])
    with pyg_accel.patched():
        batch = next(iter(DataLoader(dataset, batch_size=6)))
    for item, again in zip(dataset, batch.to_data_list(), strict=True):
        assert_same(again.to_dict(), item.to_dict())


def test_everything_is_put_back():
    with pyg_accel.patched():
        pass
    assert stock_collate.__code__.co_name == "collate"
    assert stock_collate.__code__.co_filename.endswith("collate.py")


def test_items_that_a_collate_function_changes_are_batched_as_they_are():
    def augmented(items: list[Data]) -> Any:
        assert isinstance(items, list)
        for item in items:
            item.x = item.x + 100
        return Batch.from_data_list(items)

    dataset = Items([molecule() for _ in range(4)])
    with pyg_accel.patched():
        batches = torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=augmented)
        assert float(next(iter(batches)).x.min()) > 50


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


def test_a_loader_of_features_by_another_name_adds_no_batch_vector():
    graphs = [Data(feat=torch.ones(2 + i, 1)) for i in range(3)]
    theirs = [parts(batch) for batch in DataLoader(graphs, batch_size=3)]
    assert_same([parts(batch) for batch in loader.DataLoader(graphs, batch_size=3)], theirs)


def test_workers_put_together_shapes_that_differ():
    empty = Data(x=torch.ones(2, 1), edge_index=torch.tensor([]).long())
    full = Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0, 1, 0], [1, 0, 1]]))
    theirs = [parts(batch) for batch in DataLoader([empty, full], batch_size=2)]
    with pyg_accel.patched():
        ours = [parts(batch) for batch in DataLoader([empty, full], batch_size=2, num_workers=1)]
    assert_same(ours, theirs)


def test_a_dataset_whose_items_are_made_otherwise_is_asked_for_them():
    class Doubled(Items):
        def get(self, idx: int) -> Any:
            data = super().get(idx)
            data.x = 2 * data.x
            return data

    dataset = Doubled([molecule() for _ in range(5)])
    assert not selected.counted_by(dataset, None)
    with pyg_accel.patched():
        batch = next(iter(DataLoader(dataset, batch_size=5)))
    torch.testing.assert_close(batch.x, torch.cat([item.x for item in dataset]))


@pytest.mark.parametrize("bad", ["an attribute is missing", "widths differ", "no items"])
def test_bad_items_raise_what_pyg_raises(bad):
    items = [molecule(3), molecule(3)]
    if bad == "an attribute is missing":
        del items[1].edge_attr
    elif bad == "widths differ":
        items[1].x = torch.randn(3, 4)
    else:
        items = []
    errors = []
    for patched in (False, True):
        with pyg_accel.patched() if patched else torch.no_grad(), pytest.raises(Exception) as info:
            Batch.from_data_list(items)
        errors.append((info.type, str(info.value)))
    assert errors[0] == errors[1]


DATASETS = {
    "in memory": lambda: Items([molecule(smiles="C") for _ in range(10)]),
    "a list": lambda: [molecule() for _ in range(10)],
    "a subset": lambda: Subset(Items([molecule() for _ in range(10)]), [9, 0, 0, 4]),
    "a part": lambda: Items([molecule() for _ in range(10)])[3:8],
    "typed": lambda: [hetero() for _ in range(10)],
    "transformed": lambda: Items([molecule() for _ in range(10)], transform=lambda d: d.clone()),
}


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_pyg(name, device):
    dataset = DATASETS[name]()
    options = {"batch_size": 4, "follow_batch": ["x"], "exclude_keys": ["y"]}
    theirs = [parts(batch) for batch in DataLoader(dataset, **options)]
    batches = loader.DataLoader(dataset, device=device, **options)
    assert len(batches) == len(theirs)
    for _ in range(2):
        assert_same([parts(batch) for batch in batches], theirs)


def test_it_shuffles_as_torch_does():
    dataset, runs = DATASETS["in memory"](), []
    for cls in (DataLoader, loader.DataLoader):
        torch.manual_seed(1)
        runs.append([parts(batch) for batch in cls(dataset, batch_size=3, shuffle=True)])
    assert_same(*runs)


def test_batches_are_on_the_device():
    """The meta device has no data, so its batches tell where they were made."""
    data = Items([Data(x=torch.randn(3, 2)) for _ in range(4)])
    batches = loader.DataLoader(data, batch_size=2)
    assert next(iter(batches)).x.device.type == "cpu"
    typed = loader.DataLoader([hetero()], device="meta")
    assert next(iter(typed))["user"].x.device.type == "meta"


def test_the_report_says_who_collated(report_of):
    class Own(Data):
        pass

    graphs = [molecule() for _ in range(4)]
    with pyg_accel.patched():
        for _ in DataLoader(graphs, batch_size=2):
            pass
        for _ in DataLoader([*graphs[:1], Own(**graphs[1].to_dict())], batch_size=2):
            pass
    rows = {row.backend: row for row in report_of()}
    assert {row.layer for row in rows.values()} == {"Batch"}
    assert not any(row.is_forward for row in rows.values())
    assert (rows["cpu"].formula, rows["cpu"].reason, rows["cpu"].calls) == ("graphs", "", 2)
    assert rows["PyG"].formula == ""
    assert rows["PyG"].reason == "graphs of several classes: Data, Own"


def test_the_dataset_stays_where_it_is():
    data = Items([molecule() for _ in range(4)])
    before = data._data.x
    next(iter(loader.DataLoader(data, batch_size=2, device="cpu")))
    assert data._data.x is before


@pytest.mark.parametrize("option", [{"num_workers": 2}, {"pin_memory": True}])
def test_what_a_gpu_cannot_use_is_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        loader.DataLoader([molecule()], device="cuda", **option)


def test_workers_and_patch_make_the_same_batches():
    dataset = DATASETS["in memory"]()
    theirs = [parts(batch) for batch in DataLoader(dataset, batch_size=4)]
    with pyg_accel.patched():
        assert_same(
            [parts(b) for b in loader.DataLoader(dataset, batch_size=4, num_workers=1)], theirs
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", DATASETS)
def test_batches_on_a_gpu_are_those_of_pyg(name):
    dataset = DATASETS[name]()
    theirs = [batch.to("cuda") for batch in DataLoader(dataset, batch_size=4)]
    ours = [*loader.DataLoader(dataset, batch_size=4, device="cuda")]
    assert all(batch.x.is_cuda for batch in ours if isinstance(batch, Data))
    assert_same([batch.to_dict() for batch in ours], [batch.to_dict() for batch in theirs])


def test_an_empty_dataset_has_no_batches():
    assert [*loader.DataLoader([], batch_size=2)] == [*DataLoader([], batch_size=2)] == []


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
