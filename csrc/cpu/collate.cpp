// Joins graphs into one batch: parts of tensors are copied one after another.
#include "tensors.h"

namespace pyg_accel {
namespace {

bool is_strided(const Tensor& t) {
  int32_t layout = 0;
  return t.is_cpu() && aoti_torch_get_layout(t.get(), &layout) == 0 &&
         layout == aoti_torch_layout_strided();
}

bool is_dense(const Tensor& t) {
  return is_strided(t) && t.is_contiguous();
}

int64_t* longs(const Tensor& t) {
  return static_cast<int64_t*>(t.mutable_data_ptr());
}

// Where parts of tensors come from. Each is `outer` pieces of contiguous memory.
struct Parts {
  std::vector<const char*> from;  // the first piece of each part
  std::vector<int64_t> step;      // bytes from a piece to the next
  const int64_t* begin;           // entries before each part in the result
  int64_t outer;                  // product of the sizes before the dimension that grows
  int64_t inner;                  // bytes of an entry
};

// Copies parts one after another. To int64 entries `shift` is added, per part or per piece.
bool copy(const Parts& parts, const std::optional<Tensor>& shift, const Tensor& out) {
  const int64_t count = static_cast<int64_t>(parts.from.size());
  const int64_t* by = nullptr;
  int64_t each = 0;
  if (shift) {
    each = count ? shift->numel() / count : 0;
    if (out.scalar_type() != ScalarType::Long || shift->scalar_type() != ScalarType::Long ||
        !is_dense(*shift) || shift->numel() != each * count || (each != 1 && each != parts.outer))
      return false;
    by = longs(*shift);
  }
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t total = parts.begin[count] * parts.inner;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bytes = (parts.begin[i + 1] - parts.begin[i]) * parts.inner;
    for (int64_t o = 0; bytes > 0 && o < parts.outer; ++o) {
      char* target = to + o * total + parts.begin[i] * parts.inner;
      const char* source = parts.from[i] + o * parts.step[i];
      if (!by) {
        __builtin_memcpy(target, source, bytes);
        continue;
      }
      const int64_t add = by[i * each + (each > 1 ? o : 0)];
      for (int64_t k = 0; k < bytes / 8; ++k)
        reinterpret_cast<int64_t*>(target)[k] = reinterpret_cast<const int64_t*>(source)[k] + add;
    }
  }
  return true;
}

// Sets how a tensor is split at a dimension; `stacked` tensors are one entry of a new dimension.
void divide(const Tensor& like, int64_t at, bool stacked, Parts& parts) {
  parts.outer = 1;
  parts.inner = static_cast<int64_t>(like.element_size());
  for (int64_t d = 0; d < like.dim(); ++d)
    (d < at ? parts.outer : parts.inner) *= d == at && !stacked ? 1 : like.size(d);
}

// Bytes between the pieces of a tensor that is split at a dimension; -1 if a piece is not
// contiguous. Graphs from a dataset are views, with the strides of the whole dataset.
int64_t step_of(const Tensor& t, int64_t at, int64_t bytes) {
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t lowest = at == 1 ? 1 : 0;  // rows may be any distance apart
  int64_t expected = 1;
  for (int64_t d = static_cast<int64_t>(sizes.size()) - 1; d >= lowest; expected *= sizes[d], --d)
    if (sizes[d] != 1 && strides[d] != expected)
      return -1;
  return at == 1 ? strides[0] * static_cast<int64_t>(t.element_size()) : sizes[at] * bytes;
}

// Joins tensors along `dim`, or along a new first dimension without one. To int64 tensors `shift`,
// [parts] or [parts, size(0)], is added.
//
// Returns the result and where each part begins in it, [parts + 1]; nothing for tensors that are
// not on the CPU, whose pieces are not contiguous, or that differ in type or in other sizes.
std::vector<Tensor> join(std::vector<Tensor> tensors,
                         std::optional<int64_t> dim,
                         std::optional<Tensor> shift) {
  if (tensors.empty() || !is_strided(tensors[0]))
    return {};
  const Tensor& first = tensors[0];
  const ScalarType type = first.scalar_type();
  const int64_t rank = first.dim(), count = static_cast<int64_t>(tensors.size());
  const bool stacked = !dim || rank == 0;
  const int64_t at = stacked ? 0 : *dim < 0 ? *dim + rank : *dim;
  if (!stacked && (at < 0 || at >= rank))
    return {};
  const auto like = first.sizes();
  std::vector<int64_t> sizes(like.begin(), like.end());
  Tensor slices = empty_result(first, {count + 1}, ScalarType::Long);
  int64_t* begin = longs(slices);
  Parts parts{{}, {}, begin, 0, 0};
  divide(first, at, stacked, parts);
  parts.from.reserve(count);
  parts.step.reserve(count);
  begin[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& part = tensors[i];
    if (!is_strided(part) || part.scalar_type() != type || part.dim() != rank)
      return {};
    const auto own = part.sizes();
    for (int64_t d = 0; d < rank; ++d)
      if (own[d] != sizes[d] && (stacked || d != at))
        return {};
    const int64_t step = rank ? step_of(part, at, parts.inner) : 0;
    if (step < 0 && part.numel() > 0)
      return {};
    begin[i + 1] = begin[i] + (stacked ? 1 : own[at]);
    parts.from.push_back(static_cast<const char*>(part.const_data_ptr()));
    parts.step.push_back(step);
  }
  if (stacked)
    sizes.insert(sizes.begin(), count);
  else
    sizes[at] = begin[count];
  Tensor out = empty_result(first, sizes);
  if (!copy(parts, shift, out))
    return {};
  return {out, slices};
}

// Takes parts of a tensor along `dim`: part i has the entries from where[index[i]] to
// where[index[i] + 1]. `shift` and the result are as for `join`.
std::vector<Tensor> take(const Tensor& value,
                         int64_t dim,
                         const Tensor& where,
                         const Tensor& index,
                         std::optional<Tensor> shift) {
  const int64_t rank = value.dim(), count = index.numel(), at = dim < 0 ? dim + rank : dim;
  if (!is_dense(value) || at < 0 || at >= rank || !is_dense(where) ||
      where.scalar_type() != ScalarType::Long)
    return {};
  check_vector(where, "where", where.numel(), true);
  check_vector(index, "index", count, true);
  Tensor slices = empty_result(value, {count + 1}, ScalarType::Long);
  int64_t* begin = longs(slices);
  Parts parts{std::vector<const char*>(count), std::vector<int64_t>(count), begin, 0, 0};
  divide(value, at, false, parts);
  const int64_t* bounds = longs(where);
  begin[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t graph = longs(index)[i];
    STD_TORCH_CHECK(graph >= 0 && graph + 1 < where.numel(), "expected 'index' to be of graphs");
    const int64_t from = bounds[graph], to = bounds[graph + 1];
    STD_TORCH_CHECK(0 <= from && from <= to && to <= value.size(at),
                    "expected 'where' to ascend to the size of 'value'");
    begin[i + 1] = begin[i] + (to - from);
    parts.from[i] = static_cast<const char*>(value.const_data_ptr()) + from * parts.inner;
    parts.step[i] = value.size(at) * parts.inner;
  }
  std::vector<int64_t> sizes(value.sizes().begin(), value.sizes().end());
  sizes[at] = begin[count];
  Tensor out = empty_result(value, sizes);
  if (!copy(parts, shift, out))
    return {};
  return {out, slices};
}

// Returns the group of every entry, for groups that begin at `ptr`.
Tensor ptr2index(const Tensor& ptr) {
  check_vector(ptr, "ptr", ptr.numel(), true);
  const int64_t groups = ptr.numel() - 1;
  STD_TORCH_CHECK(groups >= 0, "expected 'ptr' to hold at least one entry");
  const int64_t* begin = longs(ptr);
  Tensor out = empty_result(ptr, {begin[groups]});
  for (int64_t g = 0; g < groups; ++g) {
    STD_TORCH_CHECK(begin[g] >= 0 && begin[g] <= begin[g + 1] && begin[g + 1] <= begin[groups],
                    "expected 'ptr' to ascend");
    std::fill(longs(out) + begin[g], longs(out) + begin[g + 1], g);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CompositeExplicitAutograd, m) {
  m.impl("join", TORCH_BOX(&join));
  m.impl("take", TORCH_BOX(&take));
  m.impl("ptr2index", TORCH_BOX(&ptr2index));
}

}  // namespace pyg_accel
