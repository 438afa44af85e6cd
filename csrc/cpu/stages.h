// Several sums over the edges of each row in one pass, with what they share computed once: how the
// CPU computes attention and its gradient.
//
// Entries are taken in steps: a part of a row, or several short rows. A step first computes
// numbers, one an entry and head: those that are given for every source, then sums over the width
// (dot products), then all others from these. With them at hand it adds rows of features to the
// outputs of each row. So a row of features that serves a score, a value and a gradient comes from
// memory once and from the cache after that.
#pragma once

#include "kernels.h"

namespace pyg_accel {

inline constexpr int kMaxGiven = 2;
inline constexpr int kMaxSums = 4;
// Numbers: what is given from 0 on, sums over the width, then what is computed from all of them.
inline constexpr int kFirstSum = kMaxGiven;
inline constexpr int kFirstResult = kFirstSum + kMaxSums;
inline constexpr int kMaxNumbers = kFirstResult + kMaxResults;
inline constexpr int kMaxTerms = 8;
inline constexpr int kMaxOutputs = 6;
inline constexpr int kMaxStores = 2;
// Entries of a step: so many, or fewer where they have more heads than kStepNumbers allows.
inline constexpr int64_t kStepEntries = 64;
inline constexpr int64_t kStepNumbers = 1024;
inline constexpr int64_t kMaxStepHeads = 64;

// A sum over the width, an entry and head: the dot product of operands `a` and `b` of the program,
// or if they are -1 of what the program computes.
struct WideSum {
  ProgramArgs program;
  int a;
  int b;
  int64_t width;
  bool flat;  // the program has all heads side by side as columns
};

// Adds coefficient * features to an output.
struct Term {
  ProgramArgs program;  // of the features; without operands they are 1
  int plain;            // they are this operand of the program, or -1
  bool fetched;         // which a sum has read before
  bool flat;            // the program has all heads side by side as columns
  int coefficient;      // a number, or -1 for 1
  int output;
};

// out[row, h, f], [rows, heads, width] with rows `stride` elements apart.
struct Output {
  void* data;
  int64_t stride;
  int64_t width;
  int64_t place;  // of its first accumulator
};

// A number that is kept: data[edge * stride + h].
struct Store {
  void* data;
  int64_t stride;
  int number;
};

struct StagesArgs {
  Csr csr;
  int64_t heads;
  int num_given;
  const void* given[kMaxGiven];  // [num_cols, heads] accumulators
  int64_t given_stride;
  int num_sums;
  WideSum sums[kMaxSums];
  ProgramArgs narrow;  // numbers from numbers; its columns are the heads
  int num_terms;
  Term terms[kMaxTerms];
  int num_outputs;
  Output outputs[kMaxOutputs];
  int num_stores;
  Store stores[kMaxStores];
  int scores;    // this number is replaced by its softmax over the row and multiplies terms, or -1
  void* totals;  // [rows, heads] accumulators: logarithms of the sums of exponentials
  int64_t totals_stride;
  int64_t accumulators;  // of a row: outputs, then the maximum and the sum of each head
};

}  // namespace pyg_accel
