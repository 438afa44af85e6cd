#include "cuda/sddmm_kernel.cuh"
#include "cuda/variants.h"

namespace pyg_accel {

void sddmm_bf16(int window, const SddmmArgs& args, cudaStream_t stream) {
  launch_sddmm<__nv_bfloat16, false>(window, args, stream);
}

}  // namespace pyg_accel
