// The schemas of the CPU library. They are internal: users call pyg_accel.ops, which checks shapes,
// chooses a backend and has the gradients. Sides, reductions and instructions are numbered as in
// cpu/kernels.h; pyg_accel/backends/cpu/stages.py writes them.
#include "neighbor_sample.h"
#include "take_parts.h"

STABLE_TORCH_LIBRARY(pyg_accel_cpu, m) {
  m.def(
      "csr_from_coo(Tensor edge_index, int target, int num_rows, int num_cols, bool wide) -> "
      "Tensor[]");
  m.def("csr_transpose(Tensor rowptr, Tensor col, int num_cols) -> Tensor[]");
  m.def(
      "spmm(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, bool sorted, int plan, Tensor x, "
      "Tensor? weight=None) -> Tensor");
  m.def(
      "spmm_winners(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, bool sorted, int plan, "
      "Tensor x, Tensor? weight=None) -> (Tensor, Tensor)");
  m.def("scatter_arg(int num_cols, Tensor grad, Tensor arg) -> Tensor");
  m.def("softmax(Tensor rowptr, Tensor? eid, Tensor scores, Tensor? grad) -> Tensor");
  m.def(
      "stages(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, int[] sides, "
      "Tensor[] source_numbers, int[] code, int heads, int scores, bool want_arg, "
      "bool arg_is_col, Tensor[] operands) -> Tensor[]");
  m.def("row_dots(Tensor a, Tensor b) -> Tensor");
  m.def("maxk(Tensor x, int k) -> Tensor[]");
  m.def(
      "cbsr_spmm(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, Tensor values, "
      "Tensor indices, int width, Tensor? weight, bool mean) -> Tensor");
  m.def(
      "cbsr_sspmm(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, bool sorted, "
      "Tensor rowptr_t, Tensor x, Tensor indices, Tensor? weight) -> Tensor");
  m.def(
      "cbsr_dot(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, Tensor values, "
      "Tensor indices, Tensor x) -> Tensor");
  m.def(
      "sampled(Tensor rowptr, Tensor col, Tensor? eid, int num_cols, Tensor x, Tensor? scale, "
      "Tensor? weight, int limit, int strategy, int rescale) -> Tensor");
  m.def(
      "community_best(Tensor rowptr, Tensor col, Tensor? weight, Tensor strength, Tensor labels, "
      "Tensor totals, Tensor sizes, Tensor nodes) -> Tensor");
  m.def(
      "community_merge(Tensor rowptr, Tensor col, Tensor? weight, Tensor labels, Tensor first, "
      "Tensor members) -> Tensor[]");
  m.def(pyg_accel::kNeighborSample);
  m.def(
      "nearest_points(Tensor x, Tensor y, Tensor ptr_x, Tensor ptr_y, int most, float limit, "
      "bool skip_same) -> Tensor[]");
  m.def("farthest_points(Tensor src, Tensor ptr, Tensor ptr_out, Tensor start) -> Tensor");
  m.def(
      "random_walk(Tensor rowptr, Tensor col, Tensor seed, int length, float p, float q, "
      "int random_seed) -> Tensor");
  m.def("graclus(Tensor rowptr, Tensor col, Tensor? weight, Tensor order) -> Tensor");
  m.def("join(Tensor[] parts, int? dim, Tensor? shift) -> Tensor[]");
  m.def(pyg_accel::kTakeParts);
  m.def("configure(str isa, int block_width, int block_cols) -> ()");
  m.def("info() -> str");
  m.def("functions() -> str");
}
