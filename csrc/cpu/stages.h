// Several sums over the edges of each row in one pass, with shared parts computed once: the CPU
// kernel of attention and its gradient.
//
// Entries are processed in steps: a part of a row, or several short rows. A step first computes
// numbers, one per entry and head: arguments with a number per source, then sums over the width
// (dot products), then all others from these. Then it adds rows of features, multiplied by numbers,
// to the outputs of each row. So a row of features that a score, a value and a gradient read comes
// from memory once, and then from the cache.
#pragma once

#include "kernels.h"

namespace pyg_accel {

inline constexpr int kMaxGiven = 2;
inline constexpr int kMaxSums = 4;
// Indices of numbers: arguments from 0 on, then sums over the width, then those computed from them.
inline constexpr int kFirstSum = kMaxGiven;
inline constexpr int kFirstResult = kFirstSum + kMaxSums;
inline constexpr int kMaxNumbers = kFirstResult + kMaxResults;
inline constexpr int kMaxTerms = 8;
inline constexpr int kMaxOutputs = 6;
inline constexpr int kMaxStores = 2;
// Entries of a step: at most this many, and fewer with many heads, by kStepNumbers.
inline constexpr int64_t kStepEntries = 64;
inline constexpr int64_t kStepNumbers = 1024;
inline constexpr int64_t kMaxStepHeads = 64;

// A sum over the width, per entry and head: the dot product of operands `a` and `b` of the program,
// or the sum of the result of the program if they are -1.
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

// A number to return for every edge: data[edge * stride + h].
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
