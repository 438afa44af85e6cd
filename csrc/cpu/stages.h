// Reductions over the edges of each row, of any message formulas, in one pass with shared parts
// computed once: the CPU kernel of binary-reduce, of attention, and of their gradients.
//
// Entries are processed in steps: a part of a row, or several short rows. A step first computes
// numbers, one per entry and head: arguments with a number per source, then sums over the width
// (dot products), then all others from these. Then it reduces rows of features, multiplied by
// numbers, to the outputs of each row. So a row of features that a score, a value and a gradient
// read comes from memory once, and then from the cache.
#pragma once

#include "kernels.h"

namespace pyg_accel {

inline constexpr int kMaxSourceNumbers = 3;
inline constexpr int kMaxSums = 4;
// Indices of numbers: arguments from 0 on, then sums over the width, then those computed from them.
inline constexpr int kFirstSum = kMaxSourceNumbers;
inline constexpr int kFirstResult = kFirstSum + kMaxSums;
inline constexpr int kMaxNumbers = kFirstResult + kMaxResults;
inline constexpr int kMaxTerms = 8;
inline constexpr int kMaxOutputs = 6;
// Entries of a step: at most this many, and fewer with many heads, by kStepNumbers. If rows of
// features are read for sums and again for terms, fewer keep them in the cache in between.
inline constexpr int64_t kStepEntries = 256;
inline constexpr int64_t kStepEntriesOfSums = 64;
inline constexpr int64_t kStepNumbers = 1024;
inline constexpr int64_t kMaxStepHeads = 64;
inline constexpr int64_t kStepAccumulators = 2048;  // of the rows of a step
inline constexpr int64_t kMaxStepRows = 256;

// A sum over the width, per entry and head, of the result of the program. If `dot`, it is the dot
// product of the two operands.
struct WideSum {
  ProgramArgs program;
  bool dot;
  int64_t width;
  bool flat;  // the program has all heads side by side as columns
};

// Messages coefficient * features, which are reduced to consecutive outputs.
struct Term {
  ProgramArgs program;  // of the features; without operands they are 1
  bool plain;           // they are the operand of the program, unchanged
  bool fetched;         // a sum has read the operand before
  bool flat;            // the program has all heads side by side as columns
  int coefficient;      // a number, or -1 for 1
  int output;           // the first one
  int num_outputs;
  bool first;  // no term before has these outputs
};

// out[row, h, f], [rows, heads, width] with rows `stride` elements apart; without a reduction
// out[edge, h, f]. `winners` is for maxima and minima, or null.
struct Output {
  Reduce reduce;
  void* data;
  void* winners;
  int64_t stride;
  int64_t width;
  int64_t place;  // of its first accumulator
  int64_t slots;  // place of the accumulators of its winners, or -1
};

struct StagesArgs {
  Csr csr;
  const void* rows;  // the row of each entry of a list of edges, which has no rowptr; else null
  bool arg_is_col;
  bool reads_edges;  // the numbers of edges are needed
  bool product;      // an output is a product
  int64_t heads;
  int64_t step_entries;
  int64_t step_rows;
  int num_source_numbers;
  const void* source_numbers[kMaxSourceNumbers];  // [num_cols, heads] accumulators
  int64_t heads_stride;  // of these numbers, and of those that softmax returns
  int num_sums;
  WideSum sums[kMaxSums];
  ProgramArgs narrow;  // numbers from numbers; its columns are the heads
  int num_terms;
  Term terms[kMaxTerms];
  int num_outputs;
  Output outputs[kMaxOutputs];
  int scores;  // this number is replaced by its softmax over the row and multiplies terms, or -1
  // [rows, heads] accumulators: the largest scores, and 1 / the sums of the exponentials.
  void* largest;
  void* inverse;
  int64_t accumulators;  // of a row: outputs, then the maximum and the sum of scores of each head
};

}  // namespace pyg_accel
