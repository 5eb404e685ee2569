#include "executor/describe.h"

#include "reduce/dtypes.h"
#include "reduce/ops.h"
#include "schedule/collectives.h"

namespace pycoll {

std::string describe_operation(const CallRecord& record) {
  return std::string(info(static_cast<Collective>(record.collective)).name) + " #" +
         std::to_string(record.sequence);
}

std::string describe_call(const CallRecord& record) {
  const CollectiveInfo& row = info(static_cast<Collective>(record.collective));
  if (row.id == Collective::kBarrier) return "barrier()";
  std::string text = std::string(row.name) + "(shape (";
  for (int i = 0; i < record.num_dims; ++i) {
    text += std::to_string(record.shape[i]) +
            (record.num_dims == 1 || i + 1 < record.num_dims ? "," : "");
    if (i + 1 < record.num_dims) text += " ";
  }
  text += "), dtype " + std::string(dtype_name(static_cast<DType>(record.dtype)));
  if (row.has_op) text += ", op " + std::string(op_name(static_cast<Op>(record.op)));
  if (row.has_root) text += ", root " + std::to_string(record.root);
  if (record.algorithm[0] != 0) text += ", algorithm " + std::string(record.algorithm);
  return text + ")";
}

}  // namespace pycoll
