"""Which customers buy again? Rows of linked tables, never later than the question.

    python examples/relational.py [customers] [epochs]

PyG's script for relational data, as RelBench has it, and two lines: a typed graph, batches that are
disjoint and see no row after their customer's time. It needs neither pyg-lib nor torch-sparse. The
tables are made here: a customer buys again who bought something expensive in the last ten days.
"""

import sys

import pyg_accel  # the first line
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

pyg_accel.patch()  # the second one

CUSTOMERS, EPOCHS = (int(number) for number in (*sys.argv[1:], 4000, 10)[:2])
DAYS, WIDTH = 100, 32
PURCHASES, PRODUCTS = 12 * CUSTOMERS, CUSTOMERS // 10

torch.manual_seed(0)
buyer, product = torch.randint(CUSTOMERS, (PURCHASES,)), torch.randint(PRODUCTS, (PURCHASES,))
day, price = torch.randint(DAYS, (PURCHASES,)), torch.randn(PRODUCTS)
data = HeteroData()
data["customer"].x, data["customer"].time = torch.ones(CUSTOMERS, 1), torch.zeros(CUSTOMERS).long()
data["product"].x, data["product"].time = price.view(-1, 1), torch.zeros(PRODUCTS).long()
data["purchase"].x, data["purchase"].time = day.view(-1, 1) / DAYS, day
rows = torch.arange(PURCHASES)
for kind, column in (("customer", buyer), ("product", product)):
    data["purchase", "of", kind].edge_index = torch.stack([rows, column])
    data[kind, "in", "purchase"].edge_index = torch.stack([column, rows])

asked = torch.randint(20, DAYS, (CUSTOMERS,))  # the day on which we want to know
seen = (price[product] > 1) & (day <= asked[buyer]) & (day > asked[buyer] - 10)
label = torch.zeros(CUSTOMERS).index_put_((buyer[seen],), torch.tensor(1.0))
data["customer"].y = label


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = torch.nn.ModuleDict({kind: Linear(-1, WIDTH) for kind in data.node_types})
        self.age = Linear(1, WIDTH)
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: SAGEConv(WIDTH, WIDTH, aggr="max") for kind in data.edge_types})
            for _ in range(2)
        )
        self.head = Linear(WIDTH, 1)

    def forward(self, batch: HeteroData) -> torch.Tensor:
        now = batch["customer"].seed_time
        x = {kind: self.encoders[kind](batch[kind].x) for kind in batch.node_types}
        for kind in x:  # how long ago, seen from the customer whose subgraph it is in
            age = (now[batch[kind].batch] - batch[kind].time).view(-1, 1) / 10
            x[kind] = (x[kind] + self.age(age)).relu()
        for conv in self.convs:
            x = {k: v.relu() for k, v in conv(x, batch.edge_index_dict).items()}
        return self.head(x["customer"][: batch["customer"].batch_size]).view(-1)


def batches(customers: torch.Tensor) -> NeighborLoader:
    return NeighborLoader(
        data, [16, 16], input_nodes=("customer", customers), input_time=asked[customers],
        time_attr="time", temporal_strategy="last", batch_size=256, shuffle=True,
    )  # fmt: skip


train, test = torch.arange(CUSTOMERS).split(CUSTOMERS * 3 // 4)[:2]
model = Model()
model(next(iter(batches(train))))  # sizes of lazy layers
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(EPOCHS):
    for batch in batches(train):
        optimizer.zero_grad()
        target = batch["customer"].y[: batch["customer"].batch_size]
        loss = binary_cross_entropy_with_logits(model(batch), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss:.3f}")

right = 0
with torch.no_grad():
    for batch in batches(test):
        target = batch["customer"].y[: batch["customer"].batch_size]
        right += int(((model(batch) > 0) == (target > 0)).sum())
print(f"accuracy {right / test.numel():.3f}, of the commoner answer {1 - label[test].mean():.3f}")
pyg_accel.report()
