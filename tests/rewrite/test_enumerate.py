"""How many associations there are, and which of them are left (paper, sections 3.3 and 5)."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv

import pyg_accel
from benchmarks.papers.sensei.orders import MODELS
from pyg_accel.rewrite import associations
from pyg_accel.rewrite.enumerate import enumerate_trees
from pyg_accel.rewrite.equivalents import equivalents
from pyg_accel.rewrite.ir import Attend, Leaf, Product, Sum, verify
from pyg_accel.rewrite.prune import prune
from pyg_accel.rewrite.tree import nodes_of
from pyg_accel.rewrite.tree_cost import Assumptions

A = Leaf("A", "N", "N", "sparse")
D = Leaf("D", "N", "N", "diagonal")
X = Leaf("X", "N", "F", "data")
W = Leaf("W", "F", "H", "weight")
B = Leaf("b", "1", "H", "bias")
GCN = D @ A @ D @ X @ W


def count(trees, op):
    return [sum(node.op == op for node in nodes_of(tree)) for tree in trees]


def test_products_of_products_are_one_product():
    assert Product((D, A, D, X, W)) == D @ (A @ (D @ X)) @ W


def test_neighbouring_equal_diagonals_are_multiplied():
    (form,) = equivalents(D @ A @ D @ D @ A @ D @ X)
    assert str(form) == "D A D² A D X"


def test_gcn_has_twelve_associations_of_the_kinds_that_the_paper_names():
    trees = enumerate_trees(GCN)
    assert len(trees) == len(set(map(str, trees))) == 12
    scaled = [
        next((tuple(map(str, n.args)) for n in nodes_of(t) if n.op == "scale_edges"), ())
        for t in trees
    ]
    assert scaled.count(()) == 4  # all dense
    assert scaled.count(("D", "A")) == 3
    assert scaled.count(("A", "D")) == 3
    assert scaled.count(("D", "A", "D")) == 2
    assert count(trees, "gemm") == count(trees, "spmm") == [1] * 12


@pytest.mark.parametrize("train", [False, True])
def test_eight_of_gcns_associations_are_pruned_and_two_sets_of_two_promoted(train):
    actual = prune(enumerate_trees(GCN), Assumptions(train, frozenset("XW"), frozenset("DA")))
    assert len(actual.promoted) == 4
    assert len(actual.reasons) == 8
    small_first = {"((D·(A·(D·X)))·W)", "(((D·A·D)·X)·W)"}
    product_first = {"(D·(A·(D·(X·W))))", "((D·A·D)·(X·W))"}
    assert set(map(str, actual.candidates(32, 256))) == small_first
    assert set(map(str, actual.candidates(256, 32))) == product_first
    assert set(map(str, actual.promoted)) == small_first | product_first


def test_gat_reuses_or_recomputes():
    theta = X @ W
    trees = enumerate_trees(Attend("attention", A, (theta,)) @ X @ W)
    actual = prune(trees, Assumptions())
    assert len(trees) == 2
    assert set(map(str, actual.candidates(32, 256))) == set(map(str, trees))
    reuse = "(attention(A, (X·W))·(X·W))"
    assert list(map(str, actual.candidates(256, 32))) == [reuse]
    assert [w.name for w in actual.bills[trees[-1]].forward].count("gemm") == 1


def test_a_feature_matrix_without_gradient_spares_the_product_with_the_transpose():
    trees = {str(t): t for t in enumerate_trees(A @ X @ W)}
    hidden = prune(tuple(trees.values()), Assumptions(True, frozenset("XW"), frozenset("A")))
    first = prune(tuple(trees.values()), Assumptions(True, frozenset("W"), frozenset("A")))

    def transposed(actual, text):
        return [w.cols for w in actual.bills[trees[text]].backward if w.transposed]

    assert transposed(hidden, "((A·X)·W)") == ["F"]
    assert transposed(first, "((A·X)·W)") == []
    assert transposed(first, "(A·(X·W))") == ["H"]
    assert len(hidden.candidates(256, 32)) == 1  # sizes suffice
    assert len(first.candidates(256, 32)) == 2  # one wide product, or two narrow ones
    assert first.bills[trees["((A·X)·W)"]].saved == (("N", "F", 1),)
    assert first.bills[trees["(A·(X·W))"]].saved == ()


def test_aggregates_of_static_features_are_computed_once():
    trees = {str(t): t for t in enumerate_trees(A @ X @ W)}
    given = Assumptions(True, frozenset("W"), frozenset("AX"))
    bill = prune(tuple(trees.values()), given).bills[trees["((A·X)·W)"]]
    assert [(w.name, w.once) for w in bill.forward] == [("spmm", True), ("gemm", False)]


def test_means_are_computed_by_the_kernel():
    mean = Leaf("A", "N", "N", "sparse", mean=True)
    trees = enumerate_trees(mean @ X @ W + X @ Leaf("V", "F", "H", "weight") + B)
    assert set(map(str, trees)) == {"((mean(A·X)·W) + (X·V) + b)", "(mean(A·(X·W)) + (X·V) + b)"}


def test_a_linear_layer_after_a_sum_may_come_first():
    texts = set(map(str, enumerate_trees((A @ X + X) @ W)))
    assert texts >= {"(((A·X) + X)·W)", "((A·(X·W)) + (X·W))"}


def test_sums_of_powers_have_horners_form():
    def power(k, weight):
        expr = X @ Leaf(weight, "F", "H", "weight")
        for _ in range(k):
            expr = D @ A @ D @ expr
        return expr

    trees = enumerate_trees(power(0, "U") + power(1, "V") + power(2, "W"))
    horner = "((X·U) + ((D·A·D)·((X·V) + ((D·A·D)·(X·W)))))"
    assert horner in set(map(str, trees))
    assert min(count(trees, "spmm")) == 2  # powers are shared, and in Horner's form


@pytest.mark.parametrize(
    "wrong",
    [A @ W, Sum((X, W)), Product((A, Product((A, X)))), Attend("f", X, (X,))],
    ids=["product", "sum", "nested", "attention"],
)  # fmt: skip
def test_expressions_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"multiply|sizes|within|sparse"):
        verify(wrong)


def test_the_cost_model_knows_that_heads_sum_the_same_features():
    actual = associations(GATConv(32, 64, heads=4))
    shared = {
        str(tree): [w.shared for w in actual.bills[tree].forward if w.name == "spmm_weighted"]
        for tree in actual.promoted
    }
    assert sorted(shared.values()) == [[False], [True]]
    assert all(("·X)·W" in tree) == flags[0] for tree, flags in shared.items())


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_orders_that_the_benchmark_measures_are_associations_of_the_layer(name):
    model = MODELS[name]
    for sizes in ((8, 4), (4, 8)):
        known = set(map(str, associations(model.make(*sizes)).all))
        assert {model.default(*sizes)} | {f(*sizes) for f in model.families.values()} <= known


@pytest.mark.full
def test_an_unpickled_tree_is_found_where_an_equal_one_is():
    tree = enumerate_trees(GCN)[0]
    assert pickle.loads(pickle.dumps(tree)) == tree
    code = "import pickle, sys; t = pickle.load(sys.stdin.buffer); u = t.__reduce__(); "
    code += "assert {u[0](*u[1])} == {t}"  # in a process in which strings have other hashes
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(tree), check=True)


@pytest.mark.parametrize(("conv", "fused"), [(GATv2Conv, {"reuse": 1, "recompute": 0}),
                                             (GATConv, {"reuse": 0, "recompute": 0})])  # fmt: skip
def test_features_that_scores_have_read_are_not_paid_for_again(conv, fused):
    actual = associations(conv(32, 256))
    names = {MODELS[conv.__name__.removesuffix("Conv")].families[f](32, 256): f for f in fused}
    trees = {names[str(tree)]: tree for tree in actual.all if str(tree) in names}
    assert {f: sum(w.fused for w in actual.bills[trees[f]].all) for f in fused} == fused
    x, edge_index = torch.randn(500, 32), torch.randint(500, (2, 20_000))
    (layer,) = pyg_accel.plan(conv(32, 256), x, edge_index).layers
    assert layer.trees[0].composition == ("reuse" if any(fused.values()) else "recompute")
