// Positions of sampled nodes: a hash table with open addressing, at most half full.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "tensors.h"

namespace pyg_accel {

// The nodes of a type in the order of their first appearance. If subgraphs are disjoint, the same
// node for two seeds counts as two; its batch is the seed.
template <class I>
class Positions {
 public:
  // `num_batches` is 0 unless subgraphs are disjoint.
  Positions(const Tensor& like, int64_t num_nodes, int64_t num_batches)
      : like_(like),
        num_nodes_(num_nodes),
        disjoint_(num_batches > 0),
        // A key fits a slot then, so comparing keys suffices.
        exact_(static_cast<double>(num_nodes) * (disjoint_ ? num_batches : 1) < 4294967296.0) {}

  int64_t size() const { return static_cast<int64_t>(nodes_.size()); }
  int64_t node(int64_t position) const { return nodes_[position]; }
  int64_t batch(int64_t position) const { return disjoint_ ? batches_[position] : 0; }
  const std::vector<I>& nodes() const { return nodes_; }
  const std::vector<I>& batches() const { return batches_; }

  void prefetch(I node, int64_t batch) const {
    __builtin_prefetch(slots_ + start(key(node, batch)));
  }

  // Adds a node, also where it has a position already, which it keeps.
  void append(I node, int64_t batch) {
    const int64_t before = size();
    if (insert(node, batch) < before)
      push(node, batch);
  }

  // Returns the position of a node, and adds the node if it has none.
  int64_t insert(I node, int64_t batch) {
    Slot* slot = place(node, batch);
    if (slot->position != kFree)
      return slot->position;
    const int64_t position = size();
    *slot = {tag(key(node, batch)), static_cast<uint32_t>(position)};
    push(node, batch);
    return position;
  }

 private:
  static constexpr uint32_t kFree = ~uint32_t{0};
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  struct Slot {
    uint32_t tag;
    uint32_t position;
  };

  uint64_t key(I node, int64_t batch) const {
    return static_cast<uint64_t>(node) +
           static_cast<uint64_t>(batch) * static_cast<uint64_t>(num_nodes_);
  }
  uint64_t start(uint64_t key) const { return key * kGolden >> shift_; }
  uint32_t tag(uint64_t key) const {
    return static_cast<uint32_t>(exact_ ? key : key * kGolden >> 8);
  }

  Slot* search(I node, int64_t batch) const {
    const uint64_t k = key(node, batch);
    const uint32_t mine = tag(k);
    for (uint64_t at = start(k);; at = (at + 1) & mask_) {
      Slot* slot = slots_ + at;
      if (slot->position == kFree ||
          (slot->tag == mine &&
           (exact_ || (nodes_[slot->position] == node && this->batch(slot->position) == batch))))
        return slot;
    }
  }

  // The slot of a node, after making room for it.
  Slot* place(I node, int64_t batch) {
    if (2 * nodes_.size() >= mask_)
      enlarge();
    return search(node, batch);
  }

  void push(I node, int64_t batch) {
    nodes_.push_back(node);
    if (disjoint_)
      batches_.push_back(static_cast<I>(batch));
  }

  void enlarge() {
    STD_TORCH_CHECK(nodes_.size() < kFree / 8, "more nodes in a batch than can be numbered");
    const uint64_t capacity = mask_ ? 4 * (mask_ + 1) : 4096;
    table_ = new_result(like_, {static_cast<int64_t>(capacity)}, ScalarType::Long);
    slots_ = static_cast<Slot*>(table_->mutable_data_ptr());
    __builtin_memset(slots_, 0xff, capacity * sizeof(Slot));
    mask_ = capacity - 1;
    shift_ = 64 - std::countr_zero(capacity);
    for (int64_t i = 0; i < size(); ++i) {
      if (i + 16 < size())
        prefetch(nodes_[i + 16], batch(i + 16));
      Slot* slot = search(nodes_[i], batch(i));
      if (slot->position == kFree)
        *slot = {tag(key(nodes_[i], batch(i))), static_cast<uint32_t>(i)};
    }
  }

  Tensor like_;
  int64_t num_nodes_;
  bool disjoint_;
  bool exact_;
  std::optional<Tensor> table_;
  Slot* slots_ = nullptr;
  uint64_t mask_ = 0;
  int shift_ = 63;
  std::vector<I> nodes_;
  std::vector<I> batches_;
};

}  // namespace pyg_accel
