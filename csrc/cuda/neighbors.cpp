// The operator of the CUDA library that samples neighbours; see library.cpp.
#include "cuda/neighbors.h"

#include <bit>
#include <string>
#include <tuple>

#include "cuda/check.cuh"
#include "cuda/tensors.h"

namespace pyg_accel {
namespace {

constexpr int64_t kMostNodes = INT32_MAX;  // of a type in a batch, and most edges of a hop

const char* text_of(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "";
    case Fault::kMany:
      return "expected fewer samples of every node";
    case Fault::kRow:
      return "expected 'edge_index' to hold ids of nodes that exist";
    case Fault::kWeights:
      return "expected the weights of edges to be finite and not negative";
    case Fault::kSorted:
      return "expected the edges of each target to be sorted by time";
    case Fault::kTimes:
      return "expected the times of nodes to have an entry for every node";
    case Fault::kOrder:
      return "expected 'colptr' to ascend from 0 to the number of edges";
    case Fault::kColptr:
      return "expected 'colptr' to have an entry for every node";
    case Fault::kSeed:
      return "expected 'seed' to hold ids of nodes that exist";
  }
  return "";
}

// On the device of `like`; null if it is empty.
const int64_t* longs(const Tensor& t, const char* name, const Tensor& like) {
  check_vector(t, name, t.numel(), like);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long, "expected '", name, "' to be int64");
  return t.numel() ? static_cast<const int64_t*>(t.const_data_ptr()) : nullptr;
}

Tensor counts_of(const std::vector<int64_t>& values) {
  const int64_t size = static_cast<int64_t>(values.size()), stride = 1;
  AtenTensorHandle made = nullptr;
  STD_TORCH_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int64(),
                                           aoti_torch_device_type_cpu(), 0, &made) == 0,
                  "cannot allocate a result");
  Tensor out(made);
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

// The sampled nodes of a type.
struct NodeType {
  SampledNodes nodes{};
  std::optional<Tensor> id, batch, table;
  int64_t capacity = -1;
  int64_t begin = 0;  // of those that the last hop has found
  int64_t end = 0;
  int64_t most = 0;    // the end, as far as it is known
  size_t current = 0;  // which of two numbers on the device is the end
};

// The edges of a type, and those of them that are sampled.
struct Relation {
  HopArgs hop{};
  size_t source = 0;
  size_t target = 0;
  const int64_t* num_neighbors = nullptr;  // of every hop
  std::optional<Tensor> counts;            // begin, degree and offset of the hop
  std::optional<Tensor> row, col, edge;
  int64_t size = 0;
};

class NeighborSampler {
 public:
  NeighborSampler(const Tensor& like, size_t num_types, size_t num_relations)
      : types(num_types),
        relations(num_relations),
        like_(like),
        stream_(stream_of(like)),
        wide_(is_wide(like, "colptr")),
        host_(1 + 2 * num_types + num_relations),
        state_(empty(static_cast<int64_t>(host_.size()), ScalarType::Long)),
        device_(static_cast<int64_t*>(state_.mutable_data_ptr())) {}

  std::vector<NodeType> types;
  std::vector<Relation> relations;
  bool disjoint = false;
  // How many nodes of each type are seeds, and of every hop how many edges of each relation and
  // nodes of each type it found.
  std::vector<int64_t> sizes;

  Fault run(const std::vector<Tensor>& seeds, int64_t hops, bool induced) {
    begin(seeds);
    for (int64_t ell = 0;; ++ell) {
      const bool restart = induced && ell + 1 == hops;
      for (NodeType& type : types)
        type.begin = ell == 0 || restart ? 0 : type.end;
      if (restart)
        for (Relation& r : relations) {
          r.row = r.col = r.edge = std::nullopt;
          r.size = 0;
        }
      for (size_t i = 0; i < relations.size(); ++i)
        count(i, ell < hops ? relations[i].num_neighbors[ell] : 0);
      if (const Fault fault = fetch(); fault != Fault::kNone)
        return fault;
      for (size_t t = 0; t < types.size(); ++t) {
        const int64_t end = host_[number(t)];
        sizes.push_back(ell > 0 ? end - types[t].end : end);
        types[t].end = types[t].most = end;
      }
      if (ell == hops)
        return Fault::kNone;
      if (const Fault fault = draw(); fault != Fault::kNone)
        return fault;
    }
  }

  std::vector<Tensor> results() const {
    std::vector<Tensor> out;
    for (const Relation& r : relations)
      for (const auto& t : {r.row, r.col, r.edge})
        out.push_back(t ? *t : empty(0));
    for (const NodeType& type : types) {
      out.push_back(resized(type.id, type.end, type.end));
      out.push_back(resized(type.batch, disjoint ? type.end : 0, disjoint ? type.end : 0));
    }
    return out;
  }

 private:
  Tensor empty(int64_t size, std::optional<ScalarType> type = std::nullopt) const {
    return empty_result(like_, {size}, type);
  }

  void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) const {
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_), "neighbors");
  }

  // A tensor of `size` elements, the first of which are those of another.
  Tensor resized(const std::optional<Tensor>& from, int64_t kept, int64_t size) const {
    Tensor out = empty(size);
    if (kept > 0)
      copy(out.mutable_data_ptr(), from->const_data_ptr(), kept * element_bytes(out),
           cudaMemcpyDeviceToDevice);
    return out;
  }

  // Where the number of nodes of a type is, and that of the drawn edges of a relation.
  size_t number(size_t t) const { return 1 + types[t].current * types.size() + t; }
  size_t total(size_t i) const { return 1 + 2 * types.size() + i; }

  void begin(const std::vector<Tensor>& seeds) {
    check(cudaMemsetAsync(device_, 0, sizeof(int64_t), stream_), "neighbors");
    int64_t batch = 0;
    for (size_t t = 0; t < types.size(); ++t) {
      NodeType& type = types[t];
      const int64_t count = seeds[t].numel();
      const int64_t* ids = longs(seeds[t], "seed", like_);
      reserve(type, count);
      if (count > 0)
        neighbor_seeds_cuda(type.nodes, ids, count, batch, wide_, device_, stream_);
      neighbor_table_cuda(type.nodes, count, wide_, stream_);
      host_[number(t)] = type.end = type.most = count;
      batch += count;
    }
    copy(device_ + 1, host_.data() + 1, (host_.size() - 1) * sizeof(int64_t),
         cudaMemcpyHostToDevice);
  }

  // Makes room for `count` nodes of a type. Its table is to be filled where this returns true.
  bool reserve(NodeType& type, int64_t count) {
    if (count > type.capacity) {
      type.id = resized(type.id, type.end, count);
      type.nodes.id = type.id->mutable_data_ptr();
      if (disjoint) {
        type.batch = resized(type.batch, type.end, count);
        type.nodes.batch = type.batch->mutable_data_ptr();
      }
      type.capacity = count;
    }
    const uint64_t slots = std::bit_ceil(static_cast<uint64_t>(2 * count) + 64);
    if (slots <= type.nodes.mask + 1)
      return false;
    type.table = empty(static_cast<int64_t>(slots * (sizeof(uint64_t) + sizeof(uint32_t))),
                       ScalarType::Byte);
    type.nodes.keys = static_cast<uint64_t*>(type.table->mutable_data_ptr());
    type.nodes.positions = reinterpret_cast<uint32_t*>(type.nodes.keys + slots);
    type.nodes.mask = slots - 1;
    type.nodes.shift = 64 - std::countr_zero(slots);
    return true;
  }

  // Counts the edges to draw of a relation.
  void count(size_t i, int64_t k) {
    Relation& r = relations[i];
    const NodeType& target = types[r.target];
    HopArgs& hop = r.hop;
    hop.k = k;
    hop.targets = target.nodes;
    hop.first = target.begin;
    hop.count = k == 0 ? 0 : target.most - target.begin;
    hop.num_targets = device_ + number(r.target);
    hop.fault = device_;
    if (hop.count == 0)
      return;
    r.counts = empty(3 * hop.count + 1, ScalarType::Long);
    hop.begin = static_cast<int64_t*>(r.counts->mutable_data_ptr());
    hop.degree = hop.begin + hop.count;
    hop.offset = hop.degree + hop.count;
    neighbor_count_cuda(hop, scratch_of(like_), stream_);
    copy(device_ + total(i), hop.offset + hop.count, sizeof(int64_t), cudaMemcpyDeviceToDevice);
  }

  // Waits for the device.
  Fault fetch() {
    copy(host_.data(), device_, host_.size() * sizeof(int64_t), cudaMemcpyDeviceToHost);
    check(cudaStreamSynchronize(stream_), "neighbors");
    for (size_t i = 0; i < relations.size(); ++i)
      if (relations[i].hop.count == 0)
        host_[total(i)] = 0;
    return static_cast<Fault>(host_[0]);
  }

  // Makes room for sampled edges behind those that there are.
  void grow(Relation& r, int64_t count) {
    for (auto* t : {&r.row, &r.col, &r.edge})
      *t = resized(*t, r.size, r.size + count);
    const int64_t bytes = r.size * element_bytes(*r.row);
    r.hop.row = static_cast<char*>(r.row->mutable_data_ptr()) + bytes;
    r.hop.col = static_cast<char*>(r.col->mutable_data_ptr()) + bytes;
    r.hop.edge = static_cast<char*>(r.edge->mutable_data_ptr()) + bytes;
    r.hop.size = count;
    r.size += count;
  }

  Fault draw() {
    for (size_t i = 0; i < relations.size(); ++i) {
      sizes.push_back(host_[total(i)]);
      types[relations[i].source].most += host_[total(i)];
    }
    for (NodeType& type : types) {
      if (type.most > kMostNodes)
        return Fault::kMany;
      if (reserve(type, type.most))
        neighbor_table_cuda(type.nodes, type.end, wide_, stream_);
    }
    for (size_t i = 0; i < relations.size(); ++i) {
      Relation& r = relations[i];
      HopArgs& hop = r.hop;
      const int64_t targets = types[r.target].end - types[r.target].begin;
      hop.stream = streams_;
      streams_ += static_cast<uint64_t>(targets);
      if (host_[total(i)] == 0)
        continue;
      NodeType& source = types[r.source];
      grow(r, host_[total(i)]);
      hop.count = targets;
      hop.sources = source.nodes;
      hop.targets = types[r.target].nodes;
      const Tensor slot = empty(hop.size, ScalarType::Int);
      const Tensor rank = empty(hop.size + 1, ScalarType::Int);
      hop.slot = static_cast<uint32_t*>(slot.mutable_data_ptr());
      hop.rank = static_cast<int32_t*>(rank.mutable_data_ptr());
      hop.before = device_ + number(r.source);
      source.current ^= 1;
      hop.after = device_ + number(r.source);
      neighbor_draw_cuda(hop, scratch_of(like_), stream_);
    }
    return Fault::kNone;
  }

  Tensor like_;
  cudaStream_t stream_;
  bool wide_;
  std::vector<int64_t> host_;  // what was last fetched of the state:
  Tensor state_;  // a fault; twice a number of each type of nodes; drawn edges of each relation
  int64_t* device_;
  uint64_t streams_ = 0;
};

// As that of the CPU library, for tensors on the device.
std::tuple<std::vector<Tensor>, Tensor, std::string> neighbor_sample(
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
  const int64_t hops = num_relations ? num_neighbors.size() / num_relations : 0;
  const Tensor& like = num_relations ? colptr[0] : seed[0];
  [[maybe_unused]] const auto guard = guard_of(like);
  NeighborSampler sampler(like, num_types, num_relations);
  sampler.disjoint = disjoint;
  int64_t num_seeds = 0;
  for (size_t t = 0; t < num_types; ++t) {
    num_seeds += seed[t].numel();
    sampler.types[t].nodes.num_nodes = num_nodes[t];
  }
  for (int64_t most : num_nodes)  // a key of the table is a node of a batch
    STD_TORCH_CHECK(!disjoint || !__builtin_mul_overflow(most, num_seeds, &most),
                    "expected smaller ids of nodes, or fewer disjoint subgraphs");
  for (size_t i = 0; i < num_relations; ++i) {
    const Tensor& weight = edge_weight[i];
    const int64_t count = row[i].numel();
    check_vector(colptr[i], "colptr", colptr[i].numel(), like);
    check_vector(row[i], "row", count, like);
    check_vector(weight, "edge_weight", weight.numel() ? count : 0, like);
    STD_TORCH_CHECK(is_wide(colptr[i], "colptr") == is_wide(like, "colptr") &&
                        is_wide(row[i], "row") == is_wide(like, "colptr"),
                    "expected all graphs to have one index type");
    STD_TORCH_CHECK(edge_time[i].numel() == 0 || edge_time[i].numel() == count,
                    "expected a time of every edge");
    const bool narrow = weight.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(narrow || weight.scalar_type() == ScalarType::Double,
                    "expected weights of float32 or float64");
    const void* weights = weight.numel() ? weight.const_data_ptr() : nullptr;
    Relation& r = sampler.relations[i];
    r.source = ends[2 * i];
    r.target = ends[2 * i + 1];
    r.num_neighbors = num_neighbors.data() + i * hops;
    Neighbors& graph = r.hop.graph;
    graph.colptr = colptr[i].const_data_ptr();
    graph.row = row[i].const_data_ptr();
    graph.num_targets = colptr[i].numel() - 1;
    graph.num_edges = count;
    graph.edge_time = longs(edge_time[i], "edge_time", like);
    graph.node_time = longs(node_time[r.source], "node_time", like);
    graph.num_times = node_time[r.source].numel();
    graph.weight = narrow ? static_cast<const float*>(weights) : nullptr;
    graph.wide_weight = narrow ? nullptr : static_cast<const double*>(weights);
    r.hop.seed_time = longs(seed_time, "seed_time", like);
    r.hop.seed = static_cast<uint64_t>(random_seed);
    r.hop.replace = replace;
    r.hop.last = last;
    r.hop.wide = is_wide(like, "colptr");
    STD_TORCH_CHECK(
        !(graph.edge_time || graph.node_time) || (disjoint && seed_time.numel() == num_seeds),
        "expected disjoint subgraphs and times of the seeds");
  }
  const Fault fault = sampler.run(seed, hops, induced);
  std::vector<Tensor> out;
  if (fault == Fault::kNone)
    out = sampler.results();
  return {out, counts_of(sampler.sizes), text_of(fault)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(
      "neighbor_sample(Tensor[] colptr, Tensor[] row, int[] ends, int[] num_nodes, Tensor[] seed, "
      "int[] num_neighbors, Tensor[] node_time, Tensor[] edge_time, Tensor[] edge_weight, "
      "Tensor seed_time, bool replace, bool induced, bool disjoint, bool last, int random_seed) -> "
      "(Tensor[], Tensor, str)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("neighbor_sample", TORCH_BOX(&neighbor_sample));
}

}  // namespace pyg_accel
