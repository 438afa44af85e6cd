"""Plans as data, as text, Markdown and drawings."""

import io
import re
import sys

import pytest
import torch
import torch_geometric.nn as nn

import pyg_accel
from pyg_accel import __main__ as program
from pyg_accel.rewrite import plans
from pyg_accel.rewrite.cost import Primitive


class Flops:
    """Time by size alone; an unweighted product is cheap."""

    source = "counting"
    learned = ()

    def seconds(self, primitive: Primitive) -> float:
        if primitive.name.startswith("gemm"):
            return 1e-9 * primitive.rows * primitive.inner * primitive.cols
        if primitive.graph is not None and primitive.name.startswith("spmm"):
            heavier = 1.5 if primitive.name == "spmm_weighted" else 1.0
            return 1e-9 * heavier * primitive.graph.num_entries * primitive.cols
        return 1e-9 * primitive.rows * primitive.cols

    def many(self, primitives):
        return list(map(self.seconds, primitives))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.GCNConv(12, 4)
        self.edge = nn.EdgeConv(torch.nn.Linear(8, 2))

    def forward(self, x, edge_index):
        return self.edge(self.conv(x, edge_index), edge_index)


def inputs():
    return torch.randn(50, 12), torch.randint(50, (2, 600))


def test_a_plan_names_every_tree_with_its_time_and_its_verdict():
    actual = pyg_accel.plan(Net(), *inputs(), cost=Flops())
    conv, edge = actual.layers
    assert (conv.path, conv.layer, conv.algebra) == ("conv", "GCNConv", "D A D X W + b")
    sizes = dict(conv.sizes)
    assert 600 <= sizes.pop("E") <= 650  # with self-loops
    assert sizes == {"N": 50, "F": 12, "H": 4}
    assert (conv.by, conv.source) == ("cost", "counting")
    assert len(conv.trees) == 12
    assert [t.chosen for t in conv.trees] == [True] + [False] * 11
    assert conv.trees[0].tree == "((D·(A·(D·(X·W)))) + b)"
    assert all(t.seconds is not None for t in conv.trees)
    assert sum(t.verdict.startswith("pruned: ") for t in conv.trees) == 8
    fastest = min(t.seconds for t in conv.trees)
    assert conv.trees[0].seconds == pytest.approx(fastest, rel=0.03)
    assert edge.trees == ()
    assert edge.reasons == ("aggregation by max",)


def test_the_cost_model_is_not_asked_where_sizes_suffice():
    class Untouched(Flops):
        def seconds(self, primitive):
            raise AssertionError("asked")

    fast = pyg_accel.optimize(nn.GATConv(12, 4), *inputs(), cost=Untouched())
    (layer,) = pyg_accel.plan(fast).layers
    assert layer.by == "sizes"
    assert [t.seconds for t in layer.trees] == [None, None]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("show", [pyg_accel.plan, pyg_accel.explain])
@pytest.mark.parametrize(
    "options",
    [
        {"price_all": True},
        {"price_all": False},
        {"train": True},
        {"static": ("x",)},
        {"static": None},
        {"choose": lambda trees: trees[0]},
        {"cost": Flops()},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items())[:20],
)
def test_every_option_of_optimize_is_accepted(show, options, capsys):
    x, edge_index = inputs()
    (layer,) = show(nn.GCNConv(12, 4), x, edge_index=edge_index, **options).layers
    fast = pyg_accel.optimize(nn.GCNConv(12, 4), x, edge_index=edge_index, **options)
    (same,) = pyg_accel.plan(fast).layers
    if "price_all" not in options:
        assert all(tree.seconds is not None for tree in layer.trees)
    assert layer.trees[0].tree == same.trees[0].tree
    assert (layer.sizes, layer.by) == (same.sizes, same.by)


def test_options_that_mean_nothing_are_refused_by_name():
    for options, told in (
        ({"price_all": 1}, "'price_all' to be True or False"),
        ({"train": "yes"}, "'train' to be True or False"),
        ({"static": ("z",)}, "'static' to name arguments"),
        ({"static": 3}, "expected 'static'"),
        ({"static": [torch.ones(2)]}, "expected 'static'"),
        ({"choose": 3}, "'choose' to be"),
        ({"cost": 3}, "'cost' to be a CostModel"),
        ({"cost": "abc"}, "expected 'cost'"),
        ({"no_such_option": 3}, "do not fit"),
    ):
        for run in (pyg_accel.optimize, pyg_accel.plan, pyg_accel.explain):
            with pytest.raises(ValueError, match=told):
                run(Net(), *inputs(), **options)
    for options in ({"price_all": True}, {"train": True}, {"cost": Flops()}):
        fast = pyg_accel.optimize(Net(), *inputs())
        with pytest.raises(ValueError, match="no options with a model that is rewritten"):
            pyg_accel.explain(fast, **options)
    with pytest.raises(ValueError, match="rewritten"):
        pyg_accel.plan(fast, *inputs())
    with pytest.raises(ValueError, match="expected 'file' to be a name or an open file"):
        pyg_accel.explain(fast, file=3)


def test_without_price_all_only_those_that_compete_are_priced():
    (layer,) = pyg_accel.plan(nn.GATConv(12, 4), *inputs(), cost=Flops(), price_all=False).layers
    assert [t.seconds for t in layer.trees] == [None, None]


def test_text():
    out = io.StringIO()
    actual = pyg_accel.explain(Net(), *inputs(), train=True, cost=Flops(), file=out)
    text = out.getvalue()
    assert text.startswith("Net: 1 of 2 layers rewritten for training\n")
    assert "12 associations" in text
    assert "decided by cost, counting" in text
    assert "not rewritten: aggregation by max" in text
    assert "▶" in text
    assert actual.layers[0].trees[0].backward


def test_markdown_has_a_table_a_layer():
    out = io.StringIO()
    pyg_accel.explain(Net(), *inputs(), format="md", file=out)
    rows = [line for line in out.getvalue().splitlines() if line.startswith("|")]
    assert len(rows) == 14
    assert {row.count("|") for row in rows} == {5}


def test_the_graph_to_draw_has_the_trees():
    out = io.StringIO()
    pyg_accel.explain(Net(), *inputs(), format="dot", file=out)
    labels = re.findall(r'^n\d+ \[label="(.*)"\];$', out.getvalue(), re.MULTILINE)
    assert labels.count("gemm") >= 4
    assert 'label="chosen' in out.getvalue()
    assert out.getvalue().count("{") == out.getvalue().count("}")


def test_text_explains_its_symbols_within_a_hundred_columns():
    x, edge_index = inputs()
    for conv, *told in (
        (nn.TAGConv(12, 4, K=3), "D² = D D", "A: the edges, as a matrix"),
        (nn.GATConv(12, 4, heads=2), "H·2: 2 heads of H columns each", "ᵀ: transposed"),
        (nn.TransformerConv(12, 4, heads=2), "eN: a column of N ones"),
    ):
        text = str(pyg_accel.plan(conv, x, edge_index, train=True, cost=Flops()))
        assert max(map(len, text.splitlines())) <= 100
        flat = " ".join(text.split())
        assert all(what in flat for what in told)


def test_long_reasons_are_wrapped():
    reasons = ("it reads a value " * 12,)
    layer = plans.LayerPlan("conv", "GCNConv", "", {}, (), "", "", reasons)
    actual = plans.ModelPlan("Net", False, (layer,))
    lines = str(actual).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 100


def test_repeated_nodes_are_drawn_once():
    out = io.StringIO()
    conv = nn.GATConv(12, 4)
    pyg_accel.explain(
        conv, *inputs(), format="dot", file=out, choose="(concat((softmax(A, (X·W))·(X·W))) + b)"
    )
    text = out.getvalue().encode().decode("unicode_escape")
    assert "the layer: GATConv = concat(softmax(A, X W) X W) + b" in text
    reuse = text[text.index('label="chosen') : text.index("recompute")]
    (gemm,) = re.findall(r'n(\d+) \[label="gemm"\]', reuse)
    assert len(re.findall(rf"n\d+ -> n{gemm};", reuse)) == 2


def test_the_graph_of_many_trees_says_how_many_more_there_are(tmp_path):
    path = tmp_path / "trees.dot"
    actual = pyg_accel.explain(nn.TAGConv(12, 4, K=3), *inputs(), cost=Flops(), file=str(path))
    assert f"and {len(actual.layers[0].trees) - 4} more" in path.read_text()


@pytest.mark.parametrize(
    ("conv", "chosen", "name"),
    [
        (nn.GCNConv(12, 4), "((D·(A·(D·(X·W)))) + b)", "dynamic"),
        (nn.GCNConv(12, 4), "(((D·A·D)·(X·W)) + b)", "precompute"),
        (nn.GCNConv(12, 4), "((D·((A·D)·(X·W))) + b)", "partly precompute"),
        (nn.GATConv(12, 4, bias=False), "concat((softmax(A, (X·W))·(X·W)))", "reuse"),
        (nn.GATConv(12, 4, bias=False), "concat(((softmax(A, (X·W))·X)·W))", "recompute"),
        (nn.SAGEConv(12, 4), "(mean(A·(X·W)) + (X·V) + b)", ""),
    ],
)
def test_compositions_have_the_names_of_the_paper(conv, chosen, name):
    (layer,) = pyg_accel.plan(conv, *inputs(), choose=chosen, cost=Flops()).layers
    assert layer.trees[0].chosen and layer.trees[0].composition == name
    assert f"{name}; chosen by forced".removeprefix("; ") in " ".join(plans.row(layer.trees[0]))


@pytest.mark.parametrize("format", ["pdf", ["text"]], ids=str)
def test_an_unknown_format_is_refused(format):
    with pytest.raises(ValueError, match=r"expected 'format'.*text, md, dot"):
        pyg_accel.explain(Net(), *inputs(), format=format)


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    script = tmp_path / "script.py"
    # `main` leaves both to the script; a test puts them back.
    monkeypatch.setattr(sys, "argv", ["pyg_accel", "explain", "script.py:model"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script.write_text(
        "import argparse\nargparse.ArgumentParser().parse_args()\n"
        "import torch\nfrom torch_geometric.data import Data\n"
        "from torch_geometric.nn import GCNConv\n"
        "model = GCNConv(8, 4)\n"
        "data = Data(x=torch.randn(9, 8), edge_index=torch.randint(9, (2, 30)))\n"
    )
    names = ["--inputs", "data.x,data.edge_index"]
    assert program.main(["explain", f"{script}:model", *names, "--train"]) == 0
    assert "D A D X W + b" in capsys.readouterr().out
    assert program.main(["explain", f"{script}:model"]) == 2
    assert "has no 'x'" in capsys.readouterr().err
    mistakes = {
        (f"{script}:net", *names): "has no 'net'",
        (f"{script}:data", *names): "torch.nn.Module",
        (f"{script}:model", "--inputs", "data.x"): "do not fit GCNConv",
        (f"{script}:model", "--inputs", "data.x,data.edges"): "a Data has no 'edges'",
        (str(script),): "expected SCRIPT:MODEL",
        ("nothing.py:model",): "no script 'nothing.py'",
    }
    for arguments, told in mistakes.items():
        assert program.main(["explain", *arguments]) == 2
        assert told in capsys.readouterr().err


def test_a_plan_explains_the_words_that_it_uses():
    text = str(pyg_accel.plan(Net(), *inputs(), cost=Flops()))
    for word in ("dynamic", "precompute"):
        assert f"{word}: " in " ".join(text.split())
    assert "reuse: " not in text and "roofline: " not in text
    assert "promoted" not in text


def test_a_choice_that_memory_decided_says_so():
    class FreeScaling(Flops):
        """To scale the wide features costs nothing, and is faster by half a per cent."""

        def seconds(self, primitive):
            free = primitive.name == "scale_rows" and primitive.cols == 12
            return 0.0 if free else super().seconds(primitive)

    args = torch.randn(50, 12), torch.randint(50, (2, 9000))
    chosen, *others = (
        pyg_accel.plan(nn.GCNConv(12, 4), *args, cost=FreeScaling(), train=True).layers[0].trees
    )
    fastest = min(others, key=lambda tree: tree.seconds)
    assert 0.98 < fastest.seconds / chosen.seconds < 1.0
    assert chosen.bytes_kept < fastest.bytes_kept
    assert chosen.verdict == "chosen by memory"
