// Neighbour sampling for mini-batches. Targets of a hop pick their edges in parallel; the sources
// are numbered afterwards, in the order of the edges.
#include <cmath>
#include <string>
#include <tuple>

#include "positions.h"
#include "schedule.h"

namespace pyg_accel {
namespace {

constexpr int64_t kBlock = 256;         // targets a task
constexpr int64_t kSerialPicks = 4096;  // below this, waking a thread costs more
constexpr int64_t kAhead = 16;          // entries ahead that memory is asked for

const int64_t* longs(const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.scalar_type() == ScalarType::Long,
                  "expected contiguous int64 CPU tensors");
  return t.numel() ? static_cast<const int64_t*>(t.const_data_ptr()) : nullptr;
}

// Random numbers of one target: a function of only the seed and the number of the stream.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : state_(mix(seed + mix(stream))) {}

  uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15u); }
  int64_t below(int64_t n) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(next()) * n >> 64);
  }
  double uniform() { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; }  // in (0, 1]

 private:
  static uint64_t mix(uint64_t z) {  // of SplitMix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

// The edges of a type, by target, and the sampled ones.
template <class I>
struct Relation {
  const I* colptr;
  const I* row;
  int64_t num_targets;
  int64_t num_edges;
  const int64_t* time;  // of edges; null without
  const float* weight;  // one of the two, or none
  const double* wide_weight;
  int64_t source;
  int64_t target;
  const int64_t* num_neighbors;  // of every hop
  Tensor sampled_row, sampled_col, sampled_edge;
  int64_t size = 0;

  double weight_of(int64_t e) const { return weight ? weight[e] : wide_weight[e]; }
  bool weighted() const { return weight || wide_weight; }

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

// The sampled nodes of a type; those from `begin` to `end` are the last hop's.
template <class I>
struct NodeType {
  Positions<I> positions;
  int64_t num_nodes;
  const int64_t* time;  // null without
  int64_t num_times;
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
  NeighborSampler(bool replace, bool last, uint64_t seed)
      : replace(replace), last(last), seed(seed) {}

  bool replace, last;
  uint64_t seed;
  std::vector<NodeType<I>> types;
  std::vector<Relation<I>> relations;
  std::vector<int64_t> seed_times;  // by batch; empty without times

  const char* fault() const { return fault_.load(); }

  // Forgets the edges, and lets the next hop begin at all nodes.
  void restart() {
    for (NodeType<I>& type : types)
      type.begin = 0;
    for (Relation<I>& r : relations) {
      r.size = 0;
      r.grow(0);
    }
  }

  // Samples the neighbours of the last hop's nodes along one relation; returns how many edges.
  int64_t hop(Relation<I>& r, int64_t ell) {
    NodeType<I>& targets = types[r.target];
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
          __builtin_prefetch(r.colptr + targets.positions.node(targets.begin + i + kAhead));
        ranges_[i] = range(r, targets.begin + i, k);
        offsets[i + 1] = picks(r, ranges_[i], k);
      }
    });
    for (int64_t i = 0; i < count && !fault(); ++i)
      if (__builtin_add_overflow(offsets[i], offsets[i + 1], &offsets[i + 1]) ||
          offsets[i + 1] > kMostSamples)
        fault_ = "expected fewer samples of every node";
    if (fault() || offsets[count] == 0)
      return 0;
    const int64_t old = r.size;
    r.grow(offsets[count]);
    I* row = static_cast<I*>(r.sampled_row.mutable_data_ptr()) + old;
    I* col = static_cast<I*>(r.sampled_col.mutable_data_ptr()) + old;
    I* edge = static_cast<I*>(r.sampled_edge.mutable_data_ptr()) + old;
    const uint64_t num_sources = types[r.source].num_nodes;
    parallel_tasks(tasks, offsets[count] < kSerialPicks, [&](int64_t task) {
      const int64_t begin = task * kBlock, end = std::min(count, begin + kBlock);
      Scratch scratch;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t size = offsets[i + 1] - offsets[i];
        I* mine = edge + offsets[i];
        pick(r, ranges_[i], k, size, Random(seed, stream + i), mine, scratch);
        std::fill_n(col + offsets[i], size, static_cast<I>(targets.begin + i));
        for (int64_t j = 0; j < size; ++j)
          __builtin_prefetch(r.row + mine[j]);
      }
      for (int64_t j = offsets[begin]; j < offsets[end]; ++j) {
        row[j] = r.row[edge[j]];
        if (static_cast<uint64_t>(row[j]) >= num_sources)
          fault_ = "expected 'edge_index' to hold ids of nodes that exist";
      }
    });
    if (fault())
      return 0;
    number(r, row, col, offsets[count]);
    return offsets[count];
  }

 private:
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };

  // The edges that a sampled node may draw from.
  Range range(const Relation<I>& r, int64_t position, int64_t k) {
    const Positions<I>& targets = types[r.target].positions;
    const int64_t node = targets.node(position);
    if (node >= r.num_targets) {
      fault_ = "expected 'colptr' to have an entry for every node";
      return {};
    }
    int64_t begin = r.colptr[node], end = r.colptr[node + 1];
    if (begin < 0 || end < begin || end > r.num_edges) {
      fault_ = "expected 'colptr' to ascend from 0 to the number of edges";
      return {};
    }
    const NodeType<I>& sources = types[r.source];
    if (!(r.time || sources.time) || begin == end)
      return {begin, end};
    auto time_of = [&](int64_t e) {
      if (r.time)
        return r.time[e];
      const int64_t id = r.row[e];
      if (id >= 0 && id < sources.num_times)
        return sources.time[id];
      fault_ = "expected the times of nodes to have an entry for every node";
      return int64_t{0};
    };
    const int64_t now = seed_times[targets.batch(position)];
    int64_t low = begin;  // up to which times are not later
    for (int64_t high = end; low < high;) {
      const int64_t middle = low + (high - low) / 2;
      time_of(middle) <= now ? low = middle + 1 : high = middle;
    }
    end = low;
    if (last && k >= 0)
      begin = std::max(begin, end - k);
    if (begin < end && time_of(begin) > time_of(end - 1))
      fault_ = "expected the edges of each target to be sorted by time";
    return {begin, end};
  }

  // How many edges of a range are drawn. Edges of weight 0 are only taken if all edges are.
  int64_t picks(const Relation<I>& r, Range range, int64_t k) {
    const int64_t degree = range.end - range.begin;
    if (takes_all(degree, k))
      return degree;
    int64_t eligible = degree;
    if (r.weighted()) {
      eligible = 0;
      for (int64_t e = range.begin; e < range.end; ++e) {
        const double weight = r.weight_of(e);
        if (!(weight >= 0 && weight < std::numeric_limits<double>::infinity()))
          fault_ = "expected the weights of edges to be finite and not negative";
        eligible += weight > 0;
      }
    }
    return replace && eligible > 0 ? k : std::min(k, eligible);
  }

  bool takes_all(int64_t degree, int64_t k) const { return k < 0 || (!replace && k >= degree); }

  // Writes the `size` edges that are drawn from a range.
  void pick(const Relation<I>& r,
            Range range,
            int64_t k,
            int64_t size,
            Random random,
            I* out,
            Scratch& scratch) const {
    const int64_t degree = range.end - range.begin;
    if (takes_all(degree, k)) {
      for (int64_t j = 0; j < size; ++j)
        out[j] = static_cast<I>(range.begin + j);
    } else if (size > 0 && r.weighted()) {
      replace ? pick_weighted_again(r, range, size, random, out, scratch)
              : pick_weighted(r, range, size, random, out, scratch);
    } else if (replace) {
      for (int64_t j = 0; j < size; ++j)
        out[j] = static_cast<I>(range.begin + random.below(degree));
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
        int64_t at = random.below(most + 1);
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
                            Range range,
                            int64_t size,
                            Random& random,
                            I* out,
                            Scratch& scratch) {
    std::vector<std::pair<double, int64_t>>& keys = scratch.keys;
    keys.clear();
    for (int64_t e = range.begin; e < range.end; ++e) {
      const double weight = r.weight_of(e);
      if (weight > 0)
        keys.emplace_back(-std::log(random.uniform()) / weight, e);
    }
    std::nth_element(keys.begin(), keys.begin() + (size - 1), keys.end());
    for (int64_t j = 0; j < size; ++j)
      out[j] = static_cast<I>(keys[j].second);
  }

  static void pick_weighted_again(const Relation<I>& r,
                                  Range range,
                                  int64_t size,
                                  Random& random,
                                  I* out,
                                  Scratch& scratch) {
    std::vector<double>& sums = scratch.sums;
    sums.clear();
    double total = 0;
    for (int64_t e = range.begin; e < range.end; ++e)
      sums.push_back(total += r.weight_of(e));
    for (int64_t j = 0; j < size; ++j) {
      // The first sum that reaches the draw, which is positive: never an edge of weight 0.
      const double draw = random.uniform() * total;
      const int64_t at = std::lower_bound(sums.begin(), sums.end(), draw) - sums.begin();
      out[j] = static_cast<I>(range.begin + at);
    }
  }

  // Replaces ids of sources by their positions among the sampled nodes.
  void number(const Relation<I>& r, I* row, const I* col, int64_t count) {
    Positions<I>& sources = types[r.source].positions;
    const Positions<I>& targets = types[r.target].positions;
    for (int64_t j = 0; j < count; ++j) {
      if (j + kAhead < count)
        sources.prefetch(row[j + kAhead], targets.batch(col[j + kAhead]));
      row[j] = static_cast<I>(sources.insert(row[j], targets.batch(col[j])));
    }
  }

  std::vector<Range> ranges_;
  uint64_t streams_ = 0;
  std::atomic<const char*> fault_{nullptr};
};

template <class I>
std::string run(NeighborSampler<I>& sampler,
                bool induced,
                int64_t hops,
                std::vector<int64_t>& sizes) {
  for (NodeType<I>& type : sampler.types)
    sizes.push_back(type.end);
  for (int64_t ell = 0; ell < hops; ++ell) {
    if (induced && ell + 1 == hops)
      sampler.restart();
    for (Relation<I>& r : sampler.relations)
      sizes.push_back(sampler.hop(r, ell));
    for (NodeType<I>& type : sampler.types) {
      type.begin = type.end;
      type.end = type.positions.size();
      sizes.push_back(type.end - type.begin);
    }
    if (sampler.fault())
      return sampler.fault();
  }
  return "";
}

// Relation r has the edges from nodes of type ends[2 r] to those of type ends[2 r + 1]. Empty
// tensors mean that there are no times or weights. Returns row, col and edge of each relation, node
// and batch of each type; the number of seeds of each type, and for every hop the number of edges
// of each relation and of nodes of each type; and what is wrong with the graph, or nothing.
//
// The last hop of an `induced` subgraph begins at all nodes, and its edges are all that there are.
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
  const bool wide = num_relations == 0 || is_wide(colptr[0], "colptr");
  const Tensor& like = num_relations ? colptr[0] : seed[0];
  int64_t num_seeds = 0;
  for (const Tensor& ids : seed)
    num_seeds += ids.numel();
  std::vector<Tensor> out;
  std::vector<int64_t> sizes;
  std::string fault;
  auto sample = [&]<class I>(I) {
    NeighborSampler<I> sampler{replace, last, static_cast<uint64_t>(random_seed)};
    if (const int64_t* times = longs(seed_time)) {
      STD_TORCH_CHECK(seed_time.numel() == num_seeds, "expected a time of every seed");
      sampler.seed_times.assign(times, times + num_seeds);
    }
    int64_t batch = 0;
    for (size_t t = 0; t < num_types; ++t) {
      const int64_t count = seed[t].numel(), *ids = longs(seed[t]);
      sampler.types.push_back({Positions<I>(like, num_nodes[t], disjoint ? num_seeds : 0),
                               num_nodes[t], longs(node_time[t]), node_time[t].numel(), 0, count});
      for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= num_nodes[t]) {
          fault = "expected 'seed' to hold ids of nodes that exist";
          return;
        }
        sampler.types.back().positions.append(static_cast<I>(ids[i]), disjoint ? batch++ : 0);
      }
    }
    for (size_t i = 0; i < num_relations; ++i) {
      check_vector(colptr[i], "colptr", colptr[i].numel(), wide);
      check_vector(row[i], "row", row[i].numel(), wide);
      const int64_t count = row[i].numel();
      const Tensor& weight = edge_weight[i];
      STD_TORCH_CHECK((edge_time[i].numel() == 0 || edge_time[i].numel() == count) &&
                          (weight.numel() == 0 ||
                           (weight.numel() == count && weight.is_cpu() && weight.is_contiguous())),
                      "expected a time and a weight of every edge");
      const bool narrow = weight.scalar_type() == ScalarType::Float;
      STD_TORCH_CHECK(narrow || weight.scalar_type() == ScalarType::Double,
                      "expected weights of float32 or float64");
      const void* weights = weight.numel() ? weight.const_data_ptr() : nullptr;
      const Tensor empty = new_result(like, {0});
      sampler.relations.push_back(
          {static_cast<const I*>(colptr[i].const_data_ptr()),
           static_cast<const I*>(row[i].const_data_ptr()), colptr[i].numel() - 1, count,
           longs(edge_time[i]), narrow ? static_cast<const float*>(weights) : nullptr,
           narrow ? nullptr : static_cast<const double*>(weights), ends[2 * i], ends[2 * i + 1],
           num_neighbors.data() + i * hops, empty, empty, empty});
      const bool timed = edge_time[i].numel() || sampler.types[ends[2 * i]].time;
      STD_TORCH_CHECK(!timed || (disjoint && seed_time.numel() == num_seeds),
                      "expected disjoint subgraphs and times of the seeds");
    }
    fault = run(sampler, induced, hops, sizes);
    if (!fault.empty())
      return;
    auto copy = [&](const std::vector<I>& from) {
      out.push_back(new_result(like, {static_cast<int64_t>(from.size())}));
      if (!from.empty())
        __builtin_memcpy(out.back().mutable_data_ptr(), from.data(), from.size() * sizeof(I));
    };
    for (const Relation<I>& r : sampler.relations)
      out.insert(out.end(), {r.sampled_row, r.sampled_col, r.sampled_edge});
    for (const NodeType<I>& type : sampler.types) {
      copy(type.positions.nodes());
      copy(type.positions.batches());
    }
  };
  wide ? sample(int64_t{}) : sample(int32_t{});
  Tensor counts = new_result(like, {static_cast<int64_t>(sizes.size())}, ScalarType::Long);
  std::copy(sizes.begin(), sizes.end(), static_cast<int64_t*>(counts.mutable_data_ptr()));
  return {out, counts, fault};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("neighbor_sample", TORCH_BOX(&neighbor_sample));
}

}  // namespace pyg_accel
