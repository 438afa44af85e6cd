// The bindings of attention over tiles.
#include "cuda/attention.h"

#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

// Features [rows, H | 1, F] that are read as 16-byte vectors.
Heads heads_of(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index() && t.dim() == 3 &&
                      t.scalar_type() == like.scalar_type() && t.size(2) == like.size(2) &&
                      (t.size(1) == 1 || t.size(1) == like.size(1)) && t.stride(2) == 1 &&
                      t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 && t.size(2) % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                  "expected '", name, "' to be heads of whole, aligned 16-byte vectors");
  return {t.const_data_ptr(), t.stride(0), t.size(1) == 1 ? 0 : t.stride(1)};
}

void fill_tiles(AttentionTiles& args,
                const Tensor& items,
                const Tensor& splits,
                const Tensor& tile_col,
                const Tensor& masks,
                const Tensor& rowptr,
                const Tensor& col,
                const Tensor& query,
                int64_t width) {
  const int64_t tiles = tile_col.numel() / kTileColumns, padded = query.size(2);
  STD_TORCH_CHECK(width > padded - 8 && width <= padded && padded <= 128,
                  "expected heads of at most 128 features");
  args.items = reinterpret_cast<const Item*>(int32s(items, "items", items.numel(), query));
  args.splits = reinterpret_cast<const Split*>(int32s(splits, "splits", splits.numel(), query));
  args.col = int32s(tile_col, "tile_col", tiles * kTileColumns, query);
  args.masks =
      reinterpret_cast<const uint32_t*>(int32s(masks, "masks", tiles * kAttentionWindow, query));
  args.rowptr = int32s(rowptr, "rowptr", rowptr.numel(), query);
  args.csr_col = int32s(col, "col", col.numel(), query);
  args.num_items = static_cast<int32_t>(items.numel() / 4);
  args.num_splits = static_cast<int32_t>(splits.numel() / 3);
  args.num_rows = static_cast<int32_t>(rowptr.numel() - 1);
  args.heads = static_cast<int32_t>(query.size(1));
  args.width = static_cast<int32_t>(width);
  args.padded = static_cast<int32_t>(padded);
}

// The coefficients of targets, if there are any, into the arguments of a kernel.
template <typename Args>
void fill_coefficient(Args& args, const std::optional<Tensor>& coefficient, const Tensor& query) {
  if (!coefficient)
    return;
  STD_TORCH_CHECK(coefficient->is_cuda() && coefficient->scalar_type() == ScalarType::Float &&
                      coefficient->dim() == 2 && coefficient->size(0) == query.size(0) &&
                      (coefficient->size(1) == 1 || coefficient->size(1) == query.size(1)),
                  "expected coefficients [targets, 1 or H] of float32");
  args.coefficient = static_cast<const float*>(coefficient->const_data_ptr());
  args.coefficient_stride = coefficient->stride(0);
  args.coefficient_head = coefficient->size(1) == 1 ? 0 : coefficient->stride(1);
}

// Features that an instance of the kernels has room for.
int depth_of(const Tensor& query) {
  const int64_t padded = query.size(2);
  return padded <= 32 ? 32 : padded <= 64 ? 64 : 128;
}

bool is_half(const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Half || t.scalar_type() == ScalarType::BFloat16,
                  "expected bfloat16 or float16 features");
  return t.scalar_type() == ScalarType::Half;
}

std::vector<Tensor> attention(const Tensor& items,
                              const Tensor& splits,
                              const Tensor& tile_col,
                              const Tensor& masks,
                              const Tensor& rowptr,
                              const Tensor& col,
                              const Tensor& query,
                              const Tensor& key,
                              const Tensor& value,
                              const std::optional<Tensor>& coefficient,
                              double scale,
                              int64_t width,
                              int64_t num_partials) {
  const int64_t rows = rowptr.numel() - 1, heads = query.size(1);
  STD_TORCH_CHECK(query.size(0) == rows && key.size(0) == value.size(0),
                  "expected a query for every row, and as many keys as values");
  AttentionArgs args{};
  fill_tiles(args, items, splits, tile_col, masks, rowptr, col, query, width);
  args.query = heads_of(query, "query", query);
  args.key = heads_of(key, "key", query);
  args.value = heads_of(value, "value", query);
  fill_coefficient(args, coefficient, query);
  args.scale = static_cast<float>(scale);

  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const int depth = depth_of(query);
  Tensor out = torch::stable::new_empty(query, {rows, heads, width});
  Tensor total = torch::stable::new_empty(query, {rows, heads}, ScalarType::Float);
  Tensor partial = torch::stable::new_empty(
      query, {num_partials, heads, kAttentionWindow, depth + 2}, ScalarType::Float);
  args.out = out.mutable_data_ptr();
  args.total = static_cast<float*>(total.mutable_data_ptr());
  args.partial = static_cast<float*>(partial.mutable_data_ptr());
  (is_half(query) ? attention_half : attention_bf16)(depth, args, stream_of(query));
  return {out, total};
}

// Of keys and values, [num_rows, H, F] each, if the rows of the graph are sources. Else of queries,
// and of coefficients but for the factor `scale`, [num_rows, H].
std::vector<Tensor> attention_backward(const Tensor& items,
                                       const Tensor& splits,
                                       const Tensor& tile_col,
                                       const Tensor& masks,
                                       const Tensor& rowptr,
                                       const Tensor& col,
                                       const Tensor& query,
                                       const Tensor& key,
                                       const Tensor& value,
                                       const std::optional<Tensor>& coefficient,
                                       const Tensor& grad,
                                       const Tensor& out,
                                       const Tensor& total,
                                       double scale,
                                       int64_t width,
                                       int64_t num_partials,
                                       bool sources) {
  const int64_t rows = rowptr.numel() - 1, heads = query.size(1), targets = query.size(0);
  STD_TORCH_CHECK(grad.size(0) == targets && key.size(0) == value.size(0) &&
                      (sources ? key : query).size(0) == rows,
                  "expected rows of targets and of sources");
  STD_TORCH_CHECK(out.is_cuda() && out.is_contiguous() &&
                      out.scalar_type() == query.scalar_type() &&
                      out.numel() == targets * heads * width,
                  "expected 'out' to be the result");
  STD_TORCH_CHECK(total.is_cuda() && total.is_contiguous() &&
                      total.scalar_type() == ScalarType::Float && total.numel() == targets * heads,
                  "expected 'total' to be the second result");
  AttentionBackwardArgs args{};
  fill_tiles(args, items, splits, tile_col, masks, rowptr, col, query, width);
  const Heads ends[2][2] = {{heads_of(query, "query", query), heads_of(grad, "grad", query)},
                            {heads_of(key, "key", query), heads_of(value, "value", query)}};
  for (int i = 0; i < 2; ++i) {
    args.own[i] = ends[sources][i];
    args.other[i] = ends[!sources][i];
  }
  args.sources = sources;
  TargetNumbersArgs given{};
  given.grad = ends[0][1];
  given.out = out.const_data_ptr();
  given.total = static_cast<const float*>(total.const_data_ptr());
  fill_coefficient(given, coefficient, query);
  given.scale = static_cast<float>(scale);
  given.targets = targets;
  given.heads = args.heads;
  given.width = args.width;

  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const int depth = depth_of(query);
  Tensor numbers = torch::stable::new_empty(query, {targets, heads, 4}, ScalarType::Float);
  Tensor first = torch::stable::new_empty(query, {rows, heads, width});
  Tensor second = sources ? torch::stable::new_empty(query, {rows, heads, width})
                          : torch::stable::new_empty(query, {rows, heads}, ScalarType::Float);
  Tensor partial = torch::stable::new_empty(
      query, {num_partials, heads, kAttentionWindow, sources ? 2 * depth : depth + 2},
      ScalarType::Float);
  given.numbers = static_cast<TargetNumbers*>(numbers.mutable_data_ptr());
  args.numbers = given.numbers;
  args.out[0] = first.mutable_data_ptr();
  if (sources)
    args.out[1] = second.mutable_data_ptr();
  else
    args.dots = static_cast<float*>(second.mutable_data_ptr());
  args.partial = static_cast<float*>(partial.mutable_data_ptr());
  const bool half = is_half(query);
  (half ? target_numbers_half : target_numbers_bf16)(given, stream_of(query));
  (half ? attention_backward_half : attention_backward_bf16)(depth, args, stream_of(query));
  return {first, second};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(
      "attention(Tensor items, Tensor splits, Tensor tile_col, Tensor masks, Tensor rowptr, "
      "Tensor col, Tensor query, Tensor key, Tensor value, Tensor? coefficient, float scale, "
      "int width, int num_partials) -> Tensor[]");
  m.def(
      "attention_backward(Tensor items, Tensor splits, Tensor tile_col, Tensor masks, "
      "Tensor rowptr, Tensor col, Tensor query, Tensor key, Tensor value, Tensor? coefficient, "
      "Tensor grad, Tensor out, Tensor total, float scale, int width, int num_partials, "
      "bool sources) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace pyg_accel
