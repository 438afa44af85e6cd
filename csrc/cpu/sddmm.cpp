// SDDMM with a dot product, and the softmax over the entries of each row.
#include "sddmm.h"

#include "plan_code.h"
#include "schedule.h"

namespace pyg_accel {

Tensor dot(const Csr& csr, int64_t heads, const Tensor& a, const Tensor& b) {
  const FeatureRows target(a), source(b);
  const DType dtype = dtype_of(source.tensor);
  STD_TORCH_CHECK(target.rows == csr.num_rows && source.rows == csr.num_cols &&
                      target.columns == source.columns && heads > 0 &&
                      source.columns % heads == 0 && dtype_of(target.tensor) == dtype &&
                      target.tensor.is_cpu() && source.tensor.is_cpu(),
                  "expected targets and sources of one dtype, [num_rows, H, F] and "
                  "[num_cols, H, F]");
  DotArgs args{};
  args.csr = csr;
  args.heads = heads;
  args.width = source.columns / heads;
  args.target = target.tensor.const_data_ptr();
  args.target_stride = target.stride;
  args.source = source.tensor.const_data_ptr();
  args.source_stride = source.stride;
  if (args.width == 0)
    return torch::stable::new_zeros(b, {csr.num_entries, heads});
  Tensor out = new_result(b, {csr.num_entries, heads});
  args.out = out.mutable_data_ptr();

  const Kernels& table = kernels(dtype);
  // One pass over the whole width: with blocks of columns, every score would be written several
  // times, and parts of rows of X touch as many pages as whole rows.
  parallel_rows(args.csr, args.heads * args.width, [&](int64_t begin, int64_t end) {
    table.dot_rows[args.csr.wide](args, Range{begin, end, 0, args.width});
  });
  for (const int64_t row : find_hubs(args.csr))
    parallel_pieces(args.csr, row, [&](const Piece& piece, int64_t) {
      table.dot_piece[args.csr.wide](args, piece);
    });
  return out;
}

namespace {

Tensor softmax(const Tensor& rowptr,
               const std::optional<Tensor>& eid,
               const Tensor& scores,
               const std::optional<Tensor>& grad) {
  STD_TORCH_CHECK(scores.is_cpu() && scores.is_contiguous() && scores.dim() == 2,
                  "expected 'scores' to be contiguous [E, H]");
  SoftmaxArgs args{};
  // The kernel does not read columns: rowptr is passed for them.
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
  m.impl("softmax", TORCH_BOX(&softmax));
}

}  // namespace pyg_accel
