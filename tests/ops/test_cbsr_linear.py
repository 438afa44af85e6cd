"""Linear maps of CBSR features against float64 products of the dense matrices."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from pyg_accel import CBSR, ops, use_backend
from pyg_accel.backends import Backend, backends, get_backend
from pyg_accel.native import cpu_library, cpu_unavailable_reasons

NAMES = ("reference", "cpu")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# (N, F, k, H): tails of every vector width, columns in 16 bits, outputs in several chunks, nothing.
SIZES = [(5, 7, 2, 1), (40, 33, 8, 33), (3, 256, 31, 257), (9, 257, 40, 100), (0, 64, 4, 16),
         (4, 64, 4, 0), (1, 600, 200, 64), (33, 128, 1, 300)]  # fmt: skip


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found = get_backend(request.param)
    if reasons := found.unavailable_reasons():
        pytest.skip("; ".join(reasons))
    with use_backend(found.name):
        yield found


@pytest.fixture(autouse=True)
def any_share_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are right for any k, also where they would not be chosen."""
    from pyg_accel.backends import cpu

    monkeypatch.setattr(cpu, "_COLUMNS_PER_ENTRY", 0)


def check(
    backend: Backend, size: tuple[int, int, int, int], dtype: torch.dtype, *, bias: bool = False
) -> None:
    rows, width, k, columns = size
    cbsr = ops.maxk(torch.randn(rows, width).to(dtype), k)
    values = cbsr.values.detach().requires_grad_()
    inputs = [values, torch.randn(columns, width).to(dtype).requires_grad_()]
    inputs += [torch.randn(columns).to(dtype).requires_grad_()] * bias
    exact = [t.detach().double().requires_grad_() for t in inputs]
    assert ops.multiplies_compressed(cbsr, columns)

    found = ops.cbsr_linear(cbsr._replace(values=values), *inputs[1:])
    dense = CBSR(exact[0], cbsr.indices, width).dense()
    expected = linear(dense, *exact[1:])
    seed = torch.randn(found.shape).to(dtype)
    ours = torch.autograd.grad(found, inputs, seed)
    right = torch.autograd.grad(expected, exact, seed.double())

    relative, absolute = backend.tolerance(dtype)
    big, wide = dense.detach().abs(), seed.double().abs()
    weight = exact[1].detach().abs()
    scales = [big @ weight.t() + 1, (wide @ weight).gather(1, cbsr.indices.long()), wide.t() @ big]
    scales += [wide.sum(0)] * bias
    for a, b, scale in zip((found, *ours), (expected, *right), scales, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        error = (a.double() - b).abs() - relative * scale - absolute
        assert not bool((~(error <= 0)).any()), f"off by {float(error.max()):.2e}"


@pytest.mark.parametrize("dtype", FLOATS, ids=["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_products_and_gradients_equal_the_truth(backend, size, dtype):
    check(backend, size, dtype, bias=True)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_equals_the_truth(isa):
    if cpu_unavailable_reasons() or isa not in get_backend("cpu").info()["supported"]:
        pytest.skip(f"this processor or build has no {isa}")
    cpu_library().configure(isa, 0, 0)
    with use_backend("cpu"):
        for size in SIZES:
            check(get_backend("cpu"), size, torch.float32)


def test_long_sums_are_cut_and_any_number_of_threads_gives_the_same_bits():
    if cpu_unavailable_reasons():
        pytest.skip("no extension")
    rows, width, columns = 20_000, 24, 40  # more rows than one run of additions
    cbsr = ops.maxk(torch.randn(rows, width), 3)
    weight, seed = torch.randn(columns, width), torch.randn(rows, columns)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        leaves = cbsr.values.clone().requires_grad_(), weight.clone().requires_grad_()
        out = ops.cbsr_linear(cbsr._replace(values=leaves[0]), leaves[1])
        found.append((out, *torch.autograd.grad(out, leaves, seed)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other,
                                                                       strict=True))  # fmt: skip
    right = seed.double().t() @ cbsr._replace(values=cbsr.values.double()).dense()
    torch.testing.assert_close(found[0][2].double(), right, rtol=1e-4, atol=1e-3)


def test_every_gradient_can_be_differentiated_again(backend):
    cbsr = ops.maxk(torch.randn(4, 12, dtype=torch.float64), 4)
    weight = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor, weight: Tensor) -> Tensor:
        return ops.cbsr_linear(CBSR(values, cbsr.indices, 12), weight).tanh()

    assert torch.autograd.gradgradcheck(run, (cbsr.values.requires_grad_(), weight))


def test_infinities_reach_only_what_they_are_multiplied_with(backend):
    if backend.name == "reference":
        pytest.skip("it multiplies zeros too")
    weight = torch.ones(2, 5)
    weight[0, 3] = torch.inf
    cbsr = CBSR(torch.ones(2, 1), torch.tensor([[0], [3]], dtype=torch.uint8), 5)
    expected = torch.tensor([[1.0, 1.0], [torch.inf, 1.0]])
    assert torch.equal(ops.cbsr_linear(cbsr, weight), expected)


def test_where_little_is_zero_features_are_written_out(monkeypatch):
    from pyg_accel.backends import cpu

    monkeypatch.setattr(cpu, "_COLUMNS_PER_ENTRY", 3)
    assert "cpu" in backends()
    few, many = ops.maxk(torch.randn(4, 30), 10), ops.maxk(torch.randn(4, 30), 11)
    built = not cpu_unavailable_reasons()
    assert ops.multiplies_compressed(few, 8) == built
    assert not ops.multiplies_compressed(many, 8)
    weight = torch.randn(8, 30)
    torch.testing.assert_close(ops.cbsr_linear(many, weight), many.dense() @ weight.t())
    with torch.autocast("cpu", torch.bfloat16):
        assert not ops.multiplies_compressed(few, 8)
        assert ops.cbsr_linear(few, weight).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cbsr": torch.randn(4, 9)}, "a CBSR matrix"),
        ({"weight": torch.randn(3, 8)}, r"\[H, 9\]"),
        ({"weight": torch.randn(9)}, r"\[H, 9\]"),
        ({"weight": torch.randn(3, 9).double()}, "one dtype"),
        ({"bias": torch.randn(4)}, r"'bias' to be \[3\] \(got \[4\]\)"),
        ({"bias": torch.randn(1)}, r"'bias' to be \[3\]"),
        ({"bias": torch.tensor(1.0)}, r"'bias' to be \[3\]"),
        ({"bias": torch.randn(3).double()}, "one dtype"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_what_does_not_fit_is_refused(change, message, compressed, monkeypatch):
    module = sys.modules["pyg_accel.ops.cbsr_linear"]  # the attribute of that name is the function
    monkeypatch.setattr(module, "multiplies_compressed", lambda *args: compressed)
    given = {"cbsr": ops.maxk(torch.randn(4, 9), 2), "weight": torch.randn(3, 9)} | change
    with use_backend("reference"), pytest.raises(ValueError, match=message):
        ops.cbsr_linear(**given)


def test_under_autocast_any_dtypes_meet():
    cbsr = ops.maxk(torch.randn(4, 9).bfloat16(), 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.cbsr_linear(cbsr, torch.randn(3, 9), torch.randn(3))
    assert out.shape == (4, 3)
    assert out.dtype == torch.bfloat16
