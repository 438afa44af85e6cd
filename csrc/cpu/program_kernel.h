// Binary-reduce for any message formula: the register machine (machine.h) computes the messages of
// a row tile by tile, and this file reduces them. Included once per instruction set.

template <class T, class I>
class Reducer {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using M = mask_t<A>;
  using Lane = typename Simd<A>::Lane;
  static constexpr int L = kLanes<A>;

 public:
  explicit Reducer(const ProgramArgs& a)
      : a_(a),
        machine_(a, scratch_, static_cast<const I*>(a.rows)),
        many_args_(entry_by_entry(a)),
        many_(many_args_, scratch_, targets_),
        rowptr_(static_cast<const I*>(a.csr.rowptr)),
        col_(static_cast<const I*>(a.csr.col)),
        eid_(static_cast<const I*>(a.csr.eid)) {}

  // Columns [f, f + n) of head h, n <= kTile, of entries [k0, k1) of `row`.
  void entries(int64_t row, int64_t k0, int64_t k1, int64_t h, int64_t f, int n) {
    n_ = n;
    head_ = h;
    first_ = k0;
    start_accumulators();
    const int batch = machine_.start(row, h, f, n, k1 - k0);
    for (int64_t k = k0; k < k1;) {
      const int count = tile_at(k, k1, batch);
      const A* messages = machine_.evaluate(k, count);
      for (int r = 0; r < a_.num_reduces; ++r)
        accumulate(r, messages, machine_.edges(), k, count, f);
      k += count;
      if ((k - k0) % kRunEntries == 0)
        close_run();
    }
    close_run();
    taken_ = k1 - k0;
  }

  // The same for rows [row, row_end), whose entries fit one tile, and writes their results: those
  // of `row` at element offset `place` in the outputs, with a stride of `columns` between rows.
  void
  rows(int64_t row, int64_t row_end, int64_t h, int64_t f, int n, int64_t place, int64_t columns) {
    const int64_t k0 = rowptr_[row];
    const int count = static_cast<int>(rowptr_[row_end] - k0);
    I* target = targets_;
    for (int64_t r = row; r < row_end; ++r)
      for (int64_t k = rowptr_[r]; k < rowptr_[r + 1]; ++k)
        *target++ = static_cast<I>(r);
    n_ = n;
    head_ = h;
    many_.use_rows(k0, count);
    many_.start(row, h, f, n, count);
    const A* messages = many_.evaluate(k0, count);
    for (; row < row_end; ++row, place += columns) {
      first_ = rowptr_[row];
      taken_ = rowptr_[row + 1] - first_;
      const int64_t done = first_ - k0;
      for (int r = 0; r < a_.num_reduces; ++r) {
        if (a_.reduces[r] == Reduce::kSum || a_.reduces[r] == Reduce::kMean) {
          write_sum(r, messages + done * n, place);
          continue;
        }
        start_accumulator(r);
        accumulate(r, messages + done * n, many_.edges() + done, first_, static_cast<int>(taken_),
                   f);
        close_run(r);
        finish(r, row, place);
      }
    }
  }

  // The same for a message that is summed over the whole width: one value per entry.
  void summed_entries(int64_t row, int64_t k0, int64_t k1, int64_t h) {
    n_ = 1;
    head_ = h;
    first_ = k0;
    start_accumulators();
    alignas(64) A totals[kTile];
    int64_t edges[kTile];
    for (int64_t k = k0; k < k1;) {
      const int count = tile_at(k, k1, kTile);
      for (int j = 0; j < count; ++j) {
        totals[j] = A{};
        edges[j] = eid_ ? static_cast<int64_t>(eid_[k + j]) : k + j;
      }
      for (int64_t f = 0; f < a_.width; f += kTile)
        add_columns(row, k, count, h, f, totals);
      for (int r = 0; r < a_.num_reduces; ++r)
        accumulate(r, totals, edges, k, count, 0);
      k += count;
      if ((k - k0) % kRunEntries == 0)
        close_run();
    }
    close_run();
    taken_ = k1 - k0;
  }

  // Writes the accumulators of a finished row; `place` is its element offset in the outputs.
  void finish(int64_t row, int64_t place) {
    for (int r = 0; r < a_.num_reduces; ++r)
      finish(r, row, place);
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
  void finish(int r, int64_t row, int64_t place) {
    if (a_.reduces[r] == Reduce::kNone)
      return;
    T* out = static_cast<T*>(a_.outs[r]) + place;
    const A scale = scale_of(r);
    for (int i = 0; i < n_; ++i)
      out[i] = from_acc<T>(result_of(r, i) / scale);
    if (a_.args[r]) {
      I* arg = static_cast<I*>(a_.args[r]) + place;
      for (int i = 0; i < n_; ++i)
        arg[i] = taken_ ? winner_of(rowptr_[row] + slots_[r][i]) : I(-1);
    }
  }

  A scale_of(int r) const {
    return a_.reduces[r] == Reduce::kMean && taken_ > 1 ? static_cast<A>(taken_) : A(1);
  }

  // The sum of the messages of a row with a single run, without the accumulators.
  void write_sum(int r, const A* messages, int64_t place) {
    T* out = static_cast<T*>(a_.outs[r]) + place;
    const V scale = splat<A>(scale_of(r));
    for (int i = 0; i < n_; i += L) {
      V s{};
      for (int64_t j = 0; j < taken_; ++j)
        s += part(messages + j * n_, n_, i);
      store_n(out + i, s / scale, n_ - i < L ? n_ - i : L);
    }
  }

  I winner_of(int64_t k) const {
    return a_.arg_is_col ? col_[k] : eid_ ? eid_[k] : static_cast<I>(k);
  }

  // A program without values that all entries of a tile share.
  static ProgramArgs entry_by_entry(ProgramArgs a) {
    for (int i = 0; i < a.num_instructions; ++i)
      a.instructions[i].invariant = false;
    return a;
  }

  // Entries of the next tile; a tile ends at the end of a run of additions.
  int tile_at(int64_t k, int64_t k1, int64_t most) const {
    const int64_t run = kRunEntries - (k - first_) % kRunEntries;
    return static_cast<int>(smaller(most, smaller(run, k1 - k)));
  }

  // Adds the sums over one block of columns to the totals of entries k, k + 1, ...
  void add_columns(int64_t row, int64_t k, int count, int64_t h, int64_t f, A* totals) {
    const int n = static_cast<int>(smaller(a_.width - f, kTile));
    const int batch = machine_.start(row, h, f, n, count);
    for (int done = 0; done < count; done += batch) {
      const int some = static_cast<int>(smaller(batch, count - done));
      const A* messages = machine_.evaluate(k + done, some);
      for (int j = 0; j < some; ++j) {
        V sum{};
        for (int i = 0; i < n; i += L)
          sum += part(messages + j * n, n, i);
        totals[done + j] += horizontal_sum<A>(sum);
      }
    }
  }

  static V part(const A* p, int n, int i) {
    return i + L <= n ? load(p + i) : load_n(p + i, n - i);
  }

  void start_accumulators() {
    for (int r = 0; r < a_.num_reduces; ++r)
      start_accumulator(r);
  }

  void start_accumulator(int r) {
    const V start = splat<A>(a_.reduces[r] == Reduce::kProd ? A(1) : A(0));
    for (int i = 0; i < n_; i += L)
      __builtin_memcpy(sums_[r] + i, &start, sizeof(start));
    if (adds(r)) {
      for (int i = 0; i < n_; i += L)
        __builtin_memcpy(totals_[r] + i, &start, sizeof(start));
    }
  }

  bool adds(int r) const {
    return a_.reduces[r] == Reduce::kSum || a_.reduces[r] == Reduce::kMean ||
           a_.reduces[r] == Reduce::kSqSum;
  }

  // Adds the sums of a run to the totals; finish() and save() read the totals.
  void close_run() {
    for (int r = 0; r < a_.num_reduces; ++r)
      close_run(r);
  }

  void close_run(int r) {
    for (int i = 0; adds(r) && i < n_; ++i) {
      totals_[r][i] += sums_[r][i];
      sums_[r][i] = A{};
    }
  }

  A result_of(int r, int i) const { return adds(r) ? totals_[r][i] : sums_[r][i]; }

  // Messages [count, n] of entries k, k + 1, ..., in their order.
  void accumulate(int r, const A* messages, const int64_t* edges, int64_t k, int count, int64_t f) {
    auto update = [&](auto fn) {
      for (int i = 0; i < n_; i += L) {
        V s;
        __builtin_memcpy(&s, sums_[r] + i, sizeof(s));
        for (int j = 0; j < count; ++j)
          s = fn(s, part(messages + j * n_, n_, i));
        __builtin_memcpy(sums_[r] + i, &s, sizeof(s));
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
        choose(r, messages, k, count, [](V m, V s) { return m > s; });
        break;
      case Reduce::kMin:
        choose(r, messages, k, count, [](V m, V s) { return m < s; });
        break;
      case Reduce::kNone: {
        const int64_t columns = a_.sum_result ? 1 : a_.width;
        T* out = static_cast<T*>(a_.outs[r]) + head_ * columns + f;
        for (int j = 0; j < count; ++j)
          for (int i = 0; i < n_; i += L)
            store_n(out + edges[j] * a_.heads * columns + i, part(messages + j * n_, n_, i),
                    n_ - i < L ? n_ - i : L);
        break;
      }
    }
  }

  // The first entry of a row wins at first, then any better one; NaN wins over all.
  template <class Better>
  void choose(int r, const A* messages, int64_t k, int count, Better better_than) {
    for (int i = 0; i < n_; i += L) {
      V s;
      M slot;
      __builtin_memcpy(&s, sums_[r] + i, sizeof(s));
      __builtin_memcpy(&slot, slots_[r] + i, sizeof(slot));
      for (int j = 0; j < count; ++j) {
        const V m = part(messages + j * n_, n_, i);
        const M better = k + j == first_ ? ~M{} : (better_than(m, s) | (m != m));
        s = better ? m : s;
        slot = better ? M{} + static_cast<Lane>(k + j - first_) : slot;
      }
      __builtin_memcpy(sums_[r] + i, &s, sizeof(s));
      __builtin_memcpy(slots_[r] + i, &slot, sizeof(slot));
    }
  }

  const ProgramArgs& a_;
  Scratch<T, I> scratch_;
  Machine<T, I> machine_;
  ProgramArgs many_args_;
  I targets_[kTile];  // the rows of the entries of a tile
  Machine<T, I> many_;
  const I* rowptr_;
  const I* col_;
  const I* eid_;
  int n_ = 0;
  int64_t head_ = 0;
  int64_t first_ = 0;  // entry at which the row or piece begins
  int64_t taken_ = 0;
  alignas(64) A sums_[kMaxReduces][kTile + 16];
  alignas(64) A totals_[kMaxReduces][kTile + 16];
  alignas(64) Lane slots_[kMaxReduces][kTile + 16];
};

// Calls fn(head, first column, count, place) for every block of a row's output.
template <class Fn>
inline void program_blocks(const ProgramArgs& a, int64_t f_begin, int64_t f_end, Fn fn) {
  for (int64_t h = 0; h < a.heads; ++h) {
    if (a.sum_result) {
      fn(h, 0, 1, h);
      continue;
    }
    for (int64_t f = f_begin; f < f_end; f += kTile)
      fn(h, f, static_cast<int>(f_end - f < kTile ? f_end - f : kTile), h * a.width + f);
  }
}

// Not inlined, so that rows, lists and pieces share one copy of the loop over entries.
template <class T, class I>
__attribute__((noinline)) void program_entries(Reducer<T, I>& reducer,
                                               const ProgramArgs& a,
                                               const Piece& piece,
                                               int64_t h,
                                               int64_t f,
                                               int n) {
  if (a.sum_result)
    reducer.summed_entries(piece.row, piece.k_begin, piece.k_end, h);
  else
    reducer.entries(piece.row, piece.k_begin, piece.k_end, h, f, n);
}

template <class T, class I>
void program_rows(const ProgramArgs& a, const Range& range) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const int64_t columns = a.heads * (a.sum_result ? 1 : a.width);
  Reducer<T, I> reducer(a);
  // Entries that fit a tile. If these are several rows, the machine runs once for all of them.
  const int64_t most = a.sum_result ? 0 : kTile / smaller(range.f_end - range.f_begin, kTile);
  for (int64_t row = range.row_begin, next; row < range.row_end; row = next) {
    for (next = row + 1; next < range.row_end && rowptr[next + 1] - rowptr[row] <= most;)
      ++next;
    if (rowptr[row + 1] - rowptr[row] > kHubDegree)
      continue;
    program_blocks(a, range.f_begin, range.f_end, [&](int64_t h, int64_t f, int n, int64_t place) {
      if (next > row + 1 && rowptr[next] > rowptr[row]) {
        reducer.rows(row, next, h, f, n, row * columns + place, columns);
        return;
      }
      for (int64_t r = row; r < next; ++r) {
        program_entries(reducer, a, {r, rowptr[r], rowptr[r + 1]}, h, f, n);
        reducer.finish(r, r * columns + place);
      }
    });
  }
}

// Messages without a reduction, in the order of an edge list: [row_begin, row_end) are entries.
template <class T, class I>
void program_list(const ProgramArgs& a, const Range& range) {
  constexpr int64_t kChunk = 128;  // what the heads of an entry have in common stays in the cache
  Reducer<T, I> reducer(a);
  for (int64_t k = range.row_begin; k < range.row_end; k += kChunk) {
    const Piece piece{0, k, smaller(k + kChunk, range.row_end)};
    program_blocks(a, range.f_begin, range.f_end, [&](int64_t h, int64_t f, int n, int64_t) {
      program_entries(reducer, a, piece, h, f, n);
    });
  }
}

template <class T, class I>
void program_piece(const ProgramArgs& a, const Piece& piece, void* partial) {
  const int64_t columns = a.heads * (a.sum_result ? 1 : a.width);
  Reducer<T, I> reducer(a);
  program_blocks(a, 0, a.width, [&](int64_t h, int64_t f, int n, int64_t place) {
    program_entries(reducer, a, piece, h, f, n);
    reducer.save(piece.row, piece.k_begin, static_cast<acc_t<T>*>(partial), columns, place);
  });
}

template <class T, class I>
void program_combine(const ProgramArgs& a, int64_t row, void* partials, int64_t count) {
  Reducer<T, I> reducer(a);
  reducer.combine(row, static_cast<const acc_t<T>*>(partials), count,
                  a.heads * (a.sum_result ? 1 : a.width));
}
