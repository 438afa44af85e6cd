// SpMM: out[i] = reduce over row i of weight * x[col].
#include <tuple>

#include "packing.h"
#include "plan_code.h"
#include "schedule.h"
#include "sddmm.h"

namespace pyg_accel {
namespace {

std::vector<Tensor> spmm(const Csr& csr,
                         const PlanCode& plan,
                         const Tensor& features,
                         const Tensor* weights,
                         bool want_arg) {
  const FeatureRows rows(features);
  const Tensor& x = rows.tensor;
  const DType dtype = dtype_of(x);
  STD_TORCH_CHECK(x.is_cpu() && rows.rows == csr.num_cols, "expected features of ", csr.num_cols,
                  " rows on a CPU");
  SpmmArgs args{};
  args.csr = csr;
  args.heads = 1;
  args.width = rows.columns;
  args.x = x.const_data_ptr();
  args.x_stride = rows.stride;
  args.reduce = static_cast<Reduce>(plan.reduce);
  args.arg_is_col = plan.arg_is_col;
  std::optional<Tensor> weight;
  if (weights) {
    weight = weights->is_contiguous() ? *weights : torch::stable::contiguous(*weights);
    const int64_t size = weight->numel(), entries = csr.num_entries;
    STD_TORCH_CHECK(weight->is_cpu() && dtype_of(*weight) == dtype,
                    "expected weights of the dtype of the features");
    args.weight = weight->const_data_ptr();
    args.combine = static_cast<Combine>(plan.combine);
    args.relu = plan.relu;
    const bool product = args.combine == Combine::kMul && !args.relu;
    if (product && size == entries) {
      args.weight_columns = 1;
    } else if (product && plan.heads > 0 && size == entries * plan.heads &&
               rows.columns % plan.heads == 0) {
      args.weight_columns = args.heads = plan.heads;  // else nothing tells the heads apart
      args.width = rows.columns / plan.heads;
    } else {
      STD_TORCH_CHECK(size == entries * rows.columns,
                      "expected a weight an edge, an edge and head, or an edge and feature");
      args.weight_columns = rows.columns;
      args.weight_rows = true;
    }
  }
  const std::vector<int64_t> shape = rows.shape(csr.num_rows);
  std::vector<Tensor> result{new_result(x, shape)};
  if (want_arg)
    result.push_back(new_result(x, shape, csr.wide ? ScalarType::Long : ScalarType::Int));
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
  PackedColumns packed(pack ? csr.num_cols * blocking.width * element : 0);
  for (int64_t f = 0; f < args.width; f += blocking.width) {
    const int64_t f_end = std::min(args.width, f + blocking.width);
    if (pack) {
      packed.fill(x.const_data_ptr(), csr.num_cols, rows.stride * element, f * element,
                  (f_end - f) * element);
      args.x = packed.data();
      args.x_stride = f_end - f;
      args.x_begin = f;
    }
    if (blocking.cols >= csr.num_cols) {
      pass(f, f_end);
      continue;
    }
    std::vector<int64_t> cursor(args.csr.num_rows);
    for (int64_t row = 0; row < args.csr.num_rows; ++row)
      cursor[row] = row_pointer(args.csr, row);
    args.cursor = cursor.data();
    for (int64_t c = 0; c < csr.num_cols; c += blocking.cols) {
      args.col_end = c + blocking.cols;
      args.last_block = args.col_end >= csr.num_cols;
      pass(f, f_end);
    }
    args.cursor = nullptr;
  }
  args.x = x.const_data_ptr();
  args.x_stride = rows.stride;
  args.x_begin = 0;
  const int64_t accumulator = dtype == DType::kDouble ? 8 : 4;
  reduce_hubs(args, 2 * accumulator * args.heads * args.width, table.spmm_piece[args.csr.wide],
              table.spmm_combine[args.csr.wide]);
  return result;
}

// Adds the gradient of max/min to the source of each element. Every task has a range of columns of
// the result, so no two of them write to the same element and no atomics are needed.
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

Tensor scatter_arg(int64_t num_cols, const Tensor& grad, const Tensor& arg) {
  STD_TORCH_CHECK(arg.is_contiguous() && arg.numel() == grad.numel(),
                  "expected 'grad' and a contiguous 'arg' of one shape [N, ...]");
  const bool is_double = grad.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(is_double || grad.scalar_type() == ScalarType::Float,
                  "expected 'grad' to be float32 or float64");
  const Tensor whole = grad.is_contiguous() ? grad : torch::stable::contiguous(grad);
  const FeatureRows gradients(whole);
  const bool wide = is_wide(arg, "arg");
  const int64_t rows = gradients.rows, columns = gradients.columns;
  Tensor out = new_result(grad, gradients.shape(num_cols));
  torch::stable::zero_(out);
  const int64_t slice = is_double ? 8 : 16;  // a cache line: threads do not share one
  parallel_tasks((columns + slice - 1) / slice, rows * columns < kSerialElements, [&](int64_t i) {
    const int64_t begin = i * slice, end = std::min(columns, begin + slice);
    auto run = [&]<class T, class I>(T, I) {
      scatter_columns(static_cast<const T*>(whole.const_data_ptr()),
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

template <bool kWinners>
auto run(const Tensor& rowptr,
         const Tensor& col,
         const std::optional<Tensor>& eid,
         int64_t num_cols,
         bool sorted,
         int64_t number,
         const Tensor& x,
         const std::optional<Tensor>& other) {
  const Csr csr = csr_of(rowptr, col, eid, num_cols, sorted);
  const PlanCode plan(number);
  const bool swaps = other && plan.swapped;
  const Tensor &first = swaps ? *other : x, *second = swaps ? &x : other ? &*other : nullptr;
  if constexpr (kWinners) {
    const auto results = spmm(csr, plan, first, second, true);
    return std::tuple{results[0], results[1]};
  } else {
    return plan.dot && second ? dot(csr, plan.heads, first, *second)
                              : spmm(csr, plan, first, second, false)[0];
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("spmm", TORCH_BOX(&run<false>));
  m.impl("spmm_winners", TORCH_BOX(&run<true>));
  m.impl("scatter_arg", TORCH_BOX(&scatter_arg));
}

}  // namespace pyg_accel
