// The operators of the CUDA library that build CSR; see library.cpp.
#include "cuda/csr.h"

#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

constexpr int64_t kMost = INT32_MAX;  // all sizes are below

// A vector like `row`, of any stride.
void check_ids(const Tensor& t, const char* name, const Tensor& row) {
  STD_TORCH_CHECK(is_on_device(t) && t.dim() == 1 && t.numel() == row.numel() &&
                      t.get_device_index() == row.get_device_index() &&
                      is_wide(t, name) == is_wide(row, "row"),
                  "expected '", name, "' to be a vector like 'row'");
}

std::vector<Tensor> run(void (*build)(const CsrArgs&, const Allocate&, cudaStream_t),
                        CsrArgs args,
                        int64_t num_rows,
                        ScalarType type,
                        const Tensor& like) {
  STD_TORCH_CHECK(args.num_rows >= 0 && args.num_rows < kMost && args.num_cols >= 0 &&
                      args.num_cols < kMost && args.count < kMost,
                  "expected fewer than 2**31 - 1 nodes and edges");
  const auto guard = guard_of(like);
  const auto empty = [&](int64_t size, ScalarType of) { return empty_result(like, {size}, of); };
  std::vector<Tensor> result{empty(num_rows + 1, type), empty(args.count, type),
                             empty(args.count, type)};
  args.ptr = result[0].mutable_data_ptr();
  args.id = result[1].mutable_data_ptr();
  args.perm = result[2].mutable_data_ptr();
  build(args, scratch_of(like), stream_of(like));
  return result;
}

// Results are int32.
std::vector<Tensor> csr_from_coo(const Tensor& row,
                                 const Tensor& col,
                                 int64_t num_rows,
                                 int64_t num_cols) {
  check_ids(row, "row", row);
  check_ids(col, "col", row);
  CsrArgs args{};
  args.row = row.const_data_ptr();
  args.col = col.const_data_ptr();
  args.row_stride = row.stride(0);
  args.col_stride = col.stride(0);
  args.count = row.numel();
  args.num_rows = num_rows;
  args.num_cols = num_cols;
  args.wide = is_wide(row, "row");
  return run(csr_from_coo_cuda, args, num_rows, ScalarType::Int, row);
}

// Results have the dtype of the matrix.
std::vector<Tensor> csr_transpose(const Tensor& rowptr, const Tensor& col, int64_t num_cols) {
  STD_TORCH_CHECK(rowptr.numel() > 0, "expected 'rowptr' to be of one element at least");
  check_vector(rowptr, "rowptr", rowptr.numel(), col);
  check_vector(col, "col", col.numel(), col);
  STD_TORCH_CHECK(is_wide(rowptr, "rowptr") == is_wide(col, "col"),
                  "expected 'rowptr' and 'col' of one dtype");
  CsrArgs args{};
  args.row = rowptr.const_data_ptr();
  args.col = col.const_data_ptr();
  args.count = col.numel();
  args.num_rows = rowptr.numel() - 1;
  args.num_cols = num_cols;
  args.wide = is_wide(col, "col");
  return run(csr_transpose_cuda, args, num_cols, col.scalar_type(), col);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def("csr_from_coo(Tensor row, Tensor col, int num_rows, int num_cols) -> Tensor[]");
  m.def("csr_transpose(Tensor rowptr, Tensor col, int num_cols) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("csr_from_coo", TORCH_BOX(&csr_from_coo));
  m.impl("csr_transpose", TORCH_BOX(&csr_transpose));
}

}  // namespace pyg_accel
