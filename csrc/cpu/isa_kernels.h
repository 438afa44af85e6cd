// The kernels of one instruction set in one dtype, and the table of them.

namespace pyg_accel {
namespace PYG_ACCEL_ISA {

#include "vec.h"

#include "math.h"

#include "lanes.h"

#include "cbsr_kernel.h"
#include "dot_kernel.h"

#include "scratch.h"

#include "machine.h"
#include "maxk_kernel.h"
#include "reduce.h"
#include "sampled_kernel.h"
#include "spmm_kernel.h"
#include "stages_kernel.h"

using Dtype = PYG_ACCEL_DTYPE;

#define PYG_ACCEL_PAIR_OF(fn, T) {fn<T, int32_t>, fn<T, int64_t>}
#define PYG_ACCEL_PAIR(fn) PYG_ACCEL_PAIR_OF(fn, Dtype)

// A template, so that kernels that a dtype does not have are not compiled.
template <class T>
constexpr CbsrKernels cbsr_kernels() {
  if constexpr (std::is_floating_point_v<T>) {
    return {
        .spmm_rows = PYG_ACCEL_PAIR_OF(cbsr_spmm_rows, T),
        .spmm_piece = PYG_ACCEL_PAIR_OF(cbsr_spmm_piece, T),
        .spmm_combine = PYG_ACCEL_PAIR_OF(cbsr_spmm_combine, T),
        .sspmm_cols = PYG_ACCEL_PAIR_OF(cbsr_sspmm_cols, T),
        .dot_rows = PYG_ACCEL_PAIR_OF(cbsr_dot_rows, T),
        .dot_piece = PYG_ACCEL_PAIR_OF(cbsr_dot_piece, T),
    };
  } else {
    return {};
  }
}

template <class T, class I>
constexpr SampledRows sampled_int8() {
  if constexpr (std::is_same_v<T, float>)
    return sampled_rows<int8_t, I>;
  else
    return nullptr;
}

const Kernels& kernels_of(Dtype) {
  static constexpr Kernels table = {
      .spmm_rows = PYG_ACCEL_PAIR(spmm_rows),
      .spmm_piece = PYG_ACCEL_PAIR(spmm_piece),
      .spmm_combine = PYG_ACCEL_PAIR(spmm_combine),
      .dot_rows = PYG_ACCEL_PAIR(dot_rows),
      .dot_piece = PYG_ACCEL_PAIR(dot_piece),
      .softmax_rows = PYG_ACCEL_PAIR(softmax_rows),
      .stages_rows = PYG_ACCEL_PAIR(stages_rows),
      .stages_piece = PYG_ACCEL_PAIR(stages_piece),
      .stages_combine = PYG_ACCEL_PAIR(stages_combine),
      .row_dots = row_dots<Dtype>,
      .maxk_rows = maxk_rows<Dtype>,
      .sampled_rows = PYG_ACCEL_PAIR(sampled_rows),
      .cbsr = cbsr_kernels<Dtype>(),
      .sampled_int8 = {sampled_int8<Dtype, int32_t>(), sampled_int8<Dtype, int64_t>()},
  };
  return table;
}

}  // namespace PYG_ACCEL_ISA
}  // namespace pyg_accel
