#include "transport/ring/records.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "transport/ring/record_limits.h"

namespace pycoll {
namespace {

// XOR of both halves of the product of two words. Independent calls run in parallel in the CPU.
uint64_t mix(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd1b54a32d192ed03ull);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint32_t fold(uint64_t hash) {
  const auto folded = static_cast<uint32_t>(hash ^ (hash >> 32));
  return folded == 0 ? 1 : folded;
}

}  // namespace

uint32_t CallRecord::compute_digest() const {
  const auto word = [](int64_t value) { return static_cast<uint64_t>(value); };
  const uint64_t what = uint64_t{collective} | uint64_t{dtype} << 8 | uint64_t{op} << 16 |
                        uint64_t{flags} << 24 | uint64_t{element_size} << 32;
  // Includes the requested and the chosen algorithm: ranks that run different algorithms would wait
  // for each other forever.
  uint64_t hash =
      mix(sequence, what) + mix(static_cast<uint32_t>(root) | uint64_t{counts_hash} << 32,
                                asked_hash | uint64_t{chosen_hash} << 32);
  if (dtype_hash != 0) hash += mix(dtype_hash, 2);
  if ((flags & kHasCounts) == 0) hash += mix(word(count), 1);
  if ((flags & (kHasCounts | kShapesMayDiffer)) == 0) {
    // Each product has different constants, so that equal words at other places do not cancel.
    hash += mix(word(shape[0]) + (uint64_t{num_dims} << 56), word(shape[1]) + (uint64_t{1} << 60)) +
            mix(word(shape[2]) + (uint64_t{2} << 60), word(shape[3]) + (uint64_t{3} << 60)) +
            mix(word(shape[4]) + (uint64_t{4} << 60), word(shape[5]) + (uint64_t{5} << 60));
  }
  return fold(mix(hash, hash >> 29));
}

bool is_valid(const CallRecord& record) {
  return record.sequence > 0 && record.sequence < kMaxRecordNumber &&
         record.collective < kNumRecordedCollectives && record.dtype < kNumRecordedDTypes &&
         record.op < kNumRecordedOps && record.num_dims <= std::size(record.shape);
}

uint32_t hash_text(std::string_view text) {
  if (text.empty()) return 0;
  uint64_t hash = 1469598103934665603ull;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211ull;
  return fold(hash);
}

uint32_t hash_counts(const int64_t* counts, int num_counts) {
  uint64_t hash = static_cast<uint64_t>(num_counts);
  for (int i = 0; i < num_counts; ++i) hash = mix(hash, static_cast<uint64_t>(counts[i]));
  return fold(hash);
}

void RecordRing::write(const CallRecord& record) const {
  uint64_t* to = at(record.sequence);
  uint64_t words[kNumWords];
  std::memcpy(words, &record, sizeof(record));
  // Word 0, the sequence number, is cleared first. A reader reads it before and after the record,
  // so it never accepts a half-written record.
  store_release(to[0], 0);
  for (size_t i = 1; i < kNumWords; ++i) store_release(to[i], words[i]);
  store_release(to[0], words[0]);
}

void RecordRing::rewrite_chosen(const CallRecord& record) const {
  constexpr size_t kWord = offsetof(CallRecord, chosen) / sizeof(uint64_t);
  uint64_t word;
  std::memcpy(&word, reinterpret_cast<const std::byte*>(&record) + kWord * sizeof(word),
              sizeof(word));
  store_release(at(record.sequence)[kWord], word);
}

bool RecordRing::read(uint64_t sequence, CallRecord* record) const {
  const uint64_t* from = at(sequence);
  uint64_t words[kNumWords];
  words[0] = load_acquire(from[0]);
  if (words[0] != sequence || sequence == 0) return false;
  for (size_t i = 1; i < kNumWords; ++i) words[i] = load_acquire(from[i]);
  if (load_acquire(from[0]) != sequence) return false;
  std::memcpy(record, words, sizeof(words));
  return true;
}

uint32_t RecordRing::read_digest(uint64_t sequence) const {
  constexpr size_t kWord = offsetof(CallRecord, digest) / sizeof(uint64_t);
  static_assert(offsetof(CallRecord, digest) % sizeof(uint64_t) == 0);
  const uint64_t* from = at(sequence);
  if (load_acquire(from[0]) != sequence) return 0;
  const uint64_t word = load_acquire(from[kWord]);
  if (load_acquire(from[0]) != sequence) return 0;
  uint32_t digest;
  std::memcpy(&digest, &word, sizeof(digest));
  return digest;
}

void NameTable::write(uint16_t id, std::string_view text) const {
  if (text.size() > kMaxText) {
    text.remove_prefix(text.size() - kMaxText);
    while (!text.empty() && (static_cast<uint8_t>(text.front()) & 0xc0) == 0x80)
      text.remove_prefix(1);  // UTF-8 tail
  }
  std::memcpy(at(id) + sizeof(uint64_t), text.data(), text.size());
  // The length is written last: pairs with read().
  store_release(*reinterpret_cast<uint64_t*>(at(id)), text.size());
}

std::string_view NameTable::read(uint16_t id) const {
  if (id == 0 || id >= kNumNames) return {};
  const uint64_t size = load_acquire(*reinterpret_cast<uint64_t*>(at(id)));
  return {reinterpret_cast<const char*>(at(id)) + sizeof(uint64_t),
          std::min<size_t>(size, kMaxText)};
}

}  // namespace pycoll
