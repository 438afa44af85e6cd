// Plans: which kernel runs on which matrix, in one number. `run1` and `run2` of both libraries take
// it in place of the arrays of a graph; pyg_accel/backends/plans.py writes it.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pyg_accel {

struct PlanCode {
  explicit PlanCode(int64_t number)
      : matrix(number >> 32),
        heads(number >> 12 & 0xfffff),
        reduce(number & 3),
        combine(number >> 2 & 3),
        relu(number >> 4 & 1),
        arg_is_col(number >> 5 & 1),
        swapped(number >> 6 & 1),
        dot(number >> 7 & 1) {}

  int64_t matrix;   // its number in the table
  int64_t heads;    // of weights, or of dot products
  int reduce;       // sum, mean, max, min
  int combine;      // how a row of edge features meets that of a source
  bool relu;        // of the message
  bool arg_is_col;  // winners are columns; else edges
  bool swapped;     // the operands of run2 are the weights and the features
  bool dot;         // run2 computes dot products of both ends, of targets first unless swapped
};

// Matrices by number, for any number of threads. Numbers are not used again.
template <class Matrix>
class Table {
 public:
  int64_t add(Matrix matrix) {
    const auto made = std::make_shared<const Matrix>(std::move(matrix));
    const std::unique_lock lock(mutex_);
    matrices_.emplace(++last_, made);
    return last_;
  }

  void remove(int64_t number) {
    const std::unique_lock lock(mutex_);
    matrices_.erase(number);
  }

  std::shared_ptr<const Matrix> at(int64_t number) const {
    const std::shared_lock lock(mutex_);
    const auto found = matrices_.find(number);
    STD_TORCH_CHECK(found != matrices_.end(), "there is no matrix ", number);
    return found->second;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Matrix>> matrices_;
  int64_t last_ = 0;
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
    std::vector<int64_t> found(sizes.begin(), sizes.end());
    found[0] = count;
    return found;
  }

  torch::stable::Tensor tensor;
  int64_t rows = 0;
  int64_t columns = 1;
  int64_t stride = 0;  // elements between rows
};

// The operators of a library, by its function of a plan, features, weights or null, and whether
// winners are wanted, which it returns behind the result.
using RunPlan = std::vector<torch::stable::Tensor> (*)(const PlanCode&,
                                                       const torch::stable::Tensor&,
                                                       const torch::stable::Tensor*,
                                                       bool);

template <RunPlan kRun>
torch::stable::Tensor run1(int64_t plan, const torch::stable::Tensor& x) {
  return kRun(PlanCode(plan), x, nullptr, false)[0];
}

template <RunPlan kRun>
torch::stable::Tensor run2(int64_t number,
                           const torch::stable::Tensor& a,
                           const torch::stable::Tensor& b) {
  const PlanCode plan(number);
  return kRun(plan, plan.swapped ? b : a, plan.swapped ? &a : &b, false)[0];
}

template <RunPlan kRun>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> run1_winners(
    int64_t plan,
    const torch::stable::Tensor& x) {
  const auto found = kRun(PlanCode(plan), x, nullptr, true);
  return {found[0], found[1]};
}

template <RunPlan kRun>
std::tuple<torch::stable::Tensor, torch::stable::Tensor>
run2_winners(int64_t number, const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  const PlanCode plan(number);
  const auto found = kRun(plan, plan.swapped ? b : a, plan.swapped ? &a : &b, true);
  return {found[0], found[1]};
}

}  // namespace pyg_accel
