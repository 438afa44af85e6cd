// The operators of the CUDA library that run plans; see csrc/plans.h.
#include "cuda/row_spmm.h"

#include <algorithm>

#include "cuda/tensors.h"
#include "plans.h"

namespace pyg_accel {
namespace {

constexpr int kWarp = 32;
// Numbers that edges gather, and entries a row, from which on rows that are no whole vectors are
// copied to rows that are; and the bytes of a row from which on sums without weights lose by it.
// Measured on an H200: see pyg_accel/backends/triton/padding.py.
constexpr int64_t kPaddedNumbers = int64_t{1} << 25, kPaddedEntries = 4, kLongRow = 1024;

// A matrix, and how its rows are divided among warps. The arrays outlive it.
struct RowMatrix {
  RowSpmmArgs args;
  int64_t num_cols;
  int64_t num_entries;
  int32_t device;
};

Table<RowMatrix>& table() {
  static Table<RowMatrix> matrices;
  return matrices;
}

// `pieces`: of long rows, in the order of RowSpmmArgs; or nothing.
int64_t add_matrix(const Tensor& rowptr,
                   const Tensor& col,
                   const std::optional<Tensor>& eid,
                   int64_t num_cols,
                   const std::optional<Tensor>& order,
                   const std::vector<Tensor>& pieces,
                   int64_t limit,
                   int64_t slice,
                   int64_t lanes,
                   bool few) {
  STD_TORCH_CHECK(rowptr.numel() > 0, "expected 'rowptr' to hold at least one entry");
  const bool wide = is_wide(rowptr, "rowptr");
  const auto pointer = [&](const Tensor& t, const char* name, int64_t size) {
    check_vector(t, name, size, rowptr);
    STD_TORCH_CHECK(is_wide(t, name) == wide, "expected '", name, "' of the dtype of 'rowptr'");
    return t.const_data_ptr();
  };
  STD_TORCH_CHECK(slice > 0 && (slice & (slice - 1)) == 0 && (lanes & (lanes - 1)) == 0,
                  "expected 'slice' and 'lanes' to be powers of two");
  RowMatrix made{};
  made.num_cols = num_cols;
  made.num_entries = col.numel();
  made.device = rowptr.get_device_index();
  RowSpmmArgs& args = made.args;
  args.num_rows = rowptr.numel() - 1;
  args.rowptr = pointer(rowptr, "rowptr", rowptr.numel());
  args.col = pointer(col, "col", made.num_entries);
  args.eid = eid ? pointer(*eid, "eid", made.num_entries) : nullptr;
  args.order = order ? pointer(*order, "order", args.num_rows) : nullptr;
  args.wide = wide;
  args.limit = limit;
  args.slice = static_cast<int>(slice);
  args.lanes = static_cast<int>(lanes);
  args.few = few;
  if (!pieces.empty()) {
    STD_TORCH_CHECK(pieces.size() == 4, "expected four arrays of pieces");
    args.long_rows = pieces[0].numel();
    args.pieces = pieces[2].numel();
    args.long_row = pointer(pieces[0], "rows", args.long_rows);
    args.long_first = pointer(pieces[1], "first", args.long_rows + 1);
    args.piece_begin = pointer(pieces[2], "begin", args.pieces);
    args.piece_end = pointer(pieces[3], "end", args.pieces);
  }
  return table().add(made);
}

void remove_matrix(int64_t number) {
  table().remove(number);
}

int64_t power_above(int64_t number) {
  int64_t power = 1;
  while (power < number)
    power *= 2;
  return power;
}

// The most elements, up to 16 bytes, of which rows and their parts are whole multiples.
int vector_of(const Tensor& x, int64_t stride, int64_t width) {
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  int vector = 16 / element_bytes(x);
  while (width % vector || stride % vector || address % (vector * element_bytes(x)))
    vector /= 2;
  return vector;
}

// What the kernels read of the features: rows, or a copy of them with zeros behind each part.
struct Features {
  Features(const FeatureRows& rows, const RowMatrix& matrix, int64_t heads, bool weighted)
      : x(rows.tensor), stride(rows.stride), width(rows.columns / heads) {
    const int64_t whole = 16 / element_bytes(x);
    vector = vector_of(x, stride, width);
    const int64_t touched = rows.rows + matrix.args.num_rows;
    if (vector == whole || width == 1 || matrix.num_entries * rows.columns < kPaddedNumbers ||
        matrix.num_entries < kPaddedEntries * touched ||
        (!weighted && rows.columns * element_bytes(x) > kLongRow))
      return;
    const Tensor parts = torch::stable::reshape(x, {rows.rows, heads, width});
    x = torch::stable::pad(parts, {0, (whole - width % whole) % whole});
    width = x.size(2);
    stride = heads * width;
    vector = vector_of(x, stride, width);
  }

  Tensor x;
  int64_t stride;
  int64_t width;
  int vector;
};

void divide(RowSpmmArgs& args, const Tensor& x) {
  const int whole = 16 / element_bytes(x), most = kWarp * args.vector;
  // Two vectors a lane are compiled of single elements, and of whole vectors for few entries.
  const bool twice = args.vector == 1 || (whole == 4 && args.vector == whole && args.few);
  args.slice = static_cast<int>(std::min<int64_t>(args.slice, power_above(args.columns)));
  args.slice = std::max(std::min(args.slice, twice ? 2 * most : most), args.vector);
  const int group = std::min(args.slice / args.vector, kWarp);
  const int side_by_side = kWarp / group;
  args.lanes = args.lanes == 0 ? side_by_side : std::min(args.lanes, side_by_side);
}

// Weights in the order of the entries: each slice of the columns would fetch them from where their
// edges are.
std::optional<Tensor> in_order(const RowSpmmArgs& args, const Tensor& weight, int64_t entries) {
  const int bytes = args.weight_heads * element_bytes(weight);
  if (!args.eid || args.by_source || args.columns <= args.slice ||
      (bytes != 2 && bytes != 4 && bytes != 8) ||
      reinterpret_cast<uintptr_t>(weight.const_data_ptr()) % bytes)
    return std::nullopt;
  Tensor out = empty_result(weight, {entries, args.weight_heads});
  TakeArgs take{};
  take.values = weight.const_data_ptr();
  take.order = args.eid;
  take.out = out.mutable_data_ptr();
  take.count = entries;
  take.bytes = bytes;
  take.wide = args.wide;
  take_cuda(take, stream_of(weight));
  return out;
}

std::vector<Tensor> run(const Plan& plan,
                        const Tensor& features,
                        const Tensor* weights,
                        bool winners) {
  const auto matrix = table().at(plan.matrix);
  const FeatureRows rows(features);
  STD_TORCH_CHECK(is_on_device(features) && features.get_device_index() == matrix->device &&
                      rows.rows == matrix->num_cols,
                  "expected features of ", matrix->num_cols, " rows on the device of the graph");
  const auto guard = guard_of(features);
  RowSpmmArgs args = matrix->args;
  std::optional<Tensor> weight;
  int64_t heads = 1;
  if (weights) {
    weight = weights->is_contiguous() ? *weights : torch::stable::contiguous(*weights);
    const int64_t count = plan.by_source ? matrix->num_cols : matrix->num_entries;
    heads = weight->numel() == count ? 1 : plan.heads;
    STD_TORCH_CHECK(is_on_device(*weight) && weight->get_device_index() == matrix->device &&
                        weight->scalar_type() == features.scalar_type() && heads > 0 &&
                        weight->numel() == count * heads && rows.columns % heads == 0,
                    "expected a weight an edge, or an edge and head, like the features");
    args.weight = weight->const_data_ptr();
    args.weight_heads = static_cast<int32_t>(heads);
    args.by_source = plan.by_source;
  }
  const std::vector<int64_t> shape = rows.shape(args.num_rows);
  std::vector<Tensor> result{empty_result(features, shape)};
  const ScalarType index = args.wide ? ScalarType::Long : ScalarType::Int;
  if (winners)
    result.push_back(empty_result(features, shape, index));
  if (args.num_rows == 0 || rows.columns == 0)
    return result;
  args.out = result[0].mutable_data_ptr();
  args.winner = winners ? result[1].mutable_data_ptr() : nullptr;

  const Features read(rows, *matrix, heads, weights != nullptr);
  STD_TORCH_CHECK(heads * read.width < INT32_MAX && read.stride <= UINT32_MAX,
                  "expected rows of fewer features");
  args.x = read.x.const_data_ptr();
  args.x_stride = read.stride;
  args.vector = read.vector;
  args.width = static_cast<int32_t>(read.width);
  args.out_width = static_cast<int32_t>(rows.columns / heads);
  args.columns = static_cast<int32_t>(heads * read.width);
  args.mean = plan.reduce == 1;
  args.smallest = plan.reduce == 3;
  args.winner_of = plan.arg_is_col ? args.col : args.eid;
  divide(args, read.x);
  std::optional<Tensor> ordered;
  if (weight && (ordered = in_order(args, *weight, matrix->num_entries))) {
    args.weight = ordered->const_data_ptr();
    args.eid = nullptr;
  } else if (args.by_source) {
    args.eid = nullptr;
  }
  std::optional<Tensor> partial, places;
  if (args.pieces > 0) {
    partial = empty_result(features, {args.pieces, args.columns}, ScalarType::Float);
    args.partial = static_cast<float*>(partial->mutable_data_ptr());
    if (winners) {
      places = empty_result(features, {args.pieces, args.columns}, index);
      args.partial_at = places->mutable_data_ptr();
    }
  }
  const RowReduce reduce = plan.reduce < 2 ? RowReduce::kSum
                           : winners       ? RowReduce::kWinners
                                           : RowReduce::kExtreme;
  switch (features.scalar_type()) {
    case ScalarType::Float:
      row_spmm_float(reduce, args, stream_of(features));
      break;
    case ScalarType::BFloat16:
      row_spmm_bf16(reduce, args, stream_of(features));
      break;
    case ScalarType::Half:
      row_spmm_half(reduce, args, stream_of(features));
      break;
    default:
      STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16 features");
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(
      "add_matrix(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, Tensor? order, "
      "Tensor[] pieces, int limit, int slice, int lanes, bool few) -> int");
  m.def("remove_matrix(int matrix) -> ()");
  m.def("run1(int plan, Tensor x) -> Tensor");
  m.def("run2(int plan, Tensor x, Tensor weight) -> Tensor");
  m.def("run1_winners(int plan, Tensor x) -> (Tensor, Tensor)");
  m.def("run2_winners(int plan, Tensor x, Tensor weight) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, CompositeExplicitAutograd, m) {
  m.impl("remove_matrix", TORCH_BOX(&remove_matrix));
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("add_matrix", TORCH_BOX(&add_matrix));
  m.impl("run1", TORCH_BOX(&run1<run>));
  m.impl("run2", TORCH_BOX(&run2<run>));
  m.impl("run1_winners", TORCH_BOX(&run1_winners<run>));
  m.impl("run2_winners", TORCH_BOX(&run2_winners<run>));
}

}  // namespace pyg_accel
