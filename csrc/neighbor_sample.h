// The operator that samples neighbours, for the sampler of a library.
#pragma once

#include <string>
#include <tuple>

#include "neighbor_graph.h"
#include "stable.h"

namespace pyg_accel {

constexpr const char* kNeighborSample =
    "neighbor_sample(Tensor[] colptr, Tensor[] row, int[] ends, int[] num_nodes, Tensor[] seed, "
    "int[] num_neighbors, Tensor[] node_time, Tensor[] edge_time, Tensor[] edge_weight, "
    "Tensor seed_time, bool replace, bool induced, bool disjoint, bool last, int random_seed) -> "
    "(Tensor[], int[], str)";

// What to say of each Fault.
constexpr const char* kFaults[] = {
    "",
    "expected fewer samples of every node",
    "expected 'edge_index' to hold ids of nodes that exist",
    "expected the weights of edges to be finite and not negative",
    "expected the edges of each target to be sorted by time",
    "expected the times of nodes to have an entry for every node",
    "expected 'colptr' to ascend from 0 to the number of edges",
    "expected 'colptr' to have an entry for every node",
    "expected 'seed' to hold ids of nodes that exist",
};

// The seeds of a type of nodes.
struct Seeds {
  const int64_t* ids;
  int64_t count;
  int64_t num_nodes;  // of the type
};

// What is asked for. The last hop of an `induced` subgraph begins at all nodes, and its edges are
// all that there are.
struct Request : Draws {
  Tensor like;
  std::vector<Neighbors> relations;
  std::vector<Seeds> types;
  int64_t num_seeds;
  int64_t hops;
  bool induced;
  bool disjoint;
};

// What is found.
struct Sampled {
  std::vector<Tensor> tensors;  // row, col and edge of each relation, node and batch of each type
  // How many nodes of each type are seeds, and of every hop how many edges of each relation and
  // nodes of each type it found.
  std::vector<int64_t> sizes;
  Fault fault = Fault::kNone;
};

// The elements of a contiguous vector on the device of `like`; null if it is empty.
inline const void* elements_of(const Tensor& t,
                               const char* name,
                               int64_t size,
                               ScalarType type,
                               const Tensor& like) {
  STD_TORCH_CHECK(t.is_contiguous() && t.dim() == 1 && t.numel() == size &&
                      t.scalar_type() == type && t.is_cpu() == like.is_cpu() &&
                      t.get_device_index() == like.get_device_index(),
                  "expected '", name, "' to be a contiguous vector of ", size,
                  " elements with the device of the others, and their type of index or int64");
  return size ? t.const_data_ptr() : nullptr;
}

inline const int64_t* longs_of(const Tensor& t,
                               const char* name,
                               int64_t size,
                               const Tensor& like) {
  return static_cast<const int64_t*>(elements_of(t, name, size, ScalarType::Long, like));
}

// Relation r has the edges from nodes of type ends[2 r] to those of type ends[2 r + 1]. Empty
// tensors mean that there are no times or weights.
template <Sampled (*sample)(const Request&)>
std::tuple<std::vector<Tensor>, std::vector<int64_t>, std::string> neighbor_sample(
    const std::vector<Tensor>& colptr,
    const std::vector<Tensor>& row,
    const std::vector<int64_t>& ends,
    const std::vector<int64_t>& num_nodes,
    const std::vector<Tensor>& seed,
    const std::vector<int64_t>& num_neighbors,
    const std::vector<Tensor>& node_time,
    const std::vector<Tensor>& edge_time,
    const std::vector<Tensor>& edge_weight,
    const Tensor& seed_time,
    bool replace,
    bool induced,
    bool disjoint,
    bool last,
    int64_t random_seed) {
  const size_t num_relations = colptr.size(), num_types = seed.size();
  STD_TORCH_CHECK(num_types > 0 && num_nodes.size() == num_types && node_time.size() == num_types,
                  "expected as many entries as there are node types");
  STD_TORCH_CHECK(row.size() == num_relations && ends.size() == 2 * num_relations &&
                      edge_time.size() == num_relations && edge_weight.size() == num_relations,
                  "expected as many entries as there are edge types");
  const Tensor& like = num_relations ? colptr[0] : seed[0];
  const int64_t hops = num_relations ? num_neighbors.size() / num_relations : 0;
  const bool wide = is_wide(like, "colptr");
  const int64_t* times = longs_of(seed_time, "seed_time", seed_time.numel(), like);
  const Draws draws{times, static_cast<uint64_t>(random_seed), replace, last, wide};
  Request request{draws, like, {}, {}, 0, hops, induced, disjoint};
  for (size_t t = 0; t < num_types; ++t) {
    const int64_t count = seed[t].numel();
    request.types.push_back({longs_of(seed[t], "seed", count, like), count, num_nodes[t]});
    request.num_seeds += count;
  }
  for (int64_t most : num_nodes)  // a key of the table is a node of a batch
    STD_TORCH_CHECK(!disjoint || !__builtin_mul_overflow(most, request.num_seeds, &most),
                    "expected smaller ids of nodes, or fewer disjoint subgraphs");
  for (size_t i = 0; i < num_relations; ++i) {
    const int64_t edges = row[i].numel(), source = ends[2 * i];
    const ScalarType type = like.scalar_type(), of_weight = edge_weight[i].scalar_type();
    const bool narrow = of_weight == ScalarType::Float;
    STD_TORCH_CHECK(narrow || of_weight == ScalarType::Double,
                    "expected weights of float32 or float64");
    const void* weight = elements_of(edge_weight[i], "edge_weight",
                                     edge_weight[i].numel() ? edges : 0, of_weight, like);
    const Neighbors relation{
        elements_of(colptr[i], "colptr", colptr[i].numel(), type, like),
        elements_of(row[i], "row", edges, type, like),
        colptr[i].numel() - 1,
        edges,
        longs_of(edge_time[i], "edge_time", edge_time[i].numel() ? edges : 0, like),
        longs_of(node_time[source], "node_time", node_time[source].numel(), like),
        node_time[source].numel(),
        narrow ? static_cast<const float*>(weight) : nullptr,
        narrow ? nullptr : static_cast<const double*>(weight),
        source,
        ends[2 * i + 1],
        num_neighbors.data() + i * hops};
    STD_TORCH_CHECK(!relation.timed() || (disjoint && seed_time.numel() == request.num_seeds),
                    "expected disjoint subgraphs and times of the seeds");
    request.relations.push_back(relation);
  }
  Sampled found = sample(request);
  return {found.tensors, found.sizes, kFaults[static_cast<int64_t>(found.fault)]};
}

}  // namespace pyg_accel
