// The binding of attention over tiles.
#include "cuda/attention.h"

#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

// Features [rows, H | 1, F] that are read as 16-byte vectors.
void check_heads(const Tensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index() && t.dim() == 3 &&
                      t.scalar_type() == like.scalar_type() && t.size(2) == like.size(2) &&
                      (t.size(1) == 1 || t.size(1) == like.size(1)) && t.stride(2) == 1 &&
                      t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 && t.size(2) % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                  "expected '", name, "' to be heads of whole, aligned 16-byte vectors");
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
  const int64_t rows = rowptr.numel() - 1, heads = query.size(1), padded = query.size(2);
  check_heads(query, "query", query);
  check_heads(key, "key", query);
  check_heads(value, "value", query);
  STD_TORCH_CHECK(query.size(0) == rows && key.size(0) == value.size(0),
                  "expected a query for every row, and as many keys as values");
  STD_TORCH_CHECK(width > padded - 8 && width <= padded && padded <= 128,
                  "expected heads of at most 128 features");
  const int64_t tiles = tile_col.numel() / kTileColumns;
  AttentionArgs args{};
  args.items = reinterpret_cast<const Item*>(int32s(items, "items", items.numel(), query));
  args.splits = reinterpret_cast<const Split*>(int32s(splits, "splits", splits.numel(), query));
  args.col = int32s(tile_col, "tile_col", tiles * kTileColumns, query);
  args.masks =
      reinterpret_cast<const uint32_t*>(int32s(masks, "masks", tiles * kAttentionWindow, query));
  args.rowptr = int32s(rowptr, "rowptr", rows + 1, query);
  args.csr_col = int32s(col, "col", col.numel(), query);
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.query_stride = query.stride(0);
  args.key_stride = key.stride(0);
  args.value_stride = value.stride(0);
  args.query_head = query.size(1) == 1 ? 0 : query.stride(1);
  args.key_head = key.size(1) == 1 ? 0 : key.stride(1);
  args.value_head = value.size(1) == 1 ? 0 : value.stride(1);
  if (coefficient) {
    STD_TORCH_CHECK(coefficient->is_cuda() && coefficient->scalar_type() == ScalarType::Float &&
                        coefficient->dim() == 2 && coefficient->size(0) == rows &&
                        (coefficient->size(1) == 1 || coefficient->size(1) == heads),
                    "expected coefficients [num_rows, 1 or H] of float32");
    args.coefficient = static_cast<const float*>(coefficient->const_data_ptr());
    args.coefficient_stride = coefficient->stride(0);
    args.coefficient_head = coefficient->size(1) == 1 ? 0 : coefficient->stride(1);
  }
  args.scale = static_cast<float>(scale);
  args.num_items = static_cast<int32_t>(items.numel() / 4);
  args.num_splits = static_cast<int32_t>(splits.numel() / 3);
  args.num_rows = static_cast<int32_t>(rows);
  args.heads = static_cast<int32_t>(heads);
  args.width = static_cast<int32_t>(width);
  args.padded = static_cast<int32_t>(padded);

  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const int depth = padded <= 32 ? 32 : padded <= 64 ? 64 : 128;
  Tensor out = torch::stable::new_empty(query, {rows, heads, width});
  Tensor total = torch::stable::new_empty(query, {rows, heads}, ScalarType::Float);
  Tensor partial = torch::stable::new_empty(
      query, {num_partials, heads, kAttentionWindow, depth + 2}, ScalarType::Float);
  args.out = out.mutable_data_ptr();
  args.total = static_cast<float*>(total.mutable_data_ptr());
  args.partial = static_cast<float*>(partial.mutable_data_ptr());
  switch (query.scalar_type()) {
    case ScalarType::BFloat16:
      attention_bf16(depth, args, stream_of(query));
      break;
    case ScalarType::Half:
      attention_half(depth, args, stream_of(query));
      break;
    default:
      STD_TORCH_CHECK(false, "expected bfloat16 or float16 features");
  }
  return {out, total};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(
      "attention(Tensor items, Tensor splits, Tensor tile_col, Tensor masks, Tensor rowptr, "
      "Tensor col, Tensor query, Tensor key, Tensor value, Tensor? coefficient, float scale, "
      "int width, int num_partials) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
}

}  // namespace pyg_accel
