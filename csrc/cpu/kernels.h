// The contract between operators (which check, allocate, schedule) and row kernels (which compute).
//
// A kernel only writes a range of rows and a range of feature columns, so ranges may run in
// parallel. `eid` may be null: entry k of the CSR is edge k then. Pointers are untyped here because
// one table is for all dtypes; rowptr, col, eid and arg have the same index type.
#pragma once

#include <cstdint>

#include "functions.h"
#include "types.h"

namespace pyg_accel {

enum class Reduce : int {
  kSum = 0,
  kMean = 1,
  kMax = 2,
  kMin = 3,
  kProd = 4,
  kSqSum = 5,
  kNone = 6
};

// Rows with more entries than kHubDegree are cut into pieces of kPieceEntries. Both are fixed, so
// the order of the additions, and with it every bit of the result, is the same for any thread
// count.
inline constexpr int64_t kHubDegree = 4096;
inline constexpr int64_t kPieceEntries = 2048;
// Entries that are summed before their sum is added to the others, so that long sums have the
// rounding error of short ones.
inline constexpr int64_t kRunEntries = 256;
// Column chunks of one row that are computed before the next row.
inline constexpr int kMaxSteps = 16;

struct Csr {
  const void* rowptr;  // [num_rows + 1]
  const void* col;     // [num_entries]
  const void* eid;     // [num_entries] or null
  int64_t num_rows;
  int64_t num_cols;
  int64_t num_entries;
  bool wide;    // int64 indices instead of int32
  bool sorted;  // columns ascend within each row
};

// How a row of edge features is combined with the row of x; one weight per edge multiplies.
enum class Combine : int { kMul = 0, kAdd = 1, kSub = 2, kReverseSub = 3 };

// out[r, h, f] = reduce over entries k of row r of  weight[eid k, h] * x[col k, h, f]
// or, with a row of features per edge, of  relu?(weight[eid k, h, f] combined with x)
struct SpmmArgs {
  Csr csr;
  const void* x;  // [num_cols, heads, width], rows x_stride elements apart, from column x_begin on
  int64_t x_stride;
  int64_t x_begin;
  const void* weight;      // [num_edges, weight_columns] or null
  int64_t weight_columns;  // 1, heads, or heads * width if `weight_rows`
  bool weight_rows;
  Combine combine;
  bool relu;
  void* out;  // [num_rows, heads, width]
  void* arg;  // [num_rows, heads, width] winner of max/min, or null
  bool arg_is_col;
  int64_t heads;
  int64_t width;
  Reduce reduce;
  // Source blocking (sums only): columns below col_end, from cursor[row] on, which moves forward.
  int64_t* cursor;
  int64_t col_end;
  bool last_block;
};

// One operand of a message formula, seen as [rows, heads | 1, width | 1].
struct Operand {
  enum Side : int { kSource = 0, kTarget = 1, kEdge = 2, kNumber = 3 };
  const void* data;
  int64_t stride;  // elements between rows; 0 repeats one row; which number (kNumber)
  int side;
  bool per_head;  // else one value or row shared by all heads
  bool wide;      // `width` columns, else one
  bool index;     // holds arg indices instead of features
};

// A message formula as straight-line code over registers. Registers 0..num_operands-1 are the
// operands; instruction i writes register num_operands + i.
struct Instruction {
  Op op;
  int a;
  int b;
  double value;
  bool wide;       // yields `width` columns, else one
  bool invariant;  // depends on the target row alone: computed once a row
};

inline constexpr int kMaxOperands = 12;
inline constexpr int kMaxInstructions = 48;
inline constexpr int kMaxResults = 8;

struct ProgramArgs {
  int num_operands;
  Operand operands[kMaxOperands];
  int num_instructions;
  Instruction instructions[kMaxInstructions];
  int num_results;
  int results[kMaxResults];  // registers
  int64_t heads;
  int64_t width;
};

// scores[e, h] = sum over f of target[row, h, f] * source[col, h, f]
struct DotArgs {
  Csr csr;
  const void* target;
  int64_t target_stride;
  const void* source;
  int64_t source_stride;
  void* out;
  int64_t heads;
  int64_t width;
};

// Softmax over the entries of each row, per head; backward: out * (grad - sum(out * grad)).
struct SoftmaxArgs {
  Csr csr;
  const void* scores;  // [num_edges, heads]; the forward result when `grad` is set
  const void* grad;    // [num_edges, heads] or null
  void* out;
  int64_t heads;
};

// The k largest elements of each row of x, with their columns in ascending order.
struct MaxkArgs {
  const void* x;  // [rows, width]
  void* values;   // [rows, k]
  void* indices;  // [rows, k], uint8 or, if `wide`, uint16
  int64_t width;
  int64_t k;  // below the width
  bool wide;
};

// Products of the graph with CBSR features: k values and columns for each source node, only in
// float or double. `x` and `out` are what each operator reads and writes:
//   spmm    out[i, c] = sum (mean) over entries (i, j) and slots s with indices[j, s] = c of
//           weight * values[j, s]
//   sspmm   out[j, s] = sum over entries (i, j) of weight * x[i, indices[j, s]]
//   dot     out[edge] = sum over s of values[j, s] * x[i, indices[j, s]]
struct CbsrArgs {
  const void* indices;  // [num_cols, k], uint8 or, if `wide`, uint16: the columns, of `width`
  bool wide;
  int64_t k;
  int64_t width;
  Csr csr;
  const void* values;  // [num_cols, k]
  const void* weight;  // [num_edges] or null
  const void* x;       // [num_rows, width]
  void* out;
  bool mean;
};

enum class Strategy : int { kBucket = 0, kFastRand = 1 };
enum class Rescale : int { kNone = 0, kMean = 1, kRow = 2 };

// out[r, h, f] = sum over at most `limit` entries k of row r of  factor * weight[eid k, h] *
// x[col k, h, f]; see pyg_accel/backends/sampling.py.
struct SampledArgs {
  Csr csr;
  const void* x;  // [num_cols, heads, width], rows x_stride elements apart
  int64_t x_stride;
  const float* row_scale;     // [num_cols] or null
  const float* column_scale;  // [heads * width] or null
  const void* weight;         // [num_edges, weight_columns] or null
  int64_t weight_columns;     // 1 or heads
  void* out;                  // [num_rows, heads, width]
  int64_t heads;
  int64_t width;
  int64_t limit;
  int64_t most;  // entries that a row takes at most
  Strategy strategy;
  Rescale rescale;
};

// A range of work: rows [row_begin, row_end) and columns [f_begin, f_end) of the width.
struct Range {
  int64_t row_begin;
  int64_t row_end;
  int64_t f_begin;
  int64_t f_end;
};

// Part of one long row: entries [k_begin, k_end). The partial sums of a hub row go to `partial`
// ([heads * width] accumulators, then as many winner slots) and are combined in a fixed order.
struct Piece {
  int64_t row;
  int64_t k_begin;
  int64_t k_end;
};

struct StagesArgs;  // see stages.h

// Only in float and double. Of pairs, the second is for 64-bit indices of the graph.
struct CbsrKernels {
  // `scratch` and `partial`: width and 2 * width numbers.
  void (*spmm_rows[2])(const CbsrArgs&, int64_t begin, int64_t end, void* scratch);
  void (*spmm_piece[2])(const CbsrArgs&, const Piece&, void* partial);
  void (*spmm_combine[2])(const CbsrArgs&, int64_t row, void* partials, int64_t count);
  // Columns [begin, end) of the graph; `scratch`: (end - begin) * k numbers.
  void (*sspmm_cols[2])(const CbsrArgs&, int64_t begin, int64_t end, void* scratch);
  void (*dot_rows[2])(const CbsrArgs&, int64_t begin, int64_t end);
  void (*dot_piece[2])(const CbsrArgs&, const Piece&);
};

// `scratch` holds 3 * args.most numbers.
using SampledRows = void (*)(const SampledArgs&, const Range&, int64_t* scratch);

// The kernels of one instruction set in one dtype. Each is a separate file, so that they compile in
// parallel. Of pairs, the second is for 64-bit indices.
struct Kernels {
  void (*spmm_rows[2])(const SpmmArgs&, const Range&);
  void (*spmm_piece[2])(const SpmmArgs&, const Piece&, void* partial);
  void (*spmm_combine[2])(const SpmmArgs&, int64_t row, void* partials, int64_t count);
  void (*dot_rows[2])(const DotArgs&, const Range&);
  void (*dot_piece[2])(const DotArgs&, const Piece&);
  void (*softmax_rows[2])(const SoftmaxArgs&, const Range&);
  // `scratch` holds the accumulators of `args.step_rows` rows, and of 2 at least, `partial` of 2.
  void (*stages_rows[2])(const StagesArgs&, const Range&, void* scratch);
  void (*stages_piece[2])(const StagesArgs&, const Piece&, void* partial);
  void (*stages_combine[2])(const StagesArgs&, int64_t row, void* partials, int64_t count);
  void (*row_dots)(const DotArgs&, const Range&);
  // `scratch`: width + 64 keys of the size of an accumulator.
  void (*maxk_rows)(const MaxkArgs&, int64_t begin, int64_t end, void* scratch);
  SampledRows sampled_rows[2];
  CbsrKernels cbsr;
  SampledRows sampled_int8[2];  // in float alone, which they are added up in
};

#define PYG_ACCEL_DECLARE_KERNELS(isa) \
  namespace isa {                      \
  const Kernels& kernels_of(float);    \
  const Kernels& kernels_of(double);   \
  const Kernels& kernels_of(bf16);     \
  const Kernels& kernels_of(fp16);     \
  }
PYG_ACCEL_DECLARE_KERNELS(portable)
PYG_ACCEL_DECLARE_KERNELS(avx2)
PYG_ACCEL_DECLARE_KERNELS(avx512)
#undef PYG_ACCEL_DECLARE_KERNELS

// The kernels of the fastest instruction set that this processor supports, unless a test or a user
// has chosen another by name.
const Kernels& kernels(DType dtype);

}  // namespace pyg_accel
