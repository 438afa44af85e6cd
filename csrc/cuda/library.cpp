// The operators of the CUDA library. They are internal: users call pyg_accel.ops, which checks
// shapes, chooses a backend and knows the gradients.
#include "cuda/tensors.h"

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

}  // namespace

STABLE_TORCH_LIBRARY(pyg_accel_cuda, m) {
  m.def("take(Tensor values, Tensor order, Tensor? eid) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, CUDA, m) {
  m.impl("take", TORCH_BOX(&take));
}

}  // namespace pyg_accel
