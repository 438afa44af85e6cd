// Written by `python -m pyg_accel.formula.functions`, from its table: do not edit.
#pragma once

namespace pyg_accel {

// clang-format off
enum class Op : int {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kSel,
  kMaximum,
  kMinimum,
  kKeep,
  kNeg,
  kAbs,
  kExp,
  kLog,
  kSqrt,
  kRelu,
  kLeakyRelu,
  kSigmoid,
  kTanh,
  kSoftplus,
  kPow,
  kStep,
  kSign,
  kIszero,
  kNonzero,
  kSilu,
  kErf,
  kGelu,
  kConst,
};

inline constexpr int kBinaryOps = 8;  // the first ones

#define PYG_ACCEL_BINARY(X) \
  X(kAdd, x + y) \
  X(kSub, x - y) \
  X(kMul, x * y) \
  X(kDiv, x / y) \
  X(kMaximum, (x > y) | (x != x) ? x : y) \
  X(kMinimum, (x < y) | (x != x) ? x : y) \
  X(kKeep, y != 0 ? x : V{})

#define PYG_ACCEL_UNARY(X) \
  X(kNeg, -x) \
  X(kAbs, x < 0 ? -x : x) \
  X(kExp, vexp(x)) \
  X(kLog, vlog(x)) \
  X(kSqrt, vsqrt<A>(x)) \
  X(kRelu, x <= 0 ? V{} : x) \
  X(kLeakyRelu, x > 0 ? x : x * value) \
  X(kSigmoid, vsigmoid(x)) \
  X(kTanh, vtanh(x)) \
  X(kSoftplus, vsoftplus(x)) \
  X(kPow, vpow<A>(x, value)) \
  X(kStep, x > 0 ? splat<A>(1) : V{}) \
  X(kSign, x > 0 ? splat<A>(1) : x < 0 ? splat<A>(-1) : V{}) \
  X(kIszero, x == 0 ? splat<A>(1) : V{}) \
  X(kNonzero, x == 0 ? splat<A>(1) : x) \
  X(kSilu, x * vsigmoid(x)) \
  X(kErf, verf<A>(x)) \
  X(kGelu, x * (verf<A>(x * splat<A>(0.7071067811865476)) + 1) / 2)
// clang-format on

}  // namespace pyg_accel
