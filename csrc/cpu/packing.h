// A contiguous copy of a slice of the columns of X. Its rows are on far fewer memory pages than in
// the whole matrix, so random accesses stay within the TLB.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "schedule.h"

namespace pyg_accel {

class PackedColumns {
 public:
  explicit PackedColumns(int64_t bytes) {
    if (bytes == 0)
      return;
    constexpr int64_t kLine = 64;
    buffer_.reset(std::aligned_alloc(kLine, (bytes + kLine - 1) / kLine * kLine));
    if (!buffer_)
      throw std::bad_alloc();
    prefer_huge_pages(buffer_.get(), bytes);
  }

  // Copies `bytes` from byte `begin` of every row.
  void fill(const void* x, int64_t rows, int64_t row_bytes, int64_t begin, int64_t bytes) {
    const char* from = static_cast<const char*>(x) + begin;
    char* to = static_cast<char*>(buffer_.get());
    constexpr int64_t kRows = 4096;
    parallel_tasks((rows + kRows - 1) / kRows, false, [&](int64_t i) {
      const int64_t end = std::min(rows, (i + 1) * kRows);
      for (int64_t row = i * kRows; row < end; ++row)
        std::memcpy(to + row * bytes, from + row * row_bytes, bytes);
    });
  }

  const void* data() const { return buffer_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> buffer_;
};

}  // namespace pyg_accel
