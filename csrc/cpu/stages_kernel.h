// The steps of stages.h. Included once per instruction set.

template <class T, class I>
class Stages {
  using A = acc_t<T>;
  using V = vec_t<A>;
  using M = mask_t<A>;
  static constexpr int L = kLanes<A>;
  static constexpr int64_t kAhead = 16;  // entries ahead whose features are prefetched

 public:
  // `totals` has the accumulators of a row or piece.
  Stages(const StagesArgs& a, A* totals)
      : a_(a),
        heads_(a.heads),
        col_(static_cast<const I*>(a.csr.col)),
        eid_(static_cast<const I*>(a.csr.eid)),
        totals_(totals),
        most_(totals + a.accumulators - 2 * a.heads),
        sum_(totals + a.accumulators - a.heads) {
    if (a.narrow.num_results > 0)
      new (machines_[kNarrow]) Machine<T, I>(a.narrow, scratch_, targets_);
    for (int s = 0; s < a.num_sums; ++s)
      if (a.sums[s].a < 0)
        new (machines_[kSums + s]) Machine<T, I>(a.sums[s].program, scratch_, targets_);
    for (int t = 0; t < a.num_terms; ++t)
      if (a.terms[t].plain < 0 && a.terms[t].program.num_operands > 0)
        new (machines_[kTerms + t]) Machine<T, I>(a.terms[t].program, scratch_);
  }

  // Rows [row, end) without hubs. A step has as many whole rows as fit, or a part of a longer one,
  // so that the order of additions does not depend on `row`.
  void rows(int64_t row, int64_t end) {
    const I* rowptr = static_cast<const I*>(a_.csr.rowptr);
    const int64_t step = step_entries();
    while (row < end) {
      const int64_t k = rowptr[row];
      int64_t next = row;
      while (next < end && rowptr[next + 1] - k <= step)
        ++next;
      if (next == row) {
        if (rowptr[row + 1] - k <= kHubDegree) {
          entries(row, k, rowptr[row + 1]);
          finish(row);
        }
        ++row;
        continue;
      }
      compute_numbers(row, k, static_cast<int>(rowptr[next] - k));
      for (; row < next; ++row) {
        start();
        add_entries(row, k, static_cast<int>(rowptr[row] - k),
                    static_cast<int>(rowptr[row + 1] - rowptr[row]));
        finish(row);
      }
      store_numbers(static_cast<int>(rowptr[next] - k));
    }
  }

  // A row or a piece of it.
  void entries(int64_t row, int64_t k0, int64_t k1) {
    start();
    const int64_t step = step_entries();
    for (int64_t k = k0; k < k1; k += step) {
      const int count = static_cast<int>(smaller(step, k1 - k));
      compute_numbers(row, k, count);
      add_entries(row, k, 0, count);
      store_numbers(count);
    }
  }

  void finish(int64_t row) {
    const bool divide = a_.scores >= 0 && !is_empty(row);
    for (int o = 0; o < a_.num_outputs; ++o) {
      const Output& output = a_.outputs[o];
      T* out = static_cast<T*>(output.data) + row * output.stride;
      const A* total = totals_ + output.place;
      const int64_t columns = heads_ * output.width;
      for (int64_t f = 0; f < columns; f += L) {
        const int n = static_cast<int>(smaller(columns - f, L));
        const HeadsOfLanes heads(f, output.width);
        V v = load_n(total + f, n);
        if (divide)
          v = v / heads.spread(load_n(sum_ + heads.first,
                                      static_cast<int>(smaller(heads_ - heads.first, L))));
        store_n(out + f, v, n);
      }
    }
    if (a_.scores < 0)
      return;
    A* log_sums = static_cast<A*>(a_.totals) + row * a_.totals_stride;
    for (int64_t h = 0; h < heads_; h += L) {
      const int n = static_cast<int>(smaller(heads_ - h, L));
      const V log_sum = load_n(most_ + h, n) + vlog(load_n(sum_ + h, n));
      store_n(log_sums + h, is_empty(row) ? V{} : log_sum, n);
    }
  }

  // Adds the accumulators of another piece of the row.
  void add(const A* other) {
    const A* most = other + (most_ - totals_);
    for (int64_t h = 0; h < heads_; ++h) {
      A scale = 1;
      if (a_.scores >= 0) {
        const A before = most_[h];
        most_[h] = larger(before, most[h]);
        rescale(h, before);
        scale = factor(most[h], most_[h]);
        sum_[h] += scale * other[sum_ - totals_ + h];
      }
      for (int o = 0; o < a_.num_outputs; ++o) {
        const Output& output = a_.outputs[o];
        for (int64_t f = 0; f < output.width; ++f) {
          const int64_t i = output.place + h * output.width + f;
          totals_[i] += scale * other[i];
        }
      }
    }
  }

 private:
  static constexpr int kNarrow = 0, kSums = 1, kTerms = kSums + kMaxSums;

  // The heads, of `width` columns each, that lanes f, f + 1, ... of a row belong to.
  struct HeadsOfLanes {
    HeadsOfLanes(int64_t f, int64_t width)
        : first(static_cast<uint32_t>(f) / static_cast<uint32_t>(width)) {
      const A begin = static_cast<A>(f - first * width) + A(0.5);
      const V head =
          (__builtin_convertvector(lane_numbers<A>(), V) + begin) * (1 / static_cast<A>(width));
      of = __builtin_convertvector(head, M);
    }

    // Lane i of the result is the number of its head; numbers[0] is that of head `first`.
    V spread(V numbers) const { return __builtin_shuffle(numbers, of); }

    int64_t first;
    M of;  // the head of each lane, counted from it
  };

  // Lane i of the result is the reduction by `f` of all lanes whose index is i modulo `period`.
  template <int Step = L / 2, class F>
  static V folded(V v, int period, F f) {
    if (Step < period)
      return v;
    v = f(v, rotate<A, Step>(v, std::make_integer_sequence<int, L>{}));
    if constexpr (Step > 1)
      return folded<Step / 2>(v, period, f);
    else
      return v;
  }

  // The first n lanes of v; the others are `other`.
  static V first_lanes(V v, int n, A other) {
    return n == L ? v : lane_numbers<A>() < M{} + n ? v : splat<A>(other);
  }

  Machine<T, I>& machine(int i) { return *reinterpret_cast<Machine<T, I>*>(machines_[i]); }

  bool is_empty(int64_t row) const {
    const I* rowptr = static_cast<const I*>(a_.csr.rowptr);
    return rowptr[row] == rowptr[row + 1];
  }

  // Ignores NaN: the sum of exponentials will have it.
  static A larger(A a, A b) { return b > a ? b : a; }

  // The factor of sums of exponentials when the largest exponent changes.
  static A factor(A before, A now) { return before == now ? A(1) : std::exp(before - now); }

  int64_t step_entries() const { return smaller(kStepEntries, kStepNumbers / heads_); }

  void start() {
    for (int64_t i = 0; i < a_.accumulators; ++i)
      totals_[i] = A{};
    for (int64_t h = 0; h < heads_; ++h)
      most_[h] = -std::numeric_limits<A>::infinity();
    started_ = false;
  }

  // Numbers of the entries of a step that begins in `row`. Not inlined, so that rows and pieces
  // share it.
  __attribute__((noinline)) void compute_numbers(int64_t row, int64_t k, int count) {
    const I* rowptr = static_cast<const I*>(a_.csr.rowptr);
    for (int j = 0; j < count; ++j) {
      while (rowptr[row + 1] <= k + j)
        ++row;
      targets_[j] = static_cast<I>(row);
      edges_[j] = eid_ ? static_cast<int64_t>(eid_[k + j]) : k + j;
    }
    for (int g = 0; g < a_.num_given; ++g) {
      const A* from = static_cast<const A*>(a_.given[g]);
      for (int j = 0; j < count; ++j) {
        __builtin_prefetch(from + static_cast<int64_t>(col_[ahead(k + j)]) * a_.given_stride);
        for (int64_t h = 0; h < heads_; ++h)
          numbers_[g][j * heads_ + h] =
              from[static_cast<int64_t>(col_[k + j]) * a_.given_stride + h];
      }
    }
    for (int s = 0; s < a_.num_sums; ++s) {
      A* to = numbers_[kFirstSum + s];
      if (a_.sums[s].a >= 0) {
        dots(a_.sums[s], k, count, to);
        continue;
      }
      sums(s, k, count, to);
    }
    compute(k, count);
  }

  // Sums the `count` entries of `row`, from position `at` on, in the step that begins at k.
  __attribute__((noinline)) void add_entries(int64_t row, int64_t k, int at, int count) {
    if (count == 0)
      return;
    if (a_.scores >= 0)
      exponentiate(numbers_[a_.scores] + at * heads_, count);
    for (int t = 0; t < a_.num_terms; ++t)
      add_term(t, row, k, at, count);
  }

  void store_numbers(int count) {
    for (int s = 0; s < a_.num_stores; ++s) {
      const Store& store = a_.stores[s];
      T* out = static_cast<T*>(store.data);
      for (int j = 0; j < count; ++j)
        for (int64_t h = 0; h < heads_; ++h)
          out[edges_[j] * store.stride + h] = from_acc<T>(numbers_[store.number][j * heads_ + h]);
    }
  }

  int64_t ahead(int64_t k) const { return smaller(k + kAhead, a_.csr.num_entries - 1); }

  // The row of an operand that entry j reads, in the step that begins at k.
  int64_t row_of(const Operand& operand, int64_t k, int j) const {
    return operand.side == Operand::kSource   ? static_cast<int64_t>(col_[k + j])
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

  void dots(const WideSum& sum, int64_t k, int count, A* to) {
    const Operand &left = sum.program.operands[sum.a], &right = sum.program.operands[sum.b];
    const int64_t width = sum.width;
    for (int j = 0; j < count; ++j) {
      const T* a = static_cast<const T*>(left.data) + row_of(left, k, j) * left.stride;
      const T* b = static_cast<const T*>(right.data) + row_of(right, k, j) * right.stride;
      for (const Operand* operand : {&left, &right})
        if (operand->side != Operand::kTarget)
          prefetch(*operand, width, k + j);
      A* place = to + j * heads_;
      if (left.per_head && right.per_head && L % width == 0) {
        for (int64_t f = 0; f < heads_ * width; f += L) {
          const int n = static_cast<int>(smaller(heads_ * width - f, L));
          segment_sums(load_n(a + f, n) * load_n(b + f, n), static_cast<int>(width), n,
                       place + f / width);
        }
        continue;
      }
      for (int64_t h = 0; h < heads_; ++h)
        place[h] =
            dot(a + (left.per_head ? h * width : 0), b + (right.per_head ? h * width : 0), width);
    }
  }

  // Sums of groups of `width` lanes, a divisor of L, of the first n lanes.
  static void segment_sums(V v, int width, int n, A* to) {
    if (width > 1)
      v = running_sum(v, width);
    const V sums = __builtin_shuffle(v, lane_numbers<A>() * width);
    store_n(to, sums, n / width);
  }

  // Lane i of the result is the sum of lanes i to i + width - 1.
  template <int Step = 1>
  static V running_sum(V v, int width) {
    v += rotate<A, Step>(v, std::make_integer_sequence<int, L>{});
    if constexpr (2 * Step < L) {
      if (2 * Step < width)
        return running_sum<2 * Step>(v, width);
    }
    return v;
  }

  void sums(int s, int64_t k, int count, A* to) {
    const WideSum& sum = a_.sums[s];
    Machine<T, I>& m = machine(kSums + s);
    m.use_rows(k, count);
    const int64_t segments = sum.flat ? heads_ : 1, columns = sum.program.width;
    for (int64_t h = 0; h < heads_; h += segments) {
      for (int64_t f = 0; f < columns; f += kTile) {
        const int n = static_cast<int>(smaller(columns - f, kTile));
        const int each = static_cast<int>(n / segments);
        const int batch = m.start(0, h, f, n, count);
        for (int done = 0; done < count; done += batch) {
          const int some = static_cast<int>(smaller(batch, count - done));
          const A* message = m.evaluate(k + done, some);
          for (int j = 0; j < some; ++j) {
            A* place = to + (done + j) * heads_ + h;
            if (segments > 1 && L % each == 0) {
              for (int i = 0; i < n; i += L)
                segment_sums(part(message + j * n, n, i), each, n - i < L ? n - i : L,
                             place + i / each);
              continue;
            }
            for (int64_t g = 0; g < segments; ++g) {
              V total{};
              for (int i = 0; i < each; i += L)
                total += part(message + j * n + g * each, each, i);
              place[g] = (f > 0 ? place[g] : A{}) + horizontal_sum<A>(total);
            }
          }
        }
      }
    }
  }

  // Computes numbers from numbers, with all heads at once as columns.
  void compute(int64_t k, int count) {
    if (a_.narrow.num_results == 0)
      return;
    Machine<T, I>& m = machine(kNarrow);
    m.use({numbers_[0], k, heads_});
    m.use_rows(k, count);
    const int batch = m.start(0, 0, 0, static_cast<int>(heads_), count);
    for (int done = 0; done < count; done += batch) {
      const int some = static_cast<int>(smaller(batch, count - done));
      m.evaluate(k + done, some);
      for (int r = 0; r < a_.narrow.num_results; ++r) {
        const A* from = m.value_of(a_.narrow.results[r]);
        A* to = numbers_[kFirstResult + r] + done * heads_;
        for (int64_t i = 0; i < some * heads_; ++i)
          to[i] = from[i];
      }
    }
  }

  // Replaces scores by exponentials of their difference from the largest one so far. If a vector
  // has scores of several entries, all heads are computed at once.
  void exponentiate(A* scores, int count) {
    if (L % heads_ == 0) {
      const int n = count * static_cast<int>(heads_), vectors = (n + L - 1) / L;
      exponentiate(scores, count, L, vectors, n - (vectors - 1) * L, 0, static_cast<int>(heads_));
    } else {
      for (int64_t h = 0; h < heads_; h += L) {
        const int lanes = static_cast<int>(smaller(heads_ - h, L));
        exponentiate(scores + h, count, heads_, count, lanes, h, lanes);
      }
    }
    started_ = true;
  }

  // The same for `heads` heads from h on and `count` entries, in vectors with a stride of `stride`,
  // the last with `lanes` lanes.
  void
  exponentiate(A* scores, int count, int64_t stride, int vectors, int lanes, int64_t h, int heads) {
    const A none = -std::numeric_limits<A>::infinity();
    const auto larger_lanes = [](V a, V b) { return b > a ? b : a; };
    const bool whole = stride == L;  // a vector but the last has L lanes
    const int period = whole ? heads : L;
    const V before =
        folded(first_lanes(load_n(most_ + h, heads), heads, none), period, larger_lanes);
    V most = before;
    for (int i = 0; i < vectors; ++i) {
      const int n = whole && i + 1 < vectors ? L : lanes;
      most = larger_lanes(most, first_lanes(load_n(scores + i * stride, n), n, none));
    }
    most = folded(most, period, larger_lanes);
    store_n(most_ + h, most, heads);
    if (started_) {
      for (int g = 0; g < heads; ++g)
        rescale(h + g, before[g]);
    }
    const V shift = most == none ? V{} : most;
    for (int i = 0; i < vectors; ++i) {
      const int n = whole && i + 1 < vectors ? L : lanes;
      store_n(scores + i * stride, vexp(load_n(scores + i * stride, n) - shift), n);
    }
    // Entry by entry, so that sums do not depend on the number of heads.
    V sum = load_n(sum_ + h, heads);
    for (int j = 0; j < count; ++j)
      sum += load_n(scores + j * heads_, heads);
    store_n(sum_ + h, sum, heads);
  }

  // Scales the sums of a head so far to its new largest score.
  void rescale(int64_t h, A before) {
    if (before == most_[h] || before == -std::numeric_limits<A>::infinity())
      return;  // nothing but zeros was added to -inf
    const A scale = factor(before, most_[h]);
    sum_[h] *= scale;
    for (int o = 0; o < a_.num_outputs; ++o) {
      A* total = totals_ + a_.outputs[o].place + h * a_.outputs[o].width;
      for (int64_t f = 0; f < a_.outputs[o].width; ++f)
        total[f] *= scale;
    }
  }

  void add_term(int t, int64_t row, int64_t k, int at, int count) {
    const Term& term = a_.terms[t];
    const int64_t width = a_.outputs[term.output].width;
    const A* coefficient = coefficients(term, at, count);
    A* total = totals_ + a_.outputs[term.output].place;
    if (term.plain >= 0) {
      add_rows(term, coefficient, k, at, count, width, total);
      return;
    }
    if (term.program.num_operands > 0) {
      const int64_t step = term.flat ? heads_ : 1;
      for (int64_t h = 0; h < heads_; h += step)
        add_messages(t, coefficient, row, k, at, count, h, width, total + h * width);
      return;
    }
    for (int64_t h = 0; h < heads_; ++h) {
      A sum{};
      for (int j = 0; j < count; ++j)
        sum += coefficient[j * heads_ + h];
      total[h] += sum;
    }
  }

  // The coefficients of the features, for every entry and head.
  const A* coefficients(const Term& term, int at, int count) {
    const A* own = term.coefficient < 0 ? nullptr : numbers_[term.coefficient] + at * heads_;
    const A* weights = a_.scores < 0 ? nullptr : numbers_[a_.scores] + at * heads_;
    if (own && !weights)
      return own;
    if (weights && !own)
      return weights;
    for (int64_t i = 0; i < count * heads_; ++i)
      coefficients_[i] = own ? own[i] * weights[i] : A(1);
    return coefficients_;
  }

  void add_rows(const Term& term,
                const A* coefficient,
                int64_t k,
                int at,
                int count,
                int64_t width,
                A* total) {
    const Operand& operand = term.program.operands[term.plain];
    for (int j = 0; j < count; ++j) {
      rows_[j] = static_cast<const T*>(operand.data) + row_of(operand, k, at + j) * operand.stride;
      if (!term.fetched)
        prefetch(operand, width, k + at + j);
    }
    if (operand.per_head) {  // heads side by side are one long row
      add_columns(heads_ * width, width, coefficient, count, total);
      return;
    }
    for (int64_t h = 0; h < heads_; ++h)
      add_columns(width, width, coefficient + h, count, total + h * width);
  }

  // Columns of the rows, with a coefficient for every `width` of them.
  void add_columns(int64_t columns, int64_t width, const A* coefficient, int count, A* total) {
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
        store_n(total + f, load(total + f) + sum[i], L);
    };
    if (width % L == 0) {
      while (f + 8 * L <= columns)
        block.template operator()<8>();
      while (f + 2 * L <= columns)
        block.template operator()<2>();
    }
    for (; f < columns; f += L) {
      const int n = static_cast<int>(smaller(columns - f, L));
      const HeadsOfLanes heads(f, width);
      const A* c = coefficient + heads.first;
      V sum{};
      for (int j = 0; j < count; ++j)
        sum += load_n(rows_[j] + f, n) * heads.spread(load(c + j * heads_));
      store_n(total + f, load_n(total + f, n) + sum, n);
    }
  }

  // For head h, or for all heads side by side.
  void add_messages(int t,
                    const A* coefficient,
                    int64_t row,
                    int64_t k,
                    int at,
                    int count,
                    int64_t h,
                    int64_t width,
                    A* total) {
    Machine<T, I>& m = machine(kTerms + t);
    m.use({numbers_[0], k, heads_});
    const int64_t segments = a_.terms[t].flat ? heads_ : 1, columns = segments * width;
    alignas(64) A sums[kTile + 16];
    for (int64_t f = 0; f < columns; f += kTile) {
      const int n = static_cast<int>(smaller(columns - f, kTile));
      const int each = static_cast<int>(n / segments);
      for (int i = 0; i < n + L; ++i)
        sums[i] = A{};
      const int batch = m.start(row, h, f, n, count);
      for (int done = 0; done < count; done += batch) {
        const int some = static_cast<int>(smaller(batch, count - done));
        const A* messages = m.evaluate(k + at + done, some);
        for (int64_t g = 0; g < segments; ++g) {
          const A* message = messages + g * each;
          const A* c = coefficient + done * heads_ + h + g;
          for (int i = 0; i < each; i += L) {
            V sum = load(sums + g * each + i);
            for (int j = 0; j < some; ++j)
              sum += part(message + j * n, each, i) * c[j * heads_];
            __builtin_memcpy(sums + g * each + i, &sum, sizeof(sum));
          }
        }
      }
      for (int i = 0; i < n; ++i)
        total[f + i] += sums[i];
    }
  }

  static V part(const A* p, int n, int i) {
    return i + L <= n ? load(p + i) : load_n(p + i, n - i);
  }

  const StagesArgs& a_;
  const int64_t heads_;
  const I* col_;
  const I* eid_;
  A* totals_;
  A* most_;
  A* sum_;
  int64_t edges_[kStepEntries];
  I targets_[kStepEntries];
  const T* rows_[kStepEntries];  // of features, of every entry
  alignas(64) A coefficients_[kStepNumbers + 16];
  alignas(64) A numbers_[kMaxNumbers][kStepNumbers];
  A padding_[16];         // vectors of numbers reach over their end
  bool started_ = false;  // entries of the row or piece were added before
  Scratch<T, I> scratch_;
  alignas(Machine<T, I>) unsigned char machines_[kTerms + kMaxTerms][sizeof(Machine<T, I>)];
};
