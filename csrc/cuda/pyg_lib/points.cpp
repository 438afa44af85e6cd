// The operator of the CUDA library that finds the nearest points; see library.cpp.
#include "cuda/pyg_lib/points.h"

#include "cuda/check.cuh"
#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

const void* checked(const Tensor& t, const char* name, ScalarType type, const Tensor& like) {
  STD_TORCH_CHECK(is_on_device(t) && t.is_contiguous() && t.scalar_type() == type &&
                      t.get_device_index() == like.get_device_index(),
                  "expected '", name, "' to be contiguous, on the device of 'x'");
  return t.const_data_ptr();
}

// Returns [2, E], queries and their points; `x` is [D, N], `y` is [M, D].
// With cells, `grid` has numbers on the CPU: [origin of 3, size, slack, sizes of 3], see Cells.
Tensor nearest_points(const Tensor& x,
                      const Tensor& y,
                      const Tensor& ptr_x,
                      const Tensor& ptr_y,
                      int64_t most,
                      double limit,
                      bool skip_same,
                      const std::optional<Tensor>& cell_ptr,
                      const std::optional<Tensor>& point,
                      const std::optional<Tensor>& query,
                      const std::optional<Tensor>& grid) {
  PointArgs args{};
  args.x = static_cast<const float*>(checked(x, "x", ScalarType::Float, x));
  args.y = static_cast<const float*>(checked(y, "y", ScalarType::Float, x));
  args.ptr_x = static_cast<const int64_t*>(checked(ptr_x, "ptr_x", ScalarType::Long, x));
  args.ptr_y = static_cast<const int64_t*>(checked(ptr_y, "ptr_y", ScalarType::Long, x));
  STD_TORCH_CHECK(x.dim() == 2 && y.dim() == 2 && x.size(0) == y.size(1) &&
                      x.size(0) <= kMostDims && x.size(1) < INT32_MAX && y.size(0) < INT32_MAX,
                  "expected 'x' [D, N] and 'y' [M, D]");
  STD_TORCH_CHECK(most >= 1 && most <= kMostNeighbors, "expected 'most' from 1 to 256");
  STD_TORCH_CHECK(ptr_x.numel() == ptr_y.numel() && ptr_x.numel() > 1,
                  "expected pointers of the same examples");
  args.num_points = x.size(1);
  args.num_queries = y.size(0);
  args.examples = ptr_x.numel() - 1;
  args.dims = static_cast<int>(x.size(0));
  args.most = static_cast<int>(most);
  args.limit = static_cast<float>(limit);
  args.skip_same = skip_same;
  if (cell_ptr) {
    STD_TORCH_CHECK(point && query && grid && grid->is_cpu() && grid->numel() == 8 &&
                        grid->scalar_type() == ScalarType::Float && args.dims == 3,
                    "expected all parts of a grid in three dimensions");
    const float* numbers = static_cast<const float*>(grid->const_data_ptr());
    Cells& cells = args.cells;
    int64_t count = args.examples;
    for (int d = 0; d < 3; ++d) {
      cells.origin[d] = numbers[d];
      cells.sizes[d] = static_cast<int>(numbers[5 + d]);
      count *= cells.sizes[d];
    }
    cells.size = numbers[3];
    cells.slack = numbers[4];
    cells.ptr = int32s(*cell_ptr, "cell_ptr", count + 1, x);
    cells.point = int32s(*point, "point", args.num_points, x);
    cells.query = int32s(*query, "query", args.num_queries, x);
  }
  const auto guard = guard_of(x);
  const cudaStream_t stream = stream_of(x);
  Tensor keys = empty_result(x, {args.num_queries, most}, ScalarType::Long);
  Tensor begin = empty_result(x, {args.num_queries + 1}, ScalarType::Long);
  args.keys = static_cast<int64_t*>(keys.mutable_data_ptr());
  args.begin = static_cast<int64_t*>(begin.mutable_data_ptr());
  int64_t count = 0;
  if (args.num_queries > 0) {
    nearest_points_cuda(args, scratch_of(x), stream);
    check(cudaMemcpyAsync(&count, args.begin + args.num_queries, sizeof(count),
                          cudaMemcpyDeviceToHost, stream),
          "copy");
    check(cudaStreamSynchronize(stream), "synchronize");
  }
  Tensor result = empty_result(x, {2, count}, ScalarType::Long);
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  if (count > 0)
    write_neighbors_cuda(args, out, out + count, stream);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(
      "nearest_points(Tensor x, Tensor y, Tensor ptr_x, Tensor ptr_y, int most, float limit, "
      "bool skip_same, Tensor? cell_ptr=None, Tensor? point=None, Tensor? query=None, "
      "Tensor? grid=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("nearest_points", TORCH_BOX(&nearest_points));
}

}  // namespace pyg_accel
