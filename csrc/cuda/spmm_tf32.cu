#include "cuda/spmm_kernel.cuh"
#include "cuda/variants.h"

namespace pyg_accel {

void spmm_tf32(int window, const SpmmArgs& args, cudaStream_t stream) {
  launch_spmm<float, false>(window, args, stream);
}

}  // namespace pyg_accel
