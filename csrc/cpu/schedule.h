// Division of work: rows in pieces of about equal work, hub rows split, X in blocks that fit a
// cache.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "tensors.h"

namespace pyg_accel {

// The block of X that should fit the last-level cache. First the columns of X are split, then its
// rows (ranges of source ids): more blocks of columns mean more reads of the indices, more blocks
// of rows more reads and writes of the output.
struct Blocking {
  int64_t width;  // feature columns a pass
  int64_t cols;   // source ids a pass; num_cols if not cut
};

Blocking choose_blocking(const Csr& csr,
                         int64_t heads,
                         int64_t width,
                         int64_t element_size,
                         bool may_cut_cols);

// Runs task(i) for i in [0, count) on torch's threads; each thread takes the next free task.
template <class Task>
void parallel_tasks(int64_t count, bool serial, const Task& task) {
  if (serial || count <= 1) {
    for (int64_t i = 0; i < count; ++i)
      task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++)
      task(i);
  });
}

// Row boundaries of at most `pieces` ranges with about the same number of rows and entries.
std::vector<int64_t> split_rows(const Csr& csr, int64_t pieces);

// Rows above kHubDegree.
std::vector<int64_t> find_hubs(const Csr& csr);

inline constexpr int64_t kSerialElements = 32768;  // below this, waking a thread costs more

// run(row_begin, row_end) over all rows.
template <class Run>
void parallel_rows(const Csr& csr, int64_t columns, const Run& run) {
  const bool serial = (csr.num_entries + csr.num_rows) * columns < kSerialElements;
  const int64_t threads = serial ? 1 : torch::stable::get_num_threads();
  if (threads == 1) {
    run(0, csr.num_rows);
    return;
  }
  const std::vector<int64_t> bounds = split_rows(csr, threads * 16);
  parallel_tasks(static_cast<int64_t>(bounds.size()) - 1, false,
                 [&](int64_t i) { run(bounds[i], bounds[i + 1]); });
}

inline int64_t num_pieces(const Csr& csr, int64_t row) {
  const int64_t degree = row_pointer(csr, row + 1) - row_pointer(csr, row);
  return (degree + kPieceEntries - 1) / kPieceEntries;
}

// run(piece, index) over the pieces of one hub row.
template <class Run>
void parallel_pieces(const Csr& csr, int64_t row, const Run& run) {
  const int64_t begin = row_pointer(csr, row), end = row_pointer(csr, row + 1);
  parallel_tasks(num_pieces(csr, row), false, [&](int64_t i) {
    run(Piece{row, begin + i * kPieceEntries, std::min(end, begin + (i + 1) * kPieceEntries)}, i);
  });
}

// Hub rows of an operator that reduces: pieces in parallel, then combined in order.
template <class Args, class RunPiece, class Combine>
void reduce_hubs(const Args& args, int64_t partial_bytes, RunPiece run_piece, Combine combine) {
  for (const int64_t row : find_hubs(args.csr)) {
    const int64_t count = num_pieces(args.csr, row);
    std::vector<double> buffer((count * partial_bytes + 7) / 8);
    char* partials = reinterpret_cast<char*>(buffer.data());
    parallel_pieces(args.csr, row, [&](const Piece& piece, int64_t i) {
      run_piece(args, piece, partials + i * partial_bytes);
    });
    combine(args, row, partials, count);
  }
}

}  // namespace pyg_accel
