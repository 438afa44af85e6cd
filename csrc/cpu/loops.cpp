// Edge lists without self-loops, and the normalisation of GCN, which takes PyG some twenty
// operators.
#include <cmath>
#include <tuple>

#include "tensors.h"

namespace pyg_accel {
namespace {

struct Edges {
  explicit Edges(const Tensor& t) {
    STD_TORCH_CHECK(
        t.is_cpu() && t.scalar_type() == ScalarType::Long && t.dim() == 2 && t.size(0) == 2,
        "expected 'edge_index' to be int64 of shape [2, E]");
    row = static_cast<const int64_t*>(t.const_data_ptr());
    col = row + t.stride(0);
    stride = t.stride(1);
    count = t.size(1);
  }

  // Calls visit(row, col) for all edges but self-loops.
  template <class Visit>
  void each(const Visit& visit) const {
    for (int64_t i = 0; i < count; ++i)
      if (row[i * stride] != col[i * stride])
        visit(row[i * stride], col[i * stride]);
  }

  const int64_t* row;
  const int64_t* col;
  int64_t stride;
  int64_t count;
};

Tensor remove_self_loops(const Tensor& edge_index) {
  const Edges edges(edge_index);
  int64_t num_edges = 0;
  edges.each([&](int64_t, int64_t) { ++num_edges; });
  Tensor out = empty_result(edge_index, {2, num_edges});
  auto* to = static_cast<int64_t*>(out.mutable_data_ptr());
  edges.each([&](int64_t row, int64_t col) {
    to[0] = row;
    to[num_edges] = col;
    ++to;
  });
  return out;
}

template <class Weight>
std::tuple<Tensor, Tensor> normalise(const Tensor& edge_index, int64_t num_nodes, bool by_col) {
  const Edges edges(edge_index);
  std::vector<Weight> scale(num_nodes, 1);  // degrees at first, a loop included
  int64_t num_edges = 0;
  bool inside = true;
  edges.each([&](int64_t row, int64_t col) {
    if (row < 0 || row >= num_nodes || col < 0 || col >= num_nodes) {
      inside = false;
      return;
    }
    scale[by_col ? col : row] += 1;
    ++num_edges;
  });
  STD_TORCH_CHECK(inside, "found ids outside of [0, ", num_nodes, ")");
  for (Weight& degree : scale)
    degree = 1 / std::sqrt(degree);
  const int64_t size = num_edges + num_nodes;
  const ScalarType type = sizeof(Weight) == 8 ? ScalarType::Double : ScalarType::Float;
  Tensor out = empty_result(edge_index, {2, size});
  Tensor weight = empty_result(edge_index, {size}, type);
  auto* to = static_cast<int64_t*>(out.mutable_data_ptr());
  auto* weights = static_cast<Weight*>(weight.mutable_data_ptr());
  const auto add = [&](int64_t row, int64_t col) {
    to[0] = row;
    to[size] = col;
    *weights++ = scale[row] * scale[col];
    ++to;
  };
  edges.each(add);
  for (int64_t i = 0; i < num_nodes; ++i)
    add(i, i);
  return {out, weight};
}

std::tuple<Tensor, Tensor> gcn_norm(const Tensor& edge_index,
                                    int64_t num_nodes,
                                    bool by_col,
                                    bool double_weight) {
  STD_TORCH_CHECK(num_nodes >= 0, "expected 'num_nodes' to be at least 0");
  return double_weight ? normalise<double>(edge_index, num_nodes, by_col)
                       : normalise<float>(edge_index, num_nodes, by_col);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cpu, m) {
  m.def("remove_self_loops(Tensor edge_index) -> Tensor");
  m.def(
      "gcn_norm(Tensor edge_index, int num_nodes, bool by_col, bool double_weight) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("remove_self_loops", TORCH_BOX(&remove_self_loops));
  m.impl("gcn_norm", TORCH_BOX(&gcn_norm));
}

}  // namespace pyg_accel
