// The arguments of the methods that are plain C functions (METH_FASTCALL): from Python's array of
// positional and keyword values into named places, and from there into C++ values.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace pycoll {

/// Every argument that some method takes.
enum class Arg : uint8_t {
  kX,
  kOp,
  kRoot,
  kOut,
  kCounts,
  kSendCounts,
  kRecvCounts,
  kAlgorithm,
  kAsyncOp,
  kDeterministic,
  kPeer,
  kTag,
};
inline constexpr size_t kNumArgs = 12;

/// Name and arguments of a method; the positional arguments come first.
struct Signature {
  constexpr Signature(std::string_view function_in, std::initializer_list<Arg> positional,
                      std::initializer_list<Arg> by_keyword)
      : function(function_in), num_positional(positional.size()) {
    for (const Arg arg : positional) args[num_args++] = arg;
    for (const Arg arg : by_keyword) args[num_args++] = arg;
  }

  constexpr bool takes(Arg arg) const {
    for (size_t i = 0; i < num_args; ++i) {
      if (args[i] == arg) return true;
    }
    return false;
  }

  std::string_view function;
  size_t num_positional;
  size_t num_args = 0;
  std::array<Arg, kNumArgs> args{};
};

/// The borrowed values of one call; null where an argument is missing or None.
class Arguments {
 public:
  /// Raises UsageError for an argument that is not in the signature.
  Arguments(const Signature& signature, PyObject* const* args, Py_ssize_t num_args,
            PyObject* keywords);

  PyObject* operator[](Arg arg) const { return values_[static_cast<size_t>(arg)]; }

 private:
  std::array<PyObject*, kNumArgs> values_{};
};

/// Name of the type, shortened, for error messages.
std::string type_of(PyObject* object);

/// repr() in ASCII, shortened, for error messages.
std::string repr_of(PyObject* object);

// All of these raise UsageError, which names `what`, for an invalid value.

std::string_view text_of(PyObject* object, const char* what);
bool truth_of(PyObject* object, const char* what);
/// A rank of a world of `num_ranks`.
int rank_of(PyObject* object, const char* what, int num_ranks);
/// A sequence of one count for each rank.
std::vector<int64_t> counts_of(PyObject* object, const char* what, int num_ranks);
void set_op(Call& call, PyObject* op);

/// Raises UsageError listing the known names.
Op op_from_name(std::string_view name);

struct OpArgument {
  Op op = Op::kSum;
  double factor = 1;  // of premul: multiplies this rank's input
};

/// Reads the name of an op, or pycoll.premul(factor), which is a str with an attribute `factor`.
/// Raises UsageError for anything else.
OpArgument op_argument(PyObject* object);

}  // namespace pycoll
