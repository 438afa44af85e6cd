"""What else a rewritten model shares with the plain one: options, hooks, modes, buffers, errors."""

import pytest
import torch
import torch_geometric.nn as nn

from pyg_accel import optimize, plan

N, E = 30, 200


def example(width=8):
    torch.manual_seed(0)
    return torch.randn(N, width), torch.randint(N, (2, E))


def agree(fast, model, *args):
    torch.testing.assert_close(fast(*args), model(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda alpha: nn.APPNP(3, alpha),
        lambda alpha: nn.SSGConv(8, 4, alpha, K=3),
    ],
    ids=["appnp", "ssg"],
)
def test_what_is_kept_of_static_features_knows_the_numbers_in_it(make):
    x, edge_index = example()
    for alpha in (0.1, 0.7):
        conv = make(alpha)
        fast = optimize(conv, x, edge_index, static=("x",))
        agree(fast, conv, x, edge_index)
        agree(fast, conv, x, edge_index)
