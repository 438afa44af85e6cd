// What both libraries need of torch's stable tensors.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pyg_accel {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline bool is_wide(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, "expected '", name,
                  "' to be int32 or int64");
  return type == ScalarType::Long;
}

// An uninitialised, contiguous tensor on the device of `like`, of its dtype unless another is
// given. Without the look-up of an operator and its boxed arguments this takes a third of the time
// of torch::stable::new_empty.
inline Tensor empty_result(const Tensor& like,
                           const std::vector<int64_t>& sizes,
                           std::optional<ScalarType> type = std::nullopt) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i] > 0 ? sizes[i] : 1)
    strides[i] = stride;
  int32_t device = 0;
  AtenTensorHandle made = nullptr;
  STD_TORCH_CHECK(
      aoti_torch_get_device_type(like.get(), &device) == 0 &&
          aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                   static_cast<int32_t>(type.value_or(like.scalar_type())), device,
                                   like.get_device_index(), &made) == 0,
      "cannot allocate a result");
  return Tensor(made);
}

}  // namespace pyg_accel
