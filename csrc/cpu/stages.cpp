// Attention, its gradient, and several formulas at once (stages.h).
#include "stages.h"

#include "config.h"
#include "program.h"
#include "schedule.h"

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

// Heads [begin, begin + heads) of an operand. For the program that computes numbers from numbers,
// heads are columns.
Operand operand_at(const Recipe& recipe,
                   int64_t number,
                   int64_t begin,
                   int64_t heads,
                   int64_t width,
                   bool narrow) {
  const int64_t known = static_cast<int64_t>(recipe.operands.size());
  STD_TORCH_CHECK(number >= 0 && number < known + kMaxNumbers, "there is no such operand");
  if (number >= known)
    return Operand{nullptr, number - known, Operand::kNumber, true, narrow && heads > 1, false};
  const Tensor& t = recipe.operands[number];
  Operand operand = operand_of(t, recipe.sides[number], recipe.dtype, recipe.heads, width);
  STD_TORCH_CHECK(!operand.index, "expected operands to be features");
  if (t.size(1) > 1)
    operand.data =
        static_cast<const char*>(operand.data) + begin * t.size(2) * element_bytes(t.scalar_type());
  if (narrow) {
    operand.per_head = false;
    operand.wide = t.size(1) > 1 && heads > 1;
  }
  return operand;
}

ProgramArgs read_program(Reader& reader,
                         const Recipe& recipe,
                         const Csr& csr,
                         int64_t begin,
                         int64_t heads,
                         bool narrow) {
  ProgramArgs args{};
  args.csr = csr;
  const int64_t width = reader.next();
  args.heads = narrow ? 1 : heads;
  args.width = narrow ? heads : width;
  args.num_operands = reader.count(kMaxOperands);
  for (int i = 0; i < args.num_operands; ++i)
    args.operands[i] = operand_at(recipe, reader.next(), begin, heads, width, narrow);
  const int64_t fields = reader.next();
  set_instructions(args, reader.take(fields), fields);
  args.num_results = reader.count(kMaxResults);
  for (int i = 0; i < args.num_results; ++i) {
    args.results[i] = static_cast<int>(reader.next());
    STD_TORCH_CHECK(
        args.results[i] >= 0 && args.results[i] < args.num_operands + args.num_instructions,
        "a result must have been computed");
  }
  args.result = args.num_results > 0 ? args.results[0] : 0;
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

// Lets a program with entries of several rows compute everything for each entry.
void vary(ProgramArgs& program) {
  for (int i = 0; i < program.num_instructions; ++i)
    program.instructions[i].invariant = false;
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

StagesArgs read_stages(const Recipe& recipe, const Csr& csr, int64_t begin, int64_t heads) {
  Reader reader(recipe.code);
  StagesArgs args{};
  args.csr = csr;
  args.heads = heads;
  args.num_sums = reader.count(kMaxSums);
  for (int i = 0; i < args.num_sums; ++i) {
    WideSum& sum = args.sums[i];
    sum.program = read_program(reader, recipe, csr, begin, heads, false);
    sum.a = is_dot(sum.program) ? 0 : -1;
    sum.b = 1;
    sum.width = sum.program.width;
    sum.flat = sum.a < 0 && flatten(sum.program);
    vary(sum.program);
  }
  args.narrow = read_program(reader, recipe, csr, begin, heads, true);
  vary(args.narrow);
  args.num_outputs = reader.count(kMaxOutputs);
  for (int i = 0; i < args.num_outputs; ++i) {
    args.outputs[i].width = reader.next();
    args.outputs[i].place = args.accumulators;
    args.accumulators += heads * args.outputs[i].width;
  }
  args.accumulators += 2 * heads;
  args.num_terms = reader.count(kMaxTerms);
  for (int i = 0; i < args.num_terms; ++i) {
    Term& term = args.terms[i];
    term.output = reader.count(args.num_outputs - 1);
    term.coefficient = static_cast<int>(reader.next());
    STD_TORCH_CHECK(term.coefficient < kMaxNumbers, "there is no such number");
    term.program = read_program(reader, recipe, csr, begin, heads, false);
    const bool plain = term.program.num_operands == 1 && term.program.num_instructions == 0 &&
                       term.program.operands[0].wide && moves(term.program.operands[0]);
    term.plain = plain ? 0 : -1;
    for (int s = 0; plain && s < args.num_sums; ++s)
      for (int o = 0; o < args.sums[s].program.num_operands; ++o)
        term.fetched |= args.sums[s].program.operands[o].data == term.program.operands[0].data;
    term.flat = !plain && flatten(term.program);
  }
  args.num_stores = reader.count(kMaxStores);
  for (int i = 0; i < args.num_stores; ++i)
    args.stores[i].number = reader.count(kMaxNumbers - 1);
  return args;
}

// Heads per pass: as many as a step has room for, or by the configured width of blocks. Fewer
// heads, to fit a cache, would mean to read all numbers again.
int64_t heads_at_a_time(const StagesArgs& args) {
  const int64_t block = current_config().block_width;
  int64_t width = 1;
  for (int i = 0; i < args.num_outputs; ++i)
    width = std::max(width, args.outputs[i].width);
  for (int i = 0; i < args.num_sums; ++i)
    width = std::max(width, args.sums[i].width);
  const int64_t most = block > 0 ? std::max<int64_t>(1, block / width) : kMaxStepHeads;
  return std::min({args.heads, most, kMaxStepHeads});
}

void* advance(const Tensor& t, int64_t elements) {
  const int64_t bytes = element_bytes(t.scalar_type());
  return static_cast<char*>(t.mutable_data_ptr()) + elements * bytes;
}

// Returns the outputs [rows, H, width], the stores [edges, H], and the logarithms of the sums of
// exponentials [rows, H] if `scores` names a number.
std::vector<Tensor> stages(const Tensor& rowptr,
                           const Tensor& col,
                           const std::optional<Tensor>& eid,
                           int64_t num_cols,
                           const std::vector<int64_t>& sides,
                           const std::vector<Tensor>& given,
                           const std::vector<int64_t>& code,
                           int64_t heads,
                           int64_t scores,
                           const std::vector<Tensor>& operands) {
  STD_TORCH_CHECK(!operands.empty() && heads > 0, "expected operands and heads");
  const Tensor& like = operands[0];
  const DType dtype = dtype_of(like);
  const ScalarType wide = dtype == DType::kDouble ? ScalarType::Double : ScalarType::Float;
  const Csr csr = csr_of(rowptr, col, eid, num_cols, false);
  check_sides(csr, operands, sides);
  STD_TORCH_CHECK(given.size() <= kMaxGiven && scores < kMaxNumbers, "too many numbers");
  for (const Tensor& t : given)
    STD_TORCH_CHECK(
        t.is_cpu() && t.is_contiguous() && t.scalar_type() == wide && t.numel() == num_cols * heads,
        "expected given numbers [num_cols, H], as wide as sums are");
  const Recipe recipe{operands, sides, code, dtype, heads};

  const StagesArgs whole = read_stages(recipe, csr, 0, heads);
  std::vector<Tensor> results;
  for (int i = 0; i < whole.num_outputs; ++i)
    results.push_back(new_result(like, {csr.num_rows, heads, whole.outputs[i].width}));
  for (int i = 0; i < whole.num_stores; ++i)
    results.push_back(new_result(like, {csr.num_entries, heads}));
  if (scores >= 0)
    results.push_back(new_result(like, {csr.num_rows, heads}, wide));

  const Kernels& table = kernels(dtype);
  const int64_t pass = heads_at_a_time(whole);
  for (int64_t begin = 0; begin < heads; begin += pass) {
    StagesArgs args = read_stages(recipe, csr, begin, std::min(pass, heads - begin));
    args.num_given = static_cast<int>(given.size());
    args.given_stride = heads;
    for (int i = 0; i < args.num_given; ++i)
      args.given[i] =
          static_cast<const char*>(given[i].const_data_ptr()) + begin * element_bytes(wide);
    for (int i = 0; i < args.num_outputs; ++i) {
      Output& output = args.outputs[i];
      output.stride = heads * output.width;
      output.data = advance(results[i], begin * output.width);
    }
    for (int i = 0; i < args.num_stores; ++i) {
      args.stores[i].stride = heads;
      args.stores[i].data = advance(results[args.num_outputs + i], begin);
    }
    args.scores = static_cast<int>(scores);
    args.totals_stride = heads;
    if (scores >= 0)
      args.totals = advance(results.back(), begin);
    const int64_t bytes = args.accumulators * element_bytes(wide);
    parallel_rows(csr, args.accumulators, [&](int64_t row_begin, int64_t row_end) {
      std::vector<double> scratch((bytes + 7) / 8);
      table.stages_rows[csr.wide](args, Range{row_begin, row_end, 0, 0}, scratch.data());
    });
    reduce_hubs(args, bytes, table.stages_piece[csr.wide], table.stages_combine[csr.wide]);
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
