// MaxK, and the products of a graph and of dense matrices with its result.
#include <memory>

#include "config.h"
#include "schedule.h"

namespace pyg_accel {
namespace {

bool wide_indices(int64_t width) {
  return width > 256;
}

CbsrColumns columns_of(const Tensor& indices, int64_t width) {
  const bool wide = wide_indices(width);
  const ScalarType type = wide ? ScalarType::UInt16 : ScalarType::Byte;
  STD_TORCH_CHECK(indices.is_cpu() && indices.is_contiguous() && indices.dim() == 2 &&
                      indices.scalar_type() == type,
                  "expected 'indices' to be contiguous [N, k], uint8 up to 256 columns and uint16 "
                  "above");
  return {indices.const_data_ptr(), wide, indices.size(1), width};
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
  CbsrArgs args{columns_of(indices, width)};
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
  CbsrArgs args{columns_of(indices, x.size(1))};
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
  CbsrArgs args{columns_of(indices, x.size(1))};
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

// Common arguments of all products with a dense matrix.
CbsrLinearArgs linear_args(const Tensor& indices, int64_t width, int64_t columns) {
  CbsrLinearArgs args{columns_of(indices, width)};
  args.columns = columns;
  return args;
}

// Calls run(begin, end) for ranges of rows with k * columns multiplications each.
template <class Run>
void parallel_products(const CbsrLinearArgs& a, int64_t rows, const Run& run) {
  const int64_t some = std::max<int64_t>(1, 8 * kSerialElements / (a.k * a.columns + 1));
  parallel_tasks((rows + some - 1) / some, rows <= some,
                 [&](int64_t i) { run(i * some, std::min(rows, (i + 1) * some)); });
}

Tensor cbsr_mm(const Tensor& values, const Tensor& indices, int64_t width, const Tensor& dense) {
  CbsrLinearArgs args = linear_args(indices, width, dense.size(1));
  const int64_t rows = indices.size(0);
  const DType dtype = check_matrix(values, "values", rows, args.k);
  STD_TORCH_CHECK(check_matrix(dense, "dense", width, args.columns) == dtype,
                  "expected 'dense' of the dtype of 'values'");
  args.values = values.const_data_ptr();
  args.dense = dense.const_data_ptr();
  Tensor out = new_result(values, {rows, args.columns});
  args.out = out.mutable_data_ptr();
  parallel_products(args, rows, [&](int64_t begin, int64_t end) {
    kernels(dtype).cbsr.mm_rows[args.wide](args, begin, end);
  });
  return out;
}

Tensor cbsr_sddmm(const Tensor& x, const Tensor& indices, const Tensor& dense) {
  CbsrLinearArgs args = linear_args(indices, dense.size(0), dense.size(1));
  const int64_t rows = indices.size(0);
  const DType dtype = check_matrix(x, "x", rows, args.columns);
  STD_TORCH_CHECK(check_matrix(dense, "dense", args.width, args.columns) == dtype,
                  "expected 'dense' of the dtype of 'x'");
  args.x = x.const_data_ptr();
  args.dense = dense.const_data_ptr();
  Tensor out = new_result(x, {rows, args.k});
  args.out = out.mutable_data_ptr();
  parallel_products(args, rows, [&](int64_t begin, int64_t end) {
    kernels(dtype).cbsr.sddmm_rows[args.wide](args, begin, end);
  });
  return out;
}

// Rows are cut into pieces that only depend on sizes. Each piece has its own sums, and these are
// added up in order, so the result does not depend on the number of threads.
Tensor cbsr_mm_t(const Tensor& values, const Tensor& indices, int64_t width, const Tensor& x) {
  constexpr int64_t most_pieces = 16, least_rows = 512, most_bytes = int64_t{1} << 25;
  CbsrLinearArgs args = linear_args(indices, width, x.size(1));
  const int64_t rows = indices.size(0);
  const DType dtype = check_matrix(values, "values", rows, args.k);
  STD_TORCH_CHECK(check_matrix(x, "x", rows, args.columns) == dtype,
                  "expected 'x' of the dtype of 'values'");
  args.values = values.const_data_ptr();
  args.x = x.const_data_ptr();
  Tensor out = new_result(values, {width, args.columns});
  const int64_t size = width * args.columns;
  if (size == 0)
    return out;
  const int64_t number = element_bytes(values.scalar_type());
  const int64_t fit = std::min(most_pieces, most_bytes / (size * number));
  const int64_t pieces = std::max<int64_t>(1, std::min(fit, rows / least_rows));
  const int64_t some = (rows + pieces - 1) / pieces;
  const auto sums = std::make_unique_for_overwrite<char[]>(2 * pieces * size * number);
  parallel_tasks(pieces, pieces == 1, [&](int64_t i) {
    char* own = &sums[2 * i * size * number];
    kernels(dtype).cbsr.mm_t_rows[args.wide](
        args, std::min(rows, i * some), std::min(rows, (i + 1) * some), own, own + size * number);
  });
  auto add_up = [&]<class A>(A* total) {
    const A* parts = reinterpret_cast<const A*>(sums.get());
    std::copy(parts, parts + size, total);
    for (int64_t i = 1; i < pieces; ++i)
      for (int64_t e = 0; e < size; ++e)
        total[e] += parts[2 * i * size + e];
  };
  dtype == DType::kDouble ? add_up(static_cast<double*>(out.mutable_data_ptr()))
                          : add_up(static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("maxk", TORCH_BOX(&maxk));
  m.impl("cbsr_spmm", TORCH_BOX(&cbsr_spmm));
  m.impl("cbsr_sspmm", TORCH_BOX(&cbsr_sspmm));
  m.impl("cbsr_dot", TORCH_BOX(&cbsr_dot));
  m.impl("cbsr_mm", TORCH_BOX(&cbsr_mm));
  m.impl("cbsr_sddmm", TORCH_BOX(&cbsr_sddmm));
  m.impl("cbsr_mm_t", TORCH_BOX(&cbsr_mm_t));
}

}  // namespace pyg_accel
