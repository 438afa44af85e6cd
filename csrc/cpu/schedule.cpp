#include "schedule.h"

#include "config.h"

namespace pyg_accel {

std::vector<int64_t> split_rows(const Csr& csr, int64_t pieces) {
  pieces = std::max<int64_t>(1, std::min(pieces, csr.num_rows));
  std::vector<int64_t> bounds{0};
  const int64_t total = csr.num_entries + csr.num_rows;
  for (int64_t p = 1; p < pieces; ++p) {
    const int64_t goal = total / pieces * p;
    int64_t low = bounds.back(), high = csr.num_rows;
    while (low < high) {  // the first row whose work before it reaches the goal
      const int64_t middle = low + (high - low) / 2;
      if (row_pointer(csr, middle) + middle < goal)
        low = middle + 1;
      else
        high = middle;
    }
    if (low > bounds.back())
      bounds.push_back(low);
  }
  if (bounds.back() < csr.num_rows || bounds.size() == 1)
    bounds.push_back(csr.num_rows);
  return bounds;
}

std::vector<int64_t> find_hubs(const Csr& csr) {
  std::vector<int64_t> hubs;
  if (csr.num_entries <= kHubDegree)
    return hubs;
  for (int64_t row = 0; row < csr.num_rows; ++row)
    if (row_pointer(csr, row + 1) - row_pointer(csr, row) > kHubDegree)
      hubs.push_back(row);
  return hubs;
}

Blocking choose_blocking(const Csr& csr,
                         int64_t heads,
                         int64_t width,
                         int64_t element_size,
                         bool may_cut_cols) {
  const Config& config = current_config();
  Blocking blocking{width, csr.num_cols};
  if (config.block_width > 0 || config.block_cols > 0) {
    if (config.block_width > 0)
      blocking.width = std::min(width, config.block_width);
    if (config.block_cols > 0 && may_cut_cols && csr.sorted)
      blocking.cols = config.block_cols;
    return blocking;
  }
  const int64_t budget = config.cache_bytes * 3 / 4;  // the rest holds indices and output
  const int64_t column_bytes = std::max<int64_t>(1, csr.num_cols * heads * element_size);
  if (column_bytes * width <= budget || csr.num_entries < 2 * csr.num_cols)
    return blocking;  // fits, or too few entries for a row of X to be read again
  const int64_t line = 64 / element_size;  // a narrower slice would fetch bytes it does not use
  blocking.width = std::min(width, std::max(2 * line, budget / column_bytes / line * line));
  // Sources are split into blocks if even that slice is too large, and if a block still has several
  // entries per row, so that the extra passes over the output pay.
  const int64_t slice = column_bytes * blocking.width;
  const int64_t blocks = (slice + budget - 1) / budget;
  if (may_cut_cols && csr.sorted && blocks > 1 && csr.num_entries >= 8 * blocks * csr.num_rows)
    blocking.cols = (csr.num_cols + blocks - 1) / blocks;
  return blocking;
}

}  // namespace pyg_accel
