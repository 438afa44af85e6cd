// Random walks (node2vec), and the greedy matching of Graclus.
#include "../../neighbor_graph.h"
#include "../schedule.h"

namespace pyg_accel {
namespace {

constexpr int64_t kWalks = 64;  // a task

// A graph, whose ids are checked where they are read.
template <class I>
struct Rows {
  const I* rowptr;
  const I* col;
  int64_t size;
  int64_t edges;

  bool exists(I node) const {
    return node >= 0 && node < size && rowptr[node] >= 0 && rowptr[node] <= rowptr[node + 1] &&
           rowptr[node + 1] <= edges;
  }
  I degree(I node) const { return rowptr[node + 1] - rowptr[node]; }
  bool has(I row, I node) const {
    const I* end = col + rowptr[row + 1];
    return std::find(col + rowptr[row], end, node) != end;
  }
};

// Where a walk is, and its random numbers.
template <class I>
struct Walk {
  I* out;
  Random random;
  uint64_t draws = 0;
};

// A step of node2vec. Steps are drawn evenly and refused with the probabilities that make returns
// 1/p, and steps away from the neighbours of the node before 1/q times as likely.
template <class I>
bool advance(const Rows<I>& graph, int64_t step, double p, double q, Walk<I>& walk) {
  const double most = std::max({1 / p, 1.0, 1 / q});
  const double back = 1 / p / most, near = 1 / most, away = 1 / q / most;
  const I here = walk.out[step];
  if (!graph.exists(here))
    return false;
  const I degree = graph.degree(here);
  I next = here;  // stays on a node without edges
  for (bool refused = degree > 0; refused;) {
    next = graph.col[graph.rowptr[here] + walk.random.below(degree, walk.draws++)];
    if ((p == 1 && q == 1) || step == 0)
      break;
    if (!graph.exists(next))
      return false;
    const I before = walk.out[step - 1];
    const double draw = walk.random.uniform(walk.draws++);
    // Whether the two are neighbours is looked up only if it decides.
    if (next == before)
      refused = draw > back;
    else if (draw <= std::min(near, away))
      refused = false;
    else
      refused = draw > std::max(near, away) || draw > (graph.has(next, before) ? near : away);
  }
  walk.out[step + 1] = next;
  return true;
}

Tensor random_walk(const Tensor& rowptr,
                   const Tensor& col,
                   const Tensor& seed,
                   int64_t length,
                   double p,
                   double q,
                   int64_t random_seed) {
  const bool wide = is_wide(rowptr, "rowptr");
  check_vector(rowptr, "rowptr", rowptr.numel(), wide);
  check_vector(col, "col", col.numel(), wide);
  check_vector(seed, "seed", seed.numel(), wide);
  const int64_t count = seed.numel(), stride = length + 1;
  std::atomic<bool> good{true};
  Tensor out = new_result(rowptr, {count, stride});
  auto run = [&]<class I>(I) {
    const Rows<I> graph{static_cast<const I*>(rowptr.const_data_ptr()),
                        static_cast<const I*>(col.const_data_ptr()), rowptr.numel() - 1,
                        col.numel()};
    const I* starts = static_cast<const I*>(seed.const_data_ptr());
    I* nodes = static_cast<I*>(out.mutable_data_ptr());
    parallel_tasks((count + kWalks - 1) / kWalks, count * length < 4096, [&](int64_t task) {
      std::vector<Walk<I>> walks;
      for (int64_t i = task * kWalks; i < std::min(count, (task + 1) * kWalks); ++i) {
        walks.push_back({nodes + i * stride, Random(random_seed, i)});
        nodes[i * stride] = starts[i];
      }
      bool mine = true;  // all walks step by step: while one waits for memory, others go on
      for (int64_t step = 0; step < length && mine; ++step)
        for (Walk<I>& walk : walks)
          mine = advance<I>(graph, step, p, q, walk) && mine;
      for (const Walk<I>& walk : walks)
        mine = mine && graph.exists(walk.out[length]);
      if (!mine)
        good = false;
    });
  };
  wide ? run(int64_t{}) : run(int32_t{});
  STD_TORCH_CHECK(good, "expected 'seed' and 'col' to hold ids of nodes that exist");
  return out;
}

// Matches nodes in an order, each with the first free neighbour, or with the last of the heaviest
// free ones. Both get the smaller of their ids.
Tensor graclus(const Tensor& rowptr,
               const Tensor& col,
               const std::optional<Tensor>& weight,
               const Tensor& order) {
  const int64_t size = rowptr.numel() - 1;
  check_vector(rowptr, "rowptr", rowptr.numel(), true);
  check_vector(col, "col", col.numel(), true);
  check_vector(order, "order", size, true);
  STD_TORCH_CHECK(
      !weight || (weight->is_cpu() && weight->is_contiguous() && weight->numel() == col.numel() &&
                  weight->scalar_type() == ScalarType::Double),
      "expected 'weight' to be a contiguous CPU vector of float64");
  const int64_t* begin = static_cast<const int64_t*>(rowptr.const_data_ptr());
  const int64_t* neighbor = static_cast<const int64_t*>(col.const_data_ptr());
  const Rows<int64_t> graph{begin, neighbor, size, col.numel()};
  const int64_t* next = static_cast<const int64_t*>(order.const_data_ptr());
  const double* heavy = weight ? static_cast<const double*>(weight->const_data_ptr()) : nullptr;
  Tensor out = new_result(rowptr, {size});
  int64_t* cluster = static_cast<int64_t*>(out.mutable_data_ptr());
  std::fill_n(cluster, size, int64_t{-1});
  for (int64_t i = 0; i < size; ++i) {
    const int64_t u = next[i];
    if (cluster[u] >= 0)
      continue;
    int64_t partner = u;
    double most = 0;
    STD_TORCH_CHECK(graph.exists(u), "expected 'rowptr' to ascend from 0 to the number of edges");
    for (int64_t e = begin[u]; e < begin[u + 1]; ++e) {
      const int64_t v = neighbor[e];
      STD_TORCH_CHECK(v >= 0 && v < size, "expected 'col' to hold ids of nodes that exist");
      if (v == u || cluster[v] >= 0 || (heavy && !(heavy[e] >= most)))
        continue;
      partner = v;
      if (!heavy)
        break;
      most = heavy[e];
    }
    cluster[u] = cluster[partner] = std::min(u, partner);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("random_walk", TORCH_BOX(&random_walk));
  m.impl("graclus", TORCH_BOX(&graclus));
}

}  // namespace pyg_accel
