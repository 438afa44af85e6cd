// Checks and conversions between torch's stable tensors and the kernels' plain structs.
#pragma once

#include <sys/mman.h>

#include "kernels.h"
#include "stable.h"

namespace pyg_accel {

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat;
    case ScalarType::Double:
      return DType::kDouble;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kHalf;
    default:
      STD_TORCH_CHECK(false, "expected float32, float64, bfloat16 or float16 features");
  }
}

inline int64_t element_bytes(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    default:
      return 2;
  }
}

inline void check_vector(const Tensor& t, const char* name, int64_t size, bool wide) {
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.dim() == 1 && t.numel() == size &&
                      is_wide(t, name) == wide,
                  "expected '", name, "' to be a contiguous CPU vector of ", size,
                  " entries with the index type of 'rowptr'");
}

inline Csr csr_of(const Tensor& rowptr,
                  const Tensor& col,
                  const std::optional<Tensor>& eid,
                  int64_t num_cols,
                  bool sorted) {
  STD_TORCH_CHECK(rowptr.numel() > 0, "expected 'rowptr' to hold at least one entry");
  const bool wide = is_wide(rowptr, "rowptr");
  check_vector(rowptr, "rowptr", rowptr.numel(), wide);
  check_vector(col, "col", col.numel(), wide);
  if (eid)
    check_vector(*eid, "eid", col.numel(), wide);
  return Csr{rowptr.const_data_ptr(),
             col.const_data_ptr(),
             eid ? eid->const_data_ptr() : nullptr,
             rowptr.numel() - 1,
             num_cols,
             col.numel(),
             wide,
             sorted};
}

inline int64_t row_pointer(const Csr& csr, int64_t row) {
  return csr.wide ? static_cast<const int64_t*>(csr.rowptr)[row]
                  : static_cast<const int32_t*>(csr.rowptr)[row];
}

// Features as [rows, heads, width]; rows may have any stride, the rest is contiguous.
inline void check_rows(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 3, "expected '", name,
                  "' to be a CPU tensor [rows, H, F]");
  STD_TORCH_CHECK(t.numel() == 0 || ((t.size(2) == 1 || t.stride(2) == 1) &&
                                     (t.size(1) == 1 || t.stride(1) == t.size(2))),
                  "expected '", name, "' to be contiguous within a row");
}

inline void check_features(const Tensor& t, const char* name, DType dtype) {
  check_rows(t, name);
  STD_TORCH_CHECK(dtype_of(t) == dtype, "expected '", name, "' to share the dtype of the others");
}

// Requests large pages for new memory. A large result is a new mapping each time, and the first
// access to its small pages can take longer than computing it. If the system has no large pages,
// nothing changes.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  if (end > begin)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// An uninitialised result of the dtype of `like`.
inline Tensor new_result(const Tensor& like,
                         const std::vector<int64_t>& size,
                         std::optional<ScalarType> type = std::nullopt) {
  Tensor out = empty_result(like, size, type);
  prefer_huge_pages(out.mutable_data_ptr(), out.numel() * element_bytes(out.scalar_type()));
  return out;
}

}  // namespace pyg_accel
