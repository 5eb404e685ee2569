// Docstrings of the methods of Communicator that are plain C functions. The first line of each is
// the signature, in the form that inspect.signature reads.
#pragma once

namespace pycoll {

inline constexpr const char* kAllReduceDoc =
    R"(all_reduce($self, x, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Reduces `x` over all ranks; every rank gets the same bits.

Args:
    x: Contiguous array in host or device memory, with the buffer protocol, DLPack or
        __cuda_array_interface__. Its shape and dtype are identical on all ranks. Data pass
        through shared buffers unless all ranks' arrays are registered or come from `empty`.
    op: sum, prod, min, max, avg, band, bor, bxor or pycoll.premul(factor). 16-bit floats are
        combined in f32; integers wrap, and their avg is truncated toward zero.
    out: Array for the result: `x` itself, or an array that does not overlap `x` and has its
        dtype and number of elements, in any shape. None: in place.
    algorithm: Name of an algorithm, "ring", or of an algorithm and a protocol,
        "ring/ll". None: the candidate with the lowest expected time.
    async_op: Return a `Work` at once; its wait() returns the result.
    deterministic: Use only schedules whose result bits depend on the values and the order of
        the ranks alone, not on algorithm, size or placement. None: the communicator's setting.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    UsageError: `x` or `out` is not such an array, the op or the algorithm is unknown, or the
        algorithm is not deterministic although `deterministic` is set.
    CollectiveMismatchError: The ranks' calls differ.
    PeerDiedError: A rank's process ended or a rank closed the communicator.
    TimeoutError: A rank did not make the call, or made no progress, before the deadline.

Cost: see `pycoll show ALGORITHM` and `explain`.
Source: MPI_Allreduce; each algorithm names its own source.)";

inline constexpr const char* kBroadcastDoc =
    R"(broadcast($self, x, root=0, *, algorithm=None, async_op=False)
--

Copies the root's `x` to every rank, in place.

Args:
    x: Contiguous writable array of any dtype; shape and dtype are identical on all ranks.
    root: The rank whose values are sent.
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

Blocks until all ranks have called it.

Args:
    algorithm: An algorithm of `all_reduce`.
    async_op: As for `all_reduce`; wait() returns None.

Returns:
    None, or a `Work`.

Raises:
    As `all_reduce`.

Cost: one all_reduce of one byte.
Source: MPI_Barrier.)";

inline constexpr const char* kReduceScatterDoc =
    R"(reduce_scatter($self, x, op='sum', out=None, *, counts=None, algorithm=None, async_op=False, deterministic=None)
--

Reduces `x` over all ranks; rank r gets block r of the result.

Args:
    x: Contiguous array; shape and dtype are identical on all ranks. Its first axis is cut
        into n equal blocks of rows, or into blocks of `counts` rows.
    op: As for `all_reduce`.
    out: Array for the block: x's dtype and the block's number of elements, in any shape. It
        does not overlap x, or is exactly this rank's block of x. None: a new array of x's
        library, of shape (x.shape[0] // n, *x.shape[1:]).
    counts: Rows of each rank's block, one number for each rank, identical on all ranks; they
        add up to x.shape[0]. None: equal blocks.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.
    deterministic: As for `all_reduce`.

Returns:
    The array that holds this rank's block, or a `Work`.

Raises:
    As `all_reduce`; UsageError: the first axis cannot be cut into these blocks.

Cost: ring: (n - 1) (alpha + N/n (beta + gamma)), N bytes of x.
Source: MPI_Reduce_scatter_block and MPI_Reduce_scatter; in place as in NCCL.)";

inline constexpr const char* kAllGatherDoc =
    R"(all_gather($self, x, out=None, *, counts=None, algorithm=None, async_op=False)
--

Concatenates all ranks' `x` along the first axis, in rank order, on every rank.

Args:
    x: Contiguous array of any dtype. Shape and dtype are identical on all ranks, except for
        the number of rows where `counts` is given.
    out: Array for the result: x's dtype and the number of elements of all ranks' x, in any
        shape, such as (n, *x.shape). It does not overlap x, or its block of this rank is
        exactly x. None: a new array of x's library, of shape (n * x.shape[0], *x.shape[1:]).
    counts: Rows (first axis) of each rank's x, one number for each rank, identical on all
        ranks. None: every rank has the same number of rows.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    As `all_reduce`; UsageError: x does not have counts[rank] rows.

Cost: ring: (n - 1) (alpha + N/n beta), N bytes of the result.
Source: MPI_Allgather and MPI_Allgatherv; in place as in NCCL.)";

inline constexpr const char* kReduceDoc =
    R"(reduce($self, x, root=0, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Reduces `x` over all ranks; the root gets the result.

Args:
    x: Contiguous array; shape and dtype are identical on all ranks. It is read-only, except
        at the root where `out` is None.
    root: The rank that gets the result.
    op: As for `all_reduce`.
    out: At the root, as for `all_reduce`. Ignored on other ranks.
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

Concatenates all ranks' `x` along the first axis, in rank order, at the root.

Args:
    x: Contiguous array of any dtype; shape and dtype are identical on all ranks.
    root: The rank that gets the result.
    out: At the root, array for the result: x's dtype and n times its number of elements, in
        any shape; it does not overlap x. None: a new array of x's library, of shape
        (n * x.shape[0], *x.shape[1:]). Ignored on other ranks.
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

Sends block r of the root's `x` to rank r.

Args:
    x: At the root, a contiguous array of any dtype; its first axis is cut into n equal blocks
        of rows. On other ranks its values are not read: pass an array with the root's shape
        and dtype where `out` is None, else None.
    root: The rank whose blocks are sent.
    out: Array for the block: the dtype and number of elements of a block, in any shape. At
        the root it does not overlap x. None: a new array of x's library, of shape
        (x.shape[0] // n, *x.shape[1:]).
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    The array that holds this rank's block, or a `Work`.

Raises:
    As `all_reduce`; UsageError: the first axis is not a multiple of n, or x and out are both
        None on this rank.

Cost: direct: alpha + (n - 1)/n N beta at the root, N bytes of x.
Source: MPI_Scatter.)";

inline constexpr const char* kAllToAllDoc =
    R"(all_to_all($self, x, out=None, send_counts=None, recv_counts=None, *, algorithm=None, async_op=False)
--

Sends block r of `x` to rank r; the received blocks are concatenated in rank order.

Args:
    x: Contiguous array of any dtype; its first axis is cut into n equal blocks of rows, or
        into blocks of `send_counts` rows. The dtype and all axes but the first are identical
        on all ranks; without counts, the first is too.
    out: Array for the result: x's dtype and the number of received elements, in any shape; it
        does not overlap x. None: a new array of x's library.
    send_counts: Rows for each rank, one number for each; they add up to x.shape[0].
    recv_counts: Rows from each rank: that rank's send_counts entry for this rank. None with
        send_counts given (on all ranks): the ranks exchange their counts before this call
        returns, even with async_op.
    algorithm: As for `all_reduce`. Calls with counts have a single algorithm.
    async_op: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`.

Raises:
    As `all_reduce`; UsageError: the first axis cannot be cut into these blocks;
        CollectiveMismatchError: a rank's send_counts and the receiver's recv_counts differ.

Cost: pairwise: (n - 1) (alpha + N/n beta), N bytes of x. Without recv_counts, one more
    all_to_all of 8 n bytes.
Source: MPI_Alltoall and MPI_Alltoallv.)";

inline constexpr const char* kScanDoc =
    R"(scan($self, x, op='sum', out=None, *, algorithm=None, async_op=False, deterministic=None)
--

Computes on rank r the reduction of the `x` of ranks 0 to r.

Args:
    x: As for `all_reduce`.
    op: As for `all_reduce`, except avg.
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

Computes on rank r the reduction of the `x` of ranks 0 to r - 1.

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

Sends x[0] to the previous rank and x[1] to the next rank, on a ring of all ranks.

Args:
    x: Contiguous array of any dtype with two rows; shape and dtype are identical on all ranks.
    out: Array for the result: x's dtype and number of elements, in any shape; it does not
        overlap x. None: a new array like x.
    algorithm: As for `all_reduce`.
    async_op: As for `all_reduce`.

Returns:
    The array that holds the result, or a `Work`. Its first row is x[1] of the previous rank,
    its second row x[0] of the next rank.

Raises:
    As `all_reduce`.

Cost: alpha + N beta, N bytes of x.
Source: MPI_Neighbor_alltoall on a periodic one-dimensional grid.)";

}  // namespace pycoll
