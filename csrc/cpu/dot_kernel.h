// Dot products of both ends of every edge and of rows, and the softmax over the entries of a row.
// Included once per instruction set.

template <class T>
inline acc_t<T> dot(const T* a, const T* b, int64_t n) {
  using A = acc_t<T>;
  constexpr int L = kLanes<A>;
  vec_t<A> s0{}, s1{}, s2{}, s3{};
  int64_t i = 0;
  for (; i + 4 * L <= n; i += 4 * L) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + L) * load(b + i + L);
    s2 += load(a + i + 2 * L) * load(b + i + 2 * L);
    s3 += load(a + i + 3 * L) * load(b + i + 3 * L);
  }
  for (; i + L <= n; i += L)
    s0 += load(a + i) * load(b + i);
  if (i < n)
    s1 += load_n(a + i, static_cast<int>(n - i)) * load_n(b + i, static_cast<int>(n - i));
  return horizontal_sum<A>((s0 + s1) + (s2 + s3));
}

template <class T, class I>
void dot_piece(const DotArgs& a, const Piece& piece) {
  const I* col = static_cast<const I*>(a.csr.col);
  const I* eid = static_cast<const I*>(a.csr.eid);
  const T* target = static_cast<const T*>(a.target) + piece.row * a.target_stride;
  const T* source = static_cast<const T*>(a.source);
  T* out = static_cast<T*>(a.out);
  const int64_t last = a.csr.num_entries - 1;
  const int64_t bytes = a.heads * a.width * static_cast<int64_t>(sizeof(T));
  const int64_t ahead = bytes > 512 ? 4 : 16;
  for (int64_t k = piece.k_begin; k < piece.k_end; ++k) {
    const int64_t k_next = k + ahead < last ? k + ahead : last;
    const char* next =
        reinterpret_cast<const char*>(source + static_cast<int64_t>(col[k_next]) * a.source_stride);
    for (int64_t b = 0; b < bytes; b += 64)
      __builtin_prefetch(next + b);
    const T* xs = source + static_cast<int64_t>(col[k]) * a.source_stride;
    T* place = out + (eid ? static_cast<int64_t>(eid[k]) : k) * a.heads;
    for (int64_t h = 0; h < a.heads; ++h)
      place[h] = from_acc<T>(dot(target + h * a.width, xs + h * a.width, a.width));
  }
}

template <class T, class I>
void dot_rows(const DotArgs& a, const Range& range) {
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    if (rowptr[row + 1] - rowptr[row] <= kHubDegree)
      dot_piece<T, I>(a, {row, rowptr[row], rowptr[row + 1]});
  }
}

template <class T, class I>
void softmax_rows(const SoftmaxArgs& a, const Range& range) {
  using A = acc_t<T>;
  const I* rowptr = static_cast<const I*>(a.csr.rowptr);
  const I* eid = static_cast<const I*>(a.csr.eid);
  const T* in = static_cast<const T*>(a.scores);
  const T* grad = static_cast<const T*>(a.grad);
  T* out = static_cast<T*>(a.out);
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    const int64_t k0 = rowptr[row], k1 = rowptr[row + 1];
    for (int64_t h = 0; h < a.heads; ++h) {
      auto at = [&](int64_t k) { return (eid ? static_cast<int64_t>(eid[k]) : k) * a.heads + h; };
      if (grad) {
        A total{};
        for (int64_t k = k0; k < k1; ++k)
          total += to_acc(in[at(k)]) * to_acc(grad[at(k)]);
        for (int64_t k = k0; k < k1; ++k)
          out[at(k)] = from_acc<T>(to_acc(in[at(k)]) * (to_acc(grad[at(k)]) - total));
        continue;
      }
      A most = -std::numeric_limits<A>::infinity();
      for (int64_t k = k0; k < k1; ++k) {
        const A v = to_acc(in[at(k)]);
        most = v > most || v != v ? v : most;
      }
      A total{};
      for (int64_t k = k0; k < k1; ++k)
        total += std::exp(to_acc(in[at(k)]) - most);
      for (int64_t k = k0; k < k1; ++k)
        out[at(k)] = from_acc<T>(std::exp(to_acc(in[at(k)]) - most) / total);
    }
  }
}

// out[row, h] = sum over f of target[row, h, f] * source[row, h, f], in the accumulation type.
template <class T>
void row_dots(const DotArgs& a, const Range& range) {
  const T* target = static_cast<const T*>(a.target);
  const T* source = static_cast<const T*>(a.source);
  auto* out = static_cast<acc_t<T>*>(a.out);
  for (int64_t row = range.row_begin; row < range.row_end; ++row)
    for (int64_t h = 0; h < a.heads; ++h)
      out[row * a.heads + h] = dot(target + row * a.target_stride + h * a.width,
                                   source + row * a.source_stride + h * a.width, a.width);
}
