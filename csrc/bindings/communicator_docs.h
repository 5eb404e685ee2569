// What help(Communicator) says about the methods that are plain C functions. The first line is the
// signature, in the form that inspect.signature reads.
#pragma once

namespace pycoll {

inline constexpr const char* kAllReduceDoc =
    R"(all_reduce($self, x, op='sum', out=None, *, algorithm=None, async_op=False)
--

Reduces `x` over all ranks; every rank gets the same bits.

Args:
    x: Contiguous host array of any shape, alike on all ranks; f32 f64 f16 bf16 i32 i64
        or u8. Anything with the buffer protocol or DLPack; never copied.
    op: sum, prod, min, max or avg. 16-bit floats are combined in f32; integers wrap,
        and their avg is truncated toward zero.
    out: Array for the result, like `x`. None: in place.
    algorithm: Name of an algorithm, "ring", or of an algorithm and a protocol,
        "ring/ll". None: the one that the simulation predicts to be fastest.
    async_op: Return a `Work` at once.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    UsageError: `x` or `out` is no such array; unknown op or algorithm.
    CollectiveMismatchError: The ranks' calls differ.
    PeerDiedError: A rank's process ended or a rank closed the communicator.
    TimeoutError: A rank did not come or did not move on in time.

Cost: see `pycoll show ALGORITHM` and `explain`.)";

inline constexpr const char* kBroadcastDoc =
    R"(broadcast($self, x, root=0, *, algorithm=None, async_op=False)
--

Gives every rank the root's `x`, in place.

Args:
    x: Contiguous writable host array, alike in shape and dtype on all ranks.
    root: The rank whose values all get.
    algorithm: As for `all_reduce`.
    async_op: Return a `Work` at once.

Returns:
    `x`, or a `Work`.

Raises:
    As `all_reduce`.

Cost: binomial: ceil(log2 n) (alpha + N beta).)";

}  // namespace pycoll
