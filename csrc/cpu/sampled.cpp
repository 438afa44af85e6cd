// SpMM over a sample of each row's entries.
#include <cmath>
#include "schedule.h"

namespace pyg_accel {
namespace {

Storage storage_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Char:
      return Storage::kInt8;
    case ScalarType::Float8_e4m3fn:
      return Storage::kFloat8;
    default:
      return static_cast<Storage>(dtype_of(x));
  }
}

int64_t longest_row(const Csr& csr) {
  int64_t most = 0;
  for (int64_t row = 0; row < csr.num_rows; ++row)
    most = std::max(most, row_pointer(csr, row + 1) - row_pointer(csr, row));
  return most;
}

// The factors of Rescale::kGcn by column, computed once for all entries of a column.
std::vector<double> source_factors(const Csr& csr, int64_t limit) {
  constexpr int64_t kChunk = 1 << 14;
  std::vector<double> factors(csr.num_rows);
  parallel_tasks((csr.num_rows + kChunk - 1) / kChunk, false, [&](int64_t chunk) {
    const int64_t end = std::min(csr.num_rows, (chunk + 1) * kChunk);
    for (int64_t row = chunk * kChunk; row < end; ++row) {
      const int64_t degree = row_pointer(csr, row + 1) - row_pointer(csr, row);
      factors[row] = degree > limit ? std::sqrt(static_cast<double>(degree) / limit) : 1.0;
    }
  });
  return factors;
}

Tensor sampled(const Tensor& rowptr,
               const Tensor& col,
               const std::optional<Tensor>& eid,
               int64_t num_cols,
               const Tensor& x,
               const std::optional<Tensor>& scale,
               const std::optional<Tensor>& weight,
               int64_t limit,
               int64_t strategy,
               int64_t rescale,
               const std::optional<Tensor>& seed,
               const std::optional<Tensor>& steps) {
  SampledArgs args{};
  args.csr = csr_of(rowptr, col, eid, num_cols, false);
  const Storage storage = storage_of(x);
  const bool narrow = storage >= Storage::kInt8;
  check_rows(x, "x");
  STD_TORCH_CHECK(x.size(0) == num_cols, "expected 'x' to have ", num_cols, " rows");
  args.heads = x.size(1);
  args.width = x.size(2);
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  STD_TORCH_CHECK(narrow == scale.has_value(),
                  "expected a scale for 8-bit features, and only them");
  const int64_t columns = args.heads * args.width;
  if (scale) {
    const bool by_row = scale->dim() == 2 && scale->size(1) == 1 && scale->size(0) == num_cols;
    STD_TORCH_CHECK(
        scale->is_contiguous() && scale->scalar_type() == ScalarType::Float &&
            (by_row || (scale->dim() == 2 && scale->size(0) == 1 && scale->size(1) == columns)),
        "expected 'scale' to be contiguous float32 [num_cols, 1] or [1, H * F]");
    const auto* data = static_cast<const float*>(scale->const_data_ptr());
    (by_row ? args.row_scale : args.column_scale) = data;
  }
  if (weight) {
    STD_TORCH_CHECK(weight->is_contiguous() && weight->dim() == 2 &&
                        weight->size(0) == args.csr.num_entries &&
                        dtype_of(*weight) == (narrow ? DType::kFloat : dtype_of(x)) &&
                        (weight->size(1) == 1 || weight->size(1) == args.heads),
                    "expected 'weight' to be contiguous [E, 1 or H] of the dtype of the result");
    args.weight = weight->const_data_ptr();
    args.weight_columns = weight->size(1);
  }
  STD_TORCH_CHECK(limit > 0, "expected to take at least one entry of a row");
  args.limit = limit;
  args.strategy = static_cast<Strategy>(strategy);
  args.rescale = static_cast<Rescale>(rescale);
  if (args.strategy == Strategy::kRandom) {
    STD_TORCH_CHECK(seed && seed->numel() == 1 && is_wide(*seed, "seed") && steps &&
                        steps->numel() == 256 && !is_wide(*steps, "steps"),
                    "expected a seed of one int64 and 256 int32 steps");
    args.seed = static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr()));
    args.steps = static_cast<const int32_t*>(steps->const_data_ptr());
  }

  Tensor out = new_result(x, {args.csr.num_rows, args.heads, args.width},
                          narrow ? std::optional(ScalarType::Float) : std::nullopt);
  args.out = out.mutable_data_ptr();
  if (out.numel() == 0)
    return out;
  args.most = std::min(limit, longest_row(args.csr));
  std::vector<double> factors;
  if (args.rescale == Rescale::kGcn) {
    STD_TORCH_CHECK(num_cols == args.csr.num_rows, "expected as many columns as rows for 'gcn'");
    factors = source_factors(args.csr, limit);
    args.source_factor = factors.data();
  }
  const Kernels& table = kernels(narrow ? DType::kFloat : static_cast<DType>(storage));
  const SampledRows run = (storage == Storage::kInt8     ? table.sampled_int8
                           : storage == Storage::kFloat8 ? table.sampled_float8
                                                         : table.sampled_rows)[args.csr.wide];
  parallel_rows(args.csr, columns, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> scratch(3 * args.most);
    run(args, Range{begin, end, 0, args.width}, scratch.data());
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("sampled", TORCH_BOX(&sampled));
}

}  // namespace pyg_accel
