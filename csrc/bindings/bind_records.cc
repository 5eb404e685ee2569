// Records of the ranks' last operations, for Python: from this process's communicators, and from
// the memory of other processes (`pycoll doctor`).
#include <fcntl.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/stat.h>

#include <memory>
#include <string>

#include "base/error.h"
#include "base/fd.h"
#include "bindings/bind.h"
#include "bindings/communicator_object.h"
#include "capi/handles.h"
#include "executor/wait/describe.h"
#include "reduce/dtypes.h"
#include "reduce/ops.h"
#include "schedule/collectives.h"
#include "transport/memory/mapping.h"
#include "transport/ring/segment.h"

namespace pycoll {
namespace py = pybind11;

namespace {

const char* failure_name(FailureCode code) {
  switch (code) {
    case FailureCode::kTimeout:
      return "timeout";
    case FailureCode::kPeerDied:
      return "peer died";
    case FailureCode::kPeerLeft:
      return "peer left";
    case FailureCode::kAborted:
      return "aborted";
    default:
      return "mismatch";
  }
}

py::object failure_of(const Segment& segment) {
  const uint64_t word = load_acquire(segment.failure_word());
  if (word == 0) return py::none();
  const Failure failure = Failure::unpack(word);
  py::dict result;
  result["kind"] = failure_name(failure.code);
  result["reporter"] = failure.reporter;
  result["culprit"] = failure.culprit;
  result["signal"] = failure.signal;
  const std::string message = describe_failed_message(segment, failure);
  result["message"] = message.empty() ? py::none() : py::object(py::cast(message));
  return result;
}

py::dict group_of(const Segment& segment) {
  const SegmentHeader& header = segment.header();
  py::dict result;
  const uint64_t name_size = load_acquire(header.name_size);
  result["name"] = std::string(header.name, std::min<size_t>(name_size, SegmentHeader::kMaxName));
  result["size"] = segment.num_ranks();
  result["failure"] = failure_of(segment);
  result["now_ns"] = now_ns();
  return result;
}

py::list ranks_of(const Segment& segment) {
  static constexpr const char* kStates[] = {"absent", "here", "left"};
  py::list result;
  for (int rank = 0; rank < segment.num_ranks(); ++rank) {
    const RankControl& control = segment.control(rank);
    py::dict row;
    row["rank"] = rank;
    row["state"] = kStates[load_acquire(control.state) % 3];
    row["sequence"] = load_acquire(control.sequence);
    row["message_number"] = load_acquire(control.message_number);
    row["pid"] = load_acquire(control.pid);
    row["thread_id"] = load_acquire(control.thread_id);
    row["stack_signal"] = load_acquire(control.stack_signal);
    row["stack_fd"] = load_acquire(control.stack_fd);
    result.append(row);
  }
  return result;
}

py::object name_or_none(const NameTable& names, uint16_t id) {
  const std::string_view text = names.read(id);
  if (text.empty()) return py::none();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

py::dict record_as_dict(const Segment& segment, int rank, const CallRecord& record,
                        const TickScale& scale) {
  const CollectiveInfo& row = info(static_cast<Collective>(record.collective));
  const bool has_counts = (record.flags & CallRecord::kHasCounts) != 0;
  py::tuple shape(record.num_dims);
  for (size_t i = 0; i < record.num_dims; ++i) shape[i] = record.shape[i];
  py::dict result;
  result["rank"] = rank;
  result["sequence"] = record.sequence;
  result["collective"] = row.name;
  result["dtype"] = dtype_name(static_cast<DType>(record.dtype));
  result["op"] =
      row.has_op ? py::object(py::cast(op_name(static_cast<Op>(record.op)))) : py::none();
  result["root"] = row.has_root ? py::object(py::cast(record.root)) : py::none();
  result["count"] = has_counts ? py::none() : py::object(py::cast(record.count));
  result["shape"] = shape;
  result["nbytes"] = has_counts ? py::none()
                                : py::object(py::cast(record.count * record.element_size *
                                                      row.blocks_per_payload(segment.num_ranks())));
  result["deterministic"] = (record.flags & CallRecord::kDeterministic) != 0;
  result["asked"] = name_or_none(segment.names(rank), record.asked);
  result["algorithm"] = name_or_none(segment.names(rank), record.chosen);
  result["site"] = name_or_none(segment.names(rank), record.site);
  result["digest"] = record.digest;
  result["entered_ns"] = scale.to_ns(record.entered);
  result["finished_ns"] = record.finished == 0
                              ? py::none()
                              : py::object(py::cast(scale.to_ns(record.finished_ticks())));
  result["failed"] = record.failed();
  return result;
}

py::dict message_as_dict(const Segment& segment, int rank, const MessageRecord& record,
                         const TickScale& scale) {
  const auto rank_or_none = [](int16_t other) {
    return other == MessageRecord::kNobody ? py::none() : py::object(py::cast(other));
  };
  const auto dtype = static_cast<DType>(record.dtype);
  py::dict result;
  result["rank"] = rank;
  result["number"] = record.number;
  result["kind"] = record.is_send() ? "send" : "recv";
  result["peer"] = rank_or_none(record.peer);
  result["source"] = record.is_send() ? py::none() : rank_or_none(record.source);
  result["tag"] = record.tag;
  result["dtype"] = dtype_name(dtype);
  result["nbytes"] = record.nbytes;
  result["count"] = dtype == DType::kOpaque ? record.nbytes : record.nbytes / dtype_size(dtype);
  result["blocking"] = (record.flags & MessageRecord::kBlocking) != 0;
  result["site"] = name_or_none(segment.names(rank), record.site);
  result["entered_ns"] = scale.to_ns(record.entered);
  result["finished_ns"] = record.finished == 0
                              ? py::none()
                              : py::object(py::cast(scale.to_ns(record.finished_ticks())));
  result["failed"] = record.failed();
  return result;
}

void check_rank(const Segment& segment, int rank) {
  if (rank >= 0 && rank < segment.num_ranks()) return;
  throw UsageError("there is no rank " + std::to_string(rank) + ": expected one of 0.." +
                   std::to_string(segment.num_ranks() - 1));
}

py::list messages_of(const Segment& segment, int rank, uint64_t at_most) {
  check_rank(segment, rank);
  const TickScale scale = segment.tick_scale();
  const uint64_t newest = load_acquire(segment.control(rank).message_number);
  const uint64_t num = std::min({newest, at_most, uint64_t{MessageRing::kNumRecords}});
  py::list result;
  for (uint64_t number = newest - num + 1; number <= newest; ++number) {
    MessageRecord record;
    if (segment.messages(rank).read(number, &record) && record.dtype <= kNumDTypes) {
      result.append(message_as_dict(segment, rank, record, scale));
    }
  }
  return result;
}

py::list records_of(const Segment& segment, int rank, uint64_t at_most) {
  check_rank(segment, rank);
  const TickScale scale = segment.tick_scale();
  const uint64_t newest = load_acquire(segment.control(rank).sequence);
  const uint64_t num = std::min({newest, at_most, uint64_t{RecordRing::kNumRecords}});
  py::list result;
  for (uint64_t sequence = newest - num + 1; sequence <= newest; ++sequence) {
    CallRecord record;
    if (segment.records(rank).read(sequence, &record) && record.collective < kNumCollectives) {
      result.append(record_as_dict(segment, rank, record, scale));
    }
  }
  return result;
}

/// Shared memory of another process, read through the path of its file.
class SegmentView {
 public:
  explicit SegmentView(const std::string& path) {
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw_system_error("open " + path);
    struct stat status = {};
    if (::fstat(file.get(), &status) != 0) throw_system_error("fstat " + path);
    const auto size = static_cast<size_t>(status.st_size);
    SegmentHeader header;
    if (size < sizeof(header) ||
        ::pread(file.get(), &header, sizeof(header), 0) != static_cast<ssize_t>(sizeof(header)) ||
        header.magic != SegmentHeader::kMagic) {
      throw UsageError(path + " is not the shared memory of an initialised pycoll communicator");
    }
    const auto num_ranks = static_cast<int>(header.num_ranks);
    const bool several_hosts = header.several_hosts != 0;
    if (header.version != SegmentHeader::kVersion || num_ranks < 1 || num_ranks > kMaxRanks ||
        header.total_bytes != SegmentLayout::for_ranks(num_ranks, several_hosts).total_bytes ||
        header.total_bytes > size) {
      throw UsageError(path + " belongs to another version of pycoll (layout " +
                       std::to_string(header.version) + ", this is " +
                       std::to_string(SegmentHeader::kVersion) + "): use that version's doctor");
    }
    mapping_ = std::make_unique<Mapping>(file.get(), header.total_bytes, PROT_READ);
    segment_ = std::make_unique<Segment>(mapping_->base(), num_ranks, several_hosts);
  }
  const Segment& segment() const { return *segment_; }

 private:
  std::unique_ptr<Mapping> mapping_;
  std::unique_ptr<Segment> segment_;
};

/// The records of a communicator that another library has opened through the C table. They are
/// readable until that library closes it.
class GroupRecords {
 public:
  /// `handle`: a capsule of a pycoll_comm, alive during this.
  GroupRecords(const py::capsule& handle, std::string description)
      : shared_(handle.get_pointer<pycoll_comm>()->shared), description_(std::move(description)) {}

  bool closed() const {
    const auto shared = shared_.lock();
    return shared == nullptr || shared->comm->closed();
  }
  std::shared_ptr<Communicator> comm() const {
    auto shared = shared_.lock();
    if (shared == nullptr) throw UsageError("this group of ranks is closed");
    return {shared, shared->comm.get()};
  }
  const std::string& description() const { return description_; }

 private:
  std::weak_ptr<SharedCommunicator> shared_;
  std::string description_;
};

/// A function that calls `function` on the thread where an operation failed, and prints what that
/// raises.
std::function<void()> under_gil(const py::object& function) {
  // A pointer whose last owner takes the GIL to release the function.
  std::shared_ptr<py::object> kept(new py::object(function), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [kept] {
    const py::gil_scoped_acquire gil;
    const py::error_scope kept_error;
    try {
      (*kept)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("pycoll's record of a failure");
    }
  };
}

/// The core's communicator of an object of either kind, kept alive during the call.
Communicator* core_of(const CommunicatorObject& o) { return &o.core(); }
std::shared_ptr<Communicator> core_of(const GroupRecords& o) { return o.comm(); }

template <class Object>
void def_records(py::class_<Object>& type) {
  type.def("_group", [](Object& o) { return group_of(core_of(o)->segment()); })
      .def("_ranks", [](Object& o) { return ranks_of(core_of(o)->segment()); })
      .def(
          "_records",
          [](Object& o, int rank, uint64_t at_most) {
            return records_of(core_of(o)->segment(), rank, at_most);
          },
          py::arg("rank"), py::arg("at_most") = RecordRing::kNumRecords)
      .def(
          "_messages",
          [](Object& o, int rank, uint64_t at_most) {
            return messages_of(core_of(o)->segment(), rank, at_most);
          },
          py::arg("rank"), py::arg("at_most") = MessageRing::kNumRecords)
      .def("_set_on_failure",
           [](Object& o, const py::object& function) {
             core_of(o)->recorder().set_on_failure(under_gil(function));
           })
      .def("_set_stack_writer", [](Object& o, uint64_t signal, uint64_t fd) {
        const auto core = core_of(o);
        RankControl& control = core->segment().control(core->rank());
        store_release(control.stack_fd, fd);
        store_release(control.stack_signal, signal);
      });
}

}  // namespace

void bind_records(py::module_& m, py::handle communicator_type) {
  py::class_<SegmentView>(m, "SegmentView")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("group", [](const SegmentView& view) { return group_of(view.segment()); })
      .def("ranks", [](const SegmentView& view) { return ranks_of(view.segment()); })
      .def(
          "records",
          [](const SegmentView& view, int rank, uint64_t at_most) {
            return records_of(view.segment(), rank, at_most);
          },
          py::arg("rank"), py::arg("at_most") = RecordRing::kNumRecords)
      .def(
          "messages",
          [](const SegmentView& view, int rank, uint64_t at_most) {
            return messages_of(view.segment(), rank, at_most);
          },
          py::arg("rank"), py::arg("at_most") = MessageRing::kNumRecords);

  auto type = py::reinterpret_borrow<py::class_<CommunicatorObject>>(communicator_type);
  def_records(type);
  py::class_<GroupRecords> group(m, "GroupRecords");
  group.def(py::init<const py::capsule&, std::string>(), py::arg("handle"), py::arg("description"))
      .def_property_readonly("description", &GroupRecords::description)
      .def_property_readonly("closed", &GroupRecords::closed)
      .def_property_readonly("rank", [](const GroupRecords& o) { return o.comm()->rank(); })
      .def_property_readonly("timeout_s",
                             [](const GroupRecords& o) { return o.comm()->timeout_s(); });
  def_records(group);
}

}  // namespace pycoll
