// Binary-reduce for any message formula (program_kernel.h).
#include "program.h"
#include "schedule.h"

namespace pyg_accel {

Operand operand_of(const Tensor& t, int64_t side, DType dtype, int64_t heads, int64_t width) {
  const bool index = t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long;
  if (!index)
    check_features(t, "operands", dtype);
  STD_TORCH_CHECK(t.dim() == 3 && (t.size(1) == 1 || t.size(1) == heads) &&
                      (t.size(2) == 1 || t.size(2) == width),
                  "expected every operand to be [rows, 1 or H, 1 or F]");
  return Operand{t.const_data_ptr(),
                 t.stride(0),
                 static_cast<int>(side),
                 t.size(1) == heads && heads > 1,
                 t.size(2) == width && width > 1,
                 index};
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

namespace {

// The ends of every edge, in the order of the edge list.
template <class I>
struct EdgeList {
  std::vector<I> rows, cols;

  explicit EdgeList(const Csr& csr) : rows(csr.num_entries), cols(csr.num_entries) {
    const I* rowptr = static_cast<const I*>(csr.rowptr);
    const I* col = static_cast<const I*>(csr.col);
    const I* eid = static_cast<const I*>(csr.eid);
    for (int64_t row = 0; row < csr.num_rows; ++row) {
      for (int64_t k = rowptr[row]; k < rowptr[row + 1]; ++k) {
        rows[eid[k]] = static_cast<I>(row);
        cols[eid[k]] = col[k];
      }
    }
  }
};

// Whether nothing is reduced, and rows of features are in the order of the edge list: reading and
// writing them in this order is faster than by rows of the graph, at random.
bool is_list(const ProgramArgs& args) {
  bool wide = !args.sum_result && args.width > 1;
  for (int i = 0; i < args.num_operands; ++i)
    wide |= args.operands[i].side == Operand::kEdge && args.operands[i].wide;
  return wide && args.csr.eid &&
         std::all_of(args.reduces, args.reduces + args.num_reduces,
                     [](Reduce r) { return r == Reduce::kNone; });
}

template <class I>
void run_list(ProgramArgs args, DType dtype) {
  const EdgeList<I> list(args.csr);
  args.rows = list.rows.data();
  args.csr.col = list.cols.data();
  args.csr.eid = nullptr;
  for (int i = 0; i < args.num_instructions; ++i)
    args.instructions[i].invariant = false;
  const auto run = kernels(dtype).program_list[args.csr.wide];
  const int64_t edges = args.csr.num_entries;
  const bool serial = edges * args.heads * args.width < kSerialElements;
  const int64_t tasks = serial ? 1 : torch::stable::get_num_threads() * 16;
  parallel_tasks(tasks, serial, [&](int64_t i) {
    run(args, Range{edges * i / tasks, edges * (i + 1) / tasks, 0, args.width});
  });
}

std::vector<Tensor> gspmm(const Tensor& rowptr,
                          const Tensor& col,
                          const std::optional<Tensor>& eid,
                          int64_t num_cols,
                          const std::vector<int64_t>& sides,
                          const std::vector<int64_t>& code,
                          int64_t result,
                          bool sum_result,
                          const Tensor& like,
                          int64_t heads,
                          int64_t width,
                          int64_t out_width,
                          const std::vector<int64_t>& reduces,
                          bool want_arg,
                          bool arg_is_col,
                          const std::vector<Tensor>& operands) {
  const DType dtype = dtype_of(like);
  ProgramArgs args{};
  args.csr = csr_of(rowptr, col, eid, num_cols, false);
  check_sides(args.csr, operands, sides);
  STD_TORCH_CHECK(operands.size() <= kMaxOperands, "a message formula has at most ", kMaxOperands,
                  " operands");
  args.heads = heads;
  args.width = width;
  args.num_operands = static_cast<int>(operands.size());
  for (int i = 0; i < args.num_operands; ++i)
    args.operands[i] = operand_of(operands[i], sides[i], dtype, heads, width);
  set_instructions(args, code.data(), static_cast<int64_t>(code.size()));
  args.result = static_cast<int>(result);
  args.sum_result = sum_result;
  args.arg_is_col = arg_is_col;
  STD_TORCH_CHECK(reduces.size() >= 1 && reduces.size() <= kMaxReduces, "expected 1 to ",
                  kMaxReduces, " reductions");
  STD_TORCH_CHECK(out_width == (sum_result ? 1 : width), "inconsistent output width");
  args.num_reduces = static_cast<int>(reduces.size());

  std::vector<Tensor> results;
  const std::vector<int64_t> node_shape{args.csr.num_rows, heads, out_width};
  const std::vector<int64_t> edge_shape{args.csr.num_entries, heads, out_width};
  for (int i = 0; i < args.num_reduces; ++i) {
    args.reduces[i] = static_cast<Reduce>(reduces[i]);
    const bool edges = args.reduces[i] == Reduce::kNone;
    results.push_back(new_result(like, edges ? edge_shape : node_shape));
    args.outs[i] = results.back().mutable_data_ptr();
  }
  for (int i = 0; want_arg && i < args.num_reduces; ++i) {
    if (args.reduces[i] == Reduce::kMax || args.reduces[i] == Reduce::kMin) {
      results.push_back(new_result(rowptr, node_shape));
      args.args[i] = results.back().mutable_data_ptr();
    }
  }
  if (heads * width == 0)
    return results;
  if (is_list(args)) {
    args.csr.wide ? run_list<int64_t>(args, dtype) : run_list<int32_t>(args, dtype);
    return results;
  }

  // Blocks of columns are sized by one source operand, and suit the others. A message that is
  // summed over its width needs all columns at once.
  const int64_t element = element_bytes(like.scalar_type());
  int64_t sources = 0;
  for (int i = 0; i < args.num_operands; ++i)
    sources += args.operands[i].side == Operand::kSource && args.operands[i].wide;
  const int64_t block =
      sum_result || sources == 0
          ? width
          : choose_blocking(args.csr, heads * sources, width, element, false).width;
  const Kernels& table = kernels(dtype);
  const auto run = table.program_rows[args.csr.wide];
  for (int64_t f = 0; f < width; f += block) {
    const Range columns{0, 0, f, std::min(width, f + block)};
    parallel_rows(args.csr, heads * width, [&](int64_t begin, int64_t end) {
      run(args, Range{begin, end, columns.f_begin, columns.f_end});
    });
  }
  const int64_t accumulator = dtype == DType::kDouble ? 8 : 4;
  reduce_hubs(args, 2 * accumulator * args.num_reduces * heads * out_width,
              table.program_piece[args.csr.wide], table.program_combine[args.csr.wide]);
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("gspmm", TORCH_BOX(&gspmm));
}

}  // namespace pyg_accel
