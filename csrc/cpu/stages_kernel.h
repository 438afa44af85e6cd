// The steps of stages.h. Included once per instruction set.

template <class T, class I>
class Stages {
  using A = acc_t<T>;
  using V = vec_t<A>;
  static constexpr int L = kLanes<A>;
  static constexpr int64_t kAhead = 16;  // entries ahead whose features are prefetched

 public:
  // `totals` has the accumulators of the rows of a step, and of two rows at least.
  Stages(const StagesArgs& a, A* totals)
      : a_(a),
        heads_(a.heads),
        rowptr_(static_cast<const I*>(a.csr.rowptr)),
        col_(static_cast<const I*>(a.csr.col)),
        eid_(static_cast<const I*>(a.csr.eid)),
        totals_(totals) {
    if (a.narrow.num_results > 0)
      new (machines_[kNarrow]) Machine<T, I>(a.narrow, a.csr, scratch_);
    for (int s = 0; s < a.num_sums; ++s)
      if (!a.sums[s].dot)
        new (machines_[kSums + s]) Machine<T, I>(a.sums[s].program, a.csr, scratch_);
    for (int t = 0; t < a.num_terms; ++t)
      if (!a.terms[t].plain && a.terms[t].program.num_operands > 0)
        new (machines_[kTerms + t]) Machine<T, I>(a.terms[t].program, a.csr, scratch_);
  }

  // Rows [row, end) without hubs. A step has as many whole rows as fit, or a part of a longer one,
  // so that the order of additions does not depend on `row`.
  void rows(int64_t row, int64_t end) {
    while (row < end) {
      const int64_t k = rowptr_[row];
      int64_t next = row;
      while (next < end && next - row < a_.step_rows && rowptr_[next + 1] - k <= a_.step_entries)
        ++next;
      if (next > row) {
        direct_ = std::is_same_v<T, A>;
        step(row, next, k, static_cast<int>(rowptr_[next] - k), totals_);
        finish(row, next, totals_);
        direct_ = false;
        row = next;
        continue;
      }
      if (rowptr_[row + 1] - k <= kHubDegree) {
        entries(row, k, rowptr_[row + 1]);
        finish(row, row + 1, totals_);
      }
      ++row;
    }
  }

  // Entries [k0, k1) of a long row. Sums of steps are added up, which keeps rounding errors small.
  // Products go on, as the product of a later part may overflow where an earlier part is 0.
  void entries(int64_t row, int64_t k0, int64_t k1) {
    for (int64_t k = k0; k < k1; k += a_.step_entries) {
      const bool separate = k > k0 && !a_.product;
      A* part = separate ? totals_ + a_.accumulators : totals_;
      fresh_ = k == k0 || separate;
      step(row, row + 1, k, static_cast<int>(smaller(a_.step_entries, k1 - k)), part);
      if (separate)
        merge(totals_, part);
    }
    fresh_ = true;
  }

  // Entries [k, end) of a list of edges.
  void list(int64_t k, int64_t end) {
    for (; k < end; k += a_.step_entries)
      step(0, 1, k, static_cast<int>(smaller(a_.step_entries, end - k)), totals_);
  }

  // Merges the accumulators of two parts of a row into the first.
  void merge(A* total, const A* other) {
    for (int o = 0; a_.scores < 0 && o < a_.num_outputs; ++o) {
      const Output& output = a_.outputs[o];
      if (output.reduce == Reduce::kNone)
        continue;
      merge_parts<A>(output.reduce, heads_ * output.width, total + output.place,
                     output.winners ? total + output.slots : nullptr, other + output.place,
                     output.winners ? other + output.slots : nullptr);
    }
    if (a_.scores >= 0)
      merge_softmax(total, other);
  }

  // Computes the outputs of rows [begin, end) from their accumulators.
  void finish(int64_t begin, int64_t end, A* totals) {
    for (int o = 0; o < a_.num_outputs; ++o) {
      const Output& output = a_.outputs[o];
      if (output.reduce == Reduce::kNone)
        continue;
      const bool done =
          direct_ && a_.scores < 0 && output.reduce != Reduce::kMean && !output.winners;
      A* total = totals;
      for (int64_t row = begin; row < end; ++row, total += a_.accumulators)
        if (!done || rowptr_[row] == rowptr_[row + 1])
          finish(output, row, rowptr_[row + 1] - rowptr_[row], total);
    }
    for (int64_t row = begin; a_.scores >= 0 && row < end; ++row, totals += a_.accumulators) {
      const bool empty = rowptr_[row] == rowptr_[row + 1];
      for (int64_t h = 0; h < heads_; h += L) {
        const int n = static_cast<int>(smaller(heads_ - h, L));
        const int64_t to = row * a_.heads_stride + h;
        store_n(static_cast<A*>(a_.largest) + to, empty ? V{} : load_n(most_of(totals) + h, n), n);
        store_n(static_cast<A*>(a_.inverse) + to,
                empty ? V{} : splat<A>(1) / load_n(sum_of(totals) + h, n), n);
      }
    }
  }

 private:
  static constexpr int kNarrow = 0, kSums = 1, kTerms = kSums + kMaxSums;

  Machine<T, I>& machine(int i) { return *reinterpret_cast<Machine<T, I>*>(machines_[i]); }

  // The largest score of each head, and the sum of the exponentials.
  template <class P>
  P* most_of(P* total) const {
    return total + a_.accumulators - 2 * heads_;
  }
  template <class P>
  P* sum_of(P* total) const {
    return total + a_.accumulators - heads_;
  }

  // The accumulators of an output, of a row: its result, if this has their type and is at hand.
  A* accumulators_of(const Output& output, int64_t row, A* total) const {
    return direct_ ? static_cast<A*>(output.data) + row * output.stride : total + output.place;
  }

  void finish(const Output& output, int64_t row, int64_t degree, A* total) {
    const A* from = accumulators_of(output, row, total);
    T* out = static_cast<T*>(output.data) + row * output.stride;
    const bool divides = a_.scores >= 0 || (output.reduce == Reduce::kMean && degree > 1);
    const int64_t columns = direct_ && degree > 0 && !divides ? 0 : heads_ * output.width;
    const A empty = output.reduce == Reduce::kProd ? 1 : 0;
    for (int64_t f = 0; f < columns; f += L) {
      const int n = static_cast<int>(smaller(columns - f, L));
      V v = degree > 0 ? load_part(from + f, n) : splat<A>(empty);
      if (output.reduce == Reduce::kMean && degree > 1) {
        v = v / splat<A>(static_cast<A>(degree));
      } else if (a_.scores >= 0 && degree > 0) {
        const HeadsOfLanes<A> heads(f, output.width);
        const int64_t rest = heads_ - heads.first;
        v = v /
            heads.spread(load_n(sum_of(total) + heads.first, static_cast<int>(smaller(rest, L))));
      }
      store_n(out + f, v, n);
    }
    if (!output.winners)
      return;
    I* winners = static_cast<I*>(output.winners) + row * output.stride;
    if (degree > 0) {
      store_winners(a_.csr, a_.arg_is_col, rowptr_[row], total + output.slots,
                    heads_ * output.width, winners);
      return;
    }
    for (int64_t f = 0; f < columns; ++f)
      winners[f] = -1;
  }

  // Ignores NaN: the sum of exponentials will have it.
  static A larger(A a, A b) { return b > a ? b : a; }

  // The factor of sums of exponentials when the largest exponent changes.
  static A factor(A before, A now) { return before == now ? A(1) : std::exp(before - now); }

  void merge_softmax(A* total, const A* other) {
    for (int64_t h = 0; h < heads_; ++h) {
      const A before = most_of(total)[h], most = larger(before, most_of(other)[h]);
      const A ours = factor(before, most), theirs = factor(most_of(other)[h], most);
      most_of(total)[h] = most;
      sum_of(total)[h] = sum_of(total)[h] * ours + sum_of(other)[h] * theirs;
      for (int o = 0; o < a_.num_outputs; ++o) {
        const int64_t place = a_.outputs[o].place + h * a_.outputs[o].width;
        for (int64_t i = place; i < place + a_.outputs[o].width; ++i)
          total[i] = total[i] * ours + other[i] * theirs;
      }
    }
  }

  // `count` entries from k on, of rows [row, next), whose accumulators are at `totals`. Not
  // inlined, so that rows, pieces and lists share it.
  __attribute__((noinline)) void step(int64_t row, int64_t next, int64_t k, int count, A* totals) {
    k_ = k;
    row_ = row;
    num_rows_ = static_cast<int>(next - row);
    bounds_[0] = 0;
    for (int r = 1; r < num_rows_; ++r)
      bounds_[r] = static_cast<int>(rowptr_[row + r] - k);
    bounds_[num_rows_] = count;
    if (a_.rows)
      __builtin_memcpy(targets_, static_cast<const I*>(a_.rows) + k, count * sizeof(I));
    for (int r = 0; !a_.rows && (num_rows_ > 1 || a_.num_sums > 0) && r < num_rows_; ++r)
      for (int j = bounds_[r]; j < bounds_[r + 1]; j += 16)
        for (int i = 0; i < 16; ++i)  // later rows overwrite the excess
          targets_[j + i] = static_cast<I>(row + r);
    for (int j = 0; a_.reads_edges && j < count; ++j)
      edges_[j] = eid_ ? static_cast<int64_t>(eid_[k + j]) : k + j;
    compute_numbers(count);
    for (int r = 0; a_.scores >= 0 && r < num_rows_; ++r)
      if (bounds_[r] < bounds_[r + 1])
        exponentiate(bounds_[r], bounds_[r + 1] - bounds_[r], totals + r * a_.accumulators);
    for (int t = 0; t < a_.num_terms; ++t)
      add_term(t, count, totals);
  }

  void compute_numbers(int count) {
    for (int g = 0; g < a_.num_source_numbers; ++g) {
      const A* from = static_cast<const A*>(a_.source_numbers[g]);
      const int64_t stride = a_.heads_stride;
      for (int j = 0; j < count; ++j) {
        __builtin_prefetch(from + static_cast<int64_t>(col_[ahead(k_ + j)]) * stride);
        for (int64_t h = 0; h < heads_; ++h)
          numbers_[g][j * heads_ + h] = from[static_cast<int64_t>(col_[k_ + j]) * stride + h];
      }
    }
    for (int s = 0; s < a_.num_sums; ++s) {
      if (a_.sums[s].dot)
        dots(a_.sums[s], count, numbers_[kFirstSum + s]);
      else
        sums(s, count, numbers_[kFirstSum + s]);
    }
    if (a_.narrow.num_results > 0)
      compute(count);
  }

  // Messages [count, n] of entries `at`, at + 1, ... of the step, in rows [row, next) of the step:
  // columns [column, column + n) of the heads from `head` on.
  struct Tile {
    int row;
    int next;
    int at;
    int count;
    int n;
    int64_t head;
    int64_t column;
  };

  // Calls fn(tile, messages) for the messages of `heads` heads, `segments` of them side by side, in
  // `columns` columns. A tile has whole rows, or a part of one that does not fit, so that the order
  // of additions does not depend on the rows before.
  template <class F>
  void each_tile(int i, int64_t heads, int64_t segments, int64_t columns, int count, F fn) {
    Machine<T, I>& m = machine(i);
    m.use({numbers_[0], k_, heads_});
    const int most = kTile / static_cast<int>(smaller(columns, kTile));
    const bool single = heads == segments && columns <= kTile;
    bool started = false;  // with all entries of the step
    for (int row = 0, next; row < num_rows_; row = next) {
      const int at = bounds_[row];
      for (next = row + 1; next < num_rows_ && bounds_[next + 1] - at <= most;)
        ++next;
      const int end = bounds_[next];
      if (at == end)
        continue;
      const bool several = a_.rows || next > row + 1;
      if (several)
        m.use_entries(k_, count, edges_, targets_);
      else
        m.use_entries(k_ + at, end - at, edges_ + at, nullptr);
      for (int64_t h = 0; h < heads; h += segments) {
        for (int64_t f = 0; f < columns; f += kTile) {
          const int n = static_cast<int>(smaller(columns - f, kTile));
          if (!(several && single && started))
            m.start(row_ + row, h, f, n, end - at);
          started = several;
          const int batch = kTile / n;
          for (int done = at; done < end; done += batch) {
            const int some = static_cast<int>(smaller(batch, end - done));
            fn(Tile{row, next, done, some, n, h, f}, m.evaluate(k_ + done, some));
          }
        }
      }
    }
  }

  int64_t ahead(int64_t k) const { return smaller(k + kAhead, a_.csr.num_entries - 1); }

  // The row of an operand that entry j of the step reads.
  int64_t row_of(const Operand& operand, int j) const {
    return operand.side == Operand::kSource   ? static_cast<int64_t>(col_[k_ + j])
           : operand.side == Operand::kTarget ? static_cast<int64_t>(targets_[j])
                                              : edges_[j];
  }

  // Always inlined: GCC removes calls of a function that only prefetches.
  __attribute__((always_inline)) void prefetch(const Operand& operand,
                                               int64_t width,
                                               int64_t k) const {
    const int64_t next = ahead(k);
    const int64_t row = operand.side == Operand::kSource ? static_cast<int64_t>(col_[next])
                        : eid_                           ? static_cast<int64_t>(eid_[next])
                                                         : next;
    const char* p =
        reinterpret_cast<const char*>(static_cast<const T*>(operand.data) + row * operand.stride);
    const int64_t bytes = (operand.per_head ? heads_ : 1) * width * static_cast<int64_t>(sizeof(T));
    for (int64_t b = 0; b < bytes; b += 64)
      __builtin_prefetch(p + b);
  }

  void dots(const WideSum& sum, int count, A* to) {
    const Operand &left = sum.program.operands[0], &right = sum.program.operands[1];
    const int64_t width = sum.width;
    for (int j = 0; j < count; ++j) {
      const T* a = static_cast<const T*>(left.data) + row_of(left, j) * left.stride;
      const T* b = static_cast<const T*>(right.data) + row_of(right, j) * right.stride;
      for (const Operand* operand : {&left, &right})
        if (operand->side != Operand::kTarget)
          prefetch(*operand, width, k_ + j);
      A* place = to + j * heads_;
      if (left.per_head && right.per_head && L % width == 0) {
        for (int64_t f = 0; f < heads_ * width; f += L) {
          const int n = static_cast<int>(smaller(heads_ * width - f, L));
          segment_sums<A>(load_n(a + f, n) * load_n(b + f, n), static_cast<int>(width), n,
                          place + f / width);
        }
        continue;
      }
      for (int64_t h = 0; h < heads_; ++h)
        place[h] =
            dot(a + (left.per_head ? h * width : 0), b + (right.per_head ? h * width : 0), width);
    }
  }

  void sums(int s, int count, A* to) {
    const WideSum& sum = a_.sums[s];
    const int segments = sum.flat ? static_cast<int>(heads_) : 1;
    each_tile(kSums + s, heads_, segments, sum.program.width, count,
              [&](const Tile& tile, const A* message) {
                const int n = tile.n, each = n / segments;
                A* place = to + tile.at * heads_ + tile.head;
                for (int j = 0; j < tile.count; ++j, message += n, place += heads_) {
                  if (segments > 1 && L % each == 0) {
                    for (int i = 0; i < n; i += L)
                      segment_sums<A>(load_part(message + i, n - i), each, n - i < L ? n - i : L,
                                      place + i / each);
                    continue;
                  }
                  for (int g = 0; g < segments; ++g) {
                    V total{};
                    for (int i = 0; i < each; i += L)
                      total += load_part(message + g * each + i, each - i);
                    place[g] = (tile.column > 0 ? place[g] : A{}) + horizontal_sum<A>(total);
                  }
                }
              });
  }

  // Computes numbers from numbers, with all heads at once as columns.
  void compute(int count) {
    Machine<T, I>& m = machine(kNarrow);
    each_tile(kNarrow, 1, 1, heads_, count, [&](const Tile& tile, const A*) {
      for (int r = 0; r < a_.narrow.num_results; ++r) {
        const A* from = m.value_of(a_.narrow.results[r]);
        A* to = numbers_[kFirstResult + r] + tile.at * heads_;
        for (int64_t i = 0; i < tile.count * heads_; ++i)
          to[i] = from[i];
      }
    });
  }

  // Replaces the scores of the entries of a row by exponentials of their difference from the
  // largest. If a vector has scores of several entries, all heads are computed at once.
  void exponentiate(int at, int count, A* total) {
    A* scores = numbers_[a_.scores] + at * heads_;
    if (L % heads_ == 0) {
      const int n = count * static_cast<int>(heads_), vectors = (n + L - 1) / L;
      exponentiate(scores, count, L, vectors, n - (vectors - 1) * L, 0, static_cast<int>(heads_),
                   total);
    } else {
      for (int64_t h = 0; h < heads_; h += L) {
        const int lanes = static_cast<int>(smaller(heads_ - h, L));
        exponentiate(scores + h, count, heads_, count, lanes, h, lanes, total);
      }
    }
  }

  // Does this for `heads` heads from h on and `count` entries, in vectors with a stride of
  // `stride`, the last with `lanes` lanes.
  void exponentiate(A* scores,
                    int count,
                    int64_t stride,
                    int vectors,
                    int lanes,
                    int64_t h,
                    int heads,
                    A* total) {
    const A none = -std::numeric_limits<A>::infinity();
    const auto larger_lanes = [](V a, V b) { return b > a ? b : a; };
    const bool whole = stride == L;  // a vector but the last has L lanes
    const int period = whole ? heads : L;
    V most = splat<A>(none);
    for (int i = 0; i < vectors; ++i) {
      const int n = whole && i + 1 < vectors ? L : lanes;
      most = larger_lanes(most, first_lanes<A>(load_n(scores + i * stride, n), n, none));
    }
    most = folded<A>(most, period, larger_lanes);
    store_n(most_of(total) + h, most, heads);
    const V shift = most == none ? V{} : most;
    for (int i = 0; i < vectors; ++i) {
      const int n = whole && i + 1 < vectors ? L : lanes;
      store_n(scores + i * stride, vexp(load_n(scores + i * stride, n) - shift), n);
    }
    // Entry by entry, so that sums do not depend on the number of heads.
    V sum{};
    for (int j = 0; j < count; ++j)
      sum += load_n(scores + j * heads_, heads);
    store_n(sum_of(total) + h, sum, heads);
  }

  void add_term(int t, int count, A* totals) {
    const Term& term = a_.terms[t];
    const A* coefficient = coefficients(term, count);
    if (term.plain) {
      for (int r = 0; r < num_rows_; ++r)
        if (bounds_[r] < bounds_[r + 1])
          add_rows(
              term, coefficient, bounds_[r], bounds_[r + 1] - bounds_[r],
              accumulators_of(a_.outputs[term.output], row_ + r, totals + r * a_.accumulators));
    } else if (term.program.num_operands > 0) {
      const int64_t width = a_.outputs[term.output].width, segments = term.flat ? heads_ : 1;
      each_tile(kTerms + t, heads_, segments, segments * width, count,
                [&](const Tile& tile, const A* messages) {
                  const A* c = coefficient ? coefficient + tile.head : nullptr;
                  reduce(term, tile, tile.column + tile.head * width, messages, c, totals);
                });
    } else {
      const int n = static_cast<int>(heads_);
      reduce(term, {0, num_rows_, 0, count, n, 0, 0}, 0, coefficient, nullptr, totals);
    }
  }

  // The coefficients of the features, for every entry and head; null for ones.
  const A* coefficients(const Term& term, int count) {
    const A* own = term.coefficient < 0 ? nullptr : numbers_[term.coefficient];
    const A* weights = a_.scores < 0 ? nullptr : numbers_[a_.scores];
    if (own ? !weights : weights || !term.plain)
      return own ? own : weights;
    for (int64_t i = 0; i < count * heads_; ++i)
      coefficients_[i] = own ? own[i] * weights[i] : A(1);
    return coefficients_;
  }

  void add_rows(const Term& term, const A* coefficient, int at, int count, A* total) {
    const Operand& operand = term.program.operands[0];
    const int64_t width = a_.outputs[term.output].width;
    for (int j = 0; j < count; ++j) {
      rows_[j] = static_cast<const T*>(operand.data) + row_of(operand, at + j) * operand.stride;
      if (!term.fetched)
        prefetch(operand, width, k_ + at + j);
    }
    const bool fresh = fresh_ && term.first;
    coefficient += at * heads_;
    if (operand.per_head) {  // heads side by side are one long row
      add_columns(heads_ * width, width, coefficient, count, total, fresh);
      return;
    }
    for (int64_t h = 0; h < heads_; ++h)
      add_columns(width, width, coefficient + h, count, total + h * width, fresh);
  }

  // Columns of the rows, with a coefficient for every `width` of them.
  void add_columns(int64_t columns,
                   int64_t width,
                   const A* coefficient,
                   int count,
                   A* total,
                   bool fresh) {
    int64_t f = 0;
    auto block = [&]<int NV>() {
      V sum[NV] = {};
      const A* c[NV];
      for (int i = 0; i < NV; ++i)
        c[i] = coefficient + (f + i * L) / width;
      for (int j = 0; j < count; ++j) {
        const T* p = rows_[j] + f;
#pragma GCC unroll 8
        for (int i = 0; i < NV; ++i)
          sum[i] += load(p + i * L) * c[i][j * heads_];
      }
      for (int i = 0; i < NV; ++i, f += L)
        store_n(total + f, fresh ? sum[i] : load(total + f) + sum[i], L);
    };
    if (width % L == 0) {
      while (f + 8 * L <= columns)
        block.template operator()<8>();
      while (f + 2 * L <= columns)
        block.template operator()<2>();
    }
    for (; f < columns; f += L) {
      const int n = static_cast<int>(smaller(columns - f, L));
      const HeadsOfLanes<A> heads(f, width);
      const A* c = coefficient + heads.first;
      V sum{};
      for (int j = 0; j < count; ++j)
        sum += load_n(rows_[j] + f, n) * heads.spread(load(c + j * heads_));
      store_n(total + f, fresh ? sum : load_n(total + f, n) + sum, n);
    }
  }

  // Reduces the messages of a tile to columns of the outputs from `column` on.
  void reduce(const Term& term,
              const Tile& tile,
              int64_t column,
              const A* data,
              const A* coefficient,
              A* totals) {
    for (int o = term.output; o < term.output + term.num_outputs; ++o) {
      const Output& output = a_.outputs[o];
      if (output.reduce == Reduce::kNone) {
        T* out = static_cast<T*>(output.data) + column;
        for (int j = 0; j < tile.count; ++j)
          for (int i = 0; i < tile.n; i += L)
            store_n(out + edges_[tile.at + j] * output.stride + i,
                    load_part(data + j * tile.n + i, tile.n - i), tile.n - i < L ? tile.n - i : L);
        continue;
      }
      const auto each_row = [&](auto fn) {
        for (int r = tile.row; r < tile.next; ++r) {
          const int begin = bounds_[r] > tile.at ? bounds_[r] : tile.at;
          const int end = static_cast<int>(smaller(bounds_[r + 1], tile.at + tile.count));
          if (begin >= end)
            continue;
          A* row = totals + r * a_.accumulators;
          fn(Messages<A>{data + (begin - tile.at) * tile.n, tile.n, end - begin, tile.n,
                         accumulators_of(output, row_ + r, row) + column,
                         output.winners ? row + output.slots + column : nullptr,
                         a_.rows ? 0 : k_ + begin - rowptr_[row_ + r],
                         fresh_ && term.first && begin == bounds_[r]});
        }
      };
      if (coefficient)
        add_weighted(term, coefficient + tile.at * heads_, data, each_row);
      else
        reduce_rows<A>(output.reduce, each_row);
    }
  }

  // Adds messages times coefficients: a coefficient for each entry and head.
  template <class EachRow>
  void add_weighted(const Term& term, const A* coefficient, const A* data, EachRow each_row) {
    const int segments = term.flat ? static_cast<int>(heads_) : 1;
    each_row([&](Messages<A> m) {
      const A* c = coefficient + (m.data - data) / m.stride * heads_;
      m.columns /= segments;
      for (int g = 0; g < segments; ++g, ++c, m.data += m.columns, m.total += m.columns)
        accumulate<A>(m, 0, [&](V s, V v, int j) { return s + v * c[j * heads_]; });
    });
  }

  const StagesArgs& a_;
  const int64_t heads_;
  const I* rowptr_;
  const I* col_;
  const I* eid_;
  A* totals_;
  bool direct_ = false;  // accumulators are the outputs
  bool fresh_ = true;    // the step begins its rows
  int64_t k_ = 0;        // the first entry of the step
  int64_t row_ = 0;      // its first row
  int num_rows_ = 0;
  int bounds_[kMaxStepRows + 1];  // entries of each row, counted from the first
  int64_t edges_[kStepEntries];
  I targets_[kStepEntries + 16];
  const T* rows_[kStepEntries];  // of features, of every entry
  alignas(64) A coefficients_[kStepNumbers + 16];
  alignas(64) A numbers_[kMaxNumbers][kStepNumbers];
  A padding_[16];  // vectors of numbers reach over their end
  Scratch<T, I> scratch_;
  alignas(Machine<T, I>) unsigned char machines_[kTerms + kMaxTerms][sizeof(Machine<T, I>)];
};

template <class T, class I>
void stages_rows(const StagesArgs& a, const Range& range, void* scratch) {
  Stages<T, I> stages(a, static_cast<acc_t<T>*>(scratch));
  if (a.rows)
    stages.list(range.row_begin, range.row_end);
  else
    stages.rows(range.row_begin, range.row_end);
}

template <class T, class I>
void stages_piece(const StagesArgs& a, const Piece& piece, void* partial) {
  Stages<T, I> stages(a, static_cast<acc_t<T>*>(partial));
  stages.entries(piece.row, piece.k_begin, piece.k_end);
}

template <class T, class I>
void stages_combine(const StagesArgs& a, int64_t row, void* partials, int64_t count) {
  auto* first = static_cast<acc_t<T>*>(partials);
  Stages<T, I> stages(a, first);
  for (int64_t p = 1; p < count; ++p)
    stages.merge(first, first + 2 * p * a.accumulators);
  stages.finish(row, row + 1, first);
}
