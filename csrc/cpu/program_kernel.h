// Binary-reduce for any message formula: a small register machine that runs one instruction over a
// block of columns at a time, so its dispatch cost is shared by up to kBlock elements and every
// intermediate stays in the first-level cache. Included once per instruction set.

inline constexpr int kBlock = 128;

template <class T, class I>
class Machine {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using M = mask_t<A>;
  using Lane = typename Simd<A>::Lane;
  static constexpr int L = kLanes<A>;

 public:
  explicit Machine(const ProgramArgs& a)
      : a_(a),
        rowptr_(static_cast<const I*>(a.csr.rowptr)),
        col_(static_cast<const I*>(a.csr.col)),
        eid_(static_cast<const I*>(a.csr.eid)) {
    for (int i = 0; i < a.num_instructions; ++i)
      registers_[a.num_operands + i] = scratch_[a.num_operands + i];
    for (int o = 0; o < a.num_operands; ++o) {
      wide_[o] = a.operands[o].wide;
      if (a.operands[o].side != Operand::kTarget)
        moving_[num_moving_++].number = o;
    }
  }

  // Columns [f, f + n) of head h, n <= kBlock, of entries [k0, k1) of `row`.
  void entries(int64_t row, int64_t k0, int64_t k1, int64_t h, int64_t f, int n) {
    n_ = n;
    head_ = h;
    start_accumulators();
    start_block(row, f);
    for (int64_t k = k0; k < k1; ++k) {
      const A* message = evaluate(k);
      for (int r = 0; r < a_.num_reduces; ++r)
        accumulate(r, message, k, k == k0, f);
      if ((k - k0) % kRunEntries == kRunEntries - 1)
        close_run();
    }
    close_run();
    taken_ = k1 - k0;
  }

  // The same for a message that is summed over the whole width: one value per entry.
  void summed_entries(int64_t row, int64_t k0, int64_t k1, int64_t h) {
    head_ = h;
    n_ = 1;
    start_accumulators();
    for (int64_t k = k0; k < k1; ++k) {
      A total[L] = {};  // a whole vector, so that block() may load it
      for (int64_t f = 0; f < a_.width; f += kBlock) {
        n_ = static_cast<int>(a_.width - f < kBlock ? a_.width - f : kBlock);
        start_block(row, f);
        const A* message = evaluate(k);
        if (wide_[a_.result]) {
          V sum{};
          for (int i = 0; i < n_; i += L)
            sum += block(message, true, i);
          total[0] += horizontal_sum<A>(sum);
        } else {
          total[0] += message[0] * static_cast<A>(n_);
        }
      }
      n_ = 1;
      for (int r = 0; r < a_.num_reduces; ++r)
        accumulate(r, total, k, k == k0, 0);
      if ((k - k0) % kRunEntries == kRunEntries - 1)
        close_run();
    }
    n_ = 1;
    close_run();
    taken_ = k1 - k0;
  }

  // Writes the accumulators of a finished row; `place` is its element offset in the outputs.
  void finish(int64_t row, int64_t place) {
    const int64_t k_row = rowptr_[row];
    for (int r = 0; r < a_.num_reduces; ++r) {
      if (a_.reduces[r] == Reduce::kNone)
        continue;
      T* out = static_cast<T*>(a_.outs[r]) + place;
      const A scale = a_.reduces[r] == Reduce::kMean && taken_ > 1 ? static_cast<A>(taken_) : A(1);
      for (int i = 0; i < n_; ++i)
        out[i] = from_acc<T>(result_of(r, i) / scale);
      if (a_.args[r]) {
        I* arg = static_cast<I*>(a_.args[r]) + place;
        for (int i = 0; i < n_; ++i)
          arg[i] = taken_ ? winner_of(k_row + slots_[r][i]) : I(-1);
      }
    }
  }

  // Raw accumulators and slots of a piece: [num_reduces][2][columns], at column `place`.
  void save(int64_t row, int64_t k0, A* partial, int64_t columns, int64_t place) {
    const int64_t base = k0 - rowptr_[row];
    for (int r = 0; r < a_.num_reduces; ++r) {
      A* sums = partial + 2 * r * columns + place;
      auto* slots = reinterpret_cast<Lane*>(partial + (2 * r + 1) * columns) + place;
      for (int i = 0; i < n_; ++i) {
        sums[i] = result_of(r, i);
        slots[i] = static_cast<Lane>(slots_[r][i] + base);
      }
    }
  }

  void combine(int64_t row, const A* partials, int64_t count, int64_t columns) {
    const int64_t k_row = rowptr_[row];
    const A degree = static_cast<A>(rowptr_[row + 1] - k_row);
    const int64_t stride = 2 * a_.num_reduces * columns;
    for (int r = 0; r < a_.num_reduces; ++r) {
      const Reduce reduce = a_.reduces[r];
      if (reduce == Reduce::kNone)
        continue;
      for (int64_t f = 0; f < columns; ++f) {
        const A* sums = partials + 2 * r * columns + f;
        A best = sums[0];
        int64_t piece = 0;
        for (int64_t p = 1; p < count; ++p) {
          const A value = sums[p * stride];
          if (reduce == Reduce::kProd) {
            best *= value;
          } else if (reduce != Reduce::kMax && reduce != Reduce::kMin) {
            best += value;
          } else if (value != value || (reduce == Reduce::kMax ? value > best : value < best)) {
            best = value;
            piece = p;
          }
        }
        static_cast<T*>(a_.outs[r])[row * columns + f] =
            from_acc<T>(reduce == Reduce::kMean ? best / degree : best);
        if (a_.args[r]) {
          const auto* slots =
              reinterpret_cast<const Lane*>(partials + piece * stride + (2 * r + 1) * columns);
          static_cast<I*>(a_.args[r])[row * columns + f] = winner_of(k_row + slots[f]);
        }
      }
    }
  }

 private:
  I winner_of(int64_t k) const {
    return a_.arg_is_col ? col_[k] : eid_ ? eid_[k] : static_cast<I>(k);
  }

  V block(const A* p, bool wide, int i) const {
    if (!wide)
      return splat<A>(p[0]);
    return i + L <= n_ ? load(p + i) : load_n(p + i, n_ - i);
  }

  // Element offset of a block of columns within a row of an operand.
  int64_t offset_of(const Operand& operand, int64_t f) const {
    const int64_t columns = operand.wide ? a_.width : 1;
    return (operand.per_head ? head_ * columns : 0) + (operand.wide ? f : 0);
  }

  // Binds the target's operands, computes what depends on them alone, and prepares the others.
  void start_block(int64_t row, int64_t f) {
    for (int o = 0; o < a_.num_operands; ++o) {
      const Operand& operand = a_.operands[o];
      if (operand.side != Operand::kTarget)
        continue;
      const int64_t offset = row * operand.stride + offset_of(operand, f);
      if (operand.index)
        index_[o] = static_cast<const I*>(operand.data) + offset;
      else
        bind(o, static_cast<const T*>(operand.data) + offset);
    }
    for (int m = 0; m < num_moving_; ++m) {
      const Operand& operand = a_.operands[moving_[m].number];
      moving_[m].index = operand.index;
      if (operand.index)
        moving_[m].base = static_cast<const I*>(operand.data) + offset_of(operand, f);
      else
        moving_[m].base = static_cast<const T*>(operand.data) + offset_of(operand, f);
      moving_[m].stride = operand.stride;
      moving_[m].by_source = operand.side == Operand::kSource;
      moving_[m].bytes = operand.wide ? n_ * static_cast<int>(sizeof(T)) : 1;
    }
    execute(true, 0);
  }

  // Points a register at features in memory; 16-bit ones are widened into scratch.
  void bind(int o, const T* p) {
    if constexpr (std::is_same_v<T, A>) {
      registers_[o] = p;
    } else {
      const int n = wide_[o] ? n_ : 1;
      for (int i = 0; i < n; i += L) {
        const V v = i + L <= n ? load(p + i) : load_n(p + i, n - i);
        __builtin_memcpy(scratch_[o] + i, &v, sizeof(v));
      }
      registers_[o] = scratch_[o];
    }
  }

  const A* evaluate(int64_t k) {
    const int64_t next = k + kAhead < a_.csr.num_entries ? k + kAhead : a_.csr.num_entries - 1;
    edge_ = eid_ ? static_cast<int64_t>(eid_[k]) : k;
    const int64_t next_edge = eid_ ? static_cast<int64_t>(eid_[next]) : next;
    for (int m = 0; m < num_moving_; ++m) {
      const Moving& moving = moving_[m];
      const int64_t here = moving.by_source ? static_cast<int64_t>(col_[k]) : edge_;
      const int64_t soon = moving.by_source ? static_cast<int64_t>(col_[next]) : next_edge;
      if (moving.index) {
        index_[moving.number] = static_cast<const I*>(moving.base) + here * moving.stride;
        continue;
      }
      const T* base = static_cast<const T*>(moving.base);
      const char* p = reinterpret_cast<const char*>(base + soon * moving.stride);
      for (int b = 0; b < moving.bytes; b += 64)
        __builtin_prefetch(p + b);
      bind(moving.number, base + here * moving.stride);
    }
    execute(false, edge_);
    return registers_[a_.result];
  }

  template <class F>
  void map(int to, bool wide, F f) {
    A* out = scratch_[to];
    const int n = wide ? n_ : 1;
    for (int i = 0; i < n; i += L) {
      const V v = f(i);
      __builtin_memcpy(out + i, &v, sizeof(v));
    }
  }

  void execute(bool invariant, int64_t edge) {
    for (int i = 0; i < a_.num_instructions; ++i) {
      const Instruction& in = a_.instructions[i];
      if (in.invariant != invariant)
        continue;
      const int to = a_.num_operands + i;
      wide_[to] = in.wide;
      const A* pa = registers_[in.a];
      const A* pb = registers_[in.b];
      const bool wa = wide_[in.a], wb = wide_[in.b];
      auto x = [&](int j) { return block(pa, wa, j); };
      auto y = [&](int j) { return block(pb, wb, j); };
      const A value = static_cast<A>(in.value);
      switch (in.op) {
        case Op::kAdd:
          map(to, in.wide, [&](int j) { return x(j) + y(j); });
          break;
        case Op::kSub:
          map(to, in.wide, [&](int j) { return x(j) - y(j); });
          break;
        case Op::kMul:
          map(to, in.wide, [&](int j) { return x(j) * y(j); });
          break;
        case Op::kDiv:
          map(to, in.wide, [&](int j) { return x(j) / y(j); });
          break;
        case Op::kSelect: {
          const I* arg = index_[in.b];
          const int n = in.wide ? n_ : 1;
          for (int j = 0; j < n; ++j)
            scratch_[to][j] = static_cast<int64_t>(arg[wb ? j : 0]) == edge ? pa[wa ? j : 0] : A{};
          break;
        }
        case Op::kNeg:
          map(to, in.wide, [&](int j) { return -x(j); });
          break;
        case Op::kAbs:
          map(to, in.wide, [&](int j) { return x(j) < 0 ? -x(j) : x(j); });
          break;
        case Op::kExp:
          map(to, in.wide, [&](int j) { return vexp(x(j)); });
          break;
        case Op::kLog:
          map(to, in.wide, [&](int j) { return vlog(x(j)); });
          break;
        case Op::kSqrt:
          map(to, in.wide, [&](int j) { return vsqrt<A>(x(j)); });
          break;
        case Op::kRelu:  // the comparison is written so that NaN passes through
          map(to, in.wide, [&](int j) { return x(j) <= 0 ? V{} : x(j); });
          break;
        case Op::kLeakyRelu:
          map(to, in.wide, [&](int j) { return x(j) > 0 ? x(j) : x(j) * value; });
          break;
        case Op::kSigmoid:
          map(to, in.wide, [&](int j) { return vsigmoid(x(j)); });
          break;
        case Op::kTanh:
          map(to, in.wide, [&](int j) { return vtanh(x(j)); });
          break;
        case Op::kSoftplus:
          map(to, in.wide, [&](int j) { return vsoftplus(x(j)); });
          break;
        case Op::kPow:
          map(to, in.wide, [&](int j) { return vpow<A>(x(j), value); });
          break;
        case Op::kStep:
          map(to, in.wide, [&](int j) { return x(j) > 0 ? splat<A>(1) : V{}; });
          break;
        case Op::kSign:
          map(to, in.wide, [&](int j) {
            return x(j) > 0 ? splat<A>(1) : x(j) < 0 ? splat<A>(-1) : V{};
          });
          break;
        case Op::kIsZero:
          map(to, in.wide, [&](int j) { return x(j) == 0 ? splat<A>(1) : V{}; });
          break;
        case Op::kNonZero:
          map(to, in.wide, [&](int j) { return x(j) == 0 ? splat<A>(1) : x(j); });
          break;
        case Op::kConst:
          scratch_[to][0] = value;
          break;
      }
    }
  }

  void start_accumulators() {
    for (int r = 0; r < a_.num_reduces; ++r) {
      const V start = splat<A>(a_.reduces[r] == Reduce::kProd ? A(1) : A(0));
      for (int i = 0; i < n_; i += L)
        __builtin_memcpy(sums_[r] + i, &start, sizeof(start));
      if (adds(r)) {
        for (int i = 0; i < n_; i += L)
          __builtin_memcpy(totals_[r] + i, &start, sizeof(start));
      }
    }
  }

  bool adds(int r) const {
    return a_.reduces[r] == Reduce::kSum || a_.reduces[r] == Reduce::kMean ||
           a_.reduces[r] == Reduce::kSqSum;
  }

  // Adds the sums of a run to the totals; finish() and save() read the totals.
  void close_run() {
    for (int r = 0; r < a_.num_reduces; ++r) {
      if (!adds(r))
        continue;
      for (int i = 0; i < n_; ++i) {
        totals_[r][i] += sums_[r][i];
        sums_[r][i] = A{};
      }
    }
  }

  A result_of(int r, int i) const { return adds(r) ? totals_[r][i] : sums_[r][i]; }

  void accumulate(int r, const A* message, int64_t k, bool first, int64_t f) {
    const bool wide = !a_.sum_result && wide_[a_.result];
    A* sums = sums_[r];
    auto update = [&](auto fn) {
      for (int i = 0; i < n_; i += L) {
        V s;
        __builtin_memcpy(&s, sums + i, sizeof(s));
        s = fn(s, block(message, wide, i));
        __builtin_memcpy(sums + i, &s, sizeof(s));
      }
    };
    switch (a_.reduces[r]) {
      case Reduce::kSum:
      case Reduce::kMean:
        update([](V s, V m) { return s + m; });
        break;
      case Reduce::kSqSum:
        update([](V s, V m) { return s + m * m; });
        break;
      case Reduce::kProd:
        update([](V s, V m) { return s * m; });
        break;
      case Reduce::kMax:
      case Reduce::kMin: {
        const bool max = a_.reduces[r] == Reduce::kMax;
        if (first)
          first_ = k;
        for (int i = 0; i < n_; i += L) {
          V s;
          M slot;
          __builtin_memcpy(&s, sums + i, sizeof(s));
          __builtin_memcpy(&slot, slots_[r] + i, sizeof(slot));
          const V m = block(message, wide, i);
          const M better = first ? ~M{} : ((max ? m > s : m < s) | (m != m));
          s = better ? m : s;
          slot = better ? M{} + static_cast<Lane>(k - first_) : slot;
          __builtin_memcpy(sums + i, &s, sizeof(s));
          __builtin_memcpy(slots_[r] + i, &slot, sizeof(slot));
        }
        break;
      }
      case Reduce::kNone: {
        const int64_t columns = a_.sum_result ? 1 : a_.width;
        T* out = static_cast<T*>(a_.outs[r]) + (edge_ * a_.heads + head_) * columns + f;
        for (int i = 0; i < n_; i += L)
          store_n(out + i, block(message, wide, i), n_ - i < L ? n_ - i : L);
        break;
      }
    }
  }

  // An operand that is read at the source or the edge, and so moves from entry to entry.
  struct Moving {
    int number;
    bool by_source;
    bool index;
    int bytes;
    int64_t stride;
    const void* base;
  };
  static constexpr int64_t kAhead = 8;  // entries ahead whose operands are prefetched

  const ProgramArgs& a_;
  Moving moving_[kMaxOperands] = {};
  int num_moving_ = 0;
  const I* rowptr_;
  const I* col_;
  const I* eid_;
  int n_ = 0;
  int64_t head_ = 0;
  int64_t edge_ = 0;
  int64_t first_ = 0;
  int64_t taken_ = 0;
  const A* registers_[kMaxOperands + kMaxInstructions] = {};
  const I* index_[kMaxOperands] = {};
  bool wide_[kMaxOperands + kMaxInstructions] = {};
  alignas(64) A scratch_[kMaxOperands + kMaxInstructions][kBlock + 16];
  alignas(64) A sums_[kMaxReduces][kBlock + 16];
  alignas(64) A totals_[kMaxReduces][kBlock + 16];
  alignas(64) Lane slots_[kMaxReduces][kBlock + 16];
};

// Calls fn(head, first column, count, place) for every block of a row's output.
template <class Fn>
inline void program_blocks(const ProgramArgs& a, int64_t f_begin, int64_t f_end, Fn fn) {
  for (int64_t h = 0; h < a.heads; ++h) {
    if (a.sum_result) {
      fn(h, 0, 1, h);
      continue;
    }
    for (int64_t f = f_begin; f < f_end; f += kBlock)
      fn(h, f, static_cast<int>(f_end - f < kBlock ? f_end - f : kBlock), h * a.width + f);
  }
}

template <class T, class I>
inline void program_entries(Machine<T, I>& machine,
                            const ProgramArgs& a,
                            const Piece& piece,
                            int64_t h,
                            int64_t f,
                            int n) {
  if (a.sum_result)
    machine.summed_entries(piece.row, piece.k_begin, piece.k_end, h);
  else
    machine.entries(piece.row, piece.k_begin, piece.k_end, h, f, n);
}

template <class T, class I>
void program_rows(const ProgramArgs& a, const Range& range) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const int64_t columns = a.heads * (a.sum_result ? 1 : a.width);
  Machine<T, I> machine(a);
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    if (rowptr[row + 1] - rowptr[row] > kHubDegree)
      continue;
    program_blocks(a, range.f_begin, range.f_end, [&](int64_t h, int64_t f, int n, int64_t place) {
      program_entries(machine, a, {row, rowptr[row], rowptr[row + 1]}, h, f, n);
      machine.finish(row, row * columns + place);
    });
  }
}

template <class T, class I>
void program_piece(const ProgramArgs& a, const Piece& piece, void* partial) {
  const int64_t columns = a.heads * (a.sum_result ? 1 : a.width);
  Machine<T, I> machine(a);
  program_blocks(a, 0, a.width, [&](int64_t h, int64_t f, int n, int64_t place) {
    program_entries(machine, a, piece, h, f, n);
    machine.save(piece.row, piece.k_begin, static_cast<acc_t<T>*>(partial), columns, place);
  });
}

template <class T, class I>
void program_combine(const ProgramArgs& a, int64_t row, void* partials, int64_t count) {
  Machine<T, I> machine(a);
  machine.combine(row, static_cast<const acc_t<T>*>(partials), count,
                  a.heads * (a.sum_result ? 1 : a.width));
}
