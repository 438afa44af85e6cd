// The steps of stages.h over rows and over pieces of hubs, and the combination of pieces. Included
// once per instruction set.

template <class T, class I>
void stages_rows(const StagesArgs& a, const Range& range, void* scratch) {
  Stages<T, I> stages(a, static_cast<acc_t<T>*>(scratch));
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
    stages.add(first + p * a.accumulators);
  stages.finish(row);
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
