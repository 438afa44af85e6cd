"""``knn``, ``radius``, ``nearest`` and ``fps``: every kernel against a truth in float64."""

import math
import shutil
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from pyg_accel import pyg_lib
from pyg_accel.pyg_lib import kernels
from pyg_accel.pyg_lib.ops import blocks, cluster, points
from pyg_accel.runtime.native import cpu_unavailable_reasons, library_of

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")  # of Triton's kernels, else interpreted


def truth(
    x: Tensor, y: Tensor, ptr_x: Tensor, ptr_y: Tensor, most: int, r: float, *, skip: bool
) -> list[tuple[int, int]]:
    """Pairs by distance and index, one query after another."""
    pairs = []
    for b in range(ptr_x.numel() - 1):
        for q in range(int(ptr_y[b]), int(ptr_y[b + 1])):
            ids = [i for i in range(int(ptr_x[b]), int(ptr_x[b + 1])) if not (skip and i == q)]
            near = [(float((x[i].double() - y[q].double()).square().sum()), i) for i in ids]
            near = sorted((d, i) for d, i in near if d < r * r)[:most]
            pairs += [(q, i) for _, i in near]
    return pairs


def tree(x, y, ptr_x, ptr_y, most, r, skip):
    within = points._below_square(r, x.dtype)
    return library_of(x.device).nearest_points(x, y, ptr_x, ptr_y, most, within, skip)[0]


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The CUDA kernel, which a processor runs where there is no GPU."""
    if not GPU:
        if shutil.which("g++") is None:
            pytest.skip("there is no g++")
        emulated = request.getfixturevalue("cuda_on_cpu")
        monkeypatch.setattr(kernels, "library_of", lambda device: emulated)
    return lambda *args: kernels.nearest_points(
        *(t.to(DEVICE) if isinstance(t, Tensor) else t for t in args)
    ).cpu()


native = pytest.mark.skipif(bool(cpu_unavailable_reasons()), reason="there is no native library")


@pytest.fixture(params=["blocks", pytest.param("tree", marks=native), "cuda"])
def search_points(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    named = {"blocks": blocks.nearest_points, "tree": tree}
    return named.get(request.param) or request.getfixturevalue("cuda")


def case(
    sizes_x: list[int], sizes_y: list[int], dims: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points at whole numbers, where many distances are equal."""
    torch.manual_seed(sum(sizes_x) + dims)
    ptr = [torch.tensor([0, *sizes]).cumsum(0) for sizes in (sizes_x, sizes_y)]
    x, y = (torch.randint(0, 5, (int(p[-1]), dims)).to(dtype) for p in ptr)
    return x, y, *ptr


@pytest.mark.parametrize(
    ("most", "r", "skip"),
    [(1, math.inf, False), (4, math.inf, True), (70, math.inf, False), (6, 2.0, True)],
)
@pytest.mark.parametrize("dims", [1, 3, 5])
def test_neighbours_come_by_distance_and_index(
    search_points: Callable[..., Tensor], most: int, r: float, skip: bool, dims: int
):
    args = case([130, 0, 3, 1], [9, 2, 0, 1], dims)  # also empty examples, and k above their size
    actual = search_points(*args, most, r, skip)
    assert [tuple(pair) for pair in actual.t().tolist()] == truth(*args, most, r, skip=skip)


@pytest.mark.parametrize(("most", "r"), [(5, math.inf), (5, 1.5)])
@pytest.mark.parametrize("dims", [2, 3])
def test_cells_of_a_grid_are_searched_until_no_point_is_nearer(
    most: int, r: float, dims: int, cuda, monkeypatch
):
    monkeypatch.setattr(kernels, "_IN_CELLS", 1)
    monkeypatch.setattr(kernels, "_PER_CELL", 1)
    x, y, ptr_x, ptr_y = case([60, 1], [12, 3], dims)
    x[:5] += 20  # far from the others, over many empty cells
    actual = cuda(x, y, ptr_x, ptr_y, most, r, False)
    wanted = truth(x, y, ptr_x, ptr_y, most, r, skip=False)
    assert [tuple(pair) for pair in actual.t().tolist()] == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_every_dtype_is_searched(dtype: torch.dtype):
    x, y, ptr_x, ptr_y = case([12, 5], [4, 3], 3)
    actual = pyg_lib.ops.knn(x.to(dtype), y.to(dtype), 3, ptr_x, ptr_y)
    wanted = truth(x, y, ptr_x, ptr_y, 3, math.inf, skip=False)
    assert [tuple(pair) for pair in actual.t().tolist()] == wanted


@pytest.mark.parametrize("dims", [3, 40])
def test_many_points_and_dimensions_agree_with_all_distances(dims: int):
    torch.manual_seed(0)
    x, y = torch.rand(900, dims), torch.rand(300, dims)
    query, point = pyg_lib.ops.knn(x, y, 7)
    wanted = torch.cdist(y.double(), x.double()).topk(7, largest=False).values
    distance = (y.double()[query] - x.double()[point]).norm(dim=1).view(300, 7)
    torch.testing.assert_close(distance, wanted)
    for r in (0.2, 2.0):
        count = pyg_lib.ops.radius(x, y, r, max_num_neighbors=900)[0].bincount(minlength=300)
        assert torch.equal(count, (torch.cdist(y.double(), x.double()) < r).sum(1))


def test_an_example_that_one_side_lacks_is_empty():
    x, ptr = torch.arange(4.0), torch.tensor([0, 2, 4])
    assert pyg_lib.ops.knn(x, x, 1, ptr).tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]
    assert pyg_lib.ops.knn(x, x, 1, None, ptr).tolist() == [[0, 1], [0, 1]]


def test_cosine_compares_directions():
    x = torch.tensor([[10.0, 0.1], [0.1, 0.0], [0.0, 3.0]])
    actual = pyg_lib.ops.knn(x, torch.tensor([[1.0, 0.0], [1.0, 9.0]]), 2, cosine=True)
    assert actual[1].tolist() == [1, 0, 2, 0]


def test_points_that_are_not_finite_are_no_neighbours():
    x = torch.tensor([[0.0], [math.nan], [math.inf], [2.0]])
    assert pyg_lib.ops.knn(x, x[:1], 4)[1].tolist() == [0, 3]
    assert pyg_lib.ops.knn(x, x[1:3], 4).shape == (2, 0)
    with pytest.raises(ValueError, match="'y' to have a point"):
        pyg_lib.ops.nearest(x, x[1:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: pyg_lib.ops.knn(x, x, 0), "'k'"),
        (lambda x: pyg_lib.ops.knn(x, x[:, :1], 1), "'x'"),
        (lambda x: pyg_lib.ops.knn(x, x.double(), 1), "'y'"),
        (lambda x: pyg_lib.ops.radius(x, x, math.nan), "'r'"),
        (lambda x: pyg_lib.ops.radius(x, x, 1.0, max_num_neighbors=-1), "'max_num_neighbors'"),
        (lambda x: pyg_lib.ops.knn(x, x, 1, torch.tensor([0, 3, 1, 4])), "'ptr_x'"),
        (lambda x: pyg_lib.ops.knn(x, x, 1, None, torch.tensor([0, 2])), "'ptr_y'"),
        (lambda x: pyg_lib.ops.fps(x, torch.tensor([0, 4]), 1.5), "'ratio'"),
        (lambda x: pyg_lib.ops.fps(x, torch.tensor([0, 3])), "'ptr'"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[Tensor], Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        call(torch.rand(4, 2))


@pytest.mark.parametrize(("dims", "tile"), [(1, 64), (3, 64), (3, 8), (5, 64)])
def test_every_kernel_samples_the_same_points(dims: int, tile: int, monkeypatch):
    monkeypatch.setattr(kernels, "_ONE_TILE", tile)
    src, _, ptr, _ = case([20, 0, 1, 7], [1, 1, 1, 1], dims)
    chosen = (ptr.diff() * 0.4).ceil().long()
    ends = torch.cat([chosen.new_zeros(1), chosen.cumsum(0)])
    first = torch.tensor([3, 0, 0, 6])
    actual = cluster.farthest_points(src, ptr, chosen, first)
    assert actual[0] == 3
    assert actual.numel() == ends[-1]
    if (library := library_of(src.device)) is not None:
        assert torch.equal(library.farthest_points(src, ptr, ends, first), actual)
    if find_spec("triton"):
        on = [t.to(DEVICE) for t in (src, ptr, ends, first)]
        assert torch.equal(kernels.farthest_points(*on).cpu(), actual)
    # Each is the farthest from those before, and the first of several.
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        for i in range(start + 1, end):
            b = int(torch.searchsorted(ends, i, right=True)) - 1
            mine = src[ptr[b] : ptr[b + 1]]
            near = (mine[:, None] - src[actual[start:i]]).square().sum(-1).amin(1)
            assert int(actual[i] - ptr[b]) == int((near == near.max()).nonzero()[0])


def test_a_random_start_follows_the_seed():
    src, ptr = torch.rand(50, 3), torch.tensor([0, 50])
    torch.manual_seed(1)
    first = pyg_lib.ops.fps(src, ptr)
    torch.manual_seed(1)
    assert torch.equal(pyg_lib.ops.fps(src, ptr), first)
    assert pyg_lib.ops.fps(src, ptr, random_start=False)[0] == 0


def test_pointers_that_leave_points_out_are_clamped(cuda, monkeypatch):
    monkeypatch.setattr(kernels, "_IN_CELLS", 1)
    x, y, ptr, _ = case([40, 20], [5, 5], 3)
    query, point = cuda(x, y, ptr.new_tensor([3, 30, 50]), ptr.new_tensor([1, 5, 8]), 4, 9.0, False)
    assert query.unique().tolist() == list(range(10))
    assert 0 <= int(point.min()) <= int(point.max()) < 60


@pytest.mark.parametrize("r", [1e-300, 1e-30, 1e18, 1e30, 1e46])
def test_a_radius_whose_square_is_beyond_the_dtype(
    r: float, search_points: Callable[..., Tensor], monkeypatch
):
    monkeypatch.setattr(kernels, "_IN_CELLS", 1)
    args = case([60], [12], 3)
    actual = search_points(*args, 80, r, False)
    wanted = truth(*args, 80, min(max(r, 1e-9), 1e9), skip=False)  # points are whole numbers
    assert [tuple(pair) for pair in actual.t().tolist()] == wanted
