#include "cuda/spmm_kernel.cuh"
#include "cuda/variants.h"

namespace pyg_accel {

void spmm_half(int window, const SpmmArgs& args, cudaStream_t stream) {
  launch_spmm<__half, false>(window, args, stream);
}

}  // namespace pyg_accel
