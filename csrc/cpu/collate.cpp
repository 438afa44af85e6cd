// Joins graphs into one batch: parts of tensors are copied one after another.
#include "take_parts.h"
#include "tensors.h"

namespace pyg_accel {
namespace {

bool is_strided(const Tensor& t) {
  int32_t layout = 0;
  return t.is_cpu() && aoti_torch_get_layout(t.get(), &layout) == 0 &&
         layout == aoti_torch_layout_strided();
}

// Copies contiguous memory; what `shift` points to, if it does, is added to int64 entries.
void copy_piece(char* to, const char* from, int64_t bytes, const int64_t* shift) {
  if (!shift && bytes > 0)
    __builtin_memcpy(to, from, bytes);
  if (!shift)
    return;
  const int64_t add = *shift;
  for (int64_t k = 0; k < bytes / 8; ++k)
    reinterpret_cast<int64_t*>(to)[k] = reinterpret_cast<const int64_t*>(from)[k] + add;
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
  int64_t outer = 1, inner = static_cast<int64_t>(first.element_size());  // pieces, their entries
  for (int64_t d = 0; d < rank; ++d)
    (d < at ? outer : inner) *= d == at && !stacked ? 1 : sizes[d];
  const int64_t each = shift ? shift->numel() / count : 0;
  if (shift && (type != ScalarType::Long || shift->scalar_type() != ScalarType::Long ||
                !is_strided(*shift) || !shift->is_contiguous() || shift->numel() != each * count ||
                (each != 1 && each != outer)))
    return {};
  Tensor slices = empty_result(first, {count + 1}, ScalarType::Long);
  int64_t* begin = static_cast<int64_t*>(slices.mutable_data_ptr());
  std::vector<int64_t> step;
  begin[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& part = tensors[i];
    if (!is_strided(part) || part.scalar_type() != type || part.dim() != rank)
      return {};
    const auto own = part.sizes();
    for (int64_t d = 0; d < rank; ++d)
      if (own[d] != sizes[d] && (stacked || d != at))
        return {};
    step.push_back(rank ? step_of(part, at, inner) : 0);
    if (step[i] < 0 && part.numel() > 0)
      return {};
    begin[i + 1] = begin[i] + (stacked ? 1 : own[at]);
  }
  if (stacked)
    sizes.insert(sizes.begin(), count);
  else
    sizes[at] = begin[count];
  Tensor out = empty_result(first, sizes);
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t* by = shift ? static_cast<const int64_t*>(shift->const_data_ptr()) : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const char* from = static_cast<const char*>(tensors[i].const_data_ptr());
    for (int64_t o = 0; o < outer; ++o)
      copy_piece(to + (o * begin[count] + begin[i]) * inner, from + o * step[i],
                 (begin[i + 1] - begin[i]) * inner,
                 by ? by + i * each + (each > 1 ? o : 0) : nullptr);
  }
  return {out, slices};
}

void copy(const Parts& parts) {
  char* out = static_cast<char*>(parts.out.mutable_data_ptr());
  const char* value = static_cast<const char*>(parts.value.const_data_ptr());
  const int64_t* begin = parts.begin;
  for (int64_t i = 0; i < parts.count; ++i)
    for (int64_t o = 0; o < parts.outer; ++o)
      copy_piece(out + (o * begin[parts.count] + begin[i]) * parts.inner,
                 value + (o * parts.size + parts.from[i]) * parts.inner,
                 (begin[i + 1] - begin[i]) * parts.inner, parts.shift ? parts.shift + i : nullptr);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CompositeExplicitAutograd, m) {
  m.impl("join", TORCH_BOX(&join));
  m.impl("take_parts", TORCH_BOX(&take_parts<copy>));
}

}  // namespace pyg_accel
