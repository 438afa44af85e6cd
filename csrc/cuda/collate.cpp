// The operators of the CUDA library that put graphs into a batch; see library.cpp. What is known of
// the graphs is on the CPU, and nothing waits for the device.
#include "cuda/collate.h"

#include <algorithm>
#include <tuple>

#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

const int64_t* host_longs(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(
      t.is_cpu() && t.is_contiguous() && t.dim() > 0 && t.scalar_type() == ScalarType::Long,
      "expected '", name, "' to be contiguous int64 numbers on the CPU");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// As that of the CPU library, for a value on the device.
std::vector<Tensor> take_parts(const Tensor& value,
                               int64_t dim,
                               const Tensor& where,
                               const Tensor& index,
                               std::optional<Tensor> shift) {
  const int64_t rank = value.dim(), count = index.numel(), at = dim < 0 ? dim + rank : dim;
  if (!is_on_device(value) || !value.is_contiguous() || at < 0 || at >= rank)
    return {};
  PartsArgs args{};
  args.outer = 1;
  args.inner = element_bytes(value);
  args.size = value.size(at);
  for (int64_t d = 0; d < rank; ++d)
    (d < at ? args.outer : args.inner) *= d == at ? 1 : value.size(d);
  const int64_t* added = shift ? host_longs(*shift, "shift") : nullptr;
  if (shift && count > 0) {
    const int64_t each = shift->numel() / count;
    if (value.scalar_type() != ScalarType::Long || shift->numel() != each * count ||
        !(each == 1 || (each == 2 && args.outer == 2)))
      return {};
    args.each = static_cast<int32_t>(each);
  }
  const int64_t* bounds = host_longs(where, "where");
  const int64_t* graphs = host_longs(index, "index");
  Tensor slices = empty_result(where, {count + 1});
  int64_t* begin = static_cast<int64_t*>(slices.mutable_data_ptr());
  begin[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(graphs[i] >= 0 && graphs[i] + 1 < where.numel(),
                    "expected 'index' to be of graphs");
    const int64_t from = bounds[graphs[i]], to = bounds[graphs[i] + 1];
    STD_TORCH_CHECK(0 <= from && from <= to && to <= args.size,
                    "expected 'where' to ascend to the size of 'value'");
    begin[i + 1] = begin[i] + (to - from);
  }
  args.total = begin[count];
  if (args.total > INT32_MAX)
    return {};
  std::vector<int64_t> sizes(value.sizes().begin(), value.sizes().end());
  sizes[at] = args.total;
  [[maybe_unused]] const auto guard = guard_of(value);
  Tensor out = empty_result(value, sizes);
  args.value = value.const_data_ptr();
  args.out = out.mutable_data_ptr();
  for (int64_t first = 0; first < count; first += kParts) {
    args.first = begin[first];
    args.count = static_cast<int32_t>(std::min<int64_t>(count - first, kParts));
    for (int i = 0; i < args.count; ++i)
      args.from[i] = bounds[graphs[first + i]];
    for (int i = 0; i <= args.count; ++i)
      args.begin[i] = static_cast<int32_t>(begin[first + i] - args.first);
    if (args.each > 0)
      std::copy_n(added + first * args.each, args.count * args.each, args.shift);
    if (args.outer * args.begin[args.count] * args.inner > 0)
      take_parts_cuda(args, stream_of(value));
  }
  return {out, slices};
}

// Returns the group of every entry, of groups that begin at `ptr`, and a copy of `ptr`, on the
// device of `like`.
std::tuple<Tensor, Tensor> ptr2index(const Tensor& ptr, const Tensor& like) {
  const int64_t* begin = host_longs(ptr, "ptr");
  const int64_t groups = ptr.numel() - 1;
  STD_TORCH_CHECK(groups >= 0 && begin[0] == 0 && std::is_sorted(begin, begin + groups + 1),
                  "expected 'ptr' to ascend from 0");
  [[maybe_unused]] const auto guard = guard_of(like);
  Tensor group = empty_result(like, {begin[groups]}, ScalarType::Long);
  Tensor there = empty_result(like, {groups + 1}, ScalarType::Long);
  GroupsArgs args{};
  args.group = static_cast<int64_t*>(group.mutable_data_ptr());
  args.ptr = static_cast<int64_t*>(there.mutable_data_ptr());
  for (args.first = 0; args.first == 0 || args.first < groups; args.first += kParts) {
    args.count = static_cast<int32_t>(std::min<int64_t>(groups - args.first, kParts));
    std::copy_n(begin + args.first, args.count + 1, args.begin);
    ptr2index_cuda(args, stream_of(like));
  }
  return {group, there};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def("take_parts(Tensor value, int dim, Tensor where, Tensor index, Tensor? shift) -> Tensor[]");
  m.def("ptr2index(Tensor ptr, Tensor like) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("take_parts", TORCH_BOX(&take_parts));
  m.impl("ptr2index", TORCH_BOX(&ptr2index));
}

}  // namespace pyg_accel
