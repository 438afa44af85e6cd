// The kernels by element type, each compiled in a file of its own.
#pragma once

#include "cuda/kernels.h"

namespace pyg_accel {

// Windows of 16, 32 or 64 rows. `exact`: products of float32 to about 2^-21, the others to 2^-11.
void spmm_tf32(int window, const SpmmArgs& args, cudaStream_t stream);
void spmm_exact(int window, const SpmmArgs& args, cudaStream_t stream);
void spmm_bf16(int window, const SpmmArgs& args, cudaStream_t stream);
void spmm_half(int window, const SpmmArgs& args, cudaStream_t stream);

// The same for the sampled product.
void sddmm_tf32(int window, const SddmmArgs& args, cudaStream_t stream);
void sddmm_exact(int window, const SddmmArgs& args, cudaStream_t stream);
void sddmm_bf16(int window, const SddmmArgs& args, cudaStream_t stream);
void sddmm_half(int window, const SddmmArgs& args, cudaStream_t stream);

}  // namespace pyg_accel
