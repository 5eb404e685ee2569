#include "transport/message_records.h"

namespace pycoll {

bool MessageRing::read(uint64_t number, MessageRecord* record) const {
  const uint64_t* from = at(number);
  uint64_t words[kNumWords];
  words[0] = load_acquire(from[0]);
  if (words[0] != number || number == 0) return false;
  for (size_t i = 1; i < kNumWords; ++i) words[i] = load_acquire(from[i]);
  if (load_acquire(from[0]) != number) return false;
  *record = {};
  std::memcpy(static_cast<void*>(record), words, sizeof(words));
  return true;
}

}  // namespace pycoll
