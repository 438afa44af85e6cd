// MaxK, and the products of a graph with its result.
#include "config.h"
#include "schedule.h"

namespace pyg_accel {
namespace {

bool wide_indices(int64_t width) {
  return width > 256;
}

CbsrArgs args_of(const Tensor& indices, int64_t width) {
  const bool wide = wide_indices(width);
  const ScalarType type = wide ? ScalarType::UInt16 : ScalarType::Byte;
  STD_TORCH_CHECK(indices.is_cpu() && indices.is_contiguous() && indices.dim() == 2 &&
                      indices.scalar_type() == type,
                  "expected 'indices' to be contiguous [N, k], uint8 up to 256 columns and uint16 "
                  "above");
  return {.indices = indices.const_data_ptr(), .wide = wide, .k = indices.size(1), .width = width};
}

// Returns the dtype: CBSR products support floats and doubles.
DType check_matrix(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(
      t.is_cpu() && t.is_contiguous() && t.dim() == 2 && t.size(0) == rows && t.size(1) == columns,
      "expected '", name, "' to be contiguous [", rows, ", ", columns, "]");
  const DType dtype = dtype_of(t);
  STD_TORCH_CHECK(dtype == DType::kFloat || dtype == DType::kDouble, "expected '", name,
                  "' in float32 or float64");
  return dtype;
}

const void* check_weight(const std::optional<Tensor>& weight, const Tensor& like, int64_t edges) {
  if (!weight)
    return nullptr;
  STD_TORCH_CHECK(weight->is_contiguous() && weight->dim() == 1 && weight->numel() == edges &&
                      weight->scalar_type() == like.scalar_type(),
                  "expected 'weight' to be contiguous [", edges, "] of the dtype of the features");
  return weight->const_data_ptr();
}

std::vector<Tensor> maxk(const Tensor& x, int64_t k) {
  STD_TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.dim() == 2 && k >= 1 && k < x.size(1),
                  "expected 'x' to be contiguous [N, F] and 'k' within [1, F)");
  const int64_t rows = x.size(0), width = x.size(1);
  const bool wide = wide_indices(width);
  Tensor values = new_result(x, {rows, k});
  Tensor indices =
      torch::stable::new_empty(x, {rows, k}, wide ? ScalarType::UInt16 : ScalarType::Byte);
  const MaxkArgs args{
      x.const_data_ptr(), values.mutable_data_ptr(), indices.mutable_data_ptr(), width, k, wide};
  const auto run = kernels(dtype_of(x)).maxk_rows;
  const int64_t some = std::max<int64_t>(1, kSerialElements / width);
  parallel_tasks((rows + some - 1) / some, rows <= some, [&](int64_t i) {
    std::vector<int64_t> keys(width + 64);
    run(args, i * some, std::min(rows, (i + 1) * some), keys.data());
  });
  return {values, indices};
}

Tensor cbsr_spmm(const Tensor& rowptr,
                 const Tensor& col,
                 const std::optional<Tensor>& eid,
                 int64_t num_cols,
                 const Tensor& values,
                 const Tensor& indices,
                 int64_t width,
                 const std::optional<Tensor>& weight,
                 bool mean) {
  CbsrArgs args = args_of(indices, width);
  args.csr = csr_of(rowptr, col, eid, num_cols, false);
  const DType dtype = check_matrix(values, "values", num_cols, args.k);
  args.values = values.const_data_ptr();
  args.weight = check_weight(weight, values, args.csr.num_entries);
  args.mean = mean;
  Tensor out = new_result(values, {args.csr.num_rows, width});
  args.out = out.mutable_data_ptr();
  if (out.numel() == 0)
    return out;
  const CbsrKernels& table = kernels(dtype).cbsr;
  parallel_rows(args.csr, args.k, [&](int64_t begin, int64_t end) {
    std::vector<double> scratch(width);
    table.spmm_rows[args.csr.wide](args, begin, end, scratch.data());
  });
  reduce_hubs(args, 2 * width * element_bytes(values.scalar_type()),
              table.spmm_piece[args.csr.wide], table.spmm_combine[args.csr.wide]);
  return out;
}

// Each thread has columns of the graph, so no two of them add to the same element. Each range of
// columns visits all rows: there are as few ranges as fit their results into a share of the cache.
Tensor cbsr_sspmm(const Tensor& rowptr,
                  const Tensor& col,
                  const std::optional<Tensor>& eid,
                  int64_t num_cols,
                  bool sorted,
                  const Tensor& rowptr_t,
                  const Tensor& x,
                  const Tensor& indices,
                  const std::optional<Tensor>& weight) {
  CbsrArgs args = args_of(indices, x.size(1));
  args.csr = csr_of(rowptr, col, eid, num_cols, sorted);
  check_vector(rowptr_t, "rowptr_t", num_cols + 1, args.csr.wide);
  const DType dtype = check_matrix(x, "x", args.csr.num_rows, args.width);
  STD_TORCH_CHECK(indices.size(0) == num_cols, "expected 'indices' to have ", num_cols, " rows");
  args.weight = check_weight(weight, x, args.csr.num_entries);
  args.x = x.const_data_ptr();
  Tensor out = new_result(x, {num_cols, args.k});
  args.out = out.mutable_data_ptr();
  if (out.numel() == 0)
    return out;
  // Only the row pointers of the transpose: they tell how many entries a column has.
  const Csr transposed{
      rowptr_t.const_data_ptr(), nullptr,       nullptr, num_cols, args.csr.num_rows,
      args.csr.num_entries,      args.csr.wide, true};
  const int64_t number = element_bytes(x.scalar_type());
  const int64_t bytes = num_cols * args.k * (2 * number + 1);
  const int64_t share = std::max<int64_t>(current_config().cache_bytes / 8, 1);
  const bool serial = args.csr.num_entries * args.k < kSerialElements;
  const int64_t threads = serial ? 1 : torch::stable::get_num_threads();
  const int64_t rounds = (bytes + threads * share - 1) / (threads * share);
  const std::vector<int64_t> bounds = split_rows(transposed, rounds * threads);
  const auto run = kernels(dtype).cbsr.sspmm_cols[args.csr.wide];
  parallel_tasks(static_cast<int64_t>(bounds.size()) - 1, serial, [&](int64_t i) {
    std::vector<double> scratch((bounds[i + 1] - bounds[i]) * args.k);
    run(args, bounds[i], bounds[i + 1], scratch.data());
  });
  return out;
}

Tensor cbsr_dot(const Tensor& rowptr,
                const Tensor& col,
                const std::optional<Tensor>& eid,
                int64_t num_cols,
                const Tensor& values,
                const Tensor& indices,
                const Tensor& x) {
  CbsrArgs args = args_of(indices, x.size(1));
  args.csr = csr_of(rowptr, col, eid, num_cols, false);
  const DType dtype = check_matrix(x, "x", args.csr.num_rows, args.width);
  STD_TORCH_CHECK(check_matrix(values, "values", num_cols, args.k) == dtype,
                  "expected 'values' of the dtype of 'x'");
  args.values = values.const_data_ptr();
  args.x = x.const_data_ptr();
  Tensor out = new_result(x, {args.csr.num_entries});
  args.out = out.mutable_data_ptr();
  const CbsrKernels& table = kernels(dtype).cbsr;
  parallel_rows(args.csr, args.k, [&](int64_t begin, int64_t end) {
    table.dot_rows[args.csr.wide](args, begin, end);
  });
  for (const int64_t row : find_hubs(args.csr))
    parallel_pieces(args.csr, row, [&](const Piece& piece, int64_t) {
      table.dot_piece[args.csr.wide](args, piece);
    });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("maxk", TORCH_BOX(&maxk));
  m.impl("cbsr_spmm", TORCH_BOX(&cbsr_spmm));
  m.impl("cbsr_sspmm", TORCH_BOX(&cbsr_sspmm));
  m.impl("cbsr_dot", TORCH_BOX(&cbsr_dot));
}

}  // namespace pyg_accel
