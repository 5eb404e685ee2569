#include "capi/c_table.h"

#include <unistd.h>

#include <memory>
#include <vector>

#include "base/environment.h"
#include "base/error.h"
#include "base/version.h"
#include "capi/c_messages.h"
#include "capi/calls.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/open.h"
#include "comm/coalesce.h"
#include "device/device_library.h"
#include "reduce/cells.h"

namespace pycoll {
namespace {

int open_communicator(const pycoll_store* store, int rank, int num_ranks, double timeout_s,
                      pycoll_comm** comm, pycoll_error* error) {
  return guarded_call(error, [&] {
    *comm = new pycoll_comm{
        std::make_shared<SharedCommunicator>(open_through(*store, rank, num_ranks, timeout_s))};
    return static_cast<int>(PYCOLL_OK);
  });
}

void close_communicator(pycoll_comm* comm) {
  Communicator& communicator = *comm->shared->comm;
  if (comm->shared->pid == ::getpid()) {
    communicator.close();
  } else {
    communicator.disown();
  }
}

void release_communicator(pycoll_comm* comm) {
  close_communicator(comm);
  delete comm;
}

int health(pycoll_comm* comm) {
  if (comm->shared->comm->closed()) return PYCOLL_ABORTED_ERROR;
  const Segment& segment = comm->shared->comm->segment();
  switch (Failure::unpack(load_acquire(segment.failure_word())).code) {
    case FailureCode::kNone:
      return PYCOLL_OK;
    case FailureCode::kTimeout:
      return PYCOLL_TIMEOUT_ERROR;
    case FailureCode::kPeerDied:
    case FailureCode::kPeerLeft:
      return PYCOLL_PEER_DIED_ERROR;
    case FailureCode::kMismatch:
    case FailureCode::kMessageMismatch:
      return PYCOLL_MISMATCH_ERROR;
    case FailureCode::kCorrupted:
      return PYCOLL_DATA_ERROR;
    case FailureCode::kAborted:
    case FailureCode::kRevoked:
      break;
  }
  return PYCOLL_ABORTED_ERROR;
}

int run(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, pycoll_error* error) {
  return guarded_call(error, [&] {
    Communicator& communicator = *comm->shared->comm;
    if (num_calls == 1) {
      communicator.run(call_of(*calls));
    } else {
      Batch batch;
      for (size_t i = 0; i < num_calls; ++i) batch.add(call_of(calls[i]), nullptr);
      batch.run(communicator, {});
    }
    return static_cast<int>(PYCOLL_OK);
  });
}

/// Runs on the progress thread.
int run_kept(Communicator& communicator, const std::vector<KeptCall>& calls, pycoll_error* error) {
  return guarded_call(error, [&] {
    if (calls.size() == 1) {
      communicator.run(calls[0].call());
    } else {
      Batch batch;
      for (const KeptCall& call : calls) batch.add(call.call(), nullptr);
      batch.run(communicator, {});
    }
    return static_cast<int>(PYCOLL_OK);
  });
}

struct Ended {
  pycoll_error error;
  int code = PYCOLL_OK;

  void tell(pycoll_done done, void* context) const {
    done(context, code == PYCOLL_OK ? nullptr : &error);
  }
};

int start(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, pycoll_done done,
          void* context, pycoll_error* error) {
  return guarded_call(error, [&] {
    Communicator& communicator = *comm->shared->comm;
    std::vector<KeptCall> kept;
    kept.reserve(num_calls);
    for (size_t i = 0; i < num_calls; ++i) kept.emplace_back(calls[i], communicator.size());
    if (communicator.is_progress_thread()) {
      Ended ended;
      ended.code = run_kept(communicator, kept, &ended.error);
      ended.tell(done, context);
      return static_cast<int>(PYCOLL_OK);
    }
    const std::lock_guard lock(comm->shared->starting);
    const auto ended = std::make_shared<Ended>();
    communicator.enqueue([&communicator, kept = std::move(kept),
                          ended] { ended->code = run_kept(communicator, kept, &ended->error); },
                         [ended, done, context] { ended->tell(done, context); });
    return static_cast<int>(PYCOLL_OK);
  });
}

int allocate(pycoll_comm* comm, size_t nbytes, pycoll_memory** memory, void** data,
             pycoll_error* error) {
  return guarded_call(error, [&] {
    *memory = new pycoll_memory{comm->shared->comm->allocate(nbytes)};
    *data = (*memory)->memory.data();
    return static_cast<int>(PYCOLL_OK);
  });
}

int register_after(int otherwise, int* uses, pycoll_error* error) {
  return guarded_call(error, [&] {
    const char* name = "PYCOLL_REGISTER_AFTER";
    *uses = env_text(name) ? static_cast<int>(env_number(name)) : otherwise;
    return static_cast<int>(PYCOLL_OK);
  });
}

int cache(pycoll_comm* comm, void* data, size_t nbytes, pycoll_array** array, pycoll_error* error) {
  return guarded_call(error, [&] {
    auto cached = std::make_shared<CachedArray>(static_cast<std::byte*>(data), nbytes);
    auto made = std::make_unique<pycoll_array>(cached);
    const std::lock_guard lock(comm->shared->starting);
    comm->shared->comm->cache_array(std::move(cached));
    *array = made.release();
    return static_cast<int>(PYCOLL_OK);
  });
}

void end_array(pycoll_array* array) {
  array->cached->end();
  delete array;
}

uint16_t name_site(pycoll_comm* comm, const char* text) {
  pycoll_error error;
  uint16_t site = 0;
  guarded_call(&error, [&] {
    site = comm->shared->comm->recorder().name_id(text);
    return static_cast<int>(PYCOLL_OK);
  });
  return site;
}

const char* device_kind(pycoll_error* error) {
  const char* kind = nullptr;
  guarded_call(error, [&] {
    kind = device_table().name;
    return static_cast<int>(PYCOLL_OK);
  });
  return kind;
}

int run_on_device(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, int device,
                  void* stream, pycoll_device_work** work, pycoll_error* error) {
  return guarded_call(error, [&] {
    std::vector<Call> of_device;
    for (size_t i = 0; i < num_calls; ++i) {
      Call& call = of_device.emplace_back(call_of(calls[i]));
      call.device = device;
      call.stream = stream;
    }
    std::shared_ptr<DeviceWork> given = comm->shared->comm->give_to_device(of_device);
    *work = given ? new pycoll_device_work{comm->shared, std::move(given)} : nullptr;
    return static_cast<int>(PYCOLL_OK);
  });
}

int poll_device_work(pycoll_device_work* work, pycoll_error* error) {
  return guarded_call(error, [&] {
    if (!work->work->done()) return static_cast<int>(PYCOLL_PENDING);
    if (const std::exception_ptr ended = work->work->error()) std::rethrow_exception(ended);
    return static_cast<int>(PYCOLL_OK);
  });
}

constexpr pycoll_api kTable = {
    .version = PYCOLL_CAPI_VERSION,
    .size = sizeof(pycoll_api),
    .core_version = kVersion.data(),  // a literal, so null-terminated
    .open = open_communicator,
    .close = close_communicator,
    .release = release_communicator,
    .set_timeout_s = [](pycoll_comm* comm,
                        double timeout_s) { comm->shared->comm->set_timeout_s(timeout_s); },
    .set_interrupted =
        [](pycoll_comm* comm, int (*interrupted)(void)) {
          comm->shared->comm->set_interrupted([interrupted] { return interrupted() != 0; });
        },
    .abort =
        [](pycoll_comm* comm) {
          if (!comm->shared->comm->closed()) comm->shared->comm->abort();
        },
    .health = health,
    .run = run,
    .start = start,
    .start_message = start_message,
    .wait_message = wait_message,
    .message_source = [](pycoll_handle* handle) { return handle->op->source; },
    .release_message = [](pycoll_handle* handle) { delete handle; },
    .allocate = allocate,
    .free = [](pycoll_memory* memory) { delete memory; },
    .cache = cache,
    .end_array = end_array,
    .register_after = register_after,
    .name_site = name_site,
    .reduces =
        [](int dtype, int op) {
          return dtype < kNumDTypes && supported(static_cast<DType>(dtype), static_cast<Op>(op))
                     ? 1
                     : 0;
        },
    .device_kind = device_kind,
    .run_on_device = run_on_device,
    .poll_device_work = poll_device_work,
    .release_device_work = [](pycoll_device_work* work) { delete work; },
    .is_capturing =
        [](int device, void* stream) {
          uint64_t capture = 0;
          guarded_call(nullptr, [&] {
            capture = Device(device_table(), device).capture_of(stream);
            return static_cast<int>(PYCOLL_OK);
          });
          return capture != 0 ? 1 : 0;
        },
    .max_staged_bytes = max_staged_bytes,
    .copy_for_send = copy_for_send,
    .release_device_bytes = release_device_bytes,
    .start_device_message = start_device_message,
};

}  // namespace

const pycoll_api* capi_table() { return &kTable; }

}  // namespace pycoll
