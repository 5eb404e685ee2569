#include "torch/bridge/torch_store.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

namespace pycoll::torch_backend {
namespace {

using Clock = std::chrono::steady_clock;

/// Context of the core's store functions.
struct StoreContext {
  c10d::Store& store;
  std::string prefix;
  std::exception_ptr signal;  // error of a Python signal handler, raised in place of later errors
};

int fail(pycoll_error* error, int code, const std::string& text) {
  *error = make_error(code, text);
  return code;
}

/// Runs `body` and returns its exception as an error code: exceptions must not enter the core.
template <class Body>
int guarded(StoreContext& context, pycoll_error* error, Body&& body) {
  try {
    return body();
  } catch (const pybind11::error_already_set&) {
    context.signal = std::current_exception();
    return fail(error, PYCOLL_ABORTED_ERROR, "interrupted");
  } catch (const c10::Error& e) {
    return fail(error, PYCOLL_SYSTEM_ERROR,
                std::string("the store: ") + e.what_without_backtrace());
  } catch (const std::exception& e) {
    return fail(error, PYCOLL_SYSTEM_ERROR, std::string("the store: ") + e.what());
  }
}

int set(void* self, const char* key, const void* value, size_t nbytes, pycoll_error* error) {
  auto& context = *static_cast<StoreContext*>(self);
  return guarded(context, error, [&] {
    const auto* bytes = static_cast<const uint8_t*>(value);
    context.store.set(context.prefix + key, std::vector<uint8_t>(bytes, bytes + nbytes));
    return static_cast<int>(PYCOLL_OK);
  });
}

int get(void* self, const char* key, double timeout_s,
        void (*take)(void* taker, const void* value, size_t nbytes), void* taker,
        pycoll_error* error) {
  auto& context = *static_cast<StoreContext*>(self);
  return guarded(context, error, [&] {
    const std::string full = context.prefix + key;
    const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
    if (!wait_for_key(context.store, full, timeout)) {
      return fail(error, PYCOLL_TIMEOUT_ERROR, "no rank has set the key " + full);
    }
    const std::vector<uint8_t> value = context.store.get(full);
    take(taker, value.data(), value.size());
    return static_cast<int>(PYCOLL_OK);
  });
}

int add(void* self, const char* key, int64_t delta, int64_t* sum, pycoll_error* error) {
  auto& context = *static_cast<StoreContext*>(self);
  return guarded(context, error, [&] {
    *sum = context.store.add(context.prefix + key, delta);
    return static_cast<int>(PYCOLL_OK);
  });
}

int remove(void* self, const char* key, pycoll_error* error) {
  auto& context = *static_cast<StoreContext*>(self);
  return guarded(context, error, [&] {
    context.store.deleteKey(context.prefix + key);
    return static_cast<int>(PYCOLL_OK);
  });
}

}  // namespace

bool wait_for_key(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout) {
  // Polls, because c10d's own waits cannot be interrupted.
  const auto end = Clock::now() + timeout;
  auto pause = std::chrono::microseconds(200);
  while (!store.check({key})) {
    if (Clock::now() >= end) return false;
    raise_signals();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20'000));
  }
  return true;
}

pycoll_comm* open_comm(const StorePtr& store, int rank, int num_ranks,
                       std::chrono::milliseconds timeout) {
  // All ranks add to one count of openings: no rank opens the group again before all have opened
  // it.
  const int64_t opened = num_ranks == 1 ? 1 : store->add("pycoll/opened", 1);
  const int64_t generation = (opened - 1) / num_ranks;
  StoreContext context{*store, "pycoll/" + std::to_string(generation) + "/", nullptr};
  const pycoll_store keys{
      .context = &context, .set = set, .get = get, .add = add, .remove = remove};
  pycoll_comm* comm = nullptr;
  pycoll_error error;
  const double timeout_s = std::chrono::duration<double>(timeout).count();
  const int code = core().open(&keys, rank, num_ranks, timeout_s, &comm, &error);
  if (context.signal) std::rethrow_exception(context.signal);
  check(code, error);
  core().set_interrupted(comm, interrupted);
  return comm;
}

}  // namespace pycoll::torch_backend
