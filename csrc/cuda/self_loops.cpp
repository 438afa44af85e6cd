// The operators of the CUDA library on self-loops; see library.cpp.
#include "cuda/self_loops.h"

#include "cuda/check.cuh"
#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

SelfLoopArgs args_of(const Tensor& edge_index, int64_t num_nodes) {
  STD_TORCH_CHECK(is_on_device(edge_index) && edge_index.scalar_type() == ScalarType::Long &&
                      edge_index.dim() == 2 && edge_index.size(0) == 2 &&
                      edge_index.size(1) < INT32_MAX && num_nodes >= 0 && num_nodes < INT32_MAX,
                  "expected 'edge_index' to be int64 of shape [2, E]");
  SelfLoopArgs args{};
  args.row = static_cast<const int64_t*>(edge_index.const_data_ptr());
  args.col = args.row + edge_index.stride(0);
  args.row_stride = args.col_stride = edge_index.stride(1);
  args.count = edge_index.size(1);
  args.num_nodes = num_nodes;
  return args;
}

// Waits for the device: how many edges stay is the size of the result.
Tensor run(SelfLoopArgs args,
           const Tensor& edge_index,
           const std::optional<ScalarType>& type,
           std::optional<Tensor>* weight) {
  const auto stream = stream_of(edge_index);
  const auto empty = [&](const std::vector<int64_t>& shape, ScalarType of) {
    return empty_result(edge_index, shape, of);
  };
  const Tensor place = empty({args.count + 1}, ScalarType::Int);
  args.place = static_cast<int32_t*>(place.mutable_data_ptr());
  std::optional<Tensor> degree;
  if (type) {
    degree = empty({args.num_nodes}, ScalarType::Int);
    args.degree = static_cast<int32_t*>(degree->mutable_data_ptr());
  }
  place_edges_cuda(args, scratch_of(edge_index), stream);
  int32_t kept = 0;
  check(
      cudaMemcpyAsync(&kept, args.place + args.count, sizeof(kept), cudaMemcpyDeviceToHost, stream),
      "self_loops");
  check(cudaStreamSynchronize(stream), "self_loops");
  args.kept = kept;
  const int64_t size = args.kept + args.num_nodes;
  Tensor out = empty({2, size}, ScalarType::Long);
  args.out = static_cast<int64_t*>(out.mutable_data_ptr());
  if (type) {
    *weight = empty({size}, *type);
    args.weight = (*weight)->mutable_data_ptr();
    args.double_weight = *type == ScalarType::Double;
  }
  write_edges_cuda(args, stream);
  return out;
}

Tensor remove_self_loops(const Tensor& edge_index) {
  const auto guard = guard_of(edge_index);
  return run(args_of(edge_index, 0), edge_index, std::nullopt, nullptr);
}

std::tuple<Tensor, Tensor> gcn_norm(const Tensor& edge_index,
                                    int64_t num_nodes,
                                    bool by_col,
                                    bool double_weight) {
  const auto guard = guard_of(edge_index);
  SelfLoopArgs args = args_of(edge_index, num_nodes);
  args.by_col = by_col;
  std::optional<Tensor> weight;
  Tensor out =
      run(args, edge_index, double_weight ? ScalarType::Double : ScalarType::Float, &weight);
  return {out, *weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def("remove_self_loops(Tensor edge_index) -> Tensor");
  m.def(
      "gcn_norm(Tensor edge_index, int num_nodes, bool by_col, bool double_weight) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("remove_self_loops", TORCH_BOX(&remove_self_loops));
  m.impl("gcn_norm", TORCH_BOX(&gcn_norm));
}

}  // namespace pyg_accel
