// The nearest points of each query, by a k-d tree of every example. Equal distances go by index:
// the bound of a box is computed as distances are, operation by operation, so that rounding never
// hides a point.
#include <limits>

#include "../schedule.h"

namespace pyg_accel {
namespace {

constexpr int64_t kLeaf = 16;       // points at most
constexpr int64_t kQueries = 128;   // a task
constexpr int64_t kInsertion = 48;  // above, a heap takes the place of a sorted list

// The tree of an example. Points are ordered by leaf, each leaf with one coordinate after another.
template <class T>
class Tree {
 public:
  Tree(const T* points, int64_t begin, int64_t end, int64_t dims)
      : points_(points), dims_(dims), ids_(end - begin), at_((end - begin) * dims) {
    for (int64_t i = begin; i < end; ++i)
      ids_[i - begin] = i;
    if (end > begin)
      split(0, end - begin);
  }

  bool empty() const { return nodes_.empty(); }

  // The squared distance from a query to the box of a node, at most that to any of its points.
  T bound(int64_t node, const T* query) const {
    const T* low = boxes_.data() + node * 2 * dims_;
    T sum = 0;
    for (int64_t d = 0; d < dims_; ++d) {
      const T below = low[d] - query[d], above = query[d] - low[dims_ + d];
      const T gap = below > 0 ? below : above > 0 ? above : 0;
      sum += gap * gap;
    }
    return sum;
  }

  // Offers the points of a node to `best`, nearer boxes first.
  template <class Best>
  void search(int64_t node, const T* query, Best& best) const {
    const Node& here = nodes_[node];
    if (here.right == 0) {
      T sums[kLeaf] = {};
      const int64_t count = here.end - here.begin;
      const T* leaf = at_.data() + here.begin * dims_;
      for (int64_t d = 0; d < dims_; ++d, leaf += count)
        for (int64_t i = 0; i < count; ++i) {
          const T gap = query[d] - leaf[i];
          sums[i] += gap * gap;
        }
      for (int64_t i = 0; i < count; ++i)
        best.offer(sums[i], ids_[here.begin + i]);
      return;
    }
    int64_t first = node + 1, second = here.right;
    T near = bound(first, query), far = bound(second, query);
    if (far < near) {
      std::swap(first, second);
      std::swap(near, far);
    }
    if (near <= best.limit())
      search(first, query, best);
    if (far <= best.limit())
      search(second, query, best);
  }

 private:
  struct Node {
    int64_t begin, end;
    int64_t right;  // the child that does not follow; 0 for a leaf
  };

  T coordinate(int64_t i, int64_t d) const { return points_[ids_[i] * dims_ + d]; }

  void split(int64_t begin, int64_t end) {
    const int64_t node = nodes_.size();
    nodes_.push_back({begin, end, 0});
    boxes_.resize(boxes_.size() + 2 * dims_);
    int64_t widest = 0;
    T width = -1;
    for (int64_t d = 0; d < dims_; ++d) {
      T low = coordinate(begin, d), high = low;
      for (int64_t i = begin + 1; i < end; ++i) {
        low = std::min(low, coordinate(i, d));
        high = std::max(high, coordinate(i, d));
      }
      boxes_[node * 2 * dims_ + d] = low;
      boxes_[node * 2 * dims_ + dims_ + d] = high;
      if (high - low > width) {
        widest = d;
        width = high - low;
      }
    }
    if (end - begin <= kLeaf) {
      T* leaf = at_.data() + begin * dims_;
      for (int64_t d = 0; d < dims_; ++d)
        for (int64_t i = begin; i < end; ++i)
          *leaf++ = coordinate(i, d);
      return;
    }
    const int64_t middle = begin + (end - begin + kLeaf - 1) / kLeaf / 2 * kLeaf;
    std::nth_element(ids_.begin() + begin, ids_.begin() + middle, ids_.begin() + end,
                     [&](int64_t a, int64_t b) {
                       return points_[a * dims_ + widest] < points_[b * dims_ + widest];
                     });
    split(begin, middle);
    nodes_[node].right = nodes_.size();
    split(middle, end);
  }

  const T* points_;
  int64_t dims_;
  std::vector<int64_t> ids_;
  std::vector<T> at_;
  std::vector<Node> nodes_;
  std::vector<T> boxes_;  // low and high corner of every node
};

// The `most` smallest pairs of distance and index that are within a limit.
template <class T>
class Nearest {
 public:
  Nearest(int64_t most, T limit) : most_(most), within_(limit) {}

  void restart(int64_t skipped) {
    skipped_ = skipped;
    found_.clear();
  }

  T limit() const { return is_full() ? worst().first : within_; }

  void offer(T distance, int64_t id) {
    if (!(distance <= limit()) || id == skipped_)
      return;
    const std::pair<T, int64_t> pair{distance, id};
    if (is_full()) {
      if (!(pair < worst()))
        return;
      if (heap())
        std::pop_heap(found_.begin(), found_.end());
      found_.pop_back();
    }
    found_.push_back(pair);
    if (heap()) {
      std::push_heap(found_.begin(), found_.end());
    } else {
      size_t at = found_.size() - 1;
      for (; at > 0 && pair < found_[at - 1]; --at)
        found_[at] = found_[at - 1];
      found_[at] = pair;
    }
  }

  const std::vector<std::pair<T, int64_t>>& sorted() {
    if (heap())
      std::sort_heap(found_.begin(), found_.end());
    return found_;
  }

 private:
  bool heap() const { return most_ > kInsertion; }
  bool is_full() const { return static_cast<int64_t>(found_.size()) == most_; }
  const std::pair<T, int64_t>& worst() const { return heap() ? found_.front() : found_.back(); }

  int64_t most_;
  T within_;
  int64_t skipped_ = -1;
  std::vector<std::pair<T, int64_t>> found_;
};

template <class T>
std::vector<Tensor> search(const Tensor& x,
                           const Tensor& y,
                           const int64_t* ptr_x,
                           const int64_t* ptr_y,
                           int64_t examples,
                           int64_t most,
                           T limit,
                           bool skip_same) {
  const T* points = static_cast<const T*>(x.const_data_ptr());
  const T* queries = static_cast<const T*>(y.const_data_ptr());
  const int64_t dims = x.size(1);
  std::vector<std::optional<Tree<T>>> trees(examples);
  parallel_tasks(examples, x.numel() + y.numel() < kSerialElements,
                 [&](int64_t b) { trees[b].emplace(points, ptr_x[b], ptr_x[b + 1], dims); });
  struct Task {
    int64_t example, begin, end;
    std::vector<int64_t> ids, counts;
  };
  std::vector<Task> tasks;
  for (int64_t b = 0; b < examples; ++b)
    for (int64_t q = ptr_y[b]; q < ptr_y[b + 1]; q += kQueries)
      tasks.push_back({b, q, std::min(q + kQueries, ptr_y[b + 1]), {}, {}});
  const int64_t count = tasks.size();
  parallel_tasks(count, count * kQueries * dims < 4096, [&](int64_t t) {
    Task& task = tasks[t];
    const Tree<T>& tree = *trees[task.example];
    Nearest<T> nearest(most, limit);
    for (int64_t q = task.begin; q < task.end; ++q) {
      nearest.restart(skip_same ? q : -1);
      if (!tree.empty())
        tree.search(0, queries + q * dims, nearest);
      for (const auto& pair : nearest.sorted())
        task.ids.push_back(pair.second);
      task.counts.push_back(task.ids.size());
    }
  });
  std::vector<int64_t> offsets(count + 1);
  for (int64_t t = 0; t < count; ++t)
    offsets[t + 1] = offsets[t] + tasks[t].ids.size();
  Tensor out = new_result(y, {2, offsets[count]}, ScalarType::Long);
  int64_t* query = static_cast<int64_t*>(out.mutable_data_ptr());
  int64_t* point = query + offsets[count];
  parallel_tasks(count, offsets[count] < kSerialElements, [&](int64_t t) {
    const Task& task = tasks[t];
    std::copy(task.ids.begin(), task.ids.end(), point + offsets[t]);
    int64_t e = 0;
    for (int64_t q = task.begin; q < task.end; ++q)
      for (; e < task.counts[q - task.begin]; ++e)
        query[offsets[t] + e] = q;
  });
  return {out};
}

void check_ptr(const int64_t* ptr, int64_t examples, int64_t size, const char* name) {
  bool good = examples >= 0 && ptr[0] == 0 && ptr[examples] == size;
  for (int64_t b = 0; b < examples && good; ++b)
    good = ptr[b] <= ptr[b + 1];
  STD_TORCH_CHECK(good, "expected '", name, "' to ascend from 0 to ", size);
}

// Queries and their neighbours, [2, E]: of each row of `y` the at most `most` rows of `x` of its
// example whose squared distance is at most `limit`, by distance and index; not the row of the same
// number if it is to be skipped.
std::vector<Tensor> nearest_points(const Tensor& x,
                                   const Tensor& y,
                                   const Tensor& ptr_x,
                                   const Tensor& ptr_y,
                                   int64_t most,
                                   double limit,
                                   bool skip_same) {
  for (const Tensor& t : {x, y})
    STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.dim() == 2 && t.size(1) == x.size(1) &&
                        t.scalar_type() == x.scalar_type(),
                    "expected contiguous CPU matrices of one width and dtype");
  check_vector(ptr_x, "ptr_x", ptr_x.numel(), true);
  check_vector(ptr_y, "ptr_y", ptr_x.numel(), true);
  const int64_t examples = ptr_x.numel() - 1;
  const int64_t* of_x = static_cast<const int64_t*>(ptr_x.const_data_ptr());
  const int64_t* of_y = static_cast<const int64_t*>(ptr_y.const_data_ptr());
  STD_TORCH_CHECK(most > 0, "expected a positive number of points");
  check_ptr(of_x, examples, x.size(0), "ptr_x");
  check_ptr(of_y, examples, y.size(0), "ptr_y");
  auto run = [&]<class T>(T) {
    return search<T>(x, y, of_x, of_y, examples, most, static_cast<T>(limit), skip_same);
  };
  return dtype_of(x) == DType::kDouble ? run(double{}) : run(float{});
}

// Farthest-point sampling of an example: each next point is the first point at the largest distance
// from all points before.
template <class T>
void sample_farthest(const T* points,
                     int64_t size,
                     int64_t dims,
                     int64_t first,
                     int64_t begin,
                     int64_t* out,
                     int64_t count) {
  constexpr int64_t kLanes = 8, kBlock = 512;
  std::vector<T> at(size * dims), distance(size, std::numeric_limits<T>::infinity());
  for (int64_t i = 0; i < size; ++i)
    for (int64_t d = 0; d < dims; ++d)
      at[d * size + i] = points[i * dims + d];
  for (int64_t k = 0;; ++k) {
    out[k] = begin + first;
    if (k + 1 == count)
      return;
    const T* last = points + first * dims;
    T farthest = -1;
    for (int64_t block = 0; block < size; block += kBlock) {
      const int64_t width = std::min(kBlock, size - block);
      T sums[kBlock] = {}, most[kLanes];
      for (int64_t d = 0; d < dims; ++d)
        for (int64_t i = 0; i < width; ++i) {
          const T gap = at[d * size + block + i] - last[d];
          sums[i] += gap * gap;
        }
      std::fill_n(most, kLanes, T{-1});
      T* old = distance.data() + block;
      for (int64_t i = 0; i < width; ++i)
        old[i] = sums[i] < old[i] ? sums[i] : old[i];
      int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes)
        for (int64_t j = 0; j < kLanes; ++j)
          most[j] = old[i + j] > most[j] ? old[i + j] : most[j];
      for (; i < width; ++i)
        most[0] = std::max(most[0], old[i]);
      const T here = *std::max_element(most, most + kLanes);
      if (here > farthest) {
        farthest = here;
        first = block + (std::find(old, old + width, here) - old);
      }
    }
  }
}

// Samples points of all examples; `ptr_out` has the sizes of the samples, `start` the first point
// of each.
Tensor farthest_points(const Tensor& src,
                       const Tensor& ptr,
                       const Tensor& ptr_out,
                       const Tensor& start) {
  const int64_t examples = start.numel(), dims = src.size(1);
  check_vector(ptr, "ptr", examples + 1, true);
  check_vector(ptr_out, "ptr_out", examples + 1, true);
  check_vector(start, "start", examples, true);
  STD_TORCH_CHECK(src.is_cpu() && src.is_contiguous() && src.dim() == 2,
                  "expected 'src' to be a contiguous CPU matrix");
  const int64_t* begin = static_cast<const int64_t*>(ptr.const_data_ptr());
  const int64_t* to = static_cast<const int64_t*>(ptr_out.const_data_ptr());
  const int64_t* first = static_cast<const int64_t*>(start.const_data_ptr());
  check_ptr(begin, examples, src.size(0), "ptr");
  for (int64_t b = 0; b < examples; ++b)
    STD_TORCH_CHECK(to[b] >= 0 && to[b + 1] - to[b] >= 0 && first[b] >= 0 &&
                        (to[b] == to[b + 1] || first[b] < begin[b + 1] - begin[b]),
                    "expected a first point of every example with samples");
  Tensor out = new_result(ptr, {to[examples]});
  int64_t* chosen = static_cast<int64_t*>(out.mutable_data_ptr());
  auto run = [&]<class T>(T) {
    const T* points = static_cast<const T*>(src.const_data_ptr());
    parallel_tasks(examples, src.numel() < 1024, [&](int64_t b) {
      if (to[b + 1] > to[b])
        sample_farthest<T>(points + begin[b] * dims, begin[b + 1] - begin[b], dims, first[b],
                           begin[b], chosen + to[b], to[b + 1] - to[b]);
    });
  };
  dtype_of(src) == DType::kDouble ? run(double{}) : run(float{});
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("nearest_points", TORCH_BOX(&nearest_points));
  m.impl("farthest_points", TORCH_BOX(&farthest_points));
}

}  // namespace pyg_accel
