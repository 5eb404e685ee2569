/* The C interface of the core, for other libraries: a table of functions. It needs neither linking
 * with the core nor the same compiler. New functions are added at its end only.
 *
 * Python's `pycoll._core.capi` is a PyCapsule named PYCOLL_CAPI_NAME that holds a pycoll_api*.
 * Functions that may fail return a pycoll_code; unless it is PYCOLL_OK, `error` says why. No
 * function uses Python. One thread at a time may run operations in order on a communicator;
 * any thread may start, wait and abort. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PYCOLL_CAPI_NAME "pycoll._core.capi"
#define PYCOLL_CAPI_VERSION 2 /* changes when a member changes its meaning, not with new ones */

/* The kinds of the core's errors. */
typedef enum pycoll_code {
  PYCOLL_OK = 0,
  PYCOLL_ERROR,
  PYCOLL_USAGE_ERROR,
  PYCOLL_SYSTEM_ERROR,
  PYCOLL_TIMEOUT_ERROR,
  PYCOLL_PEER_DIED_ERROR,
  PYCOLL_MISMATCH_ERROR,
  PYCOLL_ABORTED_ERROR,
  PYCOLL_PENDING, /* no error: the operation is not over yet */
  PYCOLL_DATA_ERROR
} pycoll_code;

#define PYCOLL_MAX_MESSAGE 4096

typedef struct pycoll_error {
  int32_t code;                     /* pycoll_code */
  int32_t rank;                     /* PEER_DIED: the dead rank; else -1 */
  int32_t signal;                   /* PEER_DIED: the signal that ended it; 0: not known */
  char message[PYCOLL_MAX_MESSAGE]; /* null-terminated */
} pycoll_error;

/* The next three enums are in the order of the core's tables. */
typedef enum pycoll_collective {
  PYCOLL_ALL_REDUCE,
  PYCOLL_BROADCAST,
  PYCOLL_BARRIER,
  PYCOLL_REDUCE_SCATTER,
  PYCOLL_ALL_GATHER,
  PYCOLL_REDUCE,
  PYCOLL_GATHER,
  PYCOLL_SCATTER,
  PYCOLL_ALL_TO_ALL,
  PYCOLL_SCAN,
  PYCOLL_EXSCAN,
  PYCOLL_NEIGHBOR_EXCHANGE
} pycoll_collective;

typedef enum pycoll_dtype {
  PYCOLL_F32,
  PYCOLL_F64,
  PYCOLL_F16,
  PYCOLL_BF16,
  PYCOLL_F8_E4M3,
  PYCOLL_F8_E5M2,
  PYCOLL_I8,
  PYCOLL_I16,
  PYCOLL_I32,
  PYCOLL_I64,
  PYCOLL_U8,
  PYCOLL_U16,
  PYCOLL_U32,
  PYCOLL_U64,
  PYCOLL_BOOL,
  PYCOLL_C64,
  PYCOLL_C128,
  PYCOLL_OPAQUE /* any other type, of element_size bytes: copied, never reduced */
} pycoll_dtype;

typedef enum pycoll_op {
  PYCOLL_SUM,
  PYCOLL_PROD,
  PYCOLL_MIN,
  PYCOLL_MAX,
  PYCOLL_AVG,
  PYCOLL_BAND,
  PYCOLL_BOR,
  PYCOLL_BXOR,
  PYCOLL_PREMUL
} pycoll_op;

#define PYCOLL_MAX_DIMS 6

/* One collective, as this rank calls it. Zero it before setting members. */
typedef struct pycoll_call {
  int32_t collective;
  int32_t dtype;
  int32_t op;
  int32_t root;
  const void* input;   /* null if this rank has no input */
  void* output;        /* null if it has no output; may be `input` if the shapes allow it */
  int64_t count;       /* elements of one block (one rank's part) */
  size_t element_size; /* bytes; for PYCOLL_OPAQUE only */
  double factor;       /* PREMUL: the factor of `input` */
  /* Elements of each rank's block when the blocks differ (ALL_GATHER, REDUCE_SCATTER); identical on
   * all ranks. `count` is unused then. */
  const int64_t* block_counts;
  /* ALL_TO_ALL with counts: elements to and from each rank. Set both or neither. */
  const int64_t* send_counts;
  const int64_t* recv_counts;
  double timeout_s; /* 0: the communicator's */
  /* For error messages; may differ between ranks. num_dims is 0 above PYCOLL_MAX_DIMS. */
  int32_t num_dims;
  int16_t deterministic;
  uint16_t site; /* the calling place in the user's code, from name_site(); 0: not known */
  int64_t shape[PYCOLL_MAX_DIMS];
} pycoll_call;

#define PYCOLL_ANY_SOURCE (-1)

typedef struct pycoll_message {
  int32_t is_send;
  int32_t dtype;
  int32_t peer; /* for a receive also PYCOLL_ANY_SOURCE */
  int32_t tag;  /* 0 or more */
  void* data;   /* a send only reads it */
  size_t nbytes;
  double timeout_s; /* 0: the communicator's */
  uint16_t site;    /* as in pycoll_call */
} pycoll_message;

/* A key-value store through which the ranks of one communicator meet. Only that communicator uses
 * its keys.
 * Functions return 0, or a pycoll_code with a text in `error`. */
typedef struct pycoll_store {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t nbytes, pycoll_error* error);
  /* Waits until the key exists; PYCOLL_TIMEOUT_ERROR after `timeout_s`. Calls `take` once with the
   * value. */
  int (*get)(void* context, const char* key, double timeout_s,
             void (*take)(void* taker, const void* value, size_t nbytes), void* taker,
             pycoll_error* error);
  /* Adds to the number at the key (0 if there is none); the sum is in `sum`. */
  int (*add)(void* context, const char* key, int64_t delta, int64_t* sum, pycoll_error* error);
  /* Removes a key that no rank reads any more. */
  int (*remove)(void* context, const char* key, pycoll_error* error);
} pycoll_store;

typedef struct pycoll_comm pycoll_comm;                 /* a communicator */
typedef struct pycoll_handle pycoll_handle;             /* a send or receive */
typedef struct pycoll_memory pycoll_memory;             /* an allocation */
typedef struct pycoll_array pycoll_array;               /* a caller's array */
typedef struct pycoll_device_work pycoll_device_work;   /* work queued on a device */
typedef struct pycoll_device_bytes pycoll_device_bytes; /* a copy of bytes to send, on a device */

/* Called once when a started operation is over, on a thread of pycoll or on the caller's. `error`
 * is null on success, and valid only during the call. It must not wait for this communicator. */
typedef void (*pycoll_done)(void* context, const pycoll_error* error);

typedef struct pycoll_api {
  uint32_t version;         /* PYCOLL_CAPI_VERSION */
  uint32_t size;            /* bytes of this table: it has no functions beyond that */
  const char* core_version; /* version of pycoll */

  /* Opens a communicator of `num_ranks` ranks, which all call this with the same store. Collective.
   * `timeout_s` is the deadline of this call and of every later operation. */
  int (*open)(const pycoll_store* store, int rank, int num_ranks, double timeout_s,
              pycoll_comm** comm, pycoll_error* error);
  /* Leaves the communicator without waiting for the peers; operations of peers that need this rank
   * fail. Pending operations of this rank end. In a forked process it only frees resources, and the
   * peers do not notice. */
  void (*close)(pycoll_comm* comm);
  /* Closes the communicator, and frees it once its handles are released. */
  void (*release)(pycoll_comm* comm);
  void (*set_timeout_s)(pycoll_comm* comm, double timeout_s);
  /* Sets a function that a slow wait calls about every 20 ms on the caller's thread. A result other
   * than 0 ends the wait and breaks the communicator. */
  void (*set_interrupted)(pycoll_comm* comm, int (*interrupted)(void));
  /* Ends all pending operations, on all ranks. */
  void (*abort)(pycoll_comm* comm);
  /* The error that broke the communicator; PYCOLL_OK while it is usable. */
  int (*health)(pycoll_comm* comm);

  /* Runs the collectives in order on this thread, after all started ones. Consecutive small
   * all_reduces are packed into one if that changes no bit of a result. */
  int (*run)(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, pycoll_error* error);
  /* Runs the collectives on the communicator's progress thread. The calls are copied; their buffers
   * must live until `done`. Unless it returns PYCOLL_OK, nothing was started and `done` is not
   * called. Called from a `done` on the progress thread, it runs the calls before it returns, so
   * that `done` may use their results. */
  int (*start)(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, pycoll_done done,
               void* context, pycoll_error* error);

  /* Starts a send or receive. Its buffer must live until `done`, which may be called before this
   * returns. */
  int (*start_message)(pycoll_comm* comm, const pycoll_message* message, pycoll_done done,
                       void* context, pycoll_handle** handle, pycoll_error* error);
  /* Waits at most `timeout_s`. PYCOLL_PENDING: the message is not over yet, and continues. */
  int (*wait_message)(pycoll_handle* handle, double timeout_s, pycoll_error* error);
  /* The rank that sent the message; PYCOLL_ANY_SOURCE until it has arrived. */
  int (*message_source)(pycoll_handle* handle);
  void (*release_message)(pycoll_handle* handle);

  /* Allocates zeroed memory that the peers access without a copy. May outlive the communicator. */
  int (*allocate)(pycoll_comm* comm, size_t nbytes, pycoll_memory** memory, void** data,
                  pycoll_error* error);
  void (*free)(pycoll_memory* memory);

  /* Moves the pages of a caller's array into memory that the peers can access; its address and its
   * contents stay the same. Does nothing, without an error, where that is impossible. Runs after
   * the started operations and before later ones; no other thread may write the array meanwhile.
   * The caller must call end_array() before it frees the array, once no thread reads it any more,
   * even after the communicator was closed. */
  int (*cache)(pycoll_comm* comm, void* data, size_t nbytes, pycoll_array** array,
               pycoll_error* error);
  void (*end_array)(pycoll_array* array);

  /* Sets *uses to PYCOLL_REGISTER_AFTER, or to `otherwise` if the variable is not set. */
  int (*register_after)(int otherwise, int* uses, pycoll_error* error);

  /* The number of a place in the user's code ("train.py:12 in step"), for `site`. Equal texts have
   * equal numbers. 0 when the table of places is full. */
  uint16_t (*name_site)(pycoll_comm* comm, const char* text);

  /* Not 0 if elements of this dtype can be reduced by this op. */
  int (*reduces)(int dtype, int op);

  /* The kind of this process's devices: "cuda", or "threads" for emulated ones. Null: there is no
   * device library, and `error` says why. */
  const char* (*device_kind)(pycoll_error* error);
  /* Queues collectives, whose buffers are memory of `device`, on its `stream` (0: the default one),
   * where they run in order behind earlier work. Returns once they are queued. The buffers must
   * live until `work` is over; it is null if the stream is being captured. */
  int (*run_on_device)(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, int device,
                       void* stream, pycoll_device_work** work, pycoll_error* error);
  /* PYCOLL_PENDING while the device works on it, then the result. May be called by any thread, also
   * after the communicator was closed. */
  int (*poll_device_work)(pycoll_device_work* work, pycoll_error* error);
  void (*release_device_work)(pycoll_device_work* work);
  /* Not 0 if the stream is being captured: its work is recorded in a graph and does not run. */
  int (*is_capturing)(int device, void* stream);

  /* Messages of device memory with more bytes than this go from device to device. The caller copies
   * those with fewer, and all where this is SIZE_MAX, through CPU memory. */
  size_t (*max_staged_bytes)(pycoll_comm* comm);
  /* Queues a copy of what is to be sent on `stream`, behind its earlier work, to memory of `device`
   * from which the receiver takes it. */
  int (*copy_for_send)(pycoll_comm* comm, const void* data, size_t nbytes, int device, void* stream,
                       pycoll_device_bytes** bytes, pycoll_error* error);
  /* Frees the copy at the end of its message; at once, behind the copying, if it is not sent. */
  void (*release_device_bytes)(pycoll_device_bytes* bytes);
  /* As start_message, of memory of `device`. A send begins when the copying of its `bytes` is over,
   * a receive (null) when no earlier work uses the memory. */
  int (*start_device_message)(pycoll_comm* comm, const pycoll_message* message, int device,
                              pycoll_device_bytes* bytes, pycoll_done done, void* context,
                              pycoll_handle** handle, pycoll_error* error);
} pycoll_api;

#ifdef __cplusplus
}
#endif
