#include "transport/proxy/state_snapshot.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "base/ticks.h"

namespace pycoll {
namespace {

constexpr size_t kMaxRecords = 8;
constexpr size_t kMaxNames = 64;

template <class Record>
std::string_view raw(const Record& record) {
  return {reinterpret_cast<const char*>(&record), sizeof(record)};
}

template <class Record>
Record from_raw(WireReader& reader) {
  const std::string_view bytes = reader.text();
  Record record;
  if (bytes.size() != sizeof(record)) throw MalformedMessage();
  std::memcpy(&record, bytes.data(), sizeof(record));
  return record;
}

/// Converts moments to ages and back, because hosts have different clocks.
struct Clock {
  explicit Clock(const Segment& segment)
      : scale(segment.tick_scale()), now(TickMoment::now(has_steady_counter())) {}
  int64_t age_of(uint64_t ticks) const { return ticks == 0 ? 0 : now.ns - scale.to_ns(ticks); }
  uint64_t ticks_at(int64_t age_ns) const {
    constexpr uint64_t kMany = 1'000'000'000;
    const auto many_ns =
        static_cast<double>(scale.to_ns(now.ticks) - scale.to_ns(now.ticks - kMany));
    if (many_ns <= 0) return now.ticks;
    const double ticks = static_cast<double>(age_ns) * (static_cast<double>(kMany) / many_ns);
    return std::max<uint64_t>(1, now.ticks - static_cast<uint64_t>(std::max(ticks, 0.0)));
  }
  TickScale scale;
  TickMoment now;
};

void write_names(const Segment& segment, int rank, const std::set<uint16_t>& ids, WireWriter& to) {
  to.number(static_cast<uint32_t>(ids.size()));
  for (const uint16_t id : ids) to.number(id).text(segment.names(rank).read(id));
}

void read_names(const Segment& segment, int rank, bool mirrors, WireReader& from) {
  const auto count = from.number<uint32_t>();
  if (count > kMaxNames) throw MalformedMessage();
  for (uint32_t i = 0; i < count; ++i) {
    const auto id = from.number<uint16_t>();
    const std::string_view text = from.text();
    if (id >= NameTable::kNumNames) throw MalformedMessage();
    if (mirrors && id != 0) segment.names(rank).write(id, text);
  }
}

int read_rank(const Segment& segment, WireReader& from) {
  const int rank = from.number<int32_t>();
  if (rank < 0 || rank >= segment.num_ranks()) throw MalformedMessage();
  return rank;
}

/// The first recorded operation in which the two ranks differ; 0: none.
uint64_t first_difference(const Segment& segment, int one, int other) {
  const uint64_t newest = std::min(load_acquire(segment.control(one).sequence),
                                   load_acquire(segment.control(other).sequence));
  const uint64_t oldest =
      newest < RecordRing::kNumRecords ? 1 : newest - RecordRing::kNumRecords + 1;
  for (uint64_t sequence = oldest; sequence <= newest; ++sequence) {
    const uint32_t of_one = segment.records(one).read_digest(sequence);
    const uint32_t of_other = segment.records(other).read_digest(sequence);
    if (of_one != 0 && of_other != 0 && of_one != of_other) return sequence;
  }
  return 0;
}

/// The reporter's message during which the failure occurred. Number 0: none.
MessageRecord failed_message(const Segment& segment, const Failure& failure) {
  MessageRecord record;
  const uint64_t newest = load_acquire(segment.control(failure.reporter).message_number);
  for (uint64_t number = newest; failure.message != 0 && number > 0; --number) {
    if (number + MessageRing::kNumRecords <= newest) break;
    if (Failure::mark_of(number) == failure.message &&
        segment.messages(failure.reporter).read(number, &record)) {
      return record;
    }
  }
  return {};
}

}  // namespace

void write_state(const Segment& segment, int rank, std::span<const uint64_t> sequences,
                 WireWriter& to) {
  const RankControl& control = segment.control(rank);
  const Clock clock(segment);
  const uint64_t newest = load_acquire(control.sequence);
  to.number(static_cast<int32_t>(rank)).number(newest).number(load_relaxed(control.waits_for));
  to.number(
      static_cast<int64_t>(clock.now.ns - static_cast<int64_t>(load_relaxed(control.looked_ns))));
  std::set<uint64_t> wanted(sequences.begin(), sequences.end());
  wanted.insert(newest);
  std::vector<CallRecord> records;
  std::set<uint16_t> names;
  for (const uint64_t sequence : wanted) {
    CallRecord record;
    if (records.size() < kMaxRecords && segment.records(rank).read(sequence, &record)) {
      records.push_back(record);
      names.insert({record.site, record.asked, record.chosen});
    }
  }
  write_names(segment, rank, names, to);
  to.number(static_cast<uint32_t>(records.size()));
  for (const CallRecord& record : records) {
    to.text(raw(record)).number(clock.age_of(record.entered));
    to.number(clock.age_of(record.finished_ticks()));
  }
}

void read_state(const Segment& segment, WireReader& from, const std::function<bool(int)>& is_mirror,
                const std::function<void(int rank, const CallRecord& record)>& on_record) {
  const int rank = read_rank(segment, from);
  const bool mirrors = is_mirror(rank);
  RankControl& control = segment.control(rank);
  const auto newest = from.number<uint64_t>();
  const auto waits_for = from.number<uint64_t>();
  const auto looked_age_ns = from.number<int64_t>();
  if (waits_for > static_cast<uint64_t>(segment.num_ranks())) throw MalformedMessage();
  read_names(segment, rank, mirrors, from);
  const Clock clock(segment);
  const auto count = from.number<uint32_t>();
  if (count > kMaxRecords) throw MalformedMessage();
  std::vector<CallRecord> records;
  for (uint32_t i = 0; i < count; ++i) {
    auto record = from_raw<CallRecord>(from);
    const auto entered_ns = from.number<int64_t>();
    const auto finished_ns = from.number<int64_t>();
    const bool failed = record.failed();
    record.entered = clock.ticks_at(entered_ns);
    if (record.finished != 0) {
      record.finished = clock.ticks_at(finished_ns) | (failed ? CallRecord::kFailed : 0);
    }
    records.push_back(record);
    // Skip a record without news: it is unreadable while it is written.
    CallRecord known;
    if (mirrors &&
        !(segment.records(rank).read(record.sequence, &known) && known.digest == record.digest &&
          (known.finished == 0) == (record.finished == 0))) {
      segment.records(rank).write(record);
    }
  }
  if (mirrors) {
    if (newest > load_acquire(control.sequence)) store_release(control.sequence, newest);
    store_relaxed(control.looked_ns, static_cast<uint64_t>(clock.now.ns - looked_age_ns));
    store_relaxed(control.waits_for, waits_for);
  }
  for (const CallRecord& record : records) on_record(rank, record);
}

std::string failure_to_bytes(const Segment& segment) {
  const uint64_t word = load_acquire(segment.failure_word());
  const Failure failure = Failure::unpack(word);
  WireWriter bytes;
  bytes.number(word);
  const uint64_t difference = failure.code == FailureCode::kMismatch
                                  ? first_difference(segment, failure.reporter, failure.culprit)
                                  : 0;
  write_state(segment, failure.reporter, {&difference, 1}, bytes);
  write_state(segment, failure.culprit, {&difference, 1}, bytes);
  bytes.text(raw(segment.message_mismatch(failure.reporter)));
  const MessageRecord message = failed_message(segment, failure);
  bytes.text(raw(message));
  const uint16_t reason = failure.code == FailureCode::kRevoked ? failure.message : uint16_t{0};
  write_names(segment, failure.reporter, {message.site, reason}, bytes);
  return bytes.bytes();
}

Failure failure_from_bytes(const Segment& segment, std::string_view bytes,
                           const std::function<bool(int)>& is_mirror) {
  WireReader reader(bytes);
  const Failure failure = Failure::unpack(reader.number<uint64_t>());
  const auto num_ranks = static_cast<unsigned>(segment.num_ranks());
  if (failure.reporter >= num_ranks || failure.culprit >= num_ranks) throw MalformedMessage();
  const auto ignore = [](int, const CallRecord&) {};
  read_state(segment, reader, is_mirror, ignore);
  read_state(segment, reader, is_mirror, ignore);
  const auto mismatch = from_raw<MessageMismatch>(reader);
  auto message = from_raw<MessageRecord>(reader);
  const bool mirrors = is_mirror(failure.reporter);
  read_names(segment, failure.reporter, mirrors, reader);
  reader.expect_end();
  if (!mirrors) return failure;
  segment.message_mismatch(failure.reporter) = mismatch;
  if (message.number != 0) {
    segment.messages(failure.reporter).write(message);
    store_release(segment.control(failure.reporter).message_number, message.number);
  }
  return failure;
}

}  // namespace pycoll
