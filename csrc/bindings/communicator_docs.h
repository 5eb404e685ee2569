// What help(Communicator) says about the methods that are plain C functions. The first line is the
// signature, in the form that inspect.signature reads.
#pragma once

namespace pycoll {

inline constexpr const char* kAllReduceDoc =
    R"(all_reduce($self, x, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Reduces `x` over all ranks; every rank gets the same bits.

Args:
    x: Contiguous host array of any shape, alike on all ranks. Anything with the buffer
        protocol or DLPack; never copied.
    op: sum, prod, min, max or avg. 16-bit floats are combined in f32; integers wrap,
        and their avg is truncated toward zero.
    out: Array for the result: x's dtype and number of elements, in any shape; `x`, or apart
        from it. None: in place.
    algorithm: Name of an algorithm, "ring", or of an algorithm and a protocol,
        "ring/ll". None: the one that is expected to be fastest.
    async_op: Return a `Work` at once; its wait() returns the result.
    deterministic: Use only schedules whose bits depend on the values and their order of
        ranks alone, not on algorithm, size or placement. None: as the communicator.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    UsageError: `x` or `out` is no such array; unknown op or algorithm, or one that is not
        deterministic where that is asked for.
    CollectiveMismatchError: The ranks' calls differ.
    PeerDiedError: A rank's process ended or a rank closed the communicator.
    TimeoutError: A rank did not come or did not move on in time.

Cost: see `pycoll show ALGORITHM` and `explain`.
Source: MPI_Allreduce; the algorithms name theirs.)";

inline constexpr const char* kBroadcastDoc =
    R"(broadcast($self, x, root=0, *, algorithm=None, async_op=False)
--

Gives every rank the root's `x`, in place.

Args:
    x: Contiguous writable host array, alike in shape and dtype on all ranks. Any dtype.
    root: The rank whose values all get.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    `x`, or a `Work`.

Raises:
    As `all_reduce`.

Cost: binomial: ceil(log2 n) (alpha + N beta).
Source: MPI_Bcast.)";

inline constexpr const char* kBarrierDoc =
    R"(barrier($self, *, algorithm=None, async_op=False)
--

Returns when all ranks have called it.

Args:
    algorithm: One of all_reduce's; as for `all_reduce`.
    async_op: As for `all_reduce`; wait() returns None.

Returns:
    None, or a `Work`.

Raises:
    As `all_reduce`.

Cost: an all_reduce of one byte.
Source: MPI_Barrier.)";

inline constexpr const char* kReduceScatterDoc =
    R"(reduce_scatter($self, x, op='sum', out=None, *, counts=None, algorithm=None, async_op=False, deterministic=None)
--

Reduces `x` over all ranks; rank r gets block r of the result.

Args:
    x: Contiguous host array, alike in shape and dtype on all ranks. Its first axis is cut
        into n equal blocks of rows, or as `counts` says.
    op: As for `all_reduce`.
    out: Array for the block: x's dtype and the block's number of elements, in any shape; apart
        from x, or exactly this rank's block of x. None: a new array of x's library, of shape
        (x.shape[0] // n, *x.shape[1:]).
    counts: Rows of each rank's block, one number for each rank, alike on all ranks; they add
        up to x.shape[0]. None: equal blocks.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.
    deterministic: As for `all_reduce`.

Returns:
    The array that holds this rank's block, or a `Work`.

Raises:
    As `all_reduce`; UsageError: the first axis does not divide into such blocks.

Cost: ring: (n - 1) (alpha + N/n (beta + gamma)), N bytes of x.
Source: MPI_Reduce_scatter_block and MPI_Reduce_scatter; in place as in NCCL.)";

inline constexpr const char* kAllGatherDoc =
    R"(all_gather($self, x, out=None, *, counts=None, algorithm=None, async_op=False)
--

Gives every rank all ranks' `x`, one behind the other along the first axis.

Args:
    x: Contiguous host array, alike in shape and dtype on all ranks but for `counts`. Any dtype.
    out: Array for the result: x's dtype and the number of elements of all ranks' x, in any
        shape, such as (n, *x.shape); apart from x, or one whose block of this rank is exactly
        x. None: a new array of x's library, of shape (n * x.shape[0], *x.shape[1:]).
    counts: Rows (first axis) of each rank's x, one number for each rank, alike on all ranks.
        None: all alike.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    As `all_reduce`; UsageError: x has not counts[rank] rows.

Cost: ring: (n - 1) (alpha + N/n beta), N bytes of the result.
Source: MPI_Allgather and MPI_Allgatherv; in place as in NCCL.)";

inline constexpr const char* kReduceDoc =
    R"(reduce($self, x, root=0, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Reduces `x` over all ranks; the root gets the result.

Args:
    x: Contiguous host array, alike in shape and dtype on all ranks. Only read but at a root
        without `out`.
    root: The rank that gets the result.
    op: As for `all_reduce`.
    out: At the root as for `all_reduce`; elsewhere nobody looks at it.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.
    deterministic: As for `all_reduce`.

Returns:
    At the root the array that holds the result, elsewhere None; or a `Work`.

Raises:
    As `all_reduce`.

Cost: binomial: ceil(log2 n) (alpha + N (beta + gamma)).
Source: MPI_Reduce.)";

inline constexpr const char* kGatherDoc =
    R"(gather($self, x, root=0, out=None, *, algorithm=None, async_op=False)
--

Gives the root all ranks' `x`, one behind the other along the first axis.

Args:
    x: Contiguous host array, alike in shape and dtype on all ranks. Any dtype.
    root: The rank that gets them.
    out: At the root, array for the result: x's dtype and n times its number of elements, in
        any shape, apart from x; None: a new array of x's library, of shape
        (n * x.shape[0], *x.shape[1:]). Elsewhere nobody looks at it.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    At the root the array that holds the result, elsewhere None; or a `Work`.

Raises:
    As `all_reduce`.

Cost: direct: alpha + (n - 1)/n N beta at the root, N bytes of the result.
Source: MPI_Gather.)";

inline constexpr const char* kScatterDoc =
    R"(scatter($self, x, root=0, out=None, *, algorithm=None, async_op=False)
--

Gives rank r block r of the root's `x`.

Args:
    x: At the root a contiguous host array, of any dtype, whose first axis is cut into n equal
        blocks of rows. Elsewhere its values are not read: an array like the root's where `out`
        is None, else None will do.
    root: The rank whose blocks are given out.
    out: Array for the block: the dtype and number of elements of a block, in any shape; apart
        from x at the root. None: a new array of x's library, of shape
        (x.shape[0] // n, *x.shape[1:]).
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    The array that holds this rank's block, or a `Work`.

Raises:
    As `all_reduce`; UsageError: the first axis does not divide by n, or neither x nor out says
        what to expect.

Cost: direct: alpha + (n - 1)/n N beta at the root, N bytes of x.
Source: MPI_Scatter.)";

inline constexpr const char* kAllToAllDoc =
    R"(all_to_all($self, x, out=None, send_counts=None, recv_counts=None, *, algorithm=None, async_op=False)
--

Gives rank r block r of every rank's `x`, one behind the other in the order of their ranks.

Args:
    x: Contiguous host array; its first axis is cut into n equal blocks of rows, or as
        `send_counts` says. Any dtype. Alike in shape on all ranks but for the counts.
    out: Array for the result: x's dtype and the number of elements that come in, in any shape,
        apart from x. None: a new array of x's library.
    send_counts: Rows for each rank, one number for each; they add up to x.shape[0].
    recv_counts: Rows from each rank: what that rank has in its send_counts for this one. None
        beside send_counts (on all ranks): the ranks tell each other first, before this
        returns, async_op or not.
    algorithm: As for `all_reduce`. Calls with counts have one way only.
    async_op: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    As `all_reduce`; UsageError: the first axis does not divide into such blocks;
        CollectiveMismatchError: a rank sends another number of rows than is expected from it.

Cost: pairwise: (n - 1) (alpha + N/n beta), N bytes of x. Without recv_counts one more, of 8 n
    bytes.
Source: MPI_Alltoall and MPI_Alltoallv.)";

inline constexpr const char* kScanDoc =
    R"(scan($self, x, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Gives rank r the reduction of the `x` of ranks 0 to r.

Args:
    x: As for `all_reduce`.
    op: As for `all_reduce`, but avg.
    out: As for `all_reduce`.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.
    deterministic: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    As `all_reduce`.

Cost: recursive doubling: ceil(log2 n) (alpha + N (beta + gamma)).
Source: MPI_Scan.)";

inline constexpr const char* kExscanDoc =
    R"(exscan($self, x, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Gives rank r the reduction of the `x` of ranks 0 to r - 1.

Args:
    x: As for `all_reduce`.
    op: As for `scan`.
    out: As for `all_reduce`.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.
    deterministic: As for `all_reduce`.

Returns:
    The array that holds the result, whose values are undefined on rank 0; or a `Work`.

Raises:
    As `all_reduce`.

Cost: as `scan`.
Source: MPI_Exscan.)";

inline constexpr const char* kNeighborExchangeDoc =
    R"(neighbor_exchange($self, x, out=None, *, algorithm=None, async_op=False)
--

Sends x[0] to the rank before this one and x[1] to the rank after it, on a ring of all ranks.

Args:
    x: Contiguous host array with two rows, alike in shape and dtype on all ranks. Any dtype.
    out: Array for the result: x's dtype and number of elements, in any shape, apart from x.
        None: a new array like x.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`: its first row comes from the rank before this
    one (that rank's x[1]), its second from the rank after it (that rank's x[0]).

Raises:
    As `all_reduce`.

Cost: alpha + N beta, N bytes of x.
Source: MPI_Neighbor_alltoall on a periodic one-dimensional grid.)";

}  // namespace pycoll
