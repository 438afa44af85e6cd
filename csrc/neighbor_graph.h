// What a neighbour sampler is asked for, in plain pointers.
#pragma once

#include <cstdint>

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
};

}  // namespace pyg_accel
