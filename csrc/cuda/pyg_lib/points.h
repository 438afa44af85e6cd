// The nearest points of each query, as the bindings see it: plain pointers, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/allocate.h"

namespace pyg_accel {

constexpr int kMostNeighbors = 256;  // of a query
constexpr int64_t kMostDims = 1024;  // of a point

// Cells of one size in three dimensions, the same for every example. Points are in the order of
// their cells: of an example, z, y and x. So the cells between two x are one range of points.
struct Cells {
  const int32_t* ptr = nullptr;    // [examples * z * y * x + 1]; null to read whole examples
  const int32_t* point = nullptr;  // [num_points], the id of each
  const int32_t* query = nullptr;  // [num_queries], an order in which neighbours are near
  int sizes[3] = {};               // numbers of cells along x, y and z
  float origin[3] = {};
  float size = 0;
  float slack = 0;  // by how much rounding may move a point out of its cell
};

struct PointArgs {
  const float* x;        // [dims, num_points]
  const float* y;        // [num_queries, dims]
  const int64_t* ptr_x;  // [examples + 1], where the points of each example begin,
  const int64_t* ptr_y;  // and its queries
  int64_t num_points;
  int64_t num_queries;
  int64_t examples;
  int dims;
  int most;        // points of a query
  int shared;      // memory of a warp, in float4: set by the launch
  float limit;     // squared distances are below
  bool skip_same;  // leave out the point that has the number of the query
  Cells cells;
  int64_t* keys;   // [num_queries, most], the bits of a squared distance above the id of its point
  int64_t* begin;  // [num_queries + 1], where the neighbours of each query begin in the result
};

// Writes `keys` and `begin`; by distance, equal distances by id.
void nearest_points_cuda(PointArgs& args, const Allocate& allocate, cudaStream_t stream);

// Writes queries and ids of points, each [count].
void write_neighbors_cuda(const PointArgs& args,
                          int64_t* query,
                          int64_t* point,
                          cudaStream_t stream);

}  // namespace pyg_accel
