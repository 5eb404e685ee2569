// The collectives for Python: a table with one row each, and one function that runs them all. They
// are plain C functions with keyword arguments (METH_FASTCALL): for four bytes, the dispatcher of
// pybind11 costs more than the message.
#include <pybind11/pybind11.h>

#include <array>
#include <type_traits>
#include <utility>
#include <variant>

#include "bindings/arguments/invocation.h"
#include "bindings/arguments/operands.h"
#include "bindings/bind.h"
#include "bindings/communicator_docs.h"
#include "schedule/collectives.h"

namespace pycoll {
namespace py = pybind11;

namespace {

struct Method {
  Collective collective;
  Signature signature;
  const char* doc;
};

using enum Arg;

// In the order of the enumerators of Collective. Tests compare the signatures here, in the
// docstrings and in _core.pyi.
constexpr Method kMethods[] = {
    {Collective::kAllReduce,
     {"all_reduce", {kX, kOp, kOut}, {kAlgorithm, kAsyncOp, kDeterministic}},
     kAllReduceDoc},
    {Collective::kBroadcast, {"broadcast", {kX, kRoot}, {kAlgorithm, kAsyncOp}}, kBroadcastDoc},
    {Collective::kBarrier, {"barrier", {}, {kAlgorithm, kAsyncOp}}, kBarrierDoc},
    {Collective::kReduceScatter,
     {"reduce_scatter", {kX, kOp, kOut}, {kCounts, kAlgorithm, kAsyncOp, kDeterministic}},
     kReduceScatterDoc},
    {Collective::kAllGather,
     {"all_gather", {kX, kOut}, {kCounts, kAlgorithm, kAsyncOp}},
     kAllGatherDoc},
    {Collective::kReduce,
     {"reduce", {kX, kRoot, kOp, kOut}, {kAlgorithm, kAsyncOp, kDeterministic}},
     kReduceDoc},
    {Collective::kGather, {"gather", {kX, kRoot, kOut}, {kAlgorithm, kAsyncOp}}, kGatherDoc},
    {Collective::kScatter, {"scatter", {kX, kRoot, kOut}, {kAlgorithm, kAsyncOp}}, kScatterDoc},
    {Collective::kAllToAll,
     {"all_to_all", {kX, kOut, kSendCounts, kRecvCounts}, {kAlgorithm, kAsyncOp}},
     kAllToAllDoc},
    {Collective::kScan,
     {"scan", {kX, kOp, kOut}, {kAlgorithm, kAsyncOp, kDeterministic}},
     kScanDoc},
    {Collective::kExscan,
     {"exscan", {kX, kOp, kOut}, {kAlgorithm, kAsyncOp, kDeterministic}},
     kExscanDoc},
    {Collective::kNeighborExchange,
     {"neighbor_exchange", {kX, kOut}, {kAlgorithm, kAsyncOp}},
     kNeighborExchangeDoc},
};
static_assert(std::size(kMethods) == kNumCollectives);

std::vector<int64_t> read_counts(const Invocation& in, Arg arg, const char* name) {
  PyObject* given = in.args[arg];
  if (given == nullptr) return {};
  return counts_of(given, name, in.object.comm->size());
}

template <size_t row>
PyObject* collective(PyObject* self, PyObject* const* args, Py_ssize_t num_args,
                     PyObject* keywords) {
  static constexpr const Method& kMethod = kMethods[row];
  return guarded([&]() -> PyObject* {
    const Arguments arguments(kMethod.signature, args, num_args, keywords);
    Invocation in{.self = self, .object = object_of(self), .args = arguments};
    in.call.collective = kMethod.collective;
    if (PyObject* op = arguments[kOp]) set_op(in.call, op);
    if (PyObject* root = arguments[kRoot]) {
      in.call.root = rank_of(root, "root", in.object.comm->size());
    }
    if (PyObject* name = arguments[kAlgorithm]) in.call.algorithm = text_of(name, "algorithm");
    if constexpr (kMethod.signature.takes(kDeterministic)) {
      PyObject* given = arguments[kDeterministic];
      in.call.deterministic =
          given != nullptr ? truth_of(given, "deterministic") : in.object.deterministic;
    }
    if (PyObject* async_op = arguments[kAsyncOp]) in.is_async = truth_of(async_op, "async_op");
    constexpr bool kTakesRows =
        kMethod.signature.takes(kCounts) || kMethod.signature.takes(kSendCounts);
    [[maybe_unused]] std::conditional_t<kTakesRows, RowCounts, std::monostate> rows;
    if constexpr (kTakesRows) in.rows = &rows;
    if constexpr (kMethod.signature.takes(kCounts)) {
      rows.counts = read_counts(in, kCounts, "counts");
    }
    if constexpr (kMethod.signature.takes(kSendCounts)) {
      rows.send_counts = read_counts(in, kSendCounts, "send_counts");
      rows.recv_counts = read_counts(in, kRecvCounts, "recv_counts");
    }
    set_operands(in);
    if constexpr (kMethod.signature.takes(kOp)) in.operands.x->check_reducible("x", in.call.op);
    return run_or_start(in);
  });
}

template <size_t... rows>
std::array<PyMethodDef, sizeof...(rows)> method_table(std::index_sequence<rows...>) {
  return {{{kMethods[rows].signature.function.data(),
            reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(collective<rows>)),
            METH_FASTCALL | METH_KEYWORDS, kMethods[rows].doc}...}};
}

}  // namespace

void bind_collectives(py::handle communicator_type) {
  // Python keeps pointers to the entries.
  static std::array<PyMethodDef, kNumCollectives> table =
      method_table(std::make_index_sequence<kNumCollectives>());
  for (PyMethodDef& method : table) {
    py::setattr(communicator_type, method.ml_name,
                py::reinterpret_steal<py::object>(PyDescr_NewMethod(
                    reinterpret_cast<PyTypeObject*>(communicator_type.ptr()), &method)));
  }
}

}  // namespace pycoll
