// The operators of the CUDA library. They are internal: users call pyg_accel.ops, which checks
// shapes, chooses a backend and has the gradients.
#include "cuda/tensors.h"
#include "cuda/variants.h"

namespace pyg_accel {
namespace {

Tensor take(const Tensor& values, const Tensor& order, const std::optional<Tensor>& eid) {
  STD_TORCH_CHECK(values.is_cuda() && values.is_contiguous() && values.dim() == 1,
                  "expected 'values' to be a contiguous CUDA vector");
  check_vector(order, "order", order.numel(), values);
  const bool wide = is_wide(order, "order");
  if (eid) {
    check_vector(*eid, "eid", eid->numel(), values);
    STD_TORCH_CHECK(is_wide(*eid, "eid") == wide, "expected 'eid' and 'order' of one dtype");
  }
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  Tensor out = torch::stable::new_empty(values, {order.numel()});
  TakeArgs args{};
  args.values = values.const_data_ptr();
  args.order = order.const_data_ptr();
  args.eid = eid ? eid->const_data_ptr() : nullptr;
  args.out = out.mutable_data_ptr();
  args.count = order.numel();
  args.bytes = element_bytes(values);
  args.wide = wide;
  take_cuda(args, stream_of(values));
  return out;
}

void put(const Tensor& values, const Tensor& order, Tensor out) {
  check_vector(values, "values", order.numel(), values);
  check_vector(order, "order", order.numel(), values);
  check_vector(out, "out", out.numel(), values);
  STD_TORCH_CHECK(out.scalar_type() == values.scalar_type(), "expected 'out' like 'values'");
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  TakeArgs args{};
  args.values = values.const_data_ptr();
  args.order = order.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.count = order.numel();
  args.bytes = element_bytes(values);
  args.wide = is_wide(order, "order");
  put_cuda(args, stream_of(values));
}

template <typename T>
const T* pointer(const std::optional<Tensor>& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

// Features [rows, F] that the kernels read as 16-byte vectors.
void check_features(const Tensor& t, const char* name, const Tensor& like) {
  const int64_t vector = 16 / element_bytes(t);
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index() && t.dim() == 2 &&
                      t.stride(1) == 1 && t.stride(0) % vector == 0 && t.size(1) % vector == 0 &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                  "expected '", name, "' to be rows of whole, aligned 16-byte vectors");
}

void check_out(const Tensor& t, int64_t size, ScalarType type, const Tensor& like) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index() &&
                      t.is_contiguous() && t.numel() == size && t.scalar_type() == type &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                  "expected 'out' to be contiguous, of ", size, " elements");
}

void spmm(const Tensor& items,
          const Tensor& splits,
          const Tensor& tile_ptr,
          const Tensor& tile_col,
          const Tensor& slot,
          const std::optional<Tensor>& value,
          const Tensor& rowptr,
          const Tensor& col,
          const std::optional<Tensor>& eid,
          const std::optional<Tensor>& weight,
          const Tensor& x,
          int64_t width,
          int64_t window,
          int64_t warps,
          int64_t num_partials,
          bool exact,
          bool mean,
          bool add,
          Tensor out) {
  check_features(x, "x", x);
  const int64_t rows = rowptr.numel() - 1, entries = col.numel(), stored = slot.numel();
  const int64_t padded = x.size(1), vector = 16 / element_bytes(x);
  STD_TORCH_CHECK(width > padded - vector && width <= padded, "expected 'width' to fill 'x'");
  STD_TORCH_CHECK(warps >= 1 && warps <= 4, "expected 1 to 4 warps");
  check_out(out, rows * width, x.scalar_type(), x);
  SpmmArgs args{};
  args.items = reinterpret_cast<const Item*>(int32s(items, "items", items.numel(), x));
  args.splits = reinterpret_cast<const Split*>(int32s(splits, "splits", splits.numel(), x));
  args.num_items = static_cast<int32_t>(items.numel() / 4);
  args.num_splits = static_cast<int32_t>(splits.numel() / 3);
  args.tile_ptr = int32s(tile_ptr, "tile_ptr", tile_ptr.numel(), x);
  args.col = int32s(tile_col, "tile_col", (tile_ptr.numel() - 1) * kTileColumns, x);
  check_vector(slot, "slot", stored, x);
  args.slot = static_cast<const int16_t*>(slot.const_data_ptr());
  const auto check_weight = [&](const std::optional<Tensor>& t, int64_t size) {
    if (t) {
      check_vector(*t, "weight", size, x);
      STD_TORCH_CHECK(t->scalar_type() == x.scalar_type(), "expected weights like 'x'");
    }
  };
  check_weight(value, stored);
  check_weight(weight, entries);
  args.value = pointer<void>(value);
  args.weight = pointer<void>(weight);
  args.rowptr = int32s(rowptr, "rowptr", rows + 1, x);
  args.csr_col = int32s(col, "col", entries, x);
  args.eid = eid ? int32s(*eid, "eid", entries, x) : nullptr;
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.num_rows = static_cast<int32_t>(rows);
  args.width = static_cast<int32_t>(width);
  args.padded = static_cast<int32_t>(padded);
  args.warps = static_cast<int32_t>(warps);
  args.mean = mean;
  args.add = add;

  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor partial = torch::stable::new_empty(x, {num_partials, window, padded}, ScalarType::Float);
  args.out = out.mutable_data_ptr();
  args.partial = static_cast<float*>(partial.mutable_data_ptr());
  const int height = static_cast<int>(window);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      exact ? spmm_exact(height, args, stream_of(x)) : spmm_tf32(height, args, stream_of(x));
      break;
    case ScalarType::BFloat16:
      spmm_bf16(height, args, stream_of(x));
      break;
    case ScalarType::Half:
      spmm_half(height, args, stream_of(x));
      break;
    default:
      STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16 features");
  }
}

void sddmm(const Tensor& items,
           const Tensor& tile_ptr,
           const Tensor& tile_col,
           const Tensor& slot,
           const Tensor& order,
           const Tensor& target,
           const Tensor& source,
           int64_t width,
           int64_t window,
           int64_t slice,
           bool exact,
           Tensor out) {
  check_features(target, "target", source);
  check_features(source, "source", source);
  const int64_t entries = slot.numel(), vector = 16 / element_bytes(source);
  STD_TORCH_CHECK(target.size(1) == source.size(1) &&
                      target.scalar_type() == source.scalar_type() &&
                      width > source.size(1) - vector && width <= source.size(1),
                  "expected features of one width and dtype");
  STD_TORCH_CHECK(slice > 0 && slice % (64 / element_bytes(source)) == 0 &&
                      slice * element_bytes(source) <= 1024,
                  "expected slices of 64 to 1024 bytes");
  SddmmArgs args{};
  args.items = reinterpret_cast<const Item*>(int32s(items, "items", items.numel(), source));
  args.num_items = static_cast<int32_t>(items.numel() / 4);
  args.tile_ptr = int32s(tile_ptr, "tile_ptr", tile_ptr.numel(), source);
  args.col = int32s(tile_col, "tile_col", (tile_ptr.numel() - 1) * kTileColumns, source);
  check_vector(slot, "slot", entries, source);
  args.slot = static_cast<const int16_t*>(slot.const_data_ptr());
  args.order = int32s(order, "order", entries, source);
  args.target = target.const_data_ptr();
  args.source = source.const_data_ptr();
  args.target_stride = target.stride(0);
  args.source_stride = source.stride(0);
  args.num_rows = static_cast<int32_t>(target.size(0));

  const torch::stable::accelerator::DeviceGuard guard(source.get_device_index());
  const int64_t padded = source.size(1);
  const bool passes = padded > slice;
  check_out(out, out.numel(), passes ? ScalarType::Float : source.scalar_type(), source);
  args.out = out.mutable_data_ptr();
  args.sum = passes ? static_cast<float*>(out.mutable_data_ptr()) : nullptr;
  const int height = static_cast<int>(window);
  for (int64_t begin = 0; begin < padded; begin += slice) {
    args.begin = static_cast<int32_t>(begin);
    args.end = static_cast<int32_t>(begin + slice < padded ? begin + slice : padded);
    args.first = begin == 0;
    switch (source.scalar_type()) {
      case ScalarType::Float:
        (exact ? sddmm_exact : sddmm_tf32)(height, args, stream_of(source));
        break;
      case ScalarType::BFloat16:
        sddmm_bf16(height, args, stream_of(source));
        break;
      case ScalarType::Half:
        sddmm_half(height, args, stream_of(source));
        break;
      default:
        STD_TORCH_CHECK(false, "expected float32, bfloat16 or float16 features");
    }
  }
}

}  // namespace

STABLE_TORCH_LIBRARY(pyg_accel_cuda, m) {
  m.def("take(Tensor values, Tensor order, Tensor? eid) -> Tensor");
  m.def("put(Tensor values, Tensor order, Tensor(a!) out) -> ()");
  m.def(
      "spmm(Tensor items, Tensor splits, Tensor tile_ptr, Tensor tile_col, Tensor slot, "
      "Tensor? value, Tensor rowptr, Tensor col, Tensor? eid, Tensor? weight, Tensor x, "
      "int width, int window, int warps, int num_partials, bool exact, bool mean, bool add, "
      "Tensor(a!) out) -> ()");
  m.def(
      "sddmm(Tensor items, Tensor tile_ptr, Tensor tile_col, Tensor slot, Tensor order, "
      "Tensor target, Tensor source, int width, int window, int slice, bool exact, "
      "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, CUDA, m) {
  m.impl("take", TORCH_BOX(&take));
  m.impl("put", TORCH_BOX(&put));
  m.impl("spmm", TORCH_BOX(&spmm));
  m.impl("sddmm", TORCH_BOX(&sddmm));
}

}  // namespace pyg_accel
