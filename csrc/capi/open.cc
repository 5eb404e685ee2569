#include "capi/open.h"

#include <algorithm>
#include <string>

#include "base/environment.h"
#include "base/error.h"
#include "bootstrap/join/rendezvous.h"
#include "bootstrap/security/tls_setting.h"
#include "bootstrap/security/token.h"
#include "capi/guard.h"
#include "join/init.h"

namespace pycoll {
namespace {

class ForeignStore : public Store {
 public:
  explicit ForeignStore(const pycoll_store& store) : store_(store) {}

  void set(const std::string& key, const std::string& value) override {
    pycoll_error error;
    check(store_.set(store_.context, key.c_str(), value.data(), value.size(), &error), error);
  }

  std::string get(const std::string& key, const Deadline& deadline) override {
    pycoll_error error;
    std::string value;
    const auto take = [](void* taker, const void* data, size_t nbytes) {
      static_cast<std::string*>(taker)->assign(static_cast<const char*>(data), nbytes);
    };
    const double left_s = std::max(0.0, static_cast<double>(deadline.remaining_ns()) * 1e-9);
    check(store_.get(store_.context, key.c_str(), left_s, take, &value, &error), error);
    return value;
  }

  int64_t add(const std::string& key, int64_t delta) override {
    pycoll_error error;
    int64_t sum = 0;
    check(store_.add(store_.context, key.c_str(), delta, &sum, &error), error);
    return sum;
  }

  void remove(const std::string& key) override {
    pycoll_error error;
    store_.remove(store_.context, key.c_str(), &error);  // a failure is harmless: the key stays
  }

 private:
  static void check(int code, const pycoll_error& error) {
    if (code != PYCOLL_OK) raise_described(error);
  }

  pycoll_store store_;
};

}  // namespace

std::unique_ptr<Communicator> open_through(const pycoll_store& store, int rank, int num_ranks,
                                           double timeout_s) {
  check_environment();
  const Deadline deadline = Deadline::after_s(timeout_s);
  check_num_ranks(num_ranks);
  if (num_ranks == 1) {
    return std::make_unique<Communicator>(make_local_transport(make_world(1), 0), timeout_s);
  }
  ForeignStore keys(store);
  LaunchEnv who;
  who.rank = rank;
  who.num_ranks = num_ranks;
  // Stored before the ranks meet, so that no rank waits for it.
  if (rank == 0) keys.set("token", random_hex());
  const std::string name = meet(keys, who, deadline);
  // That store is neither private nor authenticated: only ranks that the kernel or PYCOLL_TOKEN
  // vouches for may use the token that it carries.
  const Token own = read_token("");
  const std::string sent = keys.get("token", deadline);
  const Token token = {own.trust == Trust::kSecret ? seal_token(own.text, sent) : sent, own.trust};
  auto transport =
      connect_through(keys, rank, num_ranks, name, token, deadline, was_started_by_mpiexec());
  // Rank 0 gets here once all other ranks have read the store for the last time.
  if (rank == 0) {
    forget_meeting(keys, num_ranks);
    keys.remove("token");
  }
  return std::make_unique<Communicator>(std::move(transport), timeout_s);
}

}  // namespace pycoll
