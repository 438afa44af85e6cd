#include "cuda/attention_kernel.cuh"

namespace pyg_accel {

void attention_half(int depth, const AttentionArgs& args, cudaStream_t stream) {
  launch_attention<__half>(depth, args, stream);
}

}  // namespace pyg_accel
