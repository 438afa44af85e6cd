// Dot products of both ends of every edge.
#pragma once

#include "tensors.h"

namespace pyg_accel {

// [E, heads] of target [num_rows, ...] and source [num_cols, ...], each with `heads` parts.
Tensor dot(const Csr& csr, int64_t heads, const Tensor& target, const Tensor& source);

}  // namespace pyg_accel
