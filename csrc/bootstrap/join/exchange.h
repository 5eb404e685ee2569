// All-gather of small byte strings while ranks join, over any carrier.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bootstrap/join/store.h"

namespace pycoll {

/// Returns every rank's `own` bytes, by rank. Collective; each `topic` is used at most once.
using Exchange =
    std::function<std::vector<std::string>(const std::string& topic, const std::string& own)>;

/// An Exchange through a store.
class StoreExchange {
 public:
  StoreExchange(Store& store, int rank, int num_ranks, const Deadline& deadline)
      : store_(store), rank_(rank), num_ranks_(num_ranks), deadline_(deadline) {}

  std::vector<std::string> operator()(const std::string& topic, const std::string& own);
  /// After an error that all ranks raise: rank 0, whose process may serve the store, waits for a
  /// short time until the other ranks have read what they need for it.
  void settle_error();
  /// Removes its keys from the store, once no rank reads them any more.
  void forget();

 private:
  Store& store_;
  const int rank_;
  const int num_ranks_;
  const Deadline deadline_;
  std::vector<std::string> keys_;
};

}  // namespace pycoll
