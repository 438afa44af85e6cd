// Products of a graph with CBSR features. Included once per instruction set (see vec.h).
//
// The k columns of a node are scattered to, or gathered from, a dense row in the first-level cache,
// so that an edge moves k values and columns instead of a row of features. Element by element: with
// AVX-512 on an EPYC 9004, expanding vectors by masks took 1.5 times as long, and gathers were not
// faster.

// Rows of the graph whose terms `sspmm` sums before adding the sum to the others.
inline constexpr int64_t kRunRows = 8192;

inline constexpr int64_t kAheadEntries = 8;  // whose memory is asked for in time

inline void prefetch_lines(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < smaller(bytes, 512); i += 64)
    __builtin_prefetch(static_cast<const char*>(p) + i);
}

template <class A, class I>
inline A cbsr_weight(const CbsrArgs& a, int64_t k) {
  if (!a.weight)
    return 1;
  const I* eid = static_cast<const I*>(a.csr.eid);
  return static_cast<const A*>(a.weight)[eid ? static_cast<int64_t>(eid[k]) : k];
}

// total += entries [k0, k1); `run` has room for a row.
template <class A, class I, class C>
inline void cbsr_spmm_entries(const CbsrArgs& a,
                              int64_t k0,
                              int64_t k1,
                              A* __restrict total,
                              A* __restrict run) {
  const I* col = static_cast<const I*>(a.csr.col);
  const A* values = static_cast<const A*>(a.values);
  const C* indices = static_cast<const C*>(a.indices);
  for (int64_t f = 0; f < a.width; ++f)
    total[f] = 0;
  for (int64_t begin = k0; begin < k1; begin += kRunEntries) {
    const int64_t end = smaller(begin + kRunEntries, k1);
    A* sums = k1 - k0 <= kRunEntries ? total : run;
    if (sums == run) {
      for (int64_t f = 0; f < a.width; ++f)
        run[f] = 0;
    }
    for (int64_t k = begin; k < end; ++k) {
      const int64_t j = col[k], next = col[smaller(k + kAheadEntries, k1 - 1)];
      prefetch_lines(values + next * a.k, a.k * static_cast<int64_t>(sizeof(A)));
      prefetch_lines(indices + next * a.k, a.k * static_cast<int64_t>(sizeof(C)));
      const A* v = values + j * a.k;
      const C* c = indices + j * a.k;
      const A w = cbsr_weight<A, I>(a, k);
#pragma GCC unroll 8
      for (int64_t s = 0; s < a.k; ++s)
        sums[c[s]] += w * v[s];
    }
    if (sums == run) {
      for (int64_t f = 0; f < a.width; ++f)
        total[f] += run[f];
    }
  }
}

template <class A, class I>
inline void cbsr_spmm_some(const CbsrArgs& a, int64_t k0, int64_t k1, A* total, A* run) {
  a.wide ? cbsr_spmm_entries<A, I, uint16_t>(a, k0, k1, total, run)
         : cbsr_spmm_entries<A, I, uint8_t>(a, k0, k1, total, run);
}

template <class A, class I>
void cbsr_spmm_rows(const CbsrArgs& a, int64_t begin, int64_t end, void* scratch) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t degree = rowptr[row + 1] - rowptr[row];
    if (degree > kHubDegree)
      continue;
    A* out = static_cast<A*>(a.out) + row * a.width;
    cbsr_spmm_some<A, I>(a, rowptr[row], rowptr[row + 1], out, static_cast<A*>(scratch));
    if (a.mean && degree > 1) {
      for (int64_t f = 0; f < a.width; ++f)
        out[f] /= static_cast<A>(degree);
    }
  }
}

template <class A, class I>
void cbsr_spmm_piece(const CbsrArgs& a, const Piece& piece, void* partial) {
  A* total = static_cast<A*>(partial);
  cbsr_spmm_some<A, I>(a, piece.k_begin, piece.k_end, total, total + a.width);
}

// Sums the pieces of a hub row in order, so the result does not depend on the number of threads.
template <class A, class I>
void cbsr_spmm_combine(const CbsrArgs& a, int64_t row, void* partials, int64_t count) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const A degree = a.mean ? static_cast<A>(rowptr[row + 1] - rowptr[row]) : 1;
  const A* sums = static_cast<const A*>(partials);
  A* out = static_cast<A*>(a.out) + row * a.width;
  for (int64_t f = 0; f < a.width; ++f) {
    A total = 0;
    for (int64_t p = 0; p < count; ++p)
      total += sums[2 * p * a.width + f];
    out[f] = total / degree;
  }
}

// The first entry in [k0, k1) whose column is at least `column`; columns ascend.
template <class I>
inline int64_t cbsr_first(const I* col, int64_t k0, int64_t k1, int64_t column) {
  while (k0 < k1) {
    const int64_t middle = k0 + (k1 - k0) / 2;
    if (col[middle] < column)
      k0 = middle + 1;
    else
      k1 = middle;
  }
  return k0;
}

// Visits all rows: each stays in the first-level cache while its neighbours in [begin, end) read
// it.
template <class A, class I, class C>
inline void cbsr_sspmm_push(const CbsrArgs& a,
                            int64_t begin,
                            int64_t end,
                            A* __restrict out,
                            A* __restrict run) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const I* col = static_cast<const I*>(a.csr.col);
  const C* indices = static_cast<const C*>(a.indices);
  const int64_t size = (end - begin) * a.k;
  const bool whole = begin == 0 && end == a.csr.num_cols;
  for (int64_t n = 0; n < size; ++n)
    out[n] = 0;
  for (int64_t first = 0; first < a.csr.num_rows; first += kRunRows) {
    A* sums = a.csr.num_rows <= kRunRows ? out : run;
    if (sums == run) {
      for (int64_t n = 0; n < size; ++n)
        run[n] = 0;
    }
    const int64_t last = smaller(first + kRunRows, a.csr.num_rows);
    for (int64_t row = first; row < last; ++row) {
      const A* x = static_cast<const A*>(a.x) + row * a.width;
      int64_t k0 = rowptr[row], k1 = rowptr[row + 1];
      if (a.csr.sorted && !whole) {
        k0 = cbsr_first(col, k0, k1, begin);
        k1 = cbsr_first(col, k0, k1, end);
      }
      for (int64_t k = k0; k < k1; ++k) {
        const int64_t j = col[k];
        if (j < begin || j >= end)  // of a row that is not sorted
          continue;
        const int64_t next = col[smaller(k + kAheadEntries, k1 - 1)];
        prefetch_lines(sums + (next - begin) * a.k, a.k * static_cast<int64_t>(sizeof(A)));
        prefetch_lines(indices + next * a.k, a.k * static_cast<int64_t>(sizeof(C)));
        const C* c = indices + j * a.k;
        A* to = sums + (j - begin) * a.k;
        const A w = cbsr_weight<A, I>(a, k);
#pragma GCC unroll 8
        for (int64_t s = 0; s < a.k; ++s)
          to[s] += w * x[c[s]];
      }
    }
    if (sums == run) {
      for (int64_t n = 0; n < size; ++n)
        out[n] += run[n];
    }
  }
}

template <class A, class I>
void cbsr_sspmm_cols(const CbsrArgs& a, int64_t begin, int64_t end, void* scratch) {
  A* out = static_cast<A*>(a.out) + begin * a.k;
  A* run = static_cast<A*>(scratch);
  a.wide ? cbsr_sspmm_push<A, I, uint16_t>(a, begin, end, out, run)
         : cbsr_sspmm_push<A, I, uint8_t>(a, begin, end, out, run);
}

template <class A, class I, class C>
inline void cbsr_dot_entries(const CbsrArgs& a, int64_t row, int64_t k0, int64_t k1) {
  const I* col = static_cast<const I*>(a.csr.col);
  const I* eid = static_cast<const I*>(a.csr.eid);
  const A* x = static_cast<const A*>(a.x) + row * a.width;
  const A* values = static_cast<const A*>(a.values);
  const C* indices = static_cast<const C*>(a.indices);
  for (int64_t k = k0; k < k1; ++k) {
    const int64_t j = col[k], next = col[smaller(k + kAheadEntries, k1 - 1)];
    prefetch_lines(values + next * a.k, a.k * static_cast<int64_t>(sizeof(A)));
    prefetch_lines(indices + next * a.k, a.k * static_cast<int64_t>(sizeof(C)));
    const A* v = values + j * a.k;
    const C* c = indices + j * a.k;
    A sums[4] = {};  // four chains of additions
    int64_t s = 0;
    for (; s + 4 <= a.k; s += 4)
      for (int i = 0; i < 4; ++i)
        sums[i] += v[s + i] * x[c[s + i]];
    for (; s < a.k; ++s)
      sums[0] += v[s] * x[c[s]];
    static_cast<A*>(a.out)[eid ? static_cast<int64_t>(eid[k]) : k] =
        (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
}

template <class A, class I>
void cbsr_dot_piece(const CbsrArgs& a, const Piece& piece) {
  a.wide ? cbsr_dot_entries<A, I, uint16_t>(a, piece.row, piece.k_begin, piece.k_end)
         : cbsr_dot_entries<A, I, uint8_t>(a, piece.row, piece.k_begin, piece.k_end);
}

template <class A, class I>
void cbsr_dot_rows(const CbsrArgs& a, int64_t begin, int64_t end) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  for (int64_t row = begin; row < end; ++row) {
    if (rowptr[row + 1] - rowptr[row] <= kHubDegree)
      cbsr_dot_piece<A, I>(a, Piece{row, rowptr[row], rowptr[row + 1]});
  }
}
