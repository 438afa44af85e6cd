#include "cuda/sddmm_kernel.cuh"
#include "cuda/variants.h"

namespace pyg_accel {

void sddmm_exact(int window, const SddmmArgs& args, cudaStream_t stream) {
  launch_sddmm<float, true>(window, args, stream);
}

}  // namespace pyg_accel
