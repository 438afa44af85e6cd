// Neighbour sampling for mini-batches. Targets of a hop pick their edges in parallel; the sources
// are numbered afterwards, in the order of the edges.
#include "neighbor_sample.h"

#include <cmath>

#include "positions.h"
#include "schedule.h"

namespace pyg_accel {
namespace {

constexpr int64_t kBlock = 256;         // targets a task
constexpr int64_t kSerialPicks = 4096;  // below this, waking a thread costs more
constexpr int64_t kAhead = 16;          // entries ahead that memory is asked for

// The edges of a type, and the sampled ones.
template <class I>
struct Relation : Neighbors {
  Tensor sampled_row, sampled_col, sampled_edge;
  int64_t size = 0;

  const I* begin_of(int64_t node) const { return static_cast<const I*>(colptr) + node; }
  const I* source_of(int64_t e) const { return static_cast<const I*>(row) + e; }

  // Makes room for more edges: exactly, since the last hop has most of them.
  void grow(int64_t count) {
    for (Tensor* t : {&sampled_row, &sampled_col, &sampled_edge}) {
      Tensor larger = new_result(*t, {size + count});
      if (size > 0)
        __builtin_memcpy(larger.mutable_data_ptr(), t->const_data_ptr(), size * sizeof(I));
      *t = larger;
    }
    size += count;
  }
};

// The sampled nodes of a type; nodes from `begin` to `end` are of the last hop.
template <class I>
struct NodeType {
  Positions<I> positions;
  int64_t begin = 0;
  int64_t end = 0;
};

constexpr int64_t kMostSamples = int64_t{1} << 40;  // of a hop: more than any memory holds

// Scratch memory of a task.
struct Scratch {
  std::vector<uint64_t> drawn;  // a bit an entry of the row, all zero between rows
  std::vector<std::pair<double, int64_t>> keys;
  std::vector<double> sums;
};

template <class I>
class NeighborSampler {
 public:
  explicit NeighborSampler(const Request& request) : request_(request) {
    const Tensor empty = new_result(request.like, {0});
    for (const Neighbors& graph : request.relations)
      relations_.push_back({graph, empty, empty, empty});
    int64_t batch = 0;
    for (const Seeds& seeds : request.types) {
      NodeType<I>& type = types_.emplace_back(NodeType<I>{
          Positions<I>(request.like, seeds.num_nodes, request.disjoint ? request.num_seeds : 0), 0,
          seeds.count});
      for (int64_t i = 0; i < seeds.count; ++i) {
        const bool exists = seeds.ids[i] >= 0 && seeds.ids[i] < seeds.num_nodes;
        if (!exists)
          report(Fault::kSeed);
        type.positions.append(static_cast<I>(exists ? seeds.ids[i] : 0),
                              request.disjoint ? batch++ : 0);
      }
    }
  }

  Sampled run() {
    Sampled sampled;
    for (NodeType<I>& type : types_)
      sampled.sizes.push_back(type.end);
    for (int64_t ell = 0; ell < request_.hops && fault_ == Fault::kNone; ++ell) {
      if (request_.induced && ell + 1 == request_.hops)
        restart();
      for (Relation<I>& r : relations_)
        sampled.sizes.push_back(hop(r, ell));
      for (NodeType<I>& type : types_) {
        type.begin = type.end;
        type.end = type.positions.size();
        sampled.sizes.push_back(type.end - type.begin);
      }
    }
    sampled.fault = fault_;
    for (const Relation<I>& r : relations_)
      sampled.tensors.insert(sampled.tensors.end(), {r.sampled_row, r.sampled_col, r.sampled_edge});
    for (const NodeType<I>& type : types_)
      for (const std::vector<I>* ids : {&type.positions.nodes(), &type.positions.batches()}) {
        Tensor out = new_result(request_.like, {static_cast<int64_t>(ids->size())});
        std::copy(ids->begin(), ids->end(), static_cast<I*>(out.mutable_data_ptr()));
        sampled.tensors.push_back(out);
      }
    return sampled;
  }

 private:
  void report(Fault fault) {
    Fault seen = fault_;
    while (seen < fault && !fault_.compare_exchange_weak(seen, fault)) {
    }
  }

  // Forgets the edges, and lets the next hop begin at all nodes.
  void restart() {
    for (NodeType<I>& type : types_)
      type.begin = 0;
    for (Relation<I>& r : relations_) {
      r.size = 0;
      r.grow(0);
    }
  }

  // Samples the neighbours of the last hop's nodes along one relation; returns how many edges.
  int64_t hop(Relation<I>& r, int64_t ell) {
    NodeType<I>& targets = types_[r.target];
    const int64_t count = targets.end - targets.begin, k = r.num_neighbors[ell];
    const uint64_t stream = streams_;
    streams_ += count;
    if (count == 0 || k == 0)
      return 0;
    ranges_.resize(count);
    std::vector<int64_t> offsets(count + 1);
    const int64_t tasks = (count + kBlock - 1) / kBlock;
    parallel_tasks(tasks, count < kSerialPicks, [&](int64_t task) {
      const int64_t end = std::min(count, (task + 1) * kBlock);
      for (int64_t i = task * kBlock; i < end; ++i) {
        if (i + kAhead < end)
          __builtin_prefetch(r.begin_of(targets.positions.node(targets.begin + i + kAhead)));
        ranges_[i] = range(r, targets.begin + i, k);
        offsets[i + 1] = picks(r, ranges_[i], k);
      }
    });
    for (int64_t i = 0; i < count && fault_ == Fault::kNone; ++i)
      if (__builtin_add_overflow(offsets[i], offsets[i + 1], &offsets[i + 1]) ||
          offsets[i + 1] > kMostSamples)
        report(Fault::kMany);
    if (fault_ != Fault::kNone || offsets[count] == 0)
      return 0;
    const int64_t old = r.size;
    r.grow(offsets[count]);
    I* row = static_cast<I*>(r.sampled_row.mutable_data_ptr()) + old;
    I* col = static_cast<I*>(r.sampled_col.mutable_data_ptr()) + old;
    I* edge = static_cast<I*>(r.sampled_edge.mutable_data_ptr()) + old;
    const uint64_t num_sources = request_.types[r.source].num_nodes;
    parallel_tasks(tasks, offsets[count] < kSerialPicks, [&](int64_t task) {
      const int64_t begin = task * kBlock, end = std::min(count, begin + kBlock);
      Scratch scratch;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t size = offsets[i + 1] - offsets[i];
        I* mine = edge + offsets[i];
        pick(r, ranges_[i], k, size, Random(request_.seed, stream + i), mine, scratch);
        std::fill_n(col + offsets[i], size, static_cast<I>(targets.begin + i));
        for (int64_t j = 0; j < size; ++j)
          __builtin_prefetch(r.source_of(mine[j]));
      }
      for (int64_t j = offsets[begin]; j < offsets[end]; ++j) {
        row[j] = *r.source_of(edge[j]);
        if (static_cast<uint64_t>(row[j]) >= num_sources)
          report(Fault::kRow);
      }
    });
    if (fault_ != Fault::kNone)
      return 0;
    number(r, row, col, offsets[count]);
    return offsets[count];
  }

  EdgeRange range(const Relation<I>& r, int64_t position, int64_t k) {
    const Positions<I>& targets = types_[r.target].positions;
    const int64_t now = r.timed() ? request_.seed_time[targets.batch(position)] : 0;
    Fault fault = Fault::kNone;
    const EdgeRange range =
        range_of<I>(r, targets.node(position), now, request_.last ? k : -1, fault);
    report(fault);
    return range;
  }

  // How many edges of a range are drawn. Edges of weight 0 are only taken if all edges are.
  int64_t picks(const Relation<I>& r, EdgeRange range, int64_t k) {
    const int64_t degree = range.end - range.begin;
    if (request_.takes_all(degree, k))
      return degree;
    int64_t eligible = degree;
    if (r.weighted()) {
      eligible = 0;
      for (int64_t e = range.begin; e < range.end; ++e) {
        const double weight = r.weight_of(e);
        if (!(weight >= 0 && weight < std::numeric_limits<double>::infinity()))
          report(Fault::kWeights);
        eligible += weight > 0;
      }
    }
    return request_.replace && eligible > 0 ? k : std::min(k, eligible);
  }

  // Draws `size` edges from a range.
  void pick(const Relation<I>& r,
            EdgeRange range,
            int64_t k,
            int64_t size,
            Random random,
            I* out,
            Scratch& scratch) const {
    const int64_t degree = range.end - range.begin;
    if (request_.takes_all(degree, k)) {
      for (int64_t j = 0; j < size; ++j)
        out[j] = static_cast<I>(range.begin + j);
    } else if (size > 0 && r.weighted()) {
      request_.replace ? pick_weighted_again(r, range, size, random, out, scratch)
                       : pick_weighted(r, range, size, random, out, scratch);
    } else if (request_.replace) {
      for (int64_t j = 0; j < size; ++j)
        out[j] = static_cast<I>(range.begin + random.below(degree, j));
    } else {  // Floyd's algorithm
      std::vector<uint64_t>& drawn = scratch.drawn;
      if (static_cast<int64_t>(drawn.size()) * 64 < degree)
        drawn.resize((degree + 63) / 64);
      auto draw = [&](int64_t at) {
        const uint64_t bit = uint64_t{1} << (at & 63);
        const bool fresh = !(drawn[at >> 6] & bit);
        drawn[at >> 6] |= bit;
        return fresh;
      };
      for (int64_t j = 0, most = degree - size; j < size; ++j, ++most) {
        int64_t at = random.below(most + 1, j);
        if (!draw(at))
          draw(at = most);
        out[j] = static_cast<I>(range.begin + at);
      }
      for (int64_t j = 0; j < size; ++j)
        drawn[(out[j] - range.begin) >> 6] = 0;
    }
  }

  // Weighted sampling by Efraimidis and Spirakis: the smallest of an exponential variate per edge.
  static void pick_weighted(const Relation<I>& r,
                            EdgeRange range,
                            int64_t size,
                            Random random,
                            I* out,
                            Scratch& scratch) {
    std::vector<std::pair<double, int64_t>>& keys = scratch.keys;
    keys.clear();
    for (int64_t e = range.begin; e < range.end; ++e) {
      const double weight = r.weight_of(e);
      if (weight > 0)
        keys.emplace_back(-std::log(random.uniform(keys.size())) / weight, e);
    }
    std::nth_element(keys.begin(), keys.begin() + (size - 1), keys.end());
    for (int64_t j = 0; j < size; ++j)
      out[j] = static_cast<I>(keys[j].second);
  }

  static void pick_weighted_again(const Relation<I>& r,
                                  EdgeRange range,
                                  int64_t size,
                                  Random random,
                                  I* out,
                                  Scratch& scratch) {
    std::vector<double>& sums = scratch.sums;
    sums.clear();
    double total = 0;
    for (int64_t e = range.begin; e < range.end; ++e)
      sums.push_back(total += r.weight_of(e));
    for (int64_t j = 0; j < size; ++j) {
      // The first sum that reaches the draw, which is positive: never an edge of weight 0.
      const double draw = random.uniform(j) * total;
      const int64_t at = std::lower_bound(sums.begin(), sums.end(), draw) - sums.begin();
      out[j] = static_cast<I>(range.begin + at);
    }
  }

  // Replaces ids of sources by their positions among the sampled nodes.
  void number(const Relation<I>& r, I* row, const I* col, int64_t count) {
    Positions<I>& sources = types_[r.source].positions;
    const Positions<I>& targets = types_[r.target].positions;
    for (int64_t j = 0; j < count; ++j) {
      if (j + kAhead < count)
        sources.prefetch(row[j + kAhead], targets.batch(col[j + kAhead]));
      row[j] = static_cast<I>(sources.insert(row[j], targets.batch(col[j])));
    }
  }

  const Request& request_;
  std::vector<NodeType<I>> types_;
  std::vector<Relation<I>> relations_;
  std::vector<EdgeRange> ranges_;
  uint64_t streams_ = 0;
  std::atomic<Fault> fault_{Fault::kNone};
};

Sampled sample(const Request& request) {
  return request.wide ? NeighborSampler<int64_t>(request).run()
                      : NeighborSampler<int32_t>(request).run();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("neighbor_sample", TORCH_BOX(&neighbor_sample<sample>));
}

}  // namespace pyg_accel
