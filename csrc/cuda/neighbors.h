// Neighbour sampling as the bindings see it: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/allocate.h"
#include "neighbor_graph.h"

namespace pyg_accel {

// The sampled nodes of a type, in the order of their first appearance. In disjoint subgraphs, nodes
// of different seeds (batches) are different. Their positions are in a table with open addressing,
// at most half full.
struct SampledNodes {
  void* id;             // [capacity], int32 or int64
  void* batch;          // [capacity], or null: one batch
  int64_t num_nodes;    // of the graph
  uint64_t* keys;       // [mask + 1]; all bits are set in free slots,
  uint32_t* positions;  // and in their positions
  uint64_t mask;
  int shift;  // 64 minus the bits of the mask
};

// Sample the neighbours of the nodes of the last hop, along edges of one type.
struct HopArgs : Draws {
  Neighbors graph;
  SampledNodes sources;
  SampledNodes targets;
  uint64_t stream;  // of random numbers, of the first target
  int64_t k;
  int64_t first;               // position of the first target
  int64_t count;               // of targets; before their number is known, the most there can be
  const int64_t* num_targets;  // sampled so far, on the device
  int64_t* begin;              // [count], of the edges that may be drawn
  int64_t* degree;             // [count], their number
  int64_t* offset;             // [count + 1], where the drawn edges of each target begin
  int64_t size;                // number of drawn edges
  void* row;                   // [size]
  void* col;
  void* edge;
  uint32_t* slot;         // [size], where each source is in the table
  int32_t* rank;          // [size + 1], new sources in front of each edge
  const int64_t* before;  // number of sources, on the device
  int64_t* after;
  int64_t* fault;
};

// Writes ids and batches of seeds; the first seed has the batch `first_batch`.
void neighbor_seeds_cuda(const SampledNodes& nodes,
                         const int64_t* seed,
                         int64_t count,
                         int64_t first_batch,
                         bool wide,
                         int64_t* fault,
                         cudaStream_t stream);

// Puts the first `count` nodes into an empty table.
void neighbor_table_cuda(const SampledNodes& nodes, int64_t count, bool wide, cudaStream_t stream);

// Writes `begin`, `degree` and `offset`; its last element is the number of drawn edges.
void neighbor_count_cuda(const HopArgs& args, const Allocate& allocate, cudaStream_t stream);

// Draws the edges, and numbers their sources.
void neighbor_draw_cuda(const HopArgs& args, const Allocate& allocate, cudaStream_t stream);

// A part of the above: many draws without replacement, and draws by weight.
void neighbor_select_cuda(const HopArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
