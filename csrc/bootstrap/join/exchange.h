// How ranks tell each other what they are: all of them at once, whatever carries it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "bootstrap/join/store.h"

namespace pycoll {

/// Every rank's `own` bytes, by rank. Collective; a `topic` is used once.
using Exchange =
    std::function<std::vector<std::string>(const std::string& topic, const std::string& own)>;

/// One through a store.
class StoreExchange {
 public:
  StoreExchange(Store& store, int rank, int num_ranks, const Deadline& deadline)
      : store_(store), rank_(rank), num_ranks_(num_ranks), deadline_(deadline) {}

  std::vector<std::string> operator()(const std::string& topic, const std::string& own);
  /// Removes what it has put there, once no rank looks at it any more.
  void forget();

 private:
  Store& store_;
  const int rank_;
  const int num_ranks_;
  const Deadline deadline_;
  std::vector<std::string> keys_;
};

}  // namespace pycoll
