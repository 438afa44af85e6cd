// The body of one instruction set: its kernels in a namespace of their own, and the table of them.

namespace pyg_accel {
namespace PYG_ACCEL_ISA {

#include "vec.h"

#include "math.h"

#include "cbsr_kernel.h"
#include "dot_kernel.h"

#include "cbsr_linear_kernel.h"
#include "scratch.h"

#include "machine.h"
#include "maxk_kernel.h"
#include "program_kernel.h"
#include "sampled_kernel.h"
#include "spmm_kernel.h"
#include "stages_kernel.h"

#include "stages_rows.h"

}  // namespace PYG_ACCEL_ISA

#define PYG_ACCEL_STRING_(x) #x
#define PYG_ACCEL_STRING(x) PYG_ACCEL_STRING_(x)
// In the order of DType, each with 32-bit and 64-bit indices.
#define PYG_ACCEL_EACH(fn)                                                        \
  {                                                                               \
    {PYG_ACCEL_ISA::fn<float, int32_t>, PYG_ACCEL_ISA::fn<float, int64_t>},       \
        {PYG_ACCEL_ISA::fn<double, int32_t>, PYG_ACCEL_ISA::fn<double, int64_t>}, \
        {PYG_ACCEL_ISA::fn<bf16, int32_t>, PYG_ACCEL_ISA::fn<bf16, int64_t>}, {   \
      PYG_ACCEL_ISA::fn<fp16, int32_t>, PYG_ACCEL_ISA::fn<fp16, int64_t>          \
    }                                                                             \
  }
// Float and double, each with 32-bit and 64-bit indices.
#define PYG_ACCEL_EACH_WIDE(fn)                                               \
  {                                                                           \
    {PYG_ACCEL_ISA::fn<float, int32_t>, PYG_ACCEL_ISA::fn<float, int64_t>}, { \
      PYG_ACCEL_ISA::fn<double, int32_t>, PYG_ACCEL_ISA::fn<double, int64_t>  \
    }                                                                         \
  }
// Float and double, each with columns of CBSR in 8 and in 16 bits.
#define PYG_ACCEL_EACH_COLUMN(fn)                                              \
  {                                                                            \
    {PYG_ACCEL_ISA::fn<float, uint8_t>, PYG_ACCEL_ISA::fn<float, uint16_t>}, { \
      PYG_ACCEL_ISA::fn<double, uint8_t>, PYG_ACCEL_ISA::fn<double, uint16_t>  \
    }                                                                          \
  }

const KernelTable PYG_ACCEL_TABLE = {
    PYG_ACCEL_STRING(PYG_ACCEL_ISA),
    PYG_ACCEL_EACH(spmm_rows),
    PYG_ACCEL_EACH(spmm_piece),
    PYG_ACCEL_EACH(spmm_combine),
    PYG_ACCEL_EACH(program_rows),
    PYG_ACCEL_EACH(program_list),
    PYG_ACCEL_EACH(program_piece),
    PYG_ACCEL_EACH(program_combine),
    PYG_ACCEL_EACH(dot_rows),
    PYG_ACCEL_EACH(dot_piece),
    PYG_ACCEL_EACH(softmax_rows),
    PYG_ACCEL_EACH(stages_rows),
    PYG_ACCEL_EACH(stages_piece),
    PYG_ACCEL_EACH(stages_combine),
    PYG_ACCEL_EACH(row_dots),
    {PYG_ACCEL_ISA::maxk_rows<float>, PYG_ACCEL_ISA::maxk_rows<double>,
     PYG_ACCEL_ISA::maxk_rows<bf16>, PYG_ACCEL_ISA::maxk_rows<fp16>},
    PYG_ACCEL_EACH_WIDE(cbsr_spmm_rows),
    PYG_ACCEL_EACH_WIDE(cbsr_spmm_piece),
    PYG_ACCEL_EACH_WIDE(cbsr_spmm_combine),
    PYG_ACCEL_EACH_WIDE(cbsr_sspmm_cols),
    PYG_ACCEL_EACH_WIDE(cbsr_dot_rows),
    PYG_ACCEL_EACH_WIDE(cbsr_dot_piece),
    PYG_ACCEL_EACH_COLUMN(cbsr_mm_rows),
    PYG_ACCEL_EACH_COLUMN(cbsr_sddmm_rows),
    PYG_ACCEL_EACH_COLUMN(cbsr_mm_t_rows),
    {{PYG_ACCEL_ISA::sampled_rows<float, int32_t>, PYG_ACCEL_ISA::sampled_rows<float, int64_t>},
     {PYG_ACCEL_ISA::sampled_rows<double, int32_t>, PYG_ACCEL_ISA::sampled_rows<double, int64_t>},
     {PYG_ACCEL_ISA::sampled_rows<bf16, int32_t>, PYG_ACCEL_ISA::sampled_rows<bf16, int64_t>},
     {PYG_ACCEL_ISA::sampled_rows<fp16, int32_t>, PYG_ACCEL_ISA::sampled_rows<fp16, int64_t>},
     {PYG_ACCEL_ISA::sampled_rows<int8_t, int32_t>, PYG_ACCEL_ISA::sampled_rows<int8_t, int64_t>},
     {PYG_ACCEL_ISA::sampled_rows<fp8, int32_t>, PYG_ACCEL_ISA::sampled_rows<fp8, int64_t>}},
};

}  // namespace pyg_accel
