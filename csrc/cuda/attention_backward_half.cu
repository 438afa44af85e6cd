#include "cuda/attention_backward_kernel.cuh"

namespace pyg_accel {

void target_numbers_half(const TargetNumbersArgs& args, cudaStream_t stream) {
  launch_target_numbers<__half>(args, stream);
}

void attention_backward_half(int depth, const AttentionBackwardArgs& args, cudaStream_t stream) {
  launch_attention_backward<__half>(depth, args, stream);
}

}  // namespace pyg_accel
