// The argument op= of a reducing collective.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

#include "reduce/ops.h"

namespace pycoll {

/// Raises UsageError listing the known names.
Op op_from_name(std::string_view name);

struct OpArgument {
  Op op = Op::kSum;
  double factor = 1;  // of premul: what this rank's input is multiplied by
};

/// Reads the name of an op, or pycoll.premul(factor), which is a str with an attribute `factor`.
/// Raises UsageError for anything else.
OpArgument op_argument(PyObject* object);

}  // namespace pycoll
