// A sparse matrix times CBSR features: a warp has a row and adds up in shared memory, without
// atomics (the MaxK-GNN paper's SpGEMM, section 4.1; see cbsr.cuh for where its columns lie).
#include "cuda/cbsr.cuh"

namespace pyg_accel {
namespace {

constexpr int kAhead = 4;  // edges of a group of lanes whose features are under way

// The features of a quad of slots, and their columns.
template <typename Value, typename Column>
struct Features {
  Quad<Value> value;
  Quad<Column> column;

  __device__ void load(const CbsrSpmmArgs& args, uint32_t source, int slot) {
    value = load_row<Value>(args.values, source, args.stride, slot);
    column = load_row<Column>(args.indices, source, args.stride, slot);
  }
  __device__ float get(int i) const { return float_of<Value>(value.bits(i)); }
};

template <typename Value, typename Column, int kLanes>
__global__ void cbsr_spmm_kernel(CbsrSpmmArgs args) {
  constexpr int kGroups = 32 / kLanes;
  constexpr bool kBlocks = kLanes == 32;  // of columns, where they do not all fit
  float4* shared = shared_memory();
  const int lane = threadIdx.x, group = lane / kLanes, member = lane % kLanes;
  Task task;
  if (!task.find(args.rows, blockIdx.x))
    return;
  const int depth = 1 << args.shift;
  for (int i = lane; i < depth * 8; i += 32)
    shared[i] = make_float4(0, 0, 0, 0);
  __syncwarp();
  const int first = blockIdx.y * depth * kLanes;
  float* sum = reinterpret_cast<float*>(shared);
  const uint32_t copy = address_of(sum + group * kLanes);

  const int chunks = (args.stride / kQuad + kLanes - 1) / kLanes;
  uint32_t next_node = 0;  // or any that exists
  float next_scale = 1;
  const auto read = [&](int32_t at) {
    next_node = at < task.end ? args.rows.col[at] : 0;
    if (args.weight && at < task.end)
      next_scale = args.weight[at];
  };
  read(task.begin + lane);
  for (int32_t base = task.begin; base < task.end; base += 32) {
    const int count = min(task.end - base, 32);
    const uint32_t node = next_node;
    const float scale = next_scale;
    read(base + 32 + lane);
    for (int from = 0; from < count; from += kGroups * kAhead) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int slot = (member * chunks + chunk) * kQuad;
        const int valid = min(args.k - slot, kQuad);
        const int safe = min(slot, args.stride - kQuad);
        Features<Value, Column> features[kAhead];
        float factor[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int edge = (from + a * kGroups + group) & 31;
          features[a].load(args, __shfl_sync(~0u, node, edge), safe);
          factor[a] = __shfl_sync(~0u, scale, edge);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int live = from + a * kGroups + group < count ? valid : 0;
          const Places at = places_of(features[a].column, copy, args.shift, first, depth * kLanes);
          if (live == kQuad && !kBlocks) {
            float before[kQuad];  // columns are distinct: all are read before any is written
#pragma unroll
            for (int i = 0; i < kQuad; ++i)
              before[i] = load_shared(at.address[i]);
#pragma unroll
            for (int i = 0; i < kQuad; ++i)
              store_shared(at.address[i], fmaf(factor[a], features[a].get(i), before[i]));
          } else {
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
              if (i >= live || at.address[i] == kNowhere)
                continue;
              const float before = load_shared(at.address[i]);
              store_shared(at.address[i], fmaf(factor[a], features[a].get(i), before));
            }
          }
          __syncwarp();
        }
      }
    }
  }

  // A lane adds up the copies of columns that follow one another, starting with another copy than
  // its neighbours do so that all banks are busy.
  float factor = 1;
  if (args.mean && task.end > task.begin && !task.piece)
    factor = 1.f / static_cast<float>(task.end - task.begin);
  const int share = depth / kGroups;
  for (int from = 0; from < share; from += kQuad) {
    const int row = group * share + from;
    float total[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      total[i] = 0;
#pragma unroll
      for (int turn = 0; turn < kGroups; ++turn)
        total[i] += sum[(row + i) * 32 + (group + turn) % kGroups * kLanes + member];
      total[i] *= factor;
    }
    const int column = first + member * depth + row;
    if (task.piece) {
      float* out = args.partial + static_cast<int64_t>(blockIdx.x) * args.width + column;
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        if (column + i < args.width)
          out[i] = total[i];
      continue;
    }
    Value* out = static_cast<Value*>(args.out) + task.row * args.width + column;
    if (args.width % kQuad == 0) {
      if (column < args.width)
        store_quad(out, total);
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        if (column + i < args.width)
          out[i] = rounded<Value>(total[i]);
    }
  }
}

template <typename Out>
__global__ void combine_kernel(CombineArgs args) {
  const int row = args.row[blockIdx.x];
  const float factor =
      args.rowptr ? 1.f / static_cast<float>(args.rowptr[row + 1] - args.rowptr[row]) : 1.f;
  for (int column = threadIdx.x; column < args.width; column += blockDim.x) {
    float total = 0;
    for (int64_t piece = args.first[blockIdx.x]; piece < args.first[blockIdx.x + 1]; ++piece)
      total += args.partial[piece * args.width + column];
    static_cast<Out*>(args.out)[static_cast<int64_t>(row) * args.width + column] =
        rounded<Out>(total * factor);
  }
}

template <typename Value, typename Column, int kLanes>
void launch(const CbsrSpmmArgs& args, cudaStream_t stream) {
  const int depth = 1 << args.shift, bytes = depth * 32 * 4;
  const unsigned slices = (args.width + depth * kLanes - 1) / (depth * kLanes);
  launch_kernel("cbsr_spmm", cbsr_spmm_kernel<Value, Column, kLanes>,
                dim3(blocks_of(args.rows, 1), slices), 32, bytes, stream, args);
}

template <typename Value, typename Column>
void launch(const CbsrSpmmArgs& args, cudaStream_t stream) {
  if (args.lanes == 4)
    launch<Value, Column, 4>(args, stream);
  else if (args.lanes == 8)
    launch<Value, Column, 8>(args, stream);
  else if (args.lanes == 16)
    launch<Value, Column, 16>(args, stream);
  else
    launch<Value, Column, 32>(args, stream);
}

template <typename Value>
void launch(const CbsrSpmmArgs& args, cudaStream_t stream) {
  if (args.wide_columns)
    launch<Value, uint16_t>(args, stream);
  else
    launch<Value, uint8_t>(args, stream);
}

}  // namespace

void cbsr_spmm_cuda(const CbsrSpmmArgs& args, cudaStream_t stream) {
  switch (args.stored) {
    case Stored::kFloat:
      return launch<float>(args, stream);
    case Stored::kBFloat16:
      return launch<__nv_bfloat16>(args, stream);
    case Stored::kHalf:
      return launch<__half>(args, stream);
  }
}

void combine_cuda(const CombineArgs& args, cudaStream_t stream) {
  if (args.count == 0)
    return;
  const auto kernel = args.stored == Stored::kBFloat16 ? combine_kernel<__nv_bfloat16>
                      : args.stored == Stored::kHalf   ? combine_kernel<__half>
                                                       : combine_kernel<float>;
  launch_kernel("combine", kernel, args.count, args.width < 256 ? 64 : 256, 0, stream, args);
}

}  // namespace pyg_accel
