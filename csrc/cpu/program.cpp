// Operands and instructions of the register machine (machine.h).
#include "program.h"

#include <algorithm>

namespace pyg_accel {

Operand operand_of(const Tensor& t, int64_t side, DType dtype, int64_t heads, int64_t width) {
  if (!is_index(t))
    check_features(t, "operands", dtype);
  STD_TORCH_CHECK(t.dim() == 3 && (t.size(1) == 1 || t.size(1) == heads) &&
                      (t.size(2) == 1 || t.size(2) == width),
                  "expected every operand to be [rows, 1 or H, 1 or F]");
  return Operand{t.const_data_ptr(),
                 t.stride(0),
                 static_cast<int>(side),
                 t.size(1) == heads && heads > 1,
                 t.size(2) == width && width > 1,
                 is_index(t)};
}

void set_instructions(ProgramArgs& args, const int64_t* code, int64_t fields) {
  STD_TORCH_CHECK(fields % kFields == 0 && fields / kFields <= kMaxInstructions,
                  "a message formula has at most ", kMaxInstructions, " operations");
  args.num_instructions = static_cast<int>(fields) / kFields;
  for (int i = 0; i < args.num_instructions; ++i) {
    const int64_t* field = code + i * kFields;
    args.instructions[i] =
        Instruction{static_cast<Op>(field[0]),       static_cast<int>(field[1]),
                    static_cast<int>(field[2]),      std::bit_cast<double>(field[3]),
                    field[4] != 0 && args.width > 1, field[5] != 0};
    // Arguments of functions without one are 0; only the second of `select` may be an index.
    const Op op = args.instructions[i].op;
    const bool binary = static_cast<int>(op) < kBinaryOps;
    auto is_index = [&](int64_t r) { return r < args.num_operands && args.operands[r].index; };
    STD_TORCH_CHECK((op == Op::kConst || !is_index(field[1])) &&
                        (!binary || is_index(field[2]) == (op == Op::kSel)),
                    "an operand of indices may only stand second in 'sel'");
    for (const int64_t input : {field[1], field[2]})
      STD_TORCH_CHECK(input >= 0 && input < args.num_operands + std::max(i, 1),
                      "a message formula may only use what it has computed");
  }
}

void check_sides(const Csr& csr,
                 const std::vector<Tensor>& operands,
                 const std::vector<int64_t>& sides) {
  STD_TORCH_CHECK(operands.size() == sides.size(), "expected a side for every operand");
  for (size_t i = 0; i < operands.size(); ++i) {
    const int64_t rows = sides[i] == Operand::kSource   ? csr.num_cols
                         : sides[i] == Operand::kTarget ? csr.num_rows
                                                        : csr.num_entries;
    STD_TORCH_CHECK(sides[i] < 0 || operands[i].size(0) == rows, "expected operand ",
                    static_cast<int64_t>(i), " to have ", rows, " rows");
  }
}

}  // namespace pyg_accel
