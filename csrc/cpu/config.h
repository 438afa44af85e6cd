// Properties of the processor, and the settings that a test or a user overrides.
#pragma once

#include <cstdint>

namespace pyg_accel {

struct Config {
  int64_t block_width;  // feature columns a pass, 0: from the cache size
  int64_t block_cols;   // source ids a pass, 0: from the cache size
  int64_t cache_bytes;  // last-level cache
};

const Config& current_config();

}  // namespace pyg_accel
