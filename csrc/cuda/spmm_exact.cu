#include "cuda/spmm_kernel.cuh"
#include "cuda/variants.h"

namespace pyg_accel {

void spmm_exact(int window, const SpmmArgs& args, cudaStream_t stream) {
  launch_spmm<float, true>(window, args, stream);
}

}  // namespace pyg_accel
