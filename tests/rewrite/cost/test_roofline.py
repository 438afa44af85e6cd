import sys

import pytest

from pyg_accel.rewrite.cost import GraphFeatures, Primitive, Roofline, cost_model, learned
from pyg_accel.runtime.machine import Device
from pyg_accel.settings import settings

GRAPH = GraphFeatures(100_000, 100_000, 2_000_000)
SPARSE = ("spmm", "spmm_weighted", "sddmm", "scale_edges", "edge_softmax", "cbsr_spmm",
          "sspmm", "sampled_spmm")  # fmt: skip


def primitive(name: str, cols: int) -> Primitive:
    sparse = name in SPARSE
    part = name in ("cbsr_spmm", "sspmm", "sampled_spmm", "maxk")
    inner = 16 if part else 0 if sparse else 64
    return Primitive(name, 100_000, inner, cols, graph=GRAPH if sparse else None)


@pytest.mark.parametrize("name", ["gemm", "gemm_tn", "scale_rows", "elementwise", "maxk", *SPARSE])
def test_every_primitive_takes_time_and_wider_ones_no_less(name):
    model = Roofline.of("cpu")
    narrow, wide = model.many([primitive(name, 32), primitive(name, 256)])
    assert 0 < narrow <= wide < 100


def test_the_roofline_agrees_with_findings_of_the_paper():
    model = Roofline.of("cpu")
    assert model.seconds(primitive("spmm", 64)) < model.seconds(primitive("spmm_weighted", 64))
    dense, sparse = GraphFeatures(10_000, 10_000, 5_000_000), GraphFeatures(10_000, 10_000, 20_000)
    gemm = model.seconds(Primitive("gemm", 10_000, 256, 256))
    spmm = [model.seconds(Primitive("spmm", 10_000, 0, 256, graph=g)) for g in (sparse, dense)]
    assert spmm[0] < gemm < spmm[1]


def test_locality_makes_gathers_cheaper():
    model = Roofline.of("cpu")
    local = GraphFeatures(10**7, 10**7, 10**8, near=0.1, far=0.1)
    random = GraphFeatures(10**7, 10**7, 10**8)
    assert (model.seconds(Primitive("spmm", 10**7, 0, 64, graph=local))
            < 0.7 * model.seconds(Primitive("spmm", 10**7, 0, 64, graph=random)))  # fmt: skip


def test_unknown_primitives_and_missing_graphs_are_errors():
    model = Roofline.of("cpu")
    with pytest.raises(ValueError, match="features of a graph for 'spmm'"):
        model.seconds(Primitive("spmm", 5, 0, 5))
    with pytest.raises(ValueError, match="no primitive is called 'fft'"):
        model.seconds(Primitive("fft", 5, 0, 5, graph=GRAPH))


def test_the_source_names_the_machine():
    assert "threads" in cost_model("cpu").source


LIBPATH = """
class XGBoostLibraryNotFound(Exception):
    pass

def find():
    raise XGBoostLibraryNotFound("Cannot find XGBoost Library in the candidate path.\\nmore")
"""
BROKEN = {
    "an import error": "raise ImportError('libgomp.so.1: cannot open shared object file')",
    "a missing dependency": "import no_such_package_of_anyone",
    "a broken library": "raise OSError('invalid ELF header')",
    "its own error": "class LibraryError(ValueError): pass\nraise LibraryError('no libxgboost.so')",
    "its library is missing": "from xgboost.libpath import find\nfind()",
    "another numpy": "raise AttributeError('_ARRAY_API not found')",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_a_broken_xgboost_leaves_the_roofline(code, tmp_path, monkeypatch):
    package = tmp_path / "xgboost"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "libpath.py").write_text(LIBPATH)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.partition(".")[0] == "xgboost"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / Device.of("cpu").slug).mkdir()
    settings.cost_models = str(tmp_path)
    learned.unusable.cache_clear()
    try:
        source = cost_model("cpu").source
    finally:
        learned.unusable.cache_clear()
        sys.modules.pop("xgboost.libpath", None)
    assert "xgboost is installed but cannot be imported: " in source
    assert "\n" not in source
