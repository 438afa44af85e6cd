#include "cuda/attention_kernel.cuh"

namespace pyg_accel {

void attention_bf16(int depth, const AttentionArgs& args, cudaStream_t stream) {
  launch_attention<__nv_bfloat16>(depth, args, stream);
}

}  // namespace pyg_accel
