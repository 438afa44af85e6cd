// A small register machine for any message formula. It runs each instruction on a tile: a block of
// columns of one entry, or, if the block is narrow, of several entries of a row or of short rows.
// So up to kTile elements share the cost of dispatch, and every intermediate result stays in the
// first-level cache. Included once per instruction set.

// A register holds the values of `count` entries: [count, columns] if wide, else [count].
template <class T, class I>
class Machine {
 public:
  using A = acc_t<T>;
  using V = vec_t<A>;
  static constexpr int L = kLanes<A>;

  Machine(const ProgramArgs& a, const Csr& csr, Scratch<T, I>& scratch)
      : a_(a),
        scratch_(scratch.values),
        spread_scratch_(scratch.spread),
        index_scratch_(scratch.indices) {
    for (int o = 0; o < a.num_operands; ++o) {
      wide_[o] = a.operands[o].wide;
      invariant_[o] = a.operands[o].side == Operand::kTarget;
      numbered_ |= a.operands[o].side == Operand::kNumber;
    }
    for (const bool target : {false, true}) {
      for (int o = 0; o < a.num_operands; ++o) {
        const Operand& operand = a.operands[o];
        if (operand.side == Operand::kNumber || invariant_[o] != target)
          continue;
        const void* ids = operand.side == Operand::kSource ? csr.col : csr.eid;
        moving_[num_moving_++] = {o, operand.index,      operand.stride, static_cast<const I*>(ids),
                                  0, csr.num_entries - 1};
      }
      num_others_ = target ? num_others_ : num_moving_;
    }
    for (int i = 0; i < a.num_instructions; ++i) {
      const Instruction& in = a.instructions[i];
      const int to = a.num_operands + i;
      registers_[to] = scratch_[to];
      wide_[to] = in.wide;
      invariant_[to] = in.invariant;
      for (const int input : {in.a, in.b})
        per_entry_[input] |= !in.invariant;
    }
    for (int i = 0; i < a.num_results; ++i)
      per_entry_[a.results[i]] = true;
  }

  // Sets where the next calls read operands of side kNumber.
  void use(const Numbers<A>& numbers) { numbers_ = numbers; }

  // The next calls are about entries k, k + 1, ...; `edges` and `targets` have the edge and the row
  // of each. Without targets, all are in the row that `start` names.
  void use_entries(int64_t k, int count, const int64_t* edges, const I* targets) {
    first_ = k;
    last_ = k + count - 1;
    edges_ = edges;
    targets_ = targets;
  }

  // The next calls of `evaluate` compute columns [f, f + n), n <= kTile, of head h, of at most
  // `entries` entries. Returns how many entries fit a tile.
  int start(int64_t row, int64_t h, int64_t f, int n, int64_t entries) {
    columns_ = n;
    head_ = h;
    batch_ = static_cast<int>(entries < 1 ? 1 : smaller(kTile / n, entries));
    count_ = 1;
    for (int m = 0; m < num_moving_; ++m) {
      Moving<I>& moving = moving_[m];
      const int o = moving.number;
      const bool fixed = m >= num_others_ && !targets_;
      const int64_t place = offset_of(a_.operands[o], f) + (fixed ? row * moving.stride : 0);
      if (moving.index)
        moving.base = static_cast<const I*>(a_.operands[o].data) + place;
      else
        moving.base = static_cast<const T*>(a_.operands[o].data) + place;
      if (fixed && moving.index) {
        index_[o] = static_cast<const I*>(moving.base);
      } else if (fixed) {
        bind(o, static_cast<const T*>(moving.base));
      } else if (m >= num_others_) {
        moving.ids = targets_;
        moving.first = first_;
        moving.last = last_;
      }
    }
    if (targets_)
      return batch_;
    execute(true);
    if (batch_ > 1)
      repeat_invariants();
    return batch_;
  }

  // The messages [count, columns] of entries k, k + 1, ... of the row, valid until the next call.
  __attribute__((noinline)) const A* evaluate(int64_t k, int count) {
    count_ = count;
    at_ = k - first_;
    for (int m = 0; m < (targets_ ? num_moving_ : num_others_); ++m) {
      const Moving<I>& moving = moving_[m];
      if (moving.index)
        gather_indices(moving, k);
      else
        gather(moving, k);
    }
    if (numbered_)
      bind_numbers(k);
    execute(false);
    return value_of(a_.results[0]);
  }

  // The contents of a register after `evaluate`, [count, columns].
  const A* value_of(int r) { return wide_[r] || columns_ == 1 ? registers_[r] : spread(r); }

 private:
  static constexpr int64_t kAhead = 24;  // at most so many entries ahead operands are prefetched

  int size_of(int r) const { return wide_[r] ? count_ * columns_ : count_; }

  V part(const A* p, int n, int i) const { return i + L <= n ? load(p + i) : load_n(p + i, n - i); }

  // Element offset of a block of columns within a row of an operand.
  int64_t offset_of(const Operand& operand, int64_t f) const {
    const int64_t columns = operand.wide ? a_.width : 1;
    return (operand.per_head ? head_ * columns : 0) + (operand.wide ? f : 0);
  }

  static int64_t row_of(const Moving<I>& moving, int64_t k) {
    return moving.ids ? static_cast<int64_t>(moving.ids[k - moving.first]) : k;
  }

  // Copies n features to p and widens them. Lanes up to a whole vector may be overwritten.
  static void copy(const T* from, int n, A* p) {
    for (int i = 0; i < n; i += L) {
      const V v = i + L <= n ? load(from + i) : load_n(from + i, n - i);
      __builtin_memcpy(p + i, &v, sizeof(v));
    }
  }

  // Points a register at features in memory; 16-bit ones are widened into scratch.
  void bind(int o, const T* p) {
    if constexpr (std::is_same_v<T, A>) {
      registers_[o] = p;
    } else {
      copy(p, wide_[o] ? columns_ : 1, scratch_[o]);
      registers_[o] = scratch_[o];
    }
  }

  void bind_numbers(int64_t k) {
    const int64_t heads = numbers_.heads;
    for (int o = 0; o < a_.num_operands; ++o) {
      if (a_.operands[o].side != Operand::kNumber)
        continue;
      const A* from = numbers_.data + a_.operands[o].stride * kStepNumbers;
      from += (k - numbers_.begin) * heads;
      registers_[o] = from;
      if (wide_[o] || heads == 1)
        continue;
      for (int j = 0; j < count_; ++j)
        scratch_[o][j] = from[j * heads + head_];
      registers_[o] = scratch_[o];
    }
  }

  void gather(const Moving<I>& moving, int64_t k) {
    const int o = moving.number;
    const T* base = static_cast<const T*>(moving.base);
    const int n = wide_[o] ? columns_ : 1;
    if (n > 1)  // loads of numbers do not wait for one another
      prefetch(moving, k, n);
    if (count_ == 1) {
      bind(o, base + row_of(moving, k) * moving.stride);
      return;
    }
    if constexpr (std::is_same_v<T, A>) {
      if (!moving.ids && moving.stride == n) {  // the rows of a tile lie one after another
        registers_[o] = base + k * moving.stride;
        return;
      }
    }
    A* to = scratch_[o];
    registers_[o] = to;
    if (n == 1) {
      for (int j = 0; j < count_; ++j)
        to[j] = to_acc(base[row_of(moving, k + j) * moving.stride]);
      return;
    }
    for (int j = 0; j < count_; ++j)
      copy(base + row_of(moving, k + j) * moving.stride, n, to + j * n);
  }

  // Always inlined: GCC removes calls of a function that only prefetches.
  __attribute__((always_inline)) void prefetch(const Moving<I>& moving, int64_t k, int n) const {
    const T* base = static_cast<const T*>(moving.base);
    const int bytes = n * static_cast<int>(sizeof(T));
    const int64_t ahead = smaller(2 * kTile / n, kAhead);
    for (int j = 0; j < count_; ++j) {
      const int64_t next = smaller(k + j + ahead, moving.last);
      const char* p = reinterpret_cast<const char*>(base + row_of(moving, next) * moving.stride);
      for (int b = 0; b < bytes; b += 64)
        __builtin_prefetch(p + b);
    }
  }

  void gather_indices(const Moving<I>& moving, int64_t k) {
    const int o = moving.number;
    const I* base = static_cast<const I*>(moving.base);
    if (count_ == 1) {
      index_[o] = base + row_of(moving, k) * moving.stride;
      return;
    }
    const int n = wide_[o] ? columns_ : 1;
    I* to = index_scratch_[o];
    for (int j = 0; j < count_; ++j)
      __builtin_memcpy(to + j * n, base + row_of(moving, k + j) * moving.stride, n * sizeof(I));
    index_[o] = to;
  }

  // Repeats a value that only depends on the target, computed once, for every entry of a tile.
  void repeat_invariants() {
    for (int r = 0; r < a_.num_operands + a_.num_instructions; ++r) {
      if (!invariant_[r] || !per_entry_[r])
        continue;
      const int n = wide_[r] ? columns_ : 1;
      if (r < a_.num_operands && a_.operands[r].index) {
        I* to = index_scratch_[r];
        for (int j = 0; j < batch_; ++j)
          __builtin_memcpy(to + j * n, index_[r], n * sizeof(I));
        index_[r] = to;
        continue;
      }
      A* to = scratch_[r];
      if (n == 1) {
        const A value = *registers_[r];
        for (int j = 0; j < batch_; ++j)
          to[j] = value;
      } else {
        for (int i = 0; i < n; i += L) {
          const V v = part(registers_[r], n, i);
          const int lanes = n - i < L ? n - i : L;
          for (int j = 0; j < batch_; ++j)
            store_n(to + j * n + i, v, lanes);
        }
      }
      registers_[r] = to;
    }
  }

  // A narrow register as [count, columns].
  const A* spread(int r) {
    A* to = spread_scratch_[r];
    const A* from = registers_[r];
    for (int j = 0; j < count_; ++j) {
      const V v = splat<A>(from[j]);
      for (int i = 0; i < columns_; i += L)
        __builtin_memcpy(to + j * columns_ + i, &v, sizeof(v));
    }
    return to;
  }

  template <class F>
  void map(int to, F f) {
    A* out = scratch_[to];
    const int n = size_of(to);
    for (int i = 0; i < n; i += L) {
      const V v = f(n, i);
      __builtin_memcpy(out + i, &v, sizeof(v));
    }
  }

  template <class F>
  void unary(int to, const A* a, F f) {
    map(to, [&](int n, int i) { return f(part(a, n, i)); });
  }

  // One entry has one value of a narrow input, which needs no copy per column.
  template <class F>
  void binary(int to, const Instruction& in, F f) {
    const A *a = registers_[in.a], *b = registers_[in.b];
    const bool one_a = in.wide && !wide_[in.a], one_b = in.wide && !wide_[in.b];
    if (count_ == 1 && (one_a || one_b)) {
      const V va = splat<A>(*a), vb = splat<A>(*b);
      map(to,
          [&](int n, int i) { return f(one_a ? va : part(a, n, i), one_b ? vb : part(b, n, i)); });
      return;
    }
    if (one_a)
      a = spread(in.a);
    if (one_b)
      b = spread(in.b);
    map(to, [&](int n, int i) { return f(part(a, n, i), part(b, n, i)); });
  }

  void select(int to, const Instruction& in) {
    const I* arg = index_[in.b];
    const int64_t* edges = edges_ + at_;
    const A* a = registers_[in.a];
    const int n = in.wide ? columns_ : 1, na = wide_[in.a] ? n : 1, nb = wide_[in.b] ? n : 1;
    for (int j = 0; j < count_; ++j) {
      const int64_t edge = edges[j];
      A* out = scratch_[to] + j * n;
      for (int i = 0; i < n; ++i)
        out[i] = static_cast<int64_t>(arg[j * nb + (nb > 1 ? i : 0)]) == edge
                     ? a[j * na + (na > 1 ? i : 0)]
                     : A{};
    }
  }

  // Not inlined: a call is cheap compared with a tile, and each copy takes seconds to compile.
  __attribute__((noinline)) void execute(bool invariant) {
    for (int i = 0; i < a_.num_instructions; ++i) {
      const Instruction& in = a_.instructions[i];
      if ((in.invariant && !targets_) != invariant)
        continue;
      const int to = a_.num_operands + i;
      registers_[to] = scratch_[to];
      const A* a = registers_[in.a];
      const A value = static_cast<A>(in.value);
      switch (in.op) {
#define PYG_ACCEL_CASE(name, ...)                          \
  case Op::name:                                           \
    binary(to, in, [&](V x, V y) { return __VA_ARGS__; }); \
    break;
        PYG_ACCEL_BINARY(PYG_ACCEL_CASE)
#undef PYG_ACCEL_CASE
#define PYG_ACCEL_CASE(name, ...)                   \
  case Op::name:                                    \
    unary(to, a, [&](V x) { return __VA_ARGS__; }); \
    break;
        PYG_ACCEL_UNARY(PYG_ACCEL_CASE)
#undef PYG_ACCEL_CASE
        case Op::kSel:
          select(to, in);
          break;
        case Op::kConst:
          for (int j = 0; j < count_; ++j)
            scratch_[to][j] = value;
          break;
      }
    }
  }

  const ProgramArgs& a_;
  const int64_t* edges_ = nullptr;
  const I* targets_ = nullptr;
  int64_t first_ = 0;  // the entry that edges and targets begin with
  int64_t last_ = 0;   // and the last one
  int64_t at_ = 0;     // the first entry of the tile, counted from it
  Moving<I> moving_[kMaxOperands] = {};
  int num_moving_ = 0;
  int num_others_ = 0;  // the others are before the operands of targets
  int columns_ = 0;
  int batch_ = 1;
  int count_ = 1;
  int64_t head_ = 0;
  const A* registers_[kRegisters] = {};
  const I* index_[kMaxOperands] = {};
  bool wide_[kRegisters] = {};
  bool invariant_[kRegisters] = {};
  bool per_entry_[kRegisters] = {};  // wanted for every entry of a tile
  bool numbered_ = false;
  Numbers<A> numbers_;
  A (*scratch_)[kTile + 16];
  A (*spread_scratch_)[kTile + 16];
  I (*index_scratch_)[kTile];
};
