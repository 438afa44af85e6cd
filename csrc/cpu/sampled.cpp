// SpMM over a sample of each row's entries.
#include "schedule.h"

namespace pyg_accel {
namespace {

int64_t longest_row(const Csr& csr) {
  int64_t most = 0;
  for (int64_t row = 0; row < csr.num_rows; ++row)
    most = std::max(most, row_pointer(csr, row + 1) - row_pointer(csr, row));
  return most;
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
               int64_t rescale) {
  SampledArgs args{};
  args.csr = csr_of(rowptr, col, eid, num_cols, false);
  const bool narrow = x.scalar_type() == ScalarType::Char;
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

  Tensor out = new_result(x, {args.csr.num_rows, args.heads, args.width},
                          narrow ? std::optional(ScalarType::Float) : std::nullopt);
  args.out = out.mutable_data_ptr();
  if (out.numel() == 0)
    return out;
  args.most = std::min(limit, longest_row(args.csr));
  const Kernels& table = kernels(narrow ? DType::kFloat : dtype_of(x));
  const SampledRows run = (narrow ? table.sampled_int8 : table.sampled_rows)[args.csr.wide];
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
