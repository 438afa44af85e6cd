"""Graphs to put together, and whether two batches are the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset


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


DATASETS = {
    "in memory": lambda: Items([molecule(smiles="C") for _ in range(10)]),
    "a list": lambda: [molecule() for _ in range(10)],
    "a subset": lambda: Subset(Items([molecule() for _ in range(10)]), [9, 0, 0, 4]),
    "a part": lambda: Items([molecule() for _ in range(10)])[3:8],
    "typed": lambda: [hetero() for _ in range(10)],
    "transformed": lambda: Items([molecule() for _ in range(10)], transform=lambda d: d.clone()),
}
