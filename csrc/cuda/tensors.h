// Checks and conversions between torch's stable tensors and the kernels' plain structs.
#pragma once

#include "cuda/allocate.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "stable.h"

namespace pyg_accel {

// A contiguous vector on the device of `like`.
inline void check_vector(const Tensor& t, const char* name, int64_t size, const Tensor& like) {
  STD_TORCH_CHECK(is_on_device(t) && t.is_contiguous() && t.dim() == 1 && t.numel() == size &&
                      t.get_device_index() == like.get_device_index(),
                  "expected '", name, "' to be a contiguous vector of ", size,
                  " elements on the device of the others");
}

inline const int32_t* int32s(const Tensor& t, const char* name, int64_t size, const Tensor& like) {
  check_vector(t, name, size, like);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, "expected '", name, "' to be int32");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

// Memory on the device of `like`, one piece at a time, for as long as the function lives.
inline Allocate scratch_of(const Tensor& like) {
  return [like, held = std::optional<Tensor>()](size_t bytes) mutable {
    held = empty_result(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
    return held->mutable_data_ptr();
  };
}

inline int element_bytes(const Tensor& t) {
  return static_cast<int>(t.element_size());
}

}  // namespace pyg_accel
