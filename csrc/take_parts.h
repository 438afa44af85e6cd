// The operator that takes parts of a tensor, for the copies of a library.
#pragma once

#include <tuple>
#include <utility>

#include "stable.h"

namespace pyg_accel {

constexpr const char* kTakeParts =
    "take_parts(Tensor value, int dim, Tensor where, Tensor index, Tensor? shift) -> "
    "(Tensor, Tensor)";

// Parts of a tensor along one of its dimensions, to be copied behind each other. Sizes and places
// are in entries of that dimension.
struct Parts {
  const Tensor& value;        // [outer, size, inner]
  const Tensor& out;          // [outer, total, inner]
  int64_t outer;              // product of the sizes before the dimension
  int64_t size;               // of the dimension
  int64_t inner;              // bytes of an entry
  int64_t count;              // of parts
  const int64_t* begin;       // [count + 1], before each part in the result
  std::vector<int64_t> from;  // before each part in the value
  const int64_t* shift;       // [count], what is added to int64 entries; null for nothing
};

inline const int64_t* host_longs(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(
      t.is_cpu() && t.is_contiguous() && t.dim() == 1 && t.scalar_type() == ScalarType::Long,
      "expected '", name, "' to be a contiguous vector of int64 numbers on the CPU");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// Takes parts of a contiguous tensor along `dim`: part i has the entries from where[index[i]] to
// where[index[i] + 1]. To those of int64 tensors shift[i] is added.
//
// Returns the result and where each part begins in it, [parts + 1].
template <void (*copy)(const Parts&)>
std::tuple<Tensor, Tensor> take_parts(const Tensor& value,
                                      int64_t dim,
                                      const Tensor& where,
                                      const Tensor& index,
                                      std::optional<Tensor> shift) {
  const int64_t rank = value.dim(), count = index.numel(), at = dim < 0 ? dim + rank : dim;
  STD_TORCH_CHECK(value.is_contiguous() && at >= 0 && at < rank,
                  "expected 'value' to be contiguous, and 'dim' one of its dimensions");
  STD_TORCH_CHECK(!shift || (value.scalar_type() == ScalarType::Long && shift->numel() == count),
                  "expected 'shift' to be a number of every part of an int64 tensor");
  const int64_t *bounds = host_longs(where, "where"), *graphs = host_longs(index, "index");
  std::vector<int64_t> sizes(value.sizes().begin(), value.sizes().end()), from;
  Tensor slices = empty_result(where, {count + 1});
  int64_t* begin = static_cast<int64_t*>(slices.mutable_data_ptr());
  begin[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(graphs[i] >= 0 && graphs[i] + 1 < where.numel(),
                    "expected 'index' to be of graphs");
    const int64_t low = bounds[graphs[i]], high = bounds[graphs[i] + 1];
    STD_TORCH_CHECK(0 <= low && low <= high && high <= sizes[at],
                    "expected 'where' to ascend to the size of 'value'");
    begin[i + 1] = begin[i] + (high - low);
    from.push_back(low);
  }
  int64_t outer = 1, inner = static_cast<int64_t>(value.element_size());
  for (int64_t d = 0; d < rank; ++d)
    (d < at ? outer : inner) *= d == at ? 1 : sizes[d];
  const int64_t size = std::exchange(sizes[at], begin[count]);
  Tensor out = empty_result(value, sizes);
  if (out.numel() > 0)
    copy({value, out, outer, size, inner, count, begin, std::move(from),
          shift ? host_longs(*shift, "shift") : nullptr});
  return {out, slices};
}

}  // namespace pyg_accel
