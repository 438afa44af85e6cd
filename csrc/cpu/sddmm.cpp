// SDDMM with a dot product, and the softmax over the entries of each row.
#include "schedule.h"

namespace pyg_accel {
namespace {

Tensor dot(const Tensor& rowptr,
           const Tensor& col,
           const std::optional<Tensor>& eid,
           int64_t num_cols,
           const Tensor& target,
           const Tensor& source) {
  const DType dtype = dtype_of(source);
  check_features(target, "target", dtype);
  check_features(source, "source", dtype);
  DotArgs args{};
  args.csr = csr_of(rowptr, col, eid, num_cols, false);
  STD_TORCH_CHECK(target.size(0) == args.csr.num_rows && source.size(0) == num_cols &&
                      target.size(1) == source.size(1) && target.size(2) == source.size(2),
                  "expected 'target' and 'source' of shapes [num_rows, H, F] and [num_cols, H, F]");
  args.heads = source.size(1);
  args.width = source.size(2);
  args.target = target.const_data_ptr();
  args.target_stride = target.stride(0);
  args.source = source.const_data_ptr();
  args.source_stride = source.stride(0);
  if (args.width == 0)
    return torch::stable::new_zeros(source, {args.csr.num_entries, args.heads});
  Tensor out = new_result(source, {args.csr.num_entries, args.heads});
  args.out = out.mutable_data_ptr();

  const Kernels& table = kernels(dtype);
  // One pass over the whole width: blocks of columns would write every score several times, and
  // rows cut out of X reach over as many pages as whole ones.
  parallel_rows(args.csr, args.heads * args.width, [&](int64_t begin, int64_t end) {
    table.dot_rows[args.csr.wide](args, Range{begin, end, 0, args.width});
  });
  for (const int64_t row : find_hubs(args.csr))
    parallel_pieces(args.csr, row, [&](const Piece& piece, int64_t) {
      table.dot_piece[args.csr.wide](args, piece);
    });
  return out;
}

Tensor softmax(const Tensor& rowptr,
               const std::optional<Tensor>& eid,
               const Tensor& scores,
               const std::optional<Tensor>& grad) {
  STD_TORCH_CHECK(scores.is_cpu() && scores.is_contiguous() && scores.dim() == 2,
                  "expected 'scores' to be contiguous [E, H]");
  SoftmaxArgs args{};
  // The columns play no part: rowptr stands in for them so that the sizes are checked once.
  args.csr = csr_of(rowptr, rowptr, std::nullopt, 0, false);
  args.csr.num_entries = scores.size(0);
  if (eid) {
    check_vector(*eid, "eid", scores.size(0), args.csr.wide);
    args.csr.eid = eid->const_data_ptr();
  }
  args.scores = scores.const_data_ptr();
  if (grad) {
    STD_TORCH_CHECK(grad->is_contiguous() && grad->numel() == scores.numel() &&
                        grad->scalar_type() == scores.scalar_type(),
                    "expected 'grad' to be like 'scores'");
    args.grad = grad->const_data_ptr();
  }
  args.heads = scores.size(1);
  Tensor out = torch::stable::empty_like(scores);
  args.out = out.mutable_data_ptr();
  const auto run = kernels(dtype_of(scores)).softmax_rows[args.csr.wide];
  parallel_rows(args.csr, 4 * args.heads,
                [&](int64_t begin, int64_t end) { run(args, Range{begin, end, 0, 0}); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyg_accel_cpu, CPU, m) {
  m.impl("dot", TORCH_BOX(&dot));
  m.impl("softmax", TORCH_BOX(&softmax));
}

}  // namespace pyg_accel
