#include "bootstrap/join/exchange.h"

#include "base/ending.h"
#include "bootstrap/join/serialize.h"

namespace pycoll {

std::vector<std::string> StoreExchange::operator()(const std::string& topic,
                                                   const std::string& own) {
  const std::string key = "hosts/" + topic;
  std::vector<std::string> all;
  if (rank_ != 0) {
    store_.set(key + "/" + std::to_string(rank_), own);
    const std::string bytes = store_.get(key, deadline_);
    WireReader reader(bytes);
    for (int i = 0; i < num_ranks_; ++i) all.emplace_back(reader.text());
    return all;
  }
  WireWriter table;
  for (int i = 0; i < num_ranks_; ++i) {
    const std::string of_rank = key + "/" + std::to_string(i);
    all.push_back(i == 0 ? own : store_.get(of_rank, deadline_));
    if (i != 0) store_.remove(of_rank);
    table.text(all.back());
  }
  store_.set(key, table.bytes());
  keys_.push_back(key);
  return all;
}

void StoreExchange::settle_error() {
  const auto key = [](int rank) { return "hosts/error/" + std::to_string(rank); };
  const Deadline end = Deadline::after_s(kLastWordSeconds);
  try {
    if (rank_ != 0) store_.set(key(rank_), "");
    for (int peer = 1; rank_ == 0 && peer < num_ranks_; ++peer) {
      store_.get(key(peer), end);
      store_.remove(key(peer));
    }
  } catch (const Error&) {
    // Another rank has ended: the error of this one says more.
  }
  if (rank_ == 0) forget();
}

void StoreExchange::forget() {
  for (const std::string& key : keys_) store_.remove(key);
  keys_.clear();
}

}  // namespace pycoll
