/* The core for other libraries, in C: a table of functions that needs neither a link to the core
 * nor its compiler, and that grows at its end only.
 *
 * Python's `pycoll._core.capi` is a PyCapsule named PYCOLL_CAPI_NAME that holds a pycoll_api*.
 * Functions that may fail return a pycoll_code; where it is not PYCOLL_OK, `error` says why. No
 * function touches Python. A communicator is used by one thread at a time for what it runs in
 * order; starting, waiting and aborting are for any thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PYCOLL_CAPI_NAME "pycoll._core.capi"
#define PYCOLL_CAPI_VERSION 2 /* another one: other meanings; a larger table keeps it */

/* Which of the core's errors it is. */
typedef enum pycoll_code {
  PYCOLL_OK = 0,
  PYCOLL_ERROR,
  PYCOLL_USAGE_ERROR,
  PYCOLL_SYSTEM_ERROR,
  PYCOLL_TIMEOUT_ERROR,
  PYCOLL_PEER_DIED_ERROR,
  PYCOLL_MISMATCH_ERROR,
  PYCOLL_ABORTED_ERROR,
  PYCOLL_PENDING /* no error: it is still going on */
} pycoll_code;

#define PYCOLL_MAX_MESSAGE 4096

typedef struct pycoll_error {
  int32_t code;                     /* pycoll_code */
  int32_t rank;                     /* PEER_DIED: of whom; else -1 */
  int32_t signal;                   /* PEER_DIED: what ended it; 0: not known */
  char message[PYCOLL_MAX_MESSAGE]; /* ends with a zero */
} pycoll_error;

/* The order of these three is that of the core's tables. */
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
  PYCOLL_OPAQUE /* any other: copied, never reduced; of element_size bytes */
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

/* One collective, as this rank calls it. Zeroed memory is a valid start. */
typedef struct pycoll_call {
  int32_t collective;
  int32_t dtype;
  int32_t op;
  int32_t root;
  const void* input;   /* null where this rank brings nothing */
  void* output;        /* null where it gets nothing; may be `input` where the shapes allow it */
  int64_t count;       /* elements of one block (of one rank's part) */
  size_t element_size; /* bytes; of PYCOLL_OPAQUE only */
  double factor;       /* PREMUL: what `input` is multiplied by */
  /* Elements of each rank's block where they differ (ALL_GATHER, REDUCE_SCATTER), alike on all
   * ranks. `count` is unused then. */
  const int64_t* block_counts;
  /* ALL_TO_ALL with counts: elements to and from each rank. Both or none. */
  const int64_t* send_counts;
  const int64_t* recv_counts;
  double timeout_s; /* 0: the communicator's */
  /* For error messages; ranks need not agree on it. More dimensions than there is room for: 0. */
  int32_t num_dims;
  int16_t deterministic;
  uint16_t site; /* where the user's code calls: of name_site(); 0: not known */
  int64_t shape[PYCOLL_MAX_DIMS];
} pycoll_call;

#define PYCOLL_ANY_SOURCE (-1)

typedef struct pycoll_message {
  int32_t is_send;
  int32_t dtype;
  int32_t peer; /* PYCOLL_ANY_SOURCE: of a receive */
  int32_t tag;  /* 0 or more */
  void* data;   /* a send only reads it */
  size_t nbytes;
  double timeout_s; /* 0: the communicator's */
  uint16_t site;    /* as a call's */
} pycoll_message;

/* A key-value store through which the ranks of a communicator meet, with keys of their own.
 * Functions return 0, or a pycoll_code with a text in `error`. */
typedef struct pycoll_store {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t nbytes, pycoll_error* error);
  /* Waits until the key is there; PYCOLL_TIMEOUT_ERROR after `timeout_s`. Hands the value to
   * `take`, once. */
  int (*get)(void* context, const char* key, double timeout_s,
             void (*take)(void* taker, const void* value, size_t nbytes), void* taker,
             pycoll_error* error);
  /* Adds to the number at the key (0 if there is none); the sum is in `sum`. */
  int (*add)(void* context, const char* key, int64_t delta, int64_t* sum, pycoll_error* error);
  /* Removes a key that nobody asks for any more. */
  int (*remove)(void* context, const char* key, pycoll_error* error);
} pycoll_store;

typedef struct pycoll_comm pycoll_comm;               /* a communicator */
typedef struct pycoll_handle pycoll_handle;           /* a send or receive */
typedef struct pycoll_memory pycoll_memory;           /* an allocation */
typedef struct pycoll_array pycoll_array;             /* an array of the caller */
typedef struct pycoll_device_work pycoll_device_work; /* what a device was given */

/* Called once, on a thread of pycoll or on the caller's, when what was started is over: `error` is
 * null if all went well, and valid during the call. It must not wait for this communicator. */
typedef void (*pycoll_done)(void* context, const pycoll_error* error);

typedef struct pycoll_api {
  uint32_t version;         /* PYCOLL_CAPI_VERSION */
  uint32_t size;            /* bytes of this table: functions beyond it are not there */
  const char* core_version; /* of pycoll */

  /* The communicator of `num_ranks` ranks, all of which call this with the same store. Collective.
   * `timeout_s` is the deadline of this, and of every later operation. */
  int (*open)(const pycoll_store* store, int rank, int num_ranks, double timeout_s,
              pycoll_comm** comm, pycoll_error* error);
  /* Leaves; peers that still need this rank are told. Needs no peer. What was started ends. In a
   * process forked off this rank's: lets go of it without a word to the peers. */
  void (*close)(pycoll_comm* comm);
  /* Closes, and frees it once its handles are released. */
  void (*release)(pycoll_comm* comm);
  void (*set_timeout_s)(pycoll_comm* comm, double timeout_s);
  /* Called about every 20 ms of a slow wait on the caller's thread: not 0 ends the wait, and breaks
   * the communicator. */
  void (*set_interrupted)(pycoll_comm* comm, int (*interrupted)(void));
  /* Ends what is going on, on all ranks. */
  void (*abort)(pycoll_comm* comm);
  /* What broke the communicator: PYCOLL_OK while it is good. */
  int (*health)(pycoll_comm* comm);

  /* Runs the collectives in their order on this thread, after what was started. Small all_reduces
   * behind each other are packed into one where no bit of a result depends on it. */
  int (*run)(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, pycoll_error* error);
  /* The same on the communicator's progress thread; the calls themselves are copied, their buffers
   * must live until `done`. Not PYCOLL_OK: nothing was started, and `done` is not called. Within
   * a `done` on that thread the calls are run before this returns, so that it may wait for them. */
  int (*start)(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, pycoll_done done,
               void* context, pycoll_error* error);

  /* Starts a send or receive. Its buffer must live until `done`, which may come before this
   * returns. */
  int (*start_message)(pycoll_comm* comm, const pycoll_message* message, pycoll_done done,
                       void* context, pycoll_handle** handle, pycoll_error* error);
  /* PYCOLL_PENDING when it is still going on after `timeout_s`, which then goes on. */
  int (*wait_message)(pycoll_handle* handle, double timeout_s, pycoll_error* error);
  /* The rank that the message came from; PYCOLL_ANY_SOURCE until it is there. */
  int (*message_source)(pycoll_handle* handle);
  void (*release_message)(pycoll_handle* handle);

  /* Zeroed memory that the peers reach without a copy. May outlive the communicator. */
  int (*allocate)(pycoll_comm* comm, size_t nbytes, pycoll_memory** memory, void** data,
                  pycoll_error* error);
  void (*free)(pycoll_memory* memory);

  /* Moves the pages of an array of the caller to where the peers reach them, unseen: it keeps its
   * address. Without a word where that cannot be done. After what was started and before what
   * comes next; nobody else may write the array meanwhile. The caller says when it is dead, also
   * after the communicator's end: before its memory is freed, and when nobody reads it any more. */
  int (*cache)(pycoll_comm* comm, void* data, size_t nbytes, pycoll_array** array,
               pycoll_error* error);
  void (*end_array)(pycoll_array* array);

  /* Sets *uses to PYCOLL_REGISTER_AFTER, or to `otherwise` where it is not set. */
  int (*register_after)(int otherwise, int* uses, pycoll_error* error);

  /* The number of a place in the user's code ("train.py:12 in step"), for `site`: alike for alike
   * texts. 0 when there is no room for more. */
  uint16_t (*name_site)(pycoll_comm* comm, const char* text);

  /* Whether elements of this dtype can be reduced by this op. */
  int (*reduces)(int dtype, int op);

  /* Of what kind this process's devices are: "cuda", or "threads" for the emulated one. Null: it
   * has no library for any, and `error` says why. */
  const char* (*device_kind)(pycoll_error* error);
  /* Gives collectives, whose buffers are memory of `device`, to `stream` of it (0: the default
   * one): they run in their order, behind what it has got. Returns when the device has them. The
   * buffers must live until they are over, of which `work` tells; it is null if the stream is
   * captured. */
  int (*run_on_device)(pycoll_comm* comm, const pycoll_call* calls, size_t num_calls, int device,
                       void* stream, pycoll_device_work** work, pycoll_error* error);
  /* PYCOLL_PENDING while the device works on it; then what ended it. Any thread, and also after the
   * communicator's end. */
  int (*poll_device_work)(pycoll_device_work* work, pycoll_error* error);
  void (*release_device_work)(pycoll_device_work* work);
  /* Not 0: what that stream of the device gets is recorded for a graph, and does not run. */
  int (*is_capturing)(int device, void* stream);
} pycoll_api;

#ifdef __cplusplus
}
#endif
