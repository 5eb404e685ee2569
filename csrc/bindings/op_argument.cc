#include "bindings/op_argument.h"

#include <string>

#include "base/error.h"
#include "bindings/arguments.h"
#include "reduce/cells.h"

namespace pycoll {
namespace py = pybind11;

Op op_from_name(std::string_view name) {
  if (const auto op = find_op(name)) return *op;
  throw UsageError("unknown op '" + std::string(name) + "': expected one of " + op_names());
}

OpArgument op_argument(PyObject* object) {
  const Op op = op_from_name(text_of(object, "op"));
  if (op != Op::kPremul) return {op, 1};
  if (PyUnicode_CheckExact(object) || !py::hasattr(object, "factor")) {
    throw UsageError("premul needs a factor: pass op=pycoll.premul(0.5)");
  }
  return {op, py::handle(object).attr("factor").cast<double>()};
}

}  // namespace pycoll
