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
    const auto ago = static_cast<uint64_t>(std::clamp(ticks, 0.0, 0x1p62));
    return now.ticks - std::min(ago, now.ticks - 1);
  }
  TickScale scale;
  TickMoment now;
};

void write_names(const Segment& segment, int rank, const std::set<uint16_t>& ids, WireWriter& to) {
  to.number(static_cast<uint32_t>(ids.size()));
  for (const uint16_t id : ids) to.number(id).text(segment.names(rank).read(id));
}

/// Length of the UTF-8 character at the start of the text; 0: it is none, or a control character.
size_t printable_bytes(std::string_view text) {
  const auto at = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  if (at(0) < 0x80) return at(0) >= 0x20 && at(0) != 0x7f;
  const size_t size = at(0) >= 0xf0 ? 4 : at(0) >= 0xe0 ? 3 : 2;
  if (at(0) < 0xc2 || at(0) > 0xf4 || text.size() < size) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned first_two = at(0) << 8 | at(1);
  const bool is_control = first_two < 0xc2a0;
  const bool is_overlong = (at(0) == 0xe0 && at(1) < 0xa0) || (at(0) == 0xf0 && at(1) < 0x90);
  const bool is_surrogate = at(0) == 0xed && at(1) >= 0xa0;
  const bool is_too_large = at(0) == 0xf4 && at(1) >= 0x90;
  return is_control || is_overlong || is_surrogate || is_too_large ? 0 : size;
}

/// The text with `?` in place of all that is no character, or that a terminal would obey.
std::string printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t size = printable_bytes(text);
    result += size == 0 ? "?" : text.substr(0, size);
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return result;
}

struct Name {
  uint16_t id;
  std::string_view text;
};

std::vector<Name> read_names(WireReader& from) {
  const auto count = from.number<uint32_t>();
  if (count > kMaxNames) throw MalformedMessage();
  std::vector<Name> names;
  for (uint32_t i = 0; i < count; ++i) {
    const auto id = from.number<uint16_t>();
    if (id >= NameTable::kNumNames) throw MalformedMessage();
    names.push_back({id, from.text()});
  }
  return names;
}

void keep_names(const Segment& segment, int rank, const std::vector<Name>& names) {
  for (const Name& name : names) {
    if (name.id != 0) segment.names(rank).write(name.id, printable(name.text));
  }
}

int64_t read_age(WireReader& from) {
  constexpr int64_t kLongest = int64_t{1} << 60;
  return std::clamp(from.number<int64_t>(), -kLongest, kLongest);
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
  const int64_t looked_age_ns = read_age(from);
  if (waits_for > static_cast<uint64_t>(segment.num_ranks()) || newest >= kMaxRecordNumber) {
    throw MalformedMessage();
  }
  const std::vector<Name> names = read_names(from);
  const Clock clock(segment);
  const auto count = from.number<uint32_t>();
  if (count > kMaxRecords) throw MalformedMessage();
  std::vector<CallRecord> records;
  for (uint32_t i = 0; i < count; ++i) {
    auto record = from_raw<CallRecord>(from);
    if (!is_valid(record)) throw MalformedMessage();
    const int64_t entered_ns = read_age(from);
    const int64_t finished_ns = read_age(from);
    const bool failed = record.failed();
    record.entered = clock.ticks_at(entered_ns);
    if (record.finished != 0) {
      record.finished = clock.ticks_at(finished_ns) | (failed ? CallRecord::kFailed : 0);
    }
    records.push_back(record);
  }
  // Nothing is written before everything has been checked.
  if (mirrors) {
    keep_names(segment, rank, names);
    for (const CallRecord& record : records) {
      // Skip a record without news: it is unreadable while it is written.
      CallRecord known;
      if (!(segment.records(rank).read(record.sequence, &known) && known.digest == record.digest &&
            (known.finished == 0) == (record.finished == 0))) {
        segment.records(rank).write(record);
      }
    }
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
  if (failure.reporter >= num_ranks || failure.culprit >= num_ranks ||
      failure.code == FailureCode::kNone || failure.code > kLastFailureCode) {
    throw MalformedMessage();
  }
  const auto ignore = [](int, const CallRecord&) {};
  read_state(segment, reader, is_mirror, ignore);
  read_state(segment, reader, is_mirror, ignore);
  const auto mismatch = from_raw<MessageMismatch>(reader);
  auto message = from_raw<MessageRecord>(reader);
  const std::vector<Name> names = read_names(reader);
  reader.expect_end();
  if (!is_valid(mismatch, segment.num_ranks()) || !is_valid(message, segment.num_ranks())) {
    throw MalformedMessage();
  }
  if (!is_mirror(failure.reporter)) return failure;
  keep_names(segment, failure.reporter, names);
  segment.message_mismatch(failure.reporter) = mismatch;
  if (message.number != 0) {
    segment.messages(failure.reporter).write(message);
    store_release(segment.control(failure.reporter).message_number, message.number);
  }
  return failure;
}

}  // namespace pycoll
