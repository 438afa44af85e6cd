#include "cuda/row_spmm_kernel.cuh"

namespace pyg_accel {

void row_spmm_half(RowReduce reduce, const RowSpmmArgs& args, cudaStream_t stream) {
  row_spmm<__half>(reduce, args, stream);
}

}  // namespace pyg_accel
