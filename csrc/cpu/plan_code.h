// What an SpMM or a dot product computes, in one number, which pyg_accel/backends/cpu/gspmm.py
// writes; and its features.
#pragma once

#include <vector>

#include "stable.h"

namespace pyg_accel {

struct PlanCode {
  explicit PlanCode(int64_t number)
      : heads(number >> 8),
        reduce(number & 3),
        combine(number >> 2 & 3),
        relu(number >> 4 & 1),
        arg_is_col(number >> 5 & 1),
        swapped(number >> 6 & 1),
        dot(number >> 7 & 1) {}

  int64_t heads;    // of weights, or of dot products
  int reduce;       // sum, mean, max, min
  int combine;      // how a row of edge features meets that of a source
  bool relu;        // of the message
  bool arg_is_col;  // winners are columns; else edges
  bool swapped;     // of two operands, the features come second
  bool dot;         // dot products of both ends; the targets come first unless swapped
};

// Features of any trailing shape as [rows, columns]: those of a row side by side.
struct FeatureRows {
  explicit FeatureRows(const torch::stable::Tensor& t) : tensor(t) {
    const auto sizes = t.sizes(), strides = t.strides();
    STD_TORCH_CHECK(!sizes.empty(), "expected features to have rows");
    bool side_by_side = true;
    for (size_t i = sizes.size() - 1; i > 0; --i) {
      side_by_side = side_by_side && (sizes[i] == 1 || strides[i] == columns);
      columns *= sizes[i];
    }
    rows = sizes[0];
    stride = strides[0];
    if (!side_by_side && rows * columns > 0) {  // e.g. the expanded gradient of a sum
      tensor = torch::stable::contiguous(t);
      stride = columns;
    }
  }

  // The shape of `count` such rows.
  std::vector<int64_t> shape(int64_t count) const {
    const auto sizes = tensor.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    shape[0] = count;
    return shape;
  }

  torch::stable::Tensor tensor;
  int64_t rows = 0;
  int64_t columns = 1;
  int64_t stride = 0;  // elements between rows
};

}  // namespace pyg_accel
