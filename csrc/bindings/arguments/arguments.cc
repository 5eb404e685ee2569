#include "bindings/arguments/arguments.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/printable.h"
#include "reduce/cells.h"

namespace pycoll {
namespace py = pybind11;

namespace {

// Names in the order of the enumerators of Arg.
constexpr std::string_view kArgNames[] = {
    "x",           "op",        "root",     "out",           "counts", "send_counts",
    "recv_counts", "algorithm", "async_op", "deterministic", "peer",   "tag",
};
static_assert(std::size(kArgNames) == kNumArgs);

// Larger than any memory, and small enough that sums of counts do not overflow.
constexpr int64_t kMaxRows = int64_t{1} << 48;

/// Index of `keyword` among the arguments, num_args when there is no such argument.
size_t find_keyword(const Signature& signature, PyObject* keyword) {
  if (!PyUnicode_IS_COMPACT_ASCII(keyword)) return signature.num_args;
  const std::string_view name(static_cast<const char*>(PyUnicode_DATA(keyword)),
                              static_cast<size_t>(PyUnicode_GET_LENGTH(keyword)));
  size_t i = 0;
  while (i < signature.num_args && kArgNames[static_cast<size_t>(signature.args[i])] != name) ++i;
  return i;
}

}  // namespace

std::string type_of(PyObject* object) { return printable(Py_TYPE(object)->tp_name, kShownBytes); }

std::string repr_of(PyObject* object) {
  const auto text = py::reinterpret_steal<py::object>(PyObject_ASCII(object));
  if (!text) {
    PyErr_Clear();
    return "a " + type_of(object);
  }
  const auto ascii = text.cast<std::string>();
  return printable(ascii, kShownBytes);
}

Arguments::Arguments(const Signature& signature, PyObject* const* args, Py_ssize_t num_args,
                     PyObject* keywords) {
  if (static_cast<size_t>(num_args) > signature.num_positional) {
    throw UsageError(std::string(signature.function) + " takes at most " +
                     std::to_string(signature.num_positional) + " positional arguments, got " +
                     std::to_string(num_args));
  }
  for (Py_ssize_t i = 0; i < num_args; ++i) {
    values_[static_cast<size_t>(signature.args[static_cast<size_t>(i)])] = args[i];
  }
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    PyObject* keyword = PyTuple_GET_ITEM(keywords, i);
    const size_t place = find_keyword(signature, keyword);
    if (place == signature.num_args) {
      throw UsageError(std::string(signature.function) + " has no argument '" +
                       std::string(text_of(keyword, "a keyword")) + "'");
    }
    const auto arg = static_cast<size_t>(signature.args[place]);
    if (values_[arg] != nullptr) {
      throw UsageError(std::string(signature.function) + " got its argument '" +
                       std::string(kArgNames[arg]) + "' twice");
    }
    values_[arg] = args[num_args + i];
  }
  for (PyObject*& value : values_) {
    if (value == Py_None) value = nullptr;
  }
}

std::string_view text_of(PyObject* object, const char* what) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    throw UsageError(std::string(what) + " is " +
                     (PyUnicode_Check(object) ? repr_of(object) + ", which UTF-8 cannot encode"
                                              : "a " + type_of(object)) +
                     ", expected a str");
  }
  constexpr Py_ssize_t kMaxBytes = 256;  // longer than any name, and short enough for a message
  if (size > kMaxBytes) {
    throw UsageError(std::string(what) + " is a str of " + std::to_string(size) +
                     " bytes, expected at most " + std::to_string(kMaxBytes));
  }
  return {text, static_cast<size_t>(size)};
}

bool truth_of(PyObject* object, const char* what) {
  const int truth = PyObject_IsTrue(object);
  if (truth >= 0) return truth == 1;
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 &&
      PyErr_ExceptionMatches(PyExc_ValueError) == 0) {
    throw py::error_already_set();
  }
  PyErr_Clear();  // such as an array of several elements, which has no truth
  throw UsageError(std::string(what) + " is " + repr_of(object) + ", expected True or False");
}

int rank_of(PyObject* object, const char* what, int num_ranks) {
  const Py_ssize_t value = PyNumber_AsSsize_t(object, nullptr);  // clips large values
  if (PyErr_Occurred() != nullptr || value < 0 || value >= num_ranks) {
    PyErr_Clear();
    throw UsageError(std::string(what) + " is " + repr_of(object) + ", expected a rank in 0.." +
                     std::to_string(num_ranks - 1));
  }
  return static_cast<int>(value);
}

std::vector<int64_t> counts_of(PyObject* object, const char* what, int num_ranks) {
  // A copy: reading an item may run code that changes a list.
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(object));
  if (!items) PyErr_Clear();
  if (!items || PyTuple_GET_SIZE(items.ptr()) != num_ranks) {
    throw UsageError(std::string(what) + " is " + repr_of(object) + ", expected a sequence of " +
                     std::to_string(num_ranks) + " counts, one for each rank");
  }
  std::vector<int64_t> counts(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), rank);
    const Py_ssize_t count = PyNumber_AsSsize_t(item, nullptr);  // clips large values
    if (PyErr_Occurred() != nullptr || count < 0 || count > kMaxRows) {
      PyErr_Clear();
      throw UsageError(std::string(what) + "[" + std::to_string(rank) + "] is " + repr_of(item) +
                       ", expected a number of rows, 0 or more");
    }
    counts[static_cast<size_t>(rank)] = count;
  }
  return counts;
}

void set_op(Call& call, PyObject* op) {
  const OpArgument argument = op_argument(op);
  call.op = argument.op;
  call.factor = argument.factor;
}

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
  const py::object factor = py::handle(object).attr("factor");
  const double value = PyFloat_AsDouble(factor.ptr());
  if (PyErr_Occurred() == nullptr) return {op, value};
  PyErr_Clear();
  throw UsageError("the factor of premul is " + repr_of(factor.ptr()) + ", expected a real number");
}

}  // namespace pycoll
