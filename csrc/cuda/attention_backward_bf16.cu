#include "cuda/attention_backward_kernel.cuh"

namespace pyg_accel {

void target_numbers_bf16(const TargetNumbersArgs& args, cudaStream_t stream) {
  launch_target_numbers<__nv_bfloat16>(args, stream);
}

void attention_backward_bf16(int depth, const AttentionBackwardArgs& args, cudaStream_t stream) {
  launch_attention_backward<__nv_bfloat16>(depth, args, stream);
}

}  // namespace pyg_accel
