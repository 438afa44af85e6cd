// The operators of the CUDA library for MaxK and CBSR; see library.cpp.
#include "cuda/cbsr.h"
#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

// `pieces` [3 * P] of rows with more than `limit` entries: row, begin and end.
Rows rows_of(const Tensor& rowptr,
             const Tensor& col,
             const std::optional<Tensor>& pieces,
             int64_t limit,
             const Tensor& like) {
  Rows rows{};
  rows.rowptr = int32s(rowptr, "rowptr", rowptr.numel(), like);
  rows.col = int32s(col, "col", col.numel(), like);
  rows.rows = static_cast<int32_t>(rowptr.numel() - 1);
  rows.limit = static_cast<int32_t>(limit);
  if (pieces) {
    rows.pieces = static_cast<int32_t>(pieces->numel() / 3);
    rows.row = int32s(*pieces, "pieces", 3 * rows.pieces, like);
    rows.begin = rows.row + rows.pieces;
    rows.end = rows.begin + rows.pieces;
  }
  return rows;
}

// The sums of pieces [P, width].
float* partial_of(const std::optional<Tensor>& partial, const Rows& rows, int64_t width) {
  STD_TORCH_CHECK(partial ? partial->is_contiguous() && is_on_device(*partial) &&
                                partial->scalar_type() == ScalarType::Float &&
                                partial->numel() == rows.pieces * width
                          : rows.pieces == 0,
                  "expected a float32 row in 'partial' for every piece");
  return partial ? static_cast<float*>(partial->mutable_data_ptr()) : nullptr;
}

Stored stored_as(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return Stored::kFloat;
    case ScalarType::BFloat16:
      return Stored::kBFloat16;
    case ScalarType::Half:
      return Stored::kHalf;
    default:
      STD_TORCH_CHECK(false, "expected '", name, "' in float32, bfloat16 or float16");
  }
}

void check_slots(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(is_on_device(t) && t.is_contiguous() && t.dim() == 2 && t.size(1) % 4 == 0 &&
                      t.get_device_index() == like.get_device_index() &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % (4 * t.element_size()) == 0,
                  "expected '", name, "' to be rows of whole, aligned quads");
}

const float* weights(const std::optional<Tensor>& weight, int64_t entries, const Tensor& like) {
  if (!weight)
    return nullptr;
  check_vector(*weight, "weight", entries, like);
  STD_TORCH_CHECK(weight->scalar_type() == ScalarType::Float, "expected weights in float32");
  return static_cast<const float*>(weight->const_data_ptr());
}

bool is_wide_columns(const Tensor& indices) {
  const ScalarType type = indices.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Byte || type == ScalarType::UInt16,
                  "expected indices in uint8 or uint16");
  return type == ScalarType::UInt16;
}

void cbsr_spmm(const Tensor& rowptr,
               const Tensor& col,
               const std::optional<Tensor>& pieces,
               int64_t limit,
               const std::optional<Tensor>& weight,
               const Tensor& values,
               const Tensor& indices,
               int64_t k,
               int64_t shift,
               int64_t lanes,
               bool mean,
               std::optional<Tensor> partial,
               Tensor out) {
  check_slots(values, "values", values);
  CbsrSpmmArgs args{};
  args.rows = rows_of(rowptr, col, pieces, limit, values);
  args.weight = weights(weight, col.numel(), values);
  args.values = values.const_data_ptr();
  args.stored = stored_as(values, "values");
  check_slots(indices, "indices", values);
  STD_TORCH_CHECK(indices.size(1) == values.size(1) && indices.size(0) == values.size(0),
                  "expected indices like values");
  args.indices = indices.const_data_ptr();
  args.wide_columns = is_wide_columns(indices);
  args.stride = static_cast<int>(values.size(1));
  args.k = static_cast<int>(k);
  args.width = static_cast<int>(out.size(1));
  args.shift = static_cast<int>(shift);
  args.lanes = static_cast<int>(lanes);
  args.mean = mean;
  STD_TORCH_CHECK(is_on_device(out) && out.is_contiguous() && out.dim() == 2,
                  "expected a dense 'out'");
  STD_TORCH_CHECK(out.size(0) == rowptr.numel() - 1 && out.scalar_type() == values.scalar_type(),
                  "expected 'out' to have the rows and the dtype of the result");
  args.out = out.mutable_data_ptr();
  args.partial = partial_of(partial, args.rows, args.width);
  const auto guard = guard_of(values);
  cbsr_spmm_cuda(args, stream_of(values));
}

void combine(const Tensor& partial,
             const Tensor& row,
             const Tensor& first,
             const std::optional<Tensor>& rowptr,
             Tensor out) {
  CombineArgs args{};
  args.partial = static_cast<const float*>(partial.const_data_ptr());
  args.row = int32s(row, "row", row.numel(), out);
  args.first = int32s(first, "first", row.numel() + 1, out);
  args.rowptr = rowptr ? int32s(*rowptr, "rowptr", rowptr->numel(), out) : nullptr;
  args.out = out.mutable_data_ptr();
  args.count = static_cast<int32_t>(row.numel());
  args.width = static_cast<int32_t>(out.size(1));
  args.stored = stored_as(out, "out");
  STD_TORCH_CHECK(partial.size(1) == out.size(1) && partial.scalar_type() == ScalarType::Float,
                  "expected partial sums of the width of 'out', in float32");
  const auto guard = guard_of(out);
  combine_cuda(args, stream_of(out));
}

void cbsr_push(const Tensor& rowptr,
               const Tensor& col,
               const std::optional<Tensor>& pieces,
               int64_t limit,
               const std::optional<Tensor>& weight,
               const Tensor& x,
               const Tensor& indices,
               int64_t k,
               int64_t shift,
               int64_t lanes,
               Tensor out) {
  STD_TORCH_CHECK(is_on_device(x) && x.is_contiguous() && x.dim() == 2 &&
                      x.scalar_type() == ScalarType::Float && x.size(0) == rowptr.numel() - 1 &&
                      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0,
                  "expected 'x' to be contiguous float32 rows, aligned");
  check_slots(indices, "indices", x);
  check_slots(out, "out", x);
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.numel() == indices.numel(),
                  "expected 'out' in float32 and like indices");
  CbsrPushArgs args{};
  args.rows = rows_of(rowptr, col, pieces, limit, x);
  args.weight = weights(weight, col.numel(), x);
  args.x = static_cast<const float*>(x.const_data_ptr());
  args.indices = indices.const_data_ptr();
  args.wide_columns = is_wide_columns(indices);
  args.stride = static_cast<int>(indices.size(1));
  args.k = static_cast<int>(k);
  args.width = static_cast<int>(x.size(1));
  args.shift = static_cast<int>(shift);
  args.lanes = static_cast<int>(lanes);
  args.out = static_cast<float*>(out.mutable_data_ptr());
  const auto guard = guard_of(x);
  cbsr_push_cuda(args, stream_of(x));
}

void cbsr_pull(const Tensor& rowptr,
               const Tensor& col,
               const std::optional<Tensor>& pieces,
               int64_t limit,
               const std::optional<Tensor>& weight,
               const Tensor& x,
               const Tensor& indices,
               int64_t slice,
               std::optional<Tensor> partial,
               Tensor out) {
  STD_TORCH_CHECK(is_on_device(x) && x.is_contiguous() && x.dim() == 2 && is_on_device(indices) &&
                      indices.is_contiguous() && out.is_contiguous() &&
                      out.scalar_type() == x.scalar_type() && out.numel() == indices.numel() &&
                      indices.size(0) == rowptr.numel() - 1 && slice > 0,
                  "expected dense 'x', and 'out' like it with the shape of 'indices'");
  CbsrPullArgs args{};
  args.rows = rows_of(rowptr, col, pieces, limit, x);
  args.weight = weights(weight, col.numel(), x);
  args.x = x.const_data_ptr();
  args.indices = indices.const_data_ptr();
  args.wide_columns = is_wide_columns(indices);
  args.out = out.mutable_data_ptr();
  args.partial = partial_of(partial, args.rows, indices.size(1));
  args.k = static_cast<int>(indices.size(1));
  args.width = static_cast<int>(x.size(1));
  args.slice = static_cast<int>(slice);
  args.stored = stored_as(x, "x");
  const auto guard = guard_of(x);
  cbsr_pull_cuda(args, stream_of(x));
}

std::vector<Tensor> maxk(const Tensor& x, int64_t k, double first) {
  STD_TORCH_CHECK(is_on_device(x) && x.is_contiguous() && x.dim() == 2 && x.size(1) <= 1024 &&
                      k >= 1 && k < x.size(1) &&
                      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0,
                  "expected aligned, contiguous rows of up to 1024 features, and 1 <= k < F");
  const auto guard = guard_of(x);
  Tensor values = torch::stable::new_empty(x, {x.size(0), k});
  Tensor indices = torch::stable::new_empty(
      x, {x.size(0), k}, x.size(1) <= 256 ? ScalarType::Byte : ScalarType::UInt16);
  maxk_cuda({x.const_data_ptr(), values.mutable_data_ptr(), indices.mutable_data_ptr(), x.size(0),
             static_cast<int>(x.size(1)), static_cast<int>(k), static_cast<float>(first),
             stored_as(x, "x")},
            stream_of(x));
  return {values, indices};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(
      "cbsr_spmm(Tensor rowptr, Tensor col, Tensor? pieces, int limit, Tensor? weight, "
      "Tensor values, Tensor indices, int k, int shift, int lanes, bool mean, "
      "Tensor(a!)? partial, Tensor(b!) out) -> ()");
  m.def(
      "cbsr_push(Tensor rowptr, Tensor col, Tensor? pieces, int limit, Tensor? weight, Tensor x, "
      "Tensor indices, int k, int shift, int lanes, Tensor(a!) out) -> ()");
  m.def(
      "cbsr_pull(Tensor rowptr, Tensor col, Tensor? pieces, int limit, Tensor? weight, Tensor x, "
      "Tensor indices, int slice, Tensor(a!)? partial, Tensor(b!) out) -> ()");
  m.def("maxk(Tensor x, int k, float first) -> Tensor[]");
  m.def("combine(Tensor partial, Tensor row, Tensor first, Tensor? rowptr, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("cbsr_spmm", TORCH_BOX(&cbsr_spmm));
  m.impl("cbsr_push", TORCH_BOX(&cbsr_push));
  m.impl("cbsr_pull", TORCH_BOX(&cbsr_pull));
  m.impl("maxk", TORCH_BOX(&maxk));
  m.impl("combine", TORCH_BOX(&combine));
}

}  // namespace pyg_accel
