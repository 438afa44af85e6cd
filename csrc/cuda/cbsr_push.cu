// The gradient of a sum of CBSR features (the MaxK-GNN paper's SSpMM, section 4.2), by atomic
// additions: a warp copies its row into shared memory as cbsr.cuh says, once for every group of
// lanes, and reads it at the stored columns of its neighbours.
#include "cuda/cbsr.cuh"

namespace pyg_accel {
namespace {

constexpr int kAhead = 4;  // edges of a group of lanes whose columns are under way

// Copy columns [first, first + kLanes << shift) of a row; each lane copies the columns of its bank.
__device__ inline void copy_row(const CbsrPushArgs& args,
                                const float* x,
                                uint32_t bank,
                                int first) {
  const int depth = 1 << args.shift;
  const bool whole = args.width % kQuad == 0;
  for (int from = 0; from < depth; from += kQuad) {
    const int column = first + from;
    float quad[kQuad] = {};
    if (whole && column < args.width) {
      const float4 read = *reinterpret_cast<const float4*>(x + column);
      quad[0] = read.x, quad[1] = read.y, quad[2] = read.z, quad[3] = read.w;
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (!whole && column + i < args.width)
        quad[i] = x[column + i];
      store_shared(bank + (from + i) * 128, quad[i]);
    }
  }
}

template <typename Column, int kLanes>
__global__ void cbsr_push_kernel(CbsrPushArgs args) {
  constexpr int kGroups = 32 / kLanes;
  float4* shared = shared_memory();
  const int lane = threadIdx.x, group = lane / kLanes, member = lane % kLanes;
  Task task;
  if (!task.find(args.rows, blockIdx.x))
    return;
  if (task.begin == task.end)
    return;
  const int depth = 1 << args.shift;
  const uint32_t mine = address_of(shared);
  const uint32_t copy = mine + group * kLanes * 4;
  const float* x = args.x + task.row * args.width;
  const int chunks = (args.stride / kQuad + kLanes - 1) / kLanes;
  const int first = blockIdx.y * depth * kLanes;
  copy_row(args, x, mine + lane * 4, first + member * depth);
  __syncwarp();
  for (int32_t base = task.begin; base < task.end; base += 32) {
    const int count = min(task.end - base, 32);
    const uint32_t node = lane < count ? args.rows.col[base + lane] : 0;  // 0: any that exists
    const float scale = args.weight && lane < count ? args.weight[base + lane] : 1.f;
    for (int from = 0; from < count; from += kGroups * kAhead) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int slot = (member * chunks + chunk) * kQuad;
        const int valid = min(args.k - slot, kQuad);
        const int safe = min(slot, args.stride - kQuad);
        Quad<Column> columns[kAhead];
        uint32_t source[kAhead];
        float factor[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int edge = (from + a * kGroups + group) & 31;
          source[a] = __shfl_sync(~0u, node, edge);
          columns[a] = load_row<Column>(args.indices, source[a], args.stride, safe);
          factor[a] = __shfl_sync(~0u, scale, edge);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int live = from + a * kGroups + group < count ? valid : 0;
          if (live <= 0)
            continue;
          const Places at = places_of(columns[a], copy, args.shift, first, depth * kLanes);
          float term[kQuad] = {};
          bool any = false;
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            if (i >= live || (sizeof(Column) > 1 && at.address[i] == kNowhere))
              continue;
            any = true;
            term[i] = load_shared(at.address[i]) * factor[a];
          }
          if (any)
            add_four(args.out + static_cast<uint64_t>(source[a]) * args.stride + slot, term);
        }
      }
    }
  }
}

template <typename Column, int kLanes>
void launch(const CbsrPushArgs& args, cudaStream_t stream) {
  const int depth = 1 << args.shift, bytes = depth * 32 * 4;
  const unsigned slices = (args.width + depth * kLanes - 1) / (depth * kLanes);
  launch_kernel("cbsr_push", cbsr_push_kernel<Column, kLanes>,
                dim3(blocks_of(args.rows, 1), slices), 32, bytes, stream, args);
}

template <typename Column>
void launch(const CbsrPushArgs& args, cudaStream_t stream) {
  if (args.lanes == 4)
    launch<Column, 4>(args, stream);
  else if (args.lanes == 8)
    launch<Column, 8>(args, stream);
  else if (args.lanes == 16)
    launch<Column, 16>(args, stream);
  else
    launch<Column, 32>(args, stream);
}

}  // namespace

void cbsr_push_cuda(const CbsrPushArgs& args, cudaStream_t stream) {
  if (args.wide_columns)
    launch<uint16_t>(args, stream);
  else
    launch<uint8_t>(args, stream);
}

}  // namespace pyg_accel
