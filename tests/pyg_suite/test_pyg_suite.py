"""PyG's own tests of `torch_geometric.nn`, loaders and samplers, stock and under ``patch()``.

``PYG_SRC`` names a checkout of PyG at the installed version. What passes stock must pass patched.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

FOLDERS = ("nn", "loader", "sampler")
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
    # with torch-sparse: a SparseTensor, which runs as SpMM in its own order, against an edge_index
    "test_message_passing::test_my_static_graph_conv",
}

# They call pyg-lib's operators, which patch() does not define.
OF_PYG_LIB = {
    "test_neighbor_loader::test_pyg_lib_and_torch_sparse_homo_equality",
    "test_neighbor_loader::test_pyg_lib_and_torch_sparse_hetero_equality",
}


def outcomes(
    source: Path, folder: Path, mode: str, **variables: str
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
         *(str(source / "test" / folder) for folder in FOLDERS)],
        cwd=work, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode in (0, 1), ran.stdout[-3000:] + ran.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        found[f"{module}::{case.get('name')}"] = (
            "failed" if failed else "skipped" if "skipped" in kinds else "passed"
        )
        if failed:
            message = next(child.get("message", "") for child in case if child.tag in failed)
            found[f"{module}::{case.get('name')}"] += f": {message.splitlines()[0][:200]}"
    return found, json.loads(facts.read_text())


@pytest.fixture(scope="module")
def source() -> Path:
    if not os.environ.get("PYG_SRC"):
        pytest.skip("PYG_SRC does not name a checkout of PyG")
    return Path(os.environ["PYG_SRC"])


@pytest.fixture(scope="module")
def stock(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found, _ = outcomes(source, tmp_path_factory.mktemp("stock"), "stock")
    assert sum(outcome == "passed" for outcome in found.values()) > 2500, "it was not collected"
    return found


@pytest.mark.slow
@pytest.mark.pyg_suite
@pytest.mark.parametrize(("always", "least"), [("", 2000), ("1", 5000)])
def test_whatever_passes_stock_passes_patched(always, least, source, stock, tmp_path) -> None:
    ours, facts = outcomes(source, tmp_path, "patched", PYG_ACCEL_ALWAYS=always)
    assert facts["accelerated"] > least, "next to nothing ran accelerated"
    passed = {name for name, outcome in stock.items() if outcome == "passed"}
    lost = sorted(name for name in passed - ROUNDING if ours.get(name) != "passed")
    assert not lost, "\n".join(f"{name} {ours.get(name, 'missing')}" for name in lost)
    # Tests that want pyg-lib, which skip stock: ours takes its place.
    without_pyg_lib = {name for name, outcome in stock.items() if outcome == "skipped"} - OF_PYG_LIB
    failed = sorted(n for n in without_pyg_lib if ours.get(n, "").startswith("failed"))
    assert not failed, "\n".join(f"{name} {ours[name]}" for name in failed)
