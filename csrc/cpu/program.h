// Programs of the register machine, from the integers that pyg_accel/backends/cpu/program.py
// writes.
#pragma once

#include "tensors.h"

namespace pyg_accel {

inline constexpr int kFields =
    6;  // of an instruction: op, a, b, bits of the value, wide, invariant

inline bool is_index(const Tensor& t) {
  return t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long;
}

// An operand [rows, 1 | heads, 1 | width].
Operand operand_of(const Tensor& t, int64_t side, DType dtype, int64_t heads, int64_t width);

// Fills in the instructions of a program, which has its operands, from `fields` integers.
void set_instructions(ProgramArgs& args, const int64_t* code, int64_t fields);

// Raises unless the operands have the numbers of rows of the graph.
void check_sides(const Csr& csr,
                 const std::vector<Tensor>& operands,
                 const std::vector<int64_t>& sides);

}  // namespace pyg_accel
