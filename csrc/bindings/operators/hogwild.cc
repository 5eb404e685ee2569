// Source: Niu et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing SGD", NeurIPS. Without
// a lock, elements are read and written by plain instructions while other processes change them:
// each process sees some older or newer value of each element, which the algorithm tolerates.
#include "bindings/operators/hogwild.h"

#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

static_assert(sizeof(pthread_mutex_t) <= kMutexBytes);

class Plain {
 public:
  explicit Plain(void*) {}
  static void add(float& x, float change) { x += change; }
};

class Atomic {
 public:
  explicit Atomic(void*) {}
  static void add(float& x, float change) { std::atomic_ref<float>(x).fetch_add(change); }
};

class Locked {
 public:
  explicit Locked(void* mutex) : mutex_(static_cast<pthread_mutex_t*>(mutex)) {
    // The last holder has died: its update is made in part, as an update without a lock may be.
    if (pthread_mutex_lock(mutex_) == EOWNERDEAD) pthread_mutex_consistent(mutex_);
  }
  ~Locked() { pthread_mutex_unlock(mutex_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  static void add(float& x, float change) { x += change; }

 private:
  pthread_mutex_t* mutex_;
};

[[noreturn]] void refuse(const char* what, int64_t found, int64_t limit) {
  throw UsageError("hogwild: there is no " + std::string(what) + " " + std::to_string(found) +
                   ", expected 0 to " + std::to_string(limit - 1));
}

void check_numbers(const char* what, const int32_t* numbers, int64_t count, int64_t limit) {
  for (int64_t s = 0; s < count; ++s) {
    if (numbers[s] < 0 || numbers[s] >= limit) refuse(what, numbers[s], limit);
  }
}

/// Ratings between the one that is stepped and the one whose factors are fetched to the cache.
constexpr int64_t kFetchedAhead = 8;

template <class Lock>
double factorize_with(const Factors& f, const int32_t* users, const int32_t* items,
                      const float* ratings, int64_t count, float rate, float l2, void* mutex) {
  constexpr int64_t kLanes = 8;  // partial sums, which the compiler adds up by vector instructions
  const int64_t dim = f.dim, width = dim + 1;
  const float decay = rate * l2;
  double sum = 0;
  for (int64_t s = 0; s < count; ++s) {
    if (s + kFetchedAhead < count) {
      __builtin_prefetch(f.users + users[s + kFetchedAhead] * width, 1);
      __builtin_prefetch(f.items + items[s + kFetchedAhead] * width, 1);
    }
    float* __restrict p = f.users + users[s] * width;
    float* __restrict q = f.items + items[s] * width;
    const Lock lock(mutex);
    float lanes[kLanes] = {};
    int64_t k = 0;
    for (; k + kLanes <= dim; k += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) lanes[j] += p[k + j] * q[k + j];
    }
    float product = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
                    ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    for (; k < dim; ++k) product += p[k] * q[k];
    const float error = ratings[s] - (f.mean + p[dim] + q[dim] + product);
    sum += static_cast<double>(error) * error;
    const float change = rate * error;
    for (k = 0; k < dim; ++k) {
      const float p_k = p[k], q_k = q[k];
      Lock::add(p[k], change * q_k - decay * p_k);
      Lock::add(q[k], change * p_k - decay * q_k);
    }
    Lock::add(p[dim], change - decay * p[dim]);
    Lock::add(q[dim], change - decay * q[dim]);
  }
  return sum;
}

template <class Lock>
double step_logistic_with(float* weights, const Examples& x, const int64_t* order,
                          int64_t num_steps, float rate, void* mutex) {
  double sum = 0;
  for (int64_t s = 0; s < num_steps; ++s) {
    const int64_t e = order[s];
    if (e < 0 || e >= x.count) refuse("example", e, x.count);
    const int64_t first = x.starts[e], last = x.starts[e + 1];
    for (int64_t j = first; j < last; ++j) {
      if (x.features[j] < 0 || x.features[j] >= x.num_features) {
        refuse("feature", x.features[j], x.num_features);
      }
    }
    const Lock lock(mutex);
    float logit = 0;
    for (int64_t j = first; j < last; ++j) logit += weights[x.features[j]] * x.values[j];
    const float share = 1 / (1 + std::exp(-logit));
    const float label = x.labels[e];
    sum += std::log1p(std::exp(-std::abs(static_cast<double>(logit)))) + std::max(logit, 0.0F) -
           label * logit;
    const float change = rate * (label - share);
    for (int64_t j = first; j < last; ++j) {
      Lock::add(weights[x.features[j]], change * x.values[j]);
    }
  }
  return sum;
}

}  // namespace

void make_shared_mutex(void* memory) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(static_cast<pthread_mutex_t*>(memory), &attributes);
  pthread_mutexattr_destroy(&attributes);
}

double factorize(const Factors& factors, const int32_t* users, const int32_t* items,
                 const float* ratings, int64_t count, float rate, float l2, SharedLock lock,
                 void* mutex) {
  check_numbers("user", users, count, factors.num_users);
  check_numbers("item", items, count, factors.num_items);
  const auto run = lock == SharedLock::kMutex    ? &factorize_with<Locked>
                   : lock == SharedLock::kAtomic ? &factorize_with<Atomic>
                                                 : &factorize_with<Plain>;
  return run(factors, users, items, ratings, count, rate, l2, mutex);
}

double step_logistic(float* weights, const Examples& examples, const int64_t* order,
                     int64_t num_steps, float rate, SharedLock lock, void* mutex) {
  const auto run = lock == SharedLock::kMutex    ? &step_logistic_with<Locked>
                   : lock == SharedLock::kAtomic ? &step_logistic_with<Atomic>
                                                 : &step_logistic_with<Plain>;
  return run(weights, examples, order, num_steps, rate, mutex);
}

}  // namespace pycoll
