// The key-value store through which ranks join: small values, set once and read by many ranks.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"

namespace pycoll {

/// Calls on one Store are served one after the other, so each thread of a rank uses its own Store.
class Store {
 public:
  virtual ~Store() = default;

  /// Sets `key` to `value` (any bytes), and wakes the ranks that wait for the key.
  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Waits until some rank has set `key`. Raises TimeoutError, naming the key, at the deadline.
  virtual std::string get(const std::string& key, const Deadline& deadline) = 0;

  /// Adds `delta` to the decimal number at `key` (absent: 0) and returns the sum. A `delta` of 0
  /// reads without waiting. Raises UsageError when the value is not a number.
  virtual int64_t add(const std::string& key, int64_t delta) = 0;

  /// Removes a key that no rank reads any more. Does nothing in a store that ends with the session.
  virtual void remove(const std::string& /*key*/) {}
};

}  // namespace pycoll
