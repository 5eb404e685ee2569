// Stochastic gradient descent by several processes on arrays that they share, with locks or
// without.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

/// How an update protects the shared arrays.
enum class SharedLock : int {
  kNone = 0,    // no protection: updates of two processes at once may lose parts of each other
  kAtomic = 1,  // each element is added to by an atomic operation
  kMutex = 2,   // one update at a time
};

/// Bytes of a mutex in shared memory, and its alignment.
constexpr size_t kMutexBytes = 64;

/// Makes a mutex for several processes in `memory`; a process that dies with it loses it.
void make_shared_mutex(void* memory);

/// Factors of a matrix of ratings: rating(u, i) = mean + user_bias(u) + item_bias(i) + p_u q_i.
struct Factors {
  float* users;  // [num_users, dim + 1], the last element is the bias
  float* items;  // [num_items, dim + 1]
  int64_t num_users, num_items, dim;
  float mean;
};

/// Steps the factors by each rating of a list in turn; returns the sum of the squared errors.
/// Raises UsageError for a user or item that does not exist.
double factorize(const Factors& factors, const int32_t* users, const int32_t* items,
                 const float* ratings, int64_t count, float rate, float l2, SharedLock lock,
                 void* mutex);

/// Examples with few features: those of example e are at [starts[e], starts[e + 1]).
struct Examples {
  const int64_t* starts;  // [count + 1]
  const int32_t* features;
  const float* values;
  const float* labels;  // 0 or 1, [count]
  int64_t count, num_features;
};

/// Steps the weights of a logistic regression by the examples of a list in turn; returns the sum of
/// the losses, nats. Raises UsageError for a feature that does not exist.
double step_logistic(float* weights, const Examples& examples, const int64_t* order,
                     int64_t num_steps, float rate, SharedLock lock, void* mutex);

}  // namespace pycoll
