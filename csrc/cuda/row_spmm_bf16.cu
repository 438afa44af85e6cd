#include "cuda/row_spmm_kernel.cuh"

namespace pyg_accel {

void row_spmm_bf16(RowReduce reduce, const RowSpmmArgs& args, cudaStream_t stream) {
  row_spmm<__nv_bfloat16>(reduce, args, stream);
}

}  // namespace pyg_accel
