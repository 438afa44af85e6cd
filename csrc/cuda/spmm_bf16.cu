#include "cuda/spmm_kernel.cuh"
#include "cuda/variants.h"

namespace pyg_accel {

void spmm_bf16(int window, const SpmmArgs& args, cudaStream_t stream) {
  launch_spmm<__nv_bfloat16, false>(window, args, stream);
}

}  // namespace pyg_accel
