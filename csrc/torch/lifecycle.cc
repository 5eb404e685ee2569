// Lifecycle of a process group: creation, split, monitored barrier and shutdown.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>

#include "torch/backend.h"

namespace pycoll::torch_backend {

namespace py = pybind11;

namespace {

// Longest wait of a destroyed group for operations that may never end.
constexpr std::chrono::milliseconds kPatience(5000);

}  // namespace

PycollBackend::PycollBackend(StorePtr store, int rank, int num_ranks,
                             c10::intrusive_ptr<BackendOptions> options)
    : Backend(rank, num_ranks),
      store_(std::move(store)),
      options_(std::move(options)),
      comm_(open_comm(store_, rank, num_ranks, options_->timeout)),
      pid_(::getpid()) {
  init();
}

PycollBackend::~PycollBackend() {
  // The caller may hold the GIL, which an operation that ends may need to release a tensor.
  const bool has_gil = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
  std::optional<py::gil_scoped_release> release;
  if (has_gil) release.emplace();
  // A rank that ends after an error must not wait for peers that will not answer.
  if (pid_ != ::getpid()) {
    (void)starter_.release();  // its thread exists only in the parent
  } else if (!pending_->is_telling()) {
    pending_->wait(Pending::kCollective, kPatience);
    pending_->wait(Pending::kMessage, kPatience);
  }
  close();
}

void PycollBackend::shutdown() {
  TORCH_CHECK(!pending_->is_telling(),
              "pycoll: a process group cannot be destroyed in a callback of its own operation, "
              "because it waits for that operation: destroy it after work.wait()");
  // A running collective ends by its deadline at the latest. A message without a matching send or
  // receive was most likely forgotten.
  if (pid_ == ::getpid()) {
    pending_->wait(Pending::kCollective);
    pending_->wait(Pending::kMessage, kPatience);
  }
  close();
}

void PycollBackend::close() {
  allocator_->close();
  core().close(comm_.get());
}

void PycollBackend::waitForPendingWorks() {
  pending_->wait(Pending::kCollective);
  pending_->wait(Pending::kMessage);
}

void PycollBackend::abort() { core().abort(comm_.get()); }

void PycollBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  core().set_timeout_s(comm_.get(), std::chrono::duration<double>(timeout).count());
}

c10d::ErrorType PycollBackend::getError() {
  switch (core().health(comm_.get())) {
    case PYCOLL_OK:
      return c10d::ErrorType::SUCCESS;
    case PYCOLL_TIMEOUT_ERROR:
      return c10d::ErrorType::TIMEOUT;
    case PYCOLL_PEER_DIED_ERROR:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

c10::intrusive_ptr<c10d::Backend> PycollBackend::split(
    const StorePtr& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return nullptr;  // not a member: nothing to do
  return merge(store, opts, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> PycollBackend::merge(
    const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
    const int& size) {
  auto options = c10::make_intrusive<BackendOptions>(*options_);
  if (opts) {
    options->timeout = opts->timeout;
    if (const auto* own = dynamic_cast<const BackendOptions*>(opts.get())) {
      options->deterministic = own->deterministic;
      options->register_after = own->register_after;
    }
  }
  return c10::make_intrusive<PycollBackend>(store, rank, size, std::move(options));
}

void PycollBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(!onCompletionHook_, "pycoll: this process group has an onCompletion hook already");
  onCompletionHook_ = std::move(hook);
}

void PycollBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  // Uses the store, not the core, so that it can name every missing rank and keep the group usable.
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout;
  const auto prefix_of = [](uint64_t number) {
    return "pycoll/monitored/" + std::to_string(number) + "/";
  };
  const uint64_t number = num_monitored_++;
  const std::string prefix = prefix_of(number);
  const std::string verdict = prefix + "verdict";
  const std::string ms = std::to_string(timeout.count()) + " ms";
  const auto end = std::chrono::steady_clock::now() + timeout;
  const auto left = [end] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::duration_cast<std::chrono::milliseconds>(
                        end - std::chrono::steady_clock::now()));
  };
  const auto fail = [](const std::string& text) { C10_THROW_ERROR(DistBackendError, text); };
  if (rank_ != 0) {
    store_->set(prefix + std::to_string(rank_), "");
    // Rank 0 waits as long before it reports the missing ranks.
    constexpr std::chrono::milliseconds kLastWord(2000);
    const bool told = wait_for_key(*store_, verdict, left() + kLastWord);
    if (told && store_->get_to_str(verdict).empty()) return;
    // The text is that of Gloo, including the punctuation.
    fail("Rank " + std::to_string(rank_) + " successfully reached monitoredBarrier, but received " +
         "errors while waiting for send/recv from rank 0" +
         (told ? ": " + store_->get_to_str(verdict)
               : ", which did not reach it within " + ms +
                     ". Please check rank 0 logs for faulty rank."));
  }
  std::vector<int> missing;
  for (int rank = 1; rank < size_; ++rank) {
    const std::string key = prefix + std::to_string(rank);
    if (wait_for_key(*store_, key, left())) {
      store_->deleteKey(key);
      continue;
    }
    missing.push_back(rank);
    if (!wait_all_ranks) break;
  }
  std::string text;
  if (!missing.empty() && timeout.count() == 0) {
    text = "Rank 0 timed out in monitoredBarrier after 0 ms";
  } else if (!missing.empty()) {
    text = wait_all_ranks ? "Ranks " : "Rank ";
    text += c10::Join(", ", missing) + " failed to pass monitoredBarrier in " + ms;
  }
  store_->set(verdict, text);
  // A rank in this barrier has read the verdict of the previous one.
  if (missing.empty() && number > 0) store_->deleteKey(prefix_of(number - 1) + "verdict");
  if (!text.empty()) fail(text);
}

at::Tensor PycollBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  return allocator_->allocate(size, c10::typeMetaToScalarType(options.dtype()));
}

}  // namespace pycoll::torch_backend
