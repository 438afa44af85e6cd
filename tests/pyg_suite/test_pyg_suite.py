"""PyG's own tests of layers, models, utilities, loaders and samplers, stock and under ``patch()``.

``PYG_SRC`` names a checkout of PyG at the installed version. What passes stock must pass patched.
Those of layers belong to the full tier; all of them are run by ``make test-pyg``.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

LAYERS, ALL = ("nn/conv",), ("nn", "loader", "sampler", "utils")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Tests that compare a patched result with one of another path by `torch.allclose`, whose absolute
# tolerance of 1e-8 is below the rounding of float32: the order of additions decides.
ROUNDING = {
    "test_cg_conv::test_cg_conv[False]",
    "test_gen_conv::test_gen_conv[softmax]",
    "test_gen_conv::test_gen_conv[aggr2]",
    # one call fused, the other not: PyG's as its graph is new, or because it returns the weights
    "test_gat_conv::test_gat_conv[True]",
    "test_gatv2_conv::test_gatv2_conv[True]",
    "test_transformer_conv::test_transformer_conv[True-None]",
    # with torch-sparse: a SparseTensor, which runs as SpMM in its own order, against an edge_index
    "test_message_passing::test_my_static_graph_conv",
}

# Tests that want pyg-lib, and fail with ours.
OF_PYG_LIB = {
    # with torch-sparse, whose draws they compare with those of pyg-lib
    "test_neighbor_loader::test_pyg_lib_and_torch_sparse_homo_equality",
    "test_neighbor_loader::test_pyg_lib_and_torch_sparse_hetero_equality",
    "test_dropout::test_dropout_path",  # expects the walk of pyg-lib's random numbers
    # wants two threads, and lets later tests spawn workers, which would have to call patch()
    "test_mixin::test_multithreading_neighbor_loader",
    "test_neighbor_loader::test_memmap_neighbor_loader",
}


def outcomes(
    source: Path, folders: tuple[str, ...], folder: Path, mode: str, **variables: str
) -> tuple[dict[str, str], dict[str, object]]:
    """Run the suite in a process of its own; return test -> outcome, and what was accelerated."""
    junit, facts = folder / f"{mode}.xml", folder / f"{mode}.json"
    work = folder / mode  # an empty folder, so that the installed PyG is imported, not the checkout
    work.mkdir()
    environment = os.environ | variables | {
        "PYG_SUITE_MODE": mode,
        "PYG_SUITE_REPORT": str(facts),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "suite_plugin", "-p", "no:cacheprovider",
         "-c", os.devnull, f"--rootdir={source / 'test'}", f"--confcutdir={source / 'test'}",
         "-W", "ignore", "--tb=native", f"--junitxml={junit}",
         *(str(source / "test" / name) for name in folders)],
        cwd=work, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode in (0, 1), ran.stdout[-3000:] + ran.stderr[-3000:]
    actual = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        actual[f"{module}::{case.get('name')}"] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
        if failed:
            message = next(child.get("message", "") for child in case if child.tag in failed)
            actual[f"{module}::{case.get('name')}"] += f": {message.splitlines()[0][:200]}"
    return actual, json.loads(facts.read_text())


@pytest.fixture(scope="module")
def source() -> Path:
    if not os.environ.get("PYG_SRC"):
        pytest.skip("PYG_SRC does not name a checkout of PyG")
    return Path(os.environ["PYG_SRC"]).resolve()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(LAYERS, id="layers"),
        pytest.param(ALL, id="all", marks=pytest.mark.pyg_suite),
    ],
)
def folders(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def stock(
    source: Path, folders: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    actual, _ = outcomes(source, folders, tmp_path_factory.mktemp("stock"), "stock")
    passed = sum(outcome == "passed" for outcome in actual.values())
    assert passed > (2500 if folders == ALL else 250), "it was not collected"
    return actual


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("always", ["", "1"], ids=["defaults", "always"])
def test_whatever_passes_stock_passes_patched(always, source, folders, stock, tmp_path) -> None:
    ours, facts = outcomes(source, folders, tmp_path, "patched", PYG_ACCEL_ALWAYS=always)
    least = {(LAYERS, ""): 700, (LAYERS, "1"): 1000, (ALL, ""): 2000, (ALL, "1"): 5000}
    assert facts["accelerated"] > least[folders, always], "next to nothing ran accelerated"
    passed = {name for name, outcome in stock.items() if outcome == "passed"}
    lost = sorted(name for name in passed - ROUNDING if ours.get(name) != "passed")
    assert not lost, "\n".join(f"{name} {ours.get(name, 'missing')}" for name in lost)
    # Tests that want pyg-lib, which skip stock: ours takes its place.
    without_pyg_lib = {name for name, outcome in stock.items() if outcome == "skipped"} - OF_PYG_LIB
    failed = sorted(n for n in without_pyg_lib if ours.get(n, "").startswith("failed"))
    assert not failed, "\n".join(f"{name} {ours[name]}" for name in failed)
