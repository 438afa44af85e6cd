// Binary-reduce of any message formulas, attention and its gradient (stages.h).
#include "stages.h"

#include "config.h"
#include "program.h"
#include "schedule.h"

#include <limits>

namespace pyg_accel {
namespace {

constexpr int64_t kMostFlat = 256;  // columns: a tile of the register machine

// The programs of numbers and of features; see pyg_accel/backends/cpu/stages.py.
struct Recipe {
  const std::vector<Tensor>& operands;
  const std::vector<int64_t>& sides;
  const std::vector<int64_t>& code;
  DType dtype;
  int64_t heads;  // of all
  bool want_arg;
  bool arg_is_col;
  int64_t scores;
};

constexpr int64_t kAllColumns = std::numeric_limits<int64_t>::max();

// Heads and columns of a pass; a block of less than all columns has one head.
struct Block {
  int64_t head;
  int64_t heads;
  int64_t column;
  int64_t columns;
};

// Reads integers one after another.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& code) : code_(code) {}

  int64_t next() { return *take(1); }

  int count(int most) {
    const int64_t n = next();
    STD_TORCH_CHECK(n >= 0 && n <= most, "too many parts of a formula");
    return static_cast<int>(n);
  }

  const int64_t* take(int64_t n) {
    STD_TORCH_CHECK(n >= 0 && at_ + n <= static_cast<int64_t>(code_.size()), "the code is cut off");
    at_ += n;
    return code_.data() + at_ - n;
  }

 private:
  const std::vector<int64_t>& code_;
  int64_t at_ = 0;
};

// A block of an operand. For the program that computes numbers from numbers, heads are columns.
Operand operand_at(const Recipe& recipe,
                   int64_t number,
                   const Block& block,
                   int64_t width,
                   bool narrow) {
  const int64_t num_tensors = static_cast<int64_t>(recipe.operands.size());
  STD_TORCH_CHECK(number >= 0 && number < num_tensors + kMaxNumbers, "there is no such operand");
  if (number >= num_tensors)
    return Operand{nullptr, number - num_tensors,      Operand::kNumber,
                   true,    narrow && block.heads > 1, false};
  const Tensor& t = recipe.operands[number];
  Operand operand = operand_of(t, recipe.sides[number], recipe.dtype, recipe.heads, width);
  const int64_t skipped =
      (t.size(1) > 1 ? block.head * t.size(2) : 0) + (operand.wide ? block.column : 0);
  operand.data = static_cast<const char*>(operand.data) + skipped * element_bytes(t.scalar_type());
  if (narrow) {
    operand.per_head = false;
    operand.wide = t.size(1) > 1 && block.heads > 1;
  }
  return operand;
}

ProgramArgs read_program(Reader& reader, const Recipe& recipe, const Block& block, bool narrow) {
  ProgramArgs args{};
  const int64_t width = reader.next();
  args.heads = narrow ? 1 : block.heads;
  args.width = narrow ? block.heads : std::min(width, block.columns);
  args.num_operands = reader.count(kMaxOperands);
  for (int i = 0; i < args.num_operands; ++i)
    args.operands[i] = operand_at(recipe, reader.next(), block, width, narrow);
  const int64_t fields = reader.next();
  set_instructions(args, reader.take(fields), fields);
  args.num_results = reader.count(kMaxResults);
  for (int i = 0; i < args.num_results; ++i) {
    args.results[i] = static_cast<int>(reader.next());
    STD_TORCH_CHECK(
        args.results[i] >= 0 && args.results[i] < args.num_operands + args.num_instructions,
        "a result must have been computed");
  }
  return args;
}

// Lets a program of only rows read all heads side by side: one start per row, not one per head.
bool flatten(ProgramArgs& program) {
  const int64_t columns = program.heads * program.width;
  bool rows = program.heads > 1 && columns <= kMostFlat && program.num_operands > 0;
  for (int i = 0; i < program.num_operands; ++i)
    rows = rows && program.operands[i].wide && program.operands[i].per_head;
  for (int i = 0; i < program.num_instructions; ++i)
    rows = rows && (program.instructions[i].wide || program.instructions[i].op == Op::kConst);
  if (!rows)
    return false;
  for (int i = 0; i < program.num_operands; ++i)
    program.operands[i].per_head = false;
  program.heads = 1;
  program.width = columns;
  return true;
}

template <class F>
bool any_operand(const ProgramArgs& program, F test) {
  return std::any_of(program.operands, program.operands + program.num_operands, test);
}

bool moves(const Operand& operand) {
  return operand.side == Operand::kSource || operand.side == Operand::kEdge;
}

// A plain product of two rows.
bool is_dot(const ProgramArgs& program) {
  return program.num_operands == 2 && program.num_instructions == 1 &&
         program.instructions[0].op == Op::kMul && program.operands[0].wide &&
         program.operands[1].wide && program.instructions[0].a != program.instructions[0].b;
}

bool is_extreme(Reduce reduce) {
  return reduce == Reduce::kMax || reduce == Reduce::kMin;
}

Output read_output(Reader& reader, const Recipe& recipe, const Block& block, StagesArgs& args) {
  Output output{};
  output.reduce = static_cast<Reduce>(reader.count(static_cast<int>(Reduce::kNone)));
  output.width = std::min(reader.next(), block.columns);
  STD_TORCH_CHECK(recipe.scores < 0 || output.reduce == Reduce::kSum,
                  "a softmax multiplies what is summed");
  args.product |= output.reduce == Reduce::kProd;
  const bool slots = recipe.want_arg && is_extreme(output.reduce);
  const int64_t size = output.reduce == Reduce::kNone ? 0 : block.heads * output.width;
  output.place = args.accumulators;
  output.slots = slots ? args.accumulators + size : -1;
  args.accumulators += slots ? 2 * size : size;
  return output;
}

Term read_term(Reader& reader, const Recipe& recipe, const Block& block, const StagesArgs& args) {
  Term term{};
  term.output = reader.count(args.num_outputs - 1);
  term.num_outputs = reader.count(args.num_outputs - term.output);
  term.first = true;
  for (int t = 0; t < args.num_terms; ++t)
    term.first = term.first && args.terms[t].output != term.output;
  term.coefficient = static_cast<int>(reader.next());
  term.program = read_program(reader, recipe, block, false);
  const Operand& operand = term.program.operands[0];
  STD_TORCH_CHECK(term.coefficient < kMaxNumbers && (term.coefficient >= 0 || recipe.scores >= 0 ||
                                                     term.program.num_operands > 0),
                  "there is no such number");
  const Reduce reduce = args.outputs[term.output].reduce;
  const bool adds = reduce == Reduce::kSum || reduce == Reduce::kMean;
  term.plain = term.program.num_operands == 1 && term.program.num_instructions == 0 &&
               operand.wide && moves(operand) && adds && term.num_outputs == 1;
  for (int s = 0; term.plain && s < args.num_sums; ++s)
    term.fetched |=
        any_operand(args.sums[s].program, [&](const Operand& o) { return o.data == operand.data; });
  term.flat = !term.plain && flatten(term.program);
  return term;
}

StagesArgs read_stages(const Recipe& recipe, const Csr& csr, const Block& block) {
  Reader reader(recipe.code);
  StagesArgs args{};
  args.csr = csr;
  args.heads = block.heads;
  args.arg_is_col = recipe.arg_is_col;
  args.scores = static_cast<int>(recipe.scores);
  args.num_sums = reader.count(kMaxSums);
  for (int i = 0; i < args.num_sums; ++i) {
    WideSum& sum = args.sums[i];
    sum.program = read_program(reader, recipe, block, false);
    sum.dot = is_dot(sum.program);
    sum.width = sum.program.width;
    sum.flat = !sum.dot && flatten(sum.program);
  }
  args.narrow = read_program(reader, recipe, block, true);
  args.num_outputs = reader.count(kMaxOutputs);
  for (int i = 0; i < args.num_outputs; ++i)
    args.outputs[i] = read_output(reader, recipe, block, args);
  args.accumulators += recipe.scores >= 0 ? 2 * block.heads : 0;
  const int num_terms = reader.count(kMaxTerms);
  for (; args.num_terms < num_terms; ++args.num_terms)
    args.terms[args.num_terms] = read_term(reader, recipe, block, args);
  for (int i = 0; i < args.num_outputs; ++i)
    args.reads_edges |= args.outputs[i].reduce == Reduce::kNone;
  const auto reads_edges = [](const Operand& o) { return o.side == Operand::kEdge || o.index; };
  bool rereads = false;
  for (int i = 0; i < args.num_sums; ++i)
    args.reads_edges |= any_operand(args.sums[i].program, reads_edges);
  for (int i = 0; i < args.num_terms; ++i) {
    args.reads_edges |= any_operand(args.terms[i].program, reads_edges);
    rereads |= args.num_sums > 0 && args.terms[i].program.num_operands > 0;
  }
  args.reads_edges |= any_operand(args.narrow, reads_edges);
  // By all heads, so that the order of additions does not depend on the heads of a pass.
  args.step_entries = std::min(rereads ? kStepEntriesOfSums : kStepEntries,
                               kStepNumbers / std::min(recipe.heads, kMaxStepHeads));
  args.step_rows = std::clamp<int64_t>(kStepAccumulators / std::max<int64_t>(1, args.accumulators),
                                       1, kMaxStepRows);
  return args;
}

int64_t widest_output(const StagesArgs& args) {
  int64_t width = 1;
  for (int i = 0; i < args.num_outputs; ++i)
    width = std::max(width, args.outputs[i].width);
  return width;
}

// The heads of a pass: as many as a step has room for, or by the configured width of blocks. Fewer
// heads, to fit a cache, would mean to read all numbers again. The columns of a pass over a single
// head: as many as let the source features fit the cache; sums over the width need them all.
Block first_block(const StagesArgs& args, const Csr& csr, int64_t element) {
  int64_t width = widest_output(args), sources = 0;
  bool divisible = args.heads == 1 && args.num_sums == 0 && args.scores < 0;
  for (int i = 0; i < args.num_outputs; ++i)
    divisible = divisible && args.outputs[i].width == width;
  for (int i = 0; i < args.num_sums; ++i)
    width = std::max(width, args.sums[i].width);
  for (int t = 0; t < args.num_terms; ++t) {
    const ProgramArgs& program = args.terms[t].program;
    sources += std::count_if(program.operands, program.operands + program.num_operands,
                             [](const Operand& o) { return o.side == Operand::kSource && o.wide; });
  }
  const int64_t configured = current_config().block_width;
  const int64_t most = configured > 0 ? std::max<int64_t>(1, configured / width) : kMaxStepHeads;
  Block block{0, std::min({args.heads, most, kMaxStepHeads}), 0, kAllColumns};
  if (divisible && sources > 0) {
    const int64_t columns = choose_blocking(csr, sources, width, element, false).width;
    block.columns = columns < width ? columns : kAllColumns;
  }
  return block;
}

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
bool is_list(const StagesArgs& args) {
  bool wide = false;
  for (int i = 0; i < args.num_outputs; ++i) {
    if (args.outputs[i].reduce != Reduce::kNone)
      return false;
    wide |= args.outputs[i].width > 1;
  }
  for (int i = 0; i < args.num_sums; ++i)
    wide |= any_operand(args.sums[i].program,
                        [](const Operand& o) { return o.side == Operand::kEdge && o.wide; });
  return wide && args.csr.eid;
}

void* advance(const Tensor& t, int64_t elements) {
  const int64_t bytes = element_bytes(t.scalar_type());
  return static_cast<char*>(t.mutable_data_ptr()) + elements * bytes;
}

using StagesRows = void (*)(const StagesArgs&, const Range&, void*);

template <class I>
void run_list(StagesArgs args, StagesRows run) {
  const EdgeList<I> list(args.csr);
  args.csr.col = list.cols.data();
  args.csr.eid = nullptr;
  args.rows = list.rows.data();
  const int64_t columns = args.heads * widest_output(args);
  const int64_t edges = args.csr.num_entries;
  const bool serial = edges * columns < kSerialElements;
  const int64_t tasks = serial ? 1 : torch::stable::get_num_threads() * 16;
  parallel_tasks(tasks, serial, [&](int64_t i) {
    run(args, Range{edges * i / tasks, edges * (i + 1) / tasks, 0, 0}, nullptr);
  });
}

void run_pass(const StagesArgs& args, const Kernels& table, int64_t element) {
  const Csr& csr = args.csr;
  const auto run = table.stages_rows[csr.wide];
  if (is_list(args))
    return csr.wide ? run_list<int64_t>(args, run) : run_list<int32_t>(args, run);
  const int64_t bytes = args.accumulators * element;
  const int64_t columns = std::max(args.accumulators, args.heads * widest_output(args));
  parallel_rows(csr, columns, [&](int64_t row_begin, int64_t row_end) {
    std::vector<double> scratch((std::max<int64_t>(2, args.step_rows) * bytes + 7) / 8);
    run(args, Range{row_begin, row_end, 0, 0}, scratch.data());
  });
  reduce_hubs(args, 2 * bytes, table.stages_piece[csr.wide], table.stages_combine[csr.wide]);
}

// Points a pass to the block of its results and of the numbers of sources.
void place_results(StagesArgs& args,
                   const Block& block,
                   const std::vector<Tensor>& results,
                   const std::vector<Tensor>& source_numbers) {
  args.num_source_numbers = static_cast<int>(source_numbers.size());
  for (int i = 0; i < args.num_source_numbers; ++i)
    args.source_numbers[i] = advance(source_numbers[i], block.head);
  int winners = args.num_outputs;
  for (int i = 0; i < args.num_outputs; ++i) {
    Output& output = args.outputs[i];
    const int64_t heads = results[i].size(1), width = results[i].size(2);
    const int64_t first = block.head * width + block.column;
    output.stride = heads * width;
    output.data = advance(results[i], first);
    if (output.slots >= 0)
      output.winners = advance(results[winners++], first);
    args.heads_stride = heads;
  }
  if (args.scores >= 0) {
    args.largest = advance(results[results.size() - 2], block.head);
    args.inverse = advance(results.back(), block.head);
  }
}

// Returns the outputs: [rows, H, width], or [edges, H, width] without a reduction; then, if
// `want_arg`, the winners of each maximum and minimum; then, if `scores` names a number, the
// largest scores [rows, H] and the inverse sums of the exponentials. `source_numbers` are
// [num_cols, H].
std::vector<Tensor> stages(const Tensor& rowptr,
                           const Tensor& col,
                           const std::optional<Tensor>& eid,
                           int64_t num_cols,
                           const std::vector<int64_t>& sides,
                           const std::vector<Tensor>& source_numbers,
                           const std::vector<int64_t>& code,
                           int64_t heads,
                           int64_t scores,
                           bool want_arg,
                           bool arg_is_col,
                           const std::vector<Tensor>& operands) {
  const auto like = std::find_if_not(operands.begin(), operands.end(), is_index);
  STD_TORCH_CHECK(like != operands.end() && heads > 0, "expected operands and heads");
  const DType dtype = dtype_of(*like);
  const ScalarType wide = dtype == DType::kDouble ? ScalarType::Double : ScalarType::Float;
  const Csr csr = csr_of(rowptr, col, eid, num_cols, false);
  check_sides(csr, operands, sides);
  STD_TORCH_CHECK(source_numbers.size() <= kMaxSourceNumbers && scores < kMaxNumbers,
                  "too many numbers");
  for (const Tensor& t : source_numbers)
    STD_TORCH_CHECK(
        t.is_cpu() && t.is_contiguous() && t.scalar_type() == wide && t.numel() == num_cols * heads,
        "expected numbers [num_cols, H] in the precision of sums");
  const Recipe recipe{operands, sides, code, dtype, heads, want_arg, arg_is_col, scores};

  StagesArgs args = read_stages(recipe, csr, {0, heads, 0, kAllColumns});
  std::vector<Tensor> results;
  for (int i = 0; i < args.num_outputs; ++i) {
    const Output& output = args.outputs[i];
    const int64_t rows = output.reduce == Reduce::kNone ? csr.num_entries : csr.num_rows;
    results.push_back(new_result(*like, {rows, heads, output.width}));
  }
  for (int i = 0; want_arg && i < args.num_outputs; ++i)
    if (is_extreme(args.outputs[i].reduce))
      results.push_back(new_result(rowptr, {csr.num_rows, heads, args.outputs[i].width}));
  for (int i = 0; scores >= 0 && i < 2; ++i)
    results.push_back(new_result(*like, {csr.num_rows, heads}, wide));

  const Block pass = first_block(args, csr, element_bytes(like->scalar_type()));
  const int64_t width = pass.columns == kAllColumns ? 1 : widest_output(args);
  for (int64_t h = 0; h < heads; h += pass.heads) {
    for (int64_t f = 0; f < width; f += std::min(width, pass.columns)) {
      Block block{h, std::min(pass.heads, heads - h), f, pass.columns};
      if (pass.columns != kAllColumns)
        block.columns = std::min(pass.columns, width - f);
      if (pass.columns != kAllColumns || pass.heads < heads)
        args = read_stages(recipe, csr, block);
      place_results(args, block, results, source_numbers);
      run_pass(args, kernels(dtype), element_bytes(wide));
    }
  }
  return results;
}

// Dot products [N, H] of a and b [N, H, F], in the precision of sums.
Tensor row_dots(const Tensor& a, const Tensor& b) {
  const DType dtype = dtype_of(a);
  check_features(a, "a", dtype);
  check_features(b, "b", dtype);
  STD_TORCH_CHECK(a.size(0) == b.size(0) && a.size(1) == b.size(1) && a.size(2) == b.size(2),
                  "expected 'a' and 'b' of one shape");
  DotArgs args{};
  args.target = a.const_data_ptr();
  args.target_stride = a.stride(0);
  args.source = b.const_data_ptr();
  args.source_stride = b.stride(0);
  args.heads = a.size(1);
  args.width = a.size(2);
  Tensor out = new_result(a, {a.size(0), a.size(1)},
                          dtype == DType::kDouble ? ScalarType::Double : ScalarType::Float);
  args.out = out.mutable_data_ptr();
  const auto run = kernels(dtype).row_dots;
  constexpr int64_t kRows = 1024;
  parallel_tasks((a.size(0) + kRows - 1) / kRows, false, [&](int64_t i) {
    run(args, Range{i * kRows, std::min(a.size(0), (i + 1) * kRows), 0, 0});
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("stages", TORCH_BOX(&stages));
  m.impl("row_dots", TORCH_BOX(&row_dots));
}

}  // namespace pyg_accel
