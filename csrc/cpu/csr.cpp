// Building CSR from edge lists, and its transpose, by counting sort: linear in edges and nodes.
#include "schedule.h"

namespace pyg_accel {
namespace {

// Stable counting sort of `keys` into buckets. Each thread has a contiguous chunk of the input and
// a count per bucket, so each bucket keeps the order of the input for any number of threads.
// place(input position, output position) is called once for each element.
template <class Key, class Out, class Place>
void counting_sort(const Key* keys,
                   int64_t count,
                   int64_t buckets,
                   Out* bucket_ptr,
                   const Place& place) {
  int64_t chunks = count < 65536 ? 1 : torch::stable::get_num_threads();
  // The counts of all chunks are summed once: keep them well below the size of the input.
  chunks = std::max<int64_t>(1, std::min(chunks, 1 + 2 * count / std::max<int64_t>(1, buckets)));
  const int64_t chunk = (count + chunks - 1) / std::max<int64_t>(1, chunks);
  std::vector<Out> offsets(chunks * buckets);
  auto range = [&](int64_t c) {
    return std::pair{std::min(count, c * chunk), std::min(count, (c + 1) * chunk)};
  };
  parallel_tasks(chunks, false, [&](int64_t c) {
    Out* mine = offsets.data() + c * buckets;
    for (auto [i, end] = range(c); i < end; ++i)
      ++mine[keys[i]];
  });
  Out total = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    bucket_ptr[b] = total;
    for (int64_t c = 0; c < chunks; ++c) {
      Out& slot = offsets[c * buckets + b];
      const Out here = slot;
      slot = total;
      total += here;
    }
  }
  bucket_ptr[buckets] = total;
  parallel_tasks(chunks, false, [&](int64_t c) {
    Out* mine = offsets.data() + c * buckets;
    for (auto [i, end] = range(c); i < end; ++i)
      place(i, mine[keys[i]]++);
  });
}

template <class Key>
bool in_range(const Key* ids, int64_t count, int64_t size) {
  std::atomic<bool> good{true};
  const int64_t tasks = std::max<int64_t>(1, count / 65536);
  parallel_tasks(tasks, false, [&](int64_t t) {
    bool mine = true;
    for (int64_t i = count * t / tasks; i < count * (t + 1) / tasks; ++i)
      mine &= ids[i] >= 0 && ids[i] < size;
    if (!mine)
      good = false;
  });
  return good;
}

template <class Key>
bool ascending(const Key* row, const Key* col, int64_t count) {
  for (int64_t i = 1; i < count; ++i)
    if (row[i] < row[i - 1] || (row[i] == row[i - 1] && col[i] < col[i - 1]))
      return false;
  return true;
}

template <class Key, class Out>
void from_coo(const Key* row,
              const Key* col,
              int64_t count,
              int64_t num_rows,
              int64_t num_cols,
              Out* rowptr,
              Out* col_out,
              Out* perm) {
  if (ascending(row, col, count)) {  // stops at the first step down: free on unsorted input
    int64_t i = 0;
    for (int64_t r = 0; r <= num_rows; ++r) {
      while (i < count && row[i] < r)
        ++i;
      rowptr[r] = static_cast<Out>(i);
    }
    for (int64_t k = 0; k < count; ++k) {
      col_out[k] = static_cast<Out>(col[k]);
      perm[k] = static_cast<Out>(k);
    }
    return;
  }
  // By column, then stably by row: columns ascend in each row and duplicates keep their order.
  std::vector<Out> by_col(count), row_by_col(count), colptr(num_cols + 1);
  counting_sort(col, count, num_cols, colptr.data(), [&](int64_t i, Out k) {
    by_col[k] = static_cast<Out>(i);
    row_by_col[k] = static_cast<Out>(row[i]);
  });
  counting_sort(row_by_col.data(), count, num_rows, rowptr, [&](int64_t i, Out k) {
    perm[k] = by_col[i];
    col_out[k] = static_cast<Out>(col[by_col[i]]);
  });
}

// Sorts the edges of a list [2, E] by its row `target`.
std::vector<Tensor> csr_from_coo(const Tensor& edge_index,
                                 int64_t target,
                                 int64_t num_rows,
                                 int64_t num_cols,
                                 bool wide) {
  const bool wide_in = is_wide(edge_index, "edge_index");
  STD_TORCH_CHECK(edge_index.is_cpu() && edge_index.dim() == 2 && edge_index.size(0) == 2 &&
                      (target == 0 || target == 1),
                  "expected 'edge_index' of shape [2, E] on a CPU, and one of its rows");
  STD_TORCH_CHECK(num_rows >= 0 && num_cols >= 0, "expected sizes that are not negative");
  const int64_t count = edge_index.size(1);
  const bool dense = count < 2 || edge_index.stride(1) == 1;
  const Tensor list = dense ? edge_index : torch::stable::contiguous(edge_index);
  const ScalarType type = wide ? ScalarType::Long : ScalarType::Int;
  auto empty = [&](int64_t n) { return new_result(list, {n}, type); };
  std::vector<Tensor> result{empty(num_rows + 1), empty(count), empty(count)};
  auto build = [&]<class Key, class Out>(Key, Out) {
    const Key* ids = static_cast<const Key*>(list.const_data_ptr());
    const Key* r = ids + target * list.stride(0);
    const Key* c = ids + (1 - target) * list.stride(0);
    STD_TORCH_CHECK(in_range(r, count, num_rows), "found target ids outside of [0, ", num_rows,
                    ")");
    STD_TORCH_CHECK(in_range(c, count, num_cols), "found source ids outside of [0, ", num_cols,
                    ")");
    from_coo(r, c, count, num_rows, num_cols, static_cast<Out*>(result[0].mutable_data_ptr()),
             static_cast<Out*>(result[1].mutable_data_ptr()),
             static_cast<Out*>(result[2].mutable_data_ptr()));
  };
  if (wide_in)
    wide ? build(int64_t{}, int64_t{}) : build(int64_t{}, int32_t{});
  else
    wide ? build(int32_t{}, int64_t{}) : build(int32_t{}, int32_t{});
  return result;
}

std::vector<Tensor> csr_transpose(const Tensor& rowptr, const Tensor& col, int64_t num_cols) {
  const Csr csr = csr_of(rowptr, col, std::nullopt, num_cols, false);
  std::vector<Tensor> result{new_result(rowptr, {num_cols + 1}),
                             new_result(rowptr, {csr.num_entries}),
                             new_result(rowptr, {csr.num_entries})};
  auto build = [&]<class I>(I) {
    const I* ptr = static_cast<const I*>(csr.rowptr);
    const I* c = static_cast<const I*>(csr.col);
    std::vector<I> row(csr.num_entries);
    parallel_rows(csr, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        std::fill(row.begin() + ptr[r], row.begin() + ptr[r + 1], static_cast<I>(r));
    });
    I* col_out = static_cast<I*>(result[1].mutable_data_ptr());
    I* perm = static_cast<I*>(result[2].mutable_data_ptr());
    counting_sort(c, csr.num_entries, num_cols, static_cast<I*>(result[0].mutable_data_ptr()),
                  [&](int64_t i, I k) {
                    col_out[k] = row[i];
                    perm[k] = static_cast<I>(i);
                  });
  };
  csr.wide ? build(int64_t{}) : build(int32_t{});
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("csr_from_coo", TORCH_BOX(&csr_from_coo));
  m.impl("csr_transpose", TORCH_BOX(&csr_transpose));
}

}  // namespace pyg_accel
