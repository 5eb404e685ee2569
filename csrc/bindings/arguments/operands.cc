#include "bindings/arguments/operands.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "base/error.h"
#include "bindings/arguments/new_array.h"
#include "schedule/collectives.h"

namespace pycoll {
namespace py = pybind11;

namespace {

using Counts = std::vector<int64_t>;

std::string name_of(const Invocation& in) { return std::string(info(in.call.collective).name); }

int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

Counts times(Counts counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

[[gnu::cold, gnu::noinline]] void describe_opaque(Invocation& in, const ArrayView& view) {
  in.call.dtype_hash = view.dtype_hash;
  in.call.dtype_text = in.object.comm->recorder().name_id(view.dtype_text());
}

inline void set_elements(Invocation& in, const ArrayView& view) {
  Call& call = in.call;
  call.dtype = view.dtype;
  if (view.dtype == DType::kOpaque) [[unlikely]]
    describe_opaque(in, view);
  call.element_size = view.element_size;
  call.device = view.device;
  call.stream = view.stream;
}

const ArrayView& view_x(Invocation& in, bool writable) {
  PyObject* x = in.args[Arg::kX];
  if (x == nullptr) throw UsageError(name_of(in) + " needs an array x");
  in.operands.x = ArrayView(x, "x", writable, Memory::kHostOrDevice);
  in.call.input = in.operands.x->data;
  set_elements(in, *in.operands.x);
  in.nbytes = in.operands.x->nbytes();
  return *in.operands.x;
}

/// Stores the axes of the shape from `first` on, for records and for the comparison with peers.
void set_shape(Call& call, const ArrayView& view, int first = 0) {
  call.num_dims = std::max(view.num_dims - first, 0);
  std::copy_n(view.shape + first, call.num_dims, call.shape);
}

void set_shape(Call& call, int64_t count) {
  call.num_dims = 1;
  call.shape[0] = count;
}

/// Number of rows of x, for a collective that cuts x along its first axis.
int64_t num_rows(const Invocation& in, const ArrayView& x) {
  if (x.num_dims == 0) {
    throw UsageError(name_of(in) +
                     " cuts x along its first axis: expected an array of 1 or more dimensions, "
                     "got a scalar");
  }
  return x.shape[0];
}

/// Elements of one row.
int64_t row_count(const ArrayView& x) {
  return std::accumulate(x.shape + std::min(x.num_dims, 1), x.shape + x.num_dims, int64_t{1},
                         std::multiplies<>());
}

/// Rows of one of `num_blocks` equal blocks of x.
int64_t block_rows(const Invocation& in, const ArrayView& x, const char* or_else) {
  const int64_t rows = num_rows(in, x);
  const int num_ranks = in.object.comm->size();
  if (rows % num_ranks != 0) {
    throw UsageError(name_of(in) + ": x has " + std::to_string(rows) +
                     " rows (its first axis), expected a multiple of the " +
                     std::to_string(num_ranks) + " ranks" + or_else);
  }
  return rows / num_ranks;
}

void check_sum(const Invocation& in, const Counts& counts, const char* what, int64_t rows) {
  if (sum(counts) == rows) return;
  throw UsageError(name_of(in) + ": " + what + " add up to " + std::to_string(sum(counts)) +
                   " rows, x has " + std::to_string(rows) + " (its first axis)");
}

[[noreturn]] void refuse_places(const ArrayView& x, const ArrayView& out) {
  const auto place = [](const ArrayView& view) {
    return view.device < 0 ? std::string("in CPU memory")
                           : "on device " + std::to_string(view.device);
  };
  throw UsageError("x is " + place(x) + ", out is " + place(out) + ": expected both in one place");
}

/// Array for the result: `out`, of any shape that has `count` elements, or a new array of `rows`
/// rows like x's.
const ArrayView& view_out(Invocation& in, int64_t count, int64_t rows) {
  PyObject* out = in.args[Arg::kOut];
  in.result =
      out != nullptr ? py::reinterpret_borrow<py::object>(out) : new_array(in.args[Arg::kX], rows);
  in.operands.out = ArrayView(in.result.ptr(), "out", true, Memory::kHostOrDevice);
  const ArrayView& view = *in.operands.out;
  if (view.device != in.call.device) [[unlikely]]
    refuse_places(*in.operands.x, view);
  if (view.count != count || !view.same_elements(*in.operands.x)) {
    throw UsageError("out has " + std::to_string(view.count) + " elements of " + view.dtype_text() +
                     ", expected " + std::to_string(count) + " of " + in.operands.x->dtype_text());
  }
  in.call.output = view.data;
  in.nbytes = std::max(in.nbytes, view.nbytes());
  return view;
}

/// Refuses an `out` that overlaps x: a step may write a part of `out` before it reads that part of
/// x.
void check_apart(const Invocation& in, const char* advice = "") {
  const ArrayView& x = *in.operands.x;
  const ArrayView& out = *in.operands.out;
  if (std::less<>()(bytes(x.data), bytes(out.data) + out.nbytes()) &&
      std::less<>()(bytes(out.data), bytes(x.data) + x.nbytes())) {
    throw UsageError("out overlaps x: pass a separate array" + std::string(advice));
  }
}

/// all_reduce, scan, exscan, reduce at its root: the result is like x, and may be x.
void like_x(Invocation& in) {
  PyObject* out = in.args[Arg::kOut];
  const bool in_place = out == nullptr || out == in.args[Arg::kX];
  const ArrayView& x = view_x(in, in_place);
  in.call.count = x.count;
  set_shape(in.call, x);
  if (in_place) {
    in.call.output = x.data;
    in.result = py::reinterpret_borrow<py::object>(in.args[Arg::kX]);
    return;
  }
  const ArrayView& output = view_out(in, x.count, 0);
  if (output.data != x.data) check_apart(in, ", or out=x");
}

void prefix(Invocation& in) {
  if (in.call.op == Op::kAvg) {
    throw UsageError(name_of(in) + " has no op avg: rank r would average " +
                     (in.call.collective == Collective::kScan ? "r+1" : "r") +
                     " values; use op='sum' and divide yourself");
  }
  like_x(in);
}

void in_place(Invocation& in) {
  const ArrayView& x = view_x(in, true);
  in.call.count = x.count;
  set_shape(in.call, x);
  in.call.output = x.data;
  in.result = py::reinterpret_borrow<py::object>(in.args[Arg::kX]);
}

void reduce(Invocation& in) {
  if (in.object.comm->rank() == in.call.root) return like_x(in);
  const ArrayView& x = view_x(in, false);
  in.call.count = x.count;
  set_shape(in.call, x);
}

void reduce_scatter(Invocation& in) {
  const ArrayView& x = view_x(in, false);
  const auto rank = static_cast<size_t>(in.object.comm->rank());
  set_shape(in.call, x);
  int64_t rows = 0;
  int64_t rows_before = 0;
  if (in.args[Arg::kCounts] != nullptr) {
    const Counts& counts = in.rows->counts;
    check_sum(in, counts, "counts", num_rows(in, x));
    rows = counts[rank];
    rows_before =
        std::accumulate(counts.begin(), counts.begin() + static_cast<int64_t>(rank), int64_t{0});
    in.operands.block_counts = times(counts, row_count(x));
    in.call.block_counts = in.operands.block_counts.data();
  } else {
    rows = block_rows(in, x, "; or pass counts=");
    rows_before = rows * static_cast<int64_t>(rank);
    in.call.count = rows * row_count(x);
  }
  const ArrayView& out = view_out(in, rows * row_count(x), rows);
  const auto offset = rows_before * row_count(x) * static_cast<int64_t>(x.element_size);
  if (out.data != bytes(x.data) + offset) check_apart(in, ", or this rank's block of x");
}

void all_gather(Invocation& in) {
  const ArrayView& x = view_x(in, false);
  const auto rank = static_cast<size_t>(in.object.comm->rank());
  const int num_ranks = in.object.comm->size();
  int64_t total_rows = 0;
  int64_t rows_before = 0;
  if (in.args[Arg::kCounts] != nullptr) {
    const Counts& counts = in.rows->counts;
    if (num_rows(in, x) != counts[rank]) {
      throw UsageError("all_gather: x has " + std::to_string(x.shape[0]) +
                       " rows (its first axis), counts[" + std::to_string(rank) +
                       "], of this rank, is " + std::to_string(counts[rank]));
    }
    total_rows = sum(counts);
    rows_before =
        std::accumulate(counts.begin(), counts.begin() + static_cast<int64_t>(rank), int64_t{0});
    in.operands.block_counts = times(counts, row_count(x));
    in.call.block_counts = in.operands.block_counts.data();
    set_shape(in.call, x);
    in.call.shape[0] = total_rows;  // each rank's number of rows may differ
  } else {
    const int64_t rows = x.num_dims == 0 ? 1 : x.shape[0];
    total_rows = rows * num_ranks;
    rows_before = rows * static_cast<int64_t>(rank);
    in.call.count = x.count;
    set_shape(in.call, x);
  }
  const ArrayView& out = view_out(in, total_rows * row_count(x), total_rows);
  const auto offset = rows_before * row_count(x) * static_cast<int64_t>(x.element_size);
  if (bytes(out.data) + offset != x.data) check_apart(in, ", or one whose block of this rank is x");
}

void gather(Invocation& in) {
  const ArrayView& x = view_x(in, false);
  in.call.count = x.count;
  set_shape(in.call, x);
  if (in.object.comm->rank() != in.call.root) return;
  const int num_ranks = in.object.comm->size();
  view_out(in, x.count * num_ranks, (x.num_dims == 0 ? 1 : x.shape[0]) * num_ranks);
  check_apart(in);
}

void scatter(Invocation& in) {
  const bool at_root = in.object.comm->rank() == in.call.root;
  if (at_root || in.args[Arg::kOut] == nullptr) {
    if (in.args[Arg::kX] == nullptr) {
      throw UsageError(at_root ? "scatter needs an array x at its root"
                               : "scatter needs an array: pass out, or an x with the root's shape "
                                 "and dtype");
    }
    const ArrayView& x = view_x(in, false);
    const int64_t rows = block_rows(in, x, "");
    in.call.count = rows * row_count(x);
    view_out(in, in.call.count, rows);
    if (at_root) check_apart(in);
    if (!at_root) in.call.input = nullptr;
  } else {
    in.result = py::reinterpret_borrow<py::object>(in.args[Arg::kOut]);
    const ArrayView& out =
        in.operands.out.emplace(in.result.ptr(), "out", true, Memory::kHostOrDevice);
    set_elements(in, out);
    in.call.count = out.count;
    in.call.output = out.data;
    in.nbytes = out.nbytes();
  }
  // Only the number of elements is equal in the root's x and the other ranks' out.
  set_shape(in.call, in.call.count);
}

/// Number of elements that each rank sends to this one: the ranks exchange their send counts.
Counts exchange_counts(CommunicatorObject& object, const Counts& send_counts) {
  Counts recv_counts(send_counts.size());
  Call call;
  call.collective = Collective::kAllToAll;
  call.input = send_counts.data();
  call.output = recv_counts.data();
  call.count = 1;
  call.dtype = DType::kI64;
  set_shape(call, object.comm->size());
  run_here(object, call, object.comm->size() * static_cast<int64_t>(sizeof(int64_t)));
  return recv_counts;
}

void all_to_all(Invocation& in) {
  const ArrayView& x = view_x(in, false);
  const bool has_recv_counts = in.args[Arg::kRecvCounts] != nullptr;
  if (in.args[Arg::kSendCounts] == nullptr) {
    if (has_recv_counts) throw UsageError("all_to_all: recv_counts requires send_counts");
    in.call.count = block_rows(in, x, "; or pass send_counts=") * row_count(x);
    set_shape(in.call, x);
    view_out(in, x.count, x.shape[0]);
    return check_apart(in);
  }
  check_sum(in, in.rows->send_counts, "send_counts", num_rows(in, x));
  const Counts recv_counts =
      has_recv_counts ? in.rows->recv_counts : exchange_counts(in.object, in.rows->send_counts);
  in.operands.send_counts = times(in.rows->send_counts, row_count(x));
  in.operands.recv_counts = times(recv_counts, row_count(x));
  in.call.send_counts = in.operands.send_counts.data();
  in.call.recv_counts = in.operands.recv_counts.data();
  set_shape(in.call, x, 1);  // the number of rows may differ between ranks
  view_out(in, sum(in.operands.recv_counts), sum(recv_counts));
  check_apart(in);
}

void neighbor_exchange(Invocation& in) {
  const ArrayView& x = view_x(in, false);
  if (num_rows(in, x) != 2) {
    throw UsageError("neighbor_exchange: x has " + std::to_string(x.shape[0]) +
                     " rows (its first axis), expected 2: for rank - 1, and for rank + 1");
  }
  in.call.count = x.count / 2;
  set_shape(in.call, x);
  view_out(in, x.count, 2);
  check_apart(in);
}

/// A barrier is an all_reduce of one byte whose value does not matter.
void barrier(Invocation& in) {
  in.call.input = in.call.output = &in.object.barrier_token;
  in.call.count = 1;
  in.call.dtype = DType::kU8;
  in.call.op = Op::kMax;
}

}  // namespace

void set_operands(Invocation& in) {
  switch (in.call.collective) {
    case Collective::kAllReduce:
      return like_x(in);
    case Collective::kScan:
    case Collective::kExscan:
      return prefix(in);
    case Collective::kBroadcast:
      return in_place(in);
    case Collective::kBarrier:
      return barrier(in);
    case Collective::kReduceScatter:
      return reduce_scatter(in);
    case Collective::kAllGather:
      return all_gather(in);
    case Collective::kReduce:
      return reduce(in);
    case Collective::kGather:
      return gather(in);
    case Collective::kScatter:
      return scatter(in);
    case Collective::kAllToAll:
      return all_to_all(in);
    case Collective::kNeighborExchange:
      return neighbor_exchange(in);
  }
}

}  // namespace pycoll
