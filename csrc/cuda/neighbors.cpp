// The operator of the CUDA library that samples neighbours; see library.cpp.
#include "cuda/neighbors.h"

#include <bit>

#include "cuda/check.cuh"
#include "cuda/tensors.h"
#include "neighbor_sample.h"

namespace pyg_accel {
namespace {

constexpr int64_t kMostNodes = INT32_MAX;  // of a type in a batch, and most edges of a hop

// The sampled nodes of a type.
struct NodeType {
  SampledNodes nodes{};
  std::optional<Tensor> id, batch, table;
  int64_t capacity = -1;
  int64_t begin = 0;  // of the nodes of the last hop
  int64_t end = 0;
  int64_t most = 0;    // the end, as far as it is known
  size_t current = 0;  // which of two numbers on the device is the end
};

// The edges of a type, and the sampled edges.
struct Relation {
  HopArgs hop;
  std::optional<Tensor> counts;  // begin, degree and offset of the hop
  std::optional<Tensor> row, col, edge;
  int64_t size = 0;
};

class NeighborSampler {
 public:
  explicit NeighborSampler(const Request& request)
      : request_(request),
        like_(request.like),
        stream_(stream_of(request.like)),
        types_(request.types.size()),
        host_(1 + 2 * request.types.size() + request.relations.size()),
        state_(empty(static_cast<int64_t>(host_.size()), ScalarType::Long)),
        device_(static_cast<int64_t*>(state_.mutable_data_ptr())) {
    for (const Neighbors& graph : request.relations)
      relations_.push_back({{request, graph}});
  }

  Sampled run() {
    const Fault fault = sample();
    return {fault == Fault::kNone ? results() : std::vector<Tensor>(), sizes_, fault};
  }

 private:
  Fault sample() {
    const int64_t hops = request_.hops;
    begin();
    for (int64_t ell = 0;; ++ell) {
      const bool restart = request_.induced && ell + 1 == hops;
      for (NodeType& type : types_)
        type.begin = ell == 0 || restart ? 0 : type.end;
      if (restart)
        for (Relation& r : relations_) {
          r.row = r.col = r.edge = std::nullopt;
          r.size = 0;
        }
      for (size_t i = 0; i < relations_.size(); ++i)
        count(i, ell < hops ? relations_[i].hop.graph.num_neighbors[ell] : 0);
      if (const Fault fault = fetch(); fault != Fault::kNone)
        return fault;
      for (size_t t = 0; t < types_.size(); ++t) {
        const int64_t end = host_[number(t)];
        sizes_.push_back(ell > 0 ? end - types_[t].end : end);
        types_[t].end = types_[t].most = end;
      }
      if (ell == hops)
        return Fault::kNone;
      if (const Fault fault = draw(); fault != Fault::kNone)
        return fault;
    }
  }

  std::vector<Tensor> results() const {
    std::vector<Tensor> out;
    for (const Relation& r : relations_)
      for (const auto& t : {r.row, r.col, r.edge})
        out.push_back(t ? *t : empty(0));
    for (const NodeType& type : types_) {
      out.push_back(resized(type.id, type.end, type.end));
      const int64_t batches = request_.disjoint ? type.end : 0;
      out.push_back(resized(type.batch, batches, batches));
    }
    return out;
  }

  Tensor empty(int64_t size, std::optional<ScalarType> type = std::nullopt) const {
    return empty_result(like_, {size}, type);
  }

  void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) const {
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_), "neighbors");
  }

  // A tensor of `size` elements that begins with the elements of another.
  Tensor resized(const std::optional<Tensor>& from, int64_t kept, int64_t size) const {
    Tensor out = empty(size);
    if (kept > 0)
      copy(out.mutable_data_ptr(), from->const_data_ptr(), kept * element_bytes(out),
           cudaMemcpyDeviceToDevice);
    return out;
  }

  // The addresses of the number of nodes of a type, and of drawn edges of a relation.
  size_t number(size_t t) const { return 1 + types_[t].current * types_.size() + t; }
  size_t total(size_t i) const { return 1 + 2 * types_.size() + i; }

  void begin() {
    check(cudaMemsetAsync(device_, 0, sizeof(int64_t), stream_), "neighbors");
    int64_t batch = 0;
    for (size_t t = 0; t < types_.size(); ++t) {
      NodeType& type = types_[t];
      const auto [ids, count, num_nodes] = request_.types[t];
      type.nodes.num_nodes = num_nodes;
      reserve(type, count);
      if (count > 0)
        neighbor_seeds_cuda(type.nodes, ids, count, batch, request_.wide, device_, stream_);
      neighbor_table_cuda(type.nodes, count, request_.wide, stream_);
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
      if (request_.disjoint) {
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
    Relation& r = relations_[i];
    const NodeType& target = types_[r.hop.graph.target];
    HopArgs& hop = r.hop;
    hop.k = k;
    hop.targets = target.nodes;
    hop.first = target.begin;
    hop.count = k == 0 ? 0 : target.most - target.begin;
    hop.num_targets = device_ + number(r.hop.graph.target);
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
    for (size_t i = 0; i < relations_.size(); ++i)
      if (relations_[i].hop.count == 0)
        host_[total(i)] = 0;
    return static_cast<Fault>(host_[0]);
  }

  // Makes room for further sampled edges.
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
    for (size_t i = 0; i < relations_.size(); ++i) {
      sizes_.push_back(host_[total(i)]);
      types_[relations_[i].hop.graph.source].most += host_[total(i)];
    }
    for (NodeType& type : types_) {
      if (type.most > kMostNodes)
        return Fault::kMany;
      if (reserve(type, type.most))
        neighbor_table_cuda(type.nodes, type.end, request_.wide, stream_);
    }
    for (size_t i = 0; i < relations_.size(); ++i) {
      Relation& r = relations_[i];
      HopArgs& hop = r.hop;
      const int64_t targets = types_[r.hop.graph.target].end - types_[r.hop.graph.target].begin;
      hop.stream = streams_;
      streams_ += static_cast<uint64_t>(targets);
      if (host_[total(i)] == 0)
        continue;
      NodeType& source = types_[r.hop.graph.source];
      grow(r, host_[total(i)]);
      hop.count = targets;
      hop.sources = source.nodes;
      hop.targets = types_[r.hop.graph.target].nodes;
      const Tensor slot = empty(hop.size, ScalarType::Int);
      const Tensor rank = empty(hop.size + 1, ScalarType::Int);
      hop.slot = static_cast<uint32_t*>(slot.mutable_data_ptr());
      hop.rank = static_cast<int32_t*>(rank.mutable_data_ptr());
      hop.before = device_ + number(r.hop.graph.source);
      source.current ^= 1;
      hop.after = device_ + number(r.hop.graph.source);
      neighbor_draw_cuda(hop, scratch_of(like_), stream_);
    }
    return Fault::kNone;
  }

  const Request& request_;
  const Tensor& like_;
  cudaStream_t stream_;
  std::vector<NodeType> types_;
  std::vector<Relation> relations_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> host_;  // the last copy of the state:
  Tensor state_;  // a fault; twice a number of each type of nodes; drawn edges of each relation
  int64_t* device_;
  uint64_t streams_ = 0;
};

Sampled sample(const Request& request) {
  [[maybe_unused]] const auto guard = guard_of(request.like);
  return NeighborSampler(request).run();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_accel_cuda, m) {
  m.def(kNeighborSample);
}

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cuda, PYG_ACCEL_DEVICE, m) {
  m.impl("neighbor_sample", TORCH_BOX(&neighbor_sample<sample>));
}

}  // namespace pyg_accel
