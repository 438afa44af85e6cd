// What the samplers of neighbours of both libraries share, in plain pointers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PYG_ACCEL_ANYWHERE __host__ __device__
#else
#define PYG_ACCEL_ANYWHERE
#endif

namespace pyg_accel {

// What is wrong with the arguments. Of several faults the last of these is reported.
enum class Fault : int64_t {
  kNone,
  kMany,
  kRow,
  kWeights,
  kSorted,
  kTimes,
  kOrder,
  kColptr,
  kSeed
};

// The edges of a type, by target.
struct Neighbors {
  const void* colptr;  // [num_targets + 1], int32 or int64
  const void* row;     // [num_edges]
  int64_t num_targets;
  int64_t num_edges;
  const int64_t* edge_time;  // null without
  const int64_t* node_time;  // [num_times], of the sources; null without
  int64_t num_times;
  const float* weight;  // one of the two, or none
  const double* wide_weight;
  int64_t source;  // the types of both ends
  int64_t target;
  const int64_t* num_neighbors;  // of every hop

  PYG_ACCEL_ANYWHERE bool timed() const { return edge_time || node_time; }
  PYG_ACCEL_ANYWHERE bool weighted() const { return weight || wide_weight; }
  PYG_ACCEL_ANYWHERE double weight_of(int64_t e) const {
    return weight ? weight[e] : wide_weight[e];
  }
};

// How edges are drawn.
struct Draws {
  const int64_t* seed_time;  // by batch; null without
  uint64_t seed;             // of random numbers
  bool replace;
  bool last;  // in time
  bool wide;  // ids are int64

  // Whether all edges of a target are taken, where `k` are asked for.
  PYG_ACCEL_ANYWHERE bool takes_all(int64_t degree, int64_t k) const {
    return k < 0 || (!replace && k >= degree);
  }
};

// Random numbers of one target by their number, those of SplitMix64 from a state that the seed and
// the number of the stream tell. Threads need no state, and results do not depend on which of them
// drew what.
class Random {
 public:
  PYG_ACCEL_ANYWHERE Random(uint64_t seed, uint64_t stream) : state_(mix(seed + mix(stream))) {}

  PYG_ACCEL_ANYWHERE uint64_t at(uint64_t index) const {
    return mix(state_ + (index + 1) * 0x9E3779B97F4A7C15u);
  }
  PYG_ACCEL_ANYWHERE int64_t below(int64_t n, uint64_t index) const {
    return static_cast<int64_t>(static_cast<unsigned __int128>(at(index)) * n >> 64);
  }
  PYG_ACCEL_ANYWHERE double uniform(uint64_t index) const {  // in (0, 1]
    return static_cast<double>((at(index) >> 11) + 1) * 0x1p-53;
  }

 private:
  PYG_ACCEL_ANYWHERE static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

// The edges that a sampled node may draw from.
struct EdgeRange {
  int64_t begin = 0;
  int64_t end = 0;
};

template <typename Index>
PYG_ACCEL_ANYWHERE int64_t time_of(const Neighbors& graph, int64_t e, Fault& fault) {
  if (graph.edge_time)
    return graph.edge_time[e];
  const int64_t id = static_cast<const Index*>(graph.row)[e];
  if (id >= 0 && id < graph.num_times)
    return graph.node_time[id];
  fault = Fault::kTimes;
  return 0;
}

// Of a graph with times, the edges that are not later than `now`, and of these the last `most`; all
// of them if that is negative. Writes to `fault` if there is one.
template <typename Index>
PYG_ACCEL_ANYWHERE EdgeRange
range_of(const Neighbors& graph, int64_t node, int64_t now, int64_t most, Fault& fault) {
  if (node >= graph.num_targets) {
    fault = Fault::kColptr;
    return {};
  }
  const Index* colptr = static_cast<const Index*>(graph.colptr);
  int64_t begin = colptr[node], end = colptr[node + 1];
  if (begin < 0 || end < begin || end > graph.num_edges) {
    fault = Fault::kOrder;
    return {};
  }
  if (!graph.timed() || begin == end)
    return {begin, end};
  int64_t low = begin;  // up to which times are not later
  for (int64_t high = end; low < high;) {
    const int64_t middle = low + (high - low) / 2;
    if (time_of<Index>(graph, middle, fault) <= now)
      low = middle + 1;
    else
      high = middle;
  }
  end = low;
  if (most >= 0 && end - begin > most)
    begin = end - most;
  if (begin < end && time_of<Index>(graph, begin, fault) > time_of<Index>(graph, end - 1, fault) &&
      fault == Fault::kNone)
    fault = Fault::kSorted;
  return {begin, end};
}

}  // namespace pyg_accel
