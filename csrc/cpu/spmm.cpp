// SpMM: out[i] = reduce over row i of weight * x[col].
#include "packing.h"
#include "schedule.h"

namespace pyg_accel {
namespace {

std::vector<Tensor> spmm(const Tensor& rowptr,
                         const Tensor& col,
                         const std::optional<Tensor>& eid,
                         int64_t num_cols,
                         bool sorted,
                         const Tensor& x,
                         const std::optional<Tensor>& weight,
                         int64_t combine,
                         bool relu,
                         int64_t reduce,
                         bool want_arg,
                         bool arg_is_col) {
  const DType dtype = dtype_of(x);
  check_features(x, "x", dtype);
  SpmmArgs args{};
  args.csr = csr_of(rowptr, col, eid, num_cols, sorted);
  STD_TORCH_CHECK(x.size(0) == num_cols, "expected 'x' to have ", num_cols, " rows");
  args.heads = x.size(1);
  args.width = x.size(2);
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.reduce = static_cast<Reduce>(reduce);
  args.arg_is_col = arg_is_col;
  if (weight) {
    STD_TORCH_CHECK(weight->is_contiguous() && weight->dim() == 3 && dtype_of(*weight) == dtype &&
                        weight->size(0) == args.csr.num_entries,
                    "expected 'weight' to be contiguous [E, H, F] of the dtype of 'x'");
    args.weight_rows = weight->size(1) == args.heads && weight->size(2) == args.width;
    STD_TORCH_CHECK(args.weight_rows || (weight->size(2) == 1 &&
                                         (weight->size(1) == 1 || weight->size(1) == args.heads)),
                    "expected 'weight' of shape [E, 1 or H, 1] or [E, H, F]");
    args.weight_columns = weight->size(1) * weight->size(2);
    args.weight = weight->const_data_ptr();
    args.combine = static_cast<Combine>(combine);
    args.relu = relu;
    STD_TORCH_CHECK(args.weight_rows || (args.combine == Combine::kMul && !relu),
                    "one weight an edge can only be multiplied with");
  }
  if (args.weight_rows || args.weight_columns <= 1) {  // nothing tells the heads apart
    args.width *= args.heads;
    args.heads = 1;
  }
  const std::vector<int64_t> shape{args.csr.num_rows, x.size(1), x.size(2)};
  std::vector<Tensor> result{new_result(x, shape)};
  if (want_arg)
    result.push_back(new_result(rowptr, shape));
  args.out = result[0].mutable_data_ptr();
  args.arg = want_arg ? result[1].mutable_data_ptr() : nullptr;
  if (result[0].numel() == 0)
    return result;

  const Kernels& table = kernels(dtype);
  const bool sums = args.reduce == Reduce::kSum || args.reduce == Reduce::kMean;
  const int64_t element = element_bytes(x.scalar_type());
  const Blocking blocking =
      choose_blocking(args.csr, args.heads, args.width, element, sums && element >= 4);
  const auto run = table.spmm_rows[args.csr.wide];
  auto pass = [&](int64_t f_begin, int64_t f_end) {
    parallel_rows(args.csr, args.heads * (f_end - f_begin), [&](int64_t begin, int64_t end) {
      run(args, Range{begin, end, f_begin, f_end});
    });
  };
  const bool pack = blocking.width < args.width && args.heads == 1;
  PackedColumns packed(pack ? num_cols * blocking.width * element : 0);
  for (int64_t f = 0; f < args.width; f += blocking.width) {
    const int64_t f_end = std::min(args.width, f + blocking.width);
    if (pack) {
      packed.fill(x.const_data_ptr(), num_cols, x.stride(0) * element, f * element,
                  (f_end - f) * element);
      args.x = packed.data();
      args.x_stride = f_end - f;
      args.x_begin = f;
    }
    if (blocking.cols >= num_cols) {
      pass(f, f_end);
      continue;
    }
    std::vector<int64_t> cursor(args.csr.num_rows);
    for (int64_t row = 0; row < args.csr.num_rows; ++row)
      cursor[row] = row_pointer(args.csr, row);
    args.cursor = cursor.data();
    for (int64_t c = 0; c < num_cols; c += blocking.cols) {
      args.col_end = c + blocking.cols;
      args.last_block = args.col_end >= num_cols;
      pass(f, f_end);
    }
    args.cursor = nullptr;
  }
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.x_begin = 0;
  const int64_t accumulator = dtype == DType::kDouble ? 8 : 4;
  reduce_hubs(args, 2 * accumulator * args.heads * args.width, table.spmm_piece[args.csr.wide],
              table.spmm_combine[args.csr.wide]);
  return result;
}

// Routes the gradient of max/min to the source each element came from. Every task owns a slice of
// columns of the result, so no two of them touch the same element and no atomics are needed.
template <class T, class I>
void scatter_columns(const T* grad,
                     const I* arg,
                     T* out,
                     int64_t rows,
                     int64_t columns,
                     int64_t begin,
                     int64_t end) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t f = begin; f < end; ++f) {
      const int64_t source = arg[r * columns + f];
      if (source >= 0)
        out[source * columns + f] += grad[r * columns + f];
    }
}

Tensor scatter_arg(const Tensor& grad, const Tensor& arg, int64_t num_cols) {
  STD_TORCH_CHECK(
      grad.is_contiguous() && arg.is_contiguous() && grad.dim() == 2 && arg.numel() == grad.numel(),
      "expected contiguous 'grad' and 'arg' of one shape [N, F]");
  const bool is_double = grad.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(is_double || grad.scalar_type() == ScalarType::Float,
                  "expected 'grad' to be float32 or float64");
  const bool wide = is_wide(arg, "arg");
  const int64_t rows = grad.size(0), columns = grad.size(1);
  Tensor out = new_result(grad, {num_cols, columns});
  torch::stable::zero_(out);
  const int64_t slice = is_double ? 8 : 16;  // a cache line: threads do not share one
  parallel_tasks((columns + slice - 1) / slice, rows * columns < kSerialElements, [&](int64_t i) {
    const int64_t begin = i * slice, end = std::min(columns, begin + slice);
    auto run = [&]<class T, class I>(T, I) {
      scatter_columns(static_cast<const T*>(grad.const_data_ptr()),
                      static_cast<const I*>(arg.const_data_ptr()),
                      static_cast<T*>(out.mutable_data_ptr()), rows, columns, begin, end);
    };
    if (is_double)
      wide ? run(double{}, int64_t{}) : run(double{}, int32_t{});
    else
      wide ? run(float{}, int64_t{}) : run(float{}, int32_t{});
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("spmm", TORCH_BOX(&spmm));
  m.impl("scatter_arg", TORCH_BOX(&scatter_arg));
}

}  // namespace pyg_accel
