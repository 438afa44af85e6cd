// The passes over the edges of Louvain's method. pyg_accel/reordering/modularity.py defines what
// they compute.
#include <bit>

#include "schedule.h"

namespace pyg_accel {
namespace {

// Sums of weights by community, for one node at a time: a hash table with open addressing, at most
// half full, that is cleared by walking over its entries.
class Sums {
 public:
  void reserve(int64_t keys) {
    const size_t size = std::bit_ceil(static_cast<size_t>(std::max<int64_t>(16, 2 * keys)));
    if (size > slots_.size()) {
      slots_.assign(size, Slot{-1, 0});
      used_.clear();
    }
    // A table of the size of this row, even if it was larger before: it stays in the first cache.
    mask_ = size - 1;
  }

  void add(int64_t key, int64_t weight) {
    size_t at = (static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15u >> 32) & mask_;
    while (slots_[at].key != key) {
      if (slots_[at].key < 0) {
        slots_[at].key = key;
        used_.push_back(at);
        break;
      }
      at = (at + 1) & mask_;
    }
    slots_[at].weight += weight;
  }

  int64_t count() const { return static_cast<int64_t>(used_.size()); }

  template <class Visit>
  void drain(const Visit& visit) {
    for (const size_t at : used_) {
      visit(slots_[at].key, slots_[at].weight);
      slots_[at] = Slot{-1, 0};
    }
    used_.clear();
  }

 private:
  struct Slot {
    int64_t key;
    int64_t weight;
  };
  std::vector<Slot> slots_;
  std::vector<size_t> used_;
  size_t mask_ = 0;
};

const int64_t* longs(const Tensor& t, const char* name, int64_t size) {
  check_vector(t, name, size, true);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

// Neighbours of a node of either index type, and the weights of its edges.
struct Entries {
  const int64_t* rowptr;
  const void* col;
  const int64_t* weight;  // null where every entry counts 1
  bool wide;
  int64_t num_nodes;

  Entries(const Tensor& rowptr, const Tensor& col, const std::optional<Tensor>& weights)
      : rowptr(longs(rowptr, "rowptr", rowptr.numel())),
        col(col.const_data_ptr()),
        weight(weights ? longs(*weights, "weight", col.numel()) : nullptr),
        wide(is_wide(col, "col")),
        num_nodes(rowptr.numel() - 1) {
    check_vector(col, "col", col.numel(), wide);
  }

  int64_t degree(int64_t node) const { return rowptr[node + 1] - rowptr[node]; }

  void add_to(Sums& sums, int64_t node, const int64_t* labels) const {
    auto run = [&]<class I>(const I* ids) {
      for (int64_t e = rowptr[node]; e < rowptr[node + 1]; ++e)
        sums.add(labels[ids[e]], weight ? weight[e] : 1);
    };
    wide ? run(static_cast<const int64_t*>(col)) : run(static_cast<const int32_t*>(col));
  }
};

// Ranges of [0, count) with about the same number of entries; each is a task with its own table.
template <class Work, class Run>
void parallel_ranges(int64_t count, const Work& work_of, const Run& run) {
  std::vector<int64_t> bounds{0};
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i)
    total += 1 + work_of(i);
  const int64_t piece = std::max<int64_t>(4096, total / (16 * torch::stable::get_num_threads()));
  int64_t work = 0;
  for (int64_t i = 0; i < count; ++i) {
    work += 1 + work_of(i);
    if (work >= piece) {
      bounds.push_back(i + 1);
      work = 0;
    }
  }
  if (bounds.back() < count)
    bounds.push_back(count);
  parallel_tasks(static_cast<int64_t>(bounds.size()) - 1, total < kSerialElements,
                 [&](int64_t i) { run(bounds[i], bounds[i + 1]); });
}

Tensor community_best(const Tensor& rowptr,
                      const Tensor& col,
                      const std::optional<Tensor>& weight,
                      const Tensor& strength,
                      const Tensor& labels,
                      const Tensor& totals,
                      const Tensor& sizes,
                      const Tensor& nodes) {
  const Entries entries(rowptr, col, weight);
  const int64_t size = entries.num_nodes;
  const int64_t *k = longs(strength, "strength", size), *label = longs(labels, "labels", size),
                *total = longs(totals, "totals", size), *members = longs(sizes, "sizes", size),
                *node = longs(nodes, "nodes", nodes.numel());
  Tensor result = new_result(nodes, {nodes.numel()});
  int64_t* out = static_cast<int64_t*>(result.mutable_data_ptr());
  int64_t all = 0;
  for (int64_t v = 0; v < size; ++v)
    all += k[v];
  const double edges = static_cast<double>(all);
  parallel_ranges(
      nodes.numel(), [&](int64_t i) { return entries.degree(node[i]); },
      [&](int64_t begin, int64_t end) {
        Sums sums;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t v = node[i], own = label[v];
          const bool alone = members[own] == 1;
          sums.reserve(entries.degree(v));
          entries.add_to(sums, v, label);
          double stay = -(static_cast<double>(k[v]) * static_cast<double>(total[own] - k[v]));
          double best = -std::numeric_limits<double>::infinity();
          int64_t winner = own;
          sums.drain([&](int64_t c, int64_t w) {
            const int64_t rest = total[c] - (c == own ? k[v] : 0);
            const double gain = edges * static_cast<double>(w) -
                                static_cast<double>(k[v]) * static_cast<double>(rest);
            if (c == own)
              stay = gain;
            else if (!(alone && members[c] == 1 && c > own) &&
                     (gain > best || (gain == best && c < winner))) {
              best = gain;
              winner = c;
            }
          });
          out[i] = best > stay ? winner : own;
        }
      });
  return result;
}

// Neighbours of every community in ascending order, without edges inside of it.
std::vector<Tensor> community_merge(const Tensor& rowptr,
                                    const Tensor& col,
                                    const std::optional<Tensor>& weight,
                                    const Tensor& labels,
                                    const Tensor& first,
                                    const Tensor& members) {
  const Entries entries(rowptr, col, weight);
  const int64_t count = first.numel() - 1;
  const int64_t *label = longs(labels, "labels", entries.num_nodes),
                *begin_of = longs(first, "first", count + 1),
                *member = longs(members, "members", entries.num_nodes);
  using Edge = std::pair<int64_t, int64_t>;
  std::vector<std::vector<Edge>> rows(count);
  auto work_of = [&](int64_t c) {
    int64_t work = 0;
    for (int64_t i = begin_of[c]; i < begin_of[c + 1]; ++i)
      work += entries.degree(member[i]);
    return work;
  };
  parallel_ranges(count, work_of, [&](int64_t begin, int64_t end) {
    Sums sums;
    for (int64_t c = begin; c < end; ++c) {
      sums.reserve(std::min(count, work_of(c)));
      for (int64_t i = begin_of[c]; i < begin_of[c + 1]; ++i)
        entries.add_to(sums, member[i], label);
      rows[c].reserve(sums.count());
      sums.drain([&](int64_t other, int64_t w) {
        if (other != c)
          rows[c].emplace_back(other, w);
      });
      std::sort(rows[c].begin(), rows[c].end());
    }
  });
  Tensor rowptr_out = new_result(rowptr, {count + 1});
  int64_t* ptr = static_cast<int64_t*>(rowptr_out.mutable_data_ptr());
  ptr[0] = 0;
  for (int64_t c = 0; c < count; ++c)
    ptr[c + 1] = ptr[c] + static_cast<int64_t>(rows[c].size());
  Tensor col_out = new_result(col, {ptr[count]}), weight_out = new_result(rowptr, {ptr[count]});
  int64_t* weights = static_cast<int64_t*>(weight_out.mutable_data_ptr());
  auto copy = [&]<class I>(I* ids) {
    for (int64_t c = 0; c < count; ++c)
      for (size_t i = 0; i < rows[c].size(); ++i) {
        ids[ptr[c] + i] = static_cast<I>(rows[c][i].first);
        weights[ptr[c] + i] = rows[c][i].second;
      }
  };
  entries.wide ? copy(static_cast<int64_t*>(col_out.mutable_data_ptr()))
               : copy(static_cast<int32_t*>(col_out.mutable_data_ptr()));
  return {rowptr_out, col_out, weight_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("community_best", TORCH_BOX(&community_best));
  m.impl("community_merge", TORCH_BOX(&community_merge));
}

}  // namespace pyg_accel
