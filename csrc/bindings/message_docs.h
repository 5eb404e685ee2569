// Docstrings of send and recv. The first line of each is the signature, in the form that
// inspect.signature reads.
#pragma once

namespace pycoll {

inline constexpr const char* kSendDoc =
    R"(send($self, x, peer, tag=0, *, async_op=False)
--

Sends `x` to rank `peer`, which receives it with the same tag.

Args:
    x: Contiguous array of any shape and dtype, with the buffer protocol or DLPack; it may be
        read-only. The call waits for the earlier work of a device array's stream.
    peer: The rank that receives; may be this one.
    tag: An int, 0 or more. Messages with the same tag arrive in the order in which they were
        sent.
    async_op: Return a `Work` at once; `x` must not be written until the `Work` is done.

Returns:
    None, or a `Work`. A large message has arrived when the operation is done; a small one may
    still be in transit.

Raises:
    UsageError: `x` is not such an array, `peer` is not a rank, or `tag` is not valid.
    CollectiveMismatchError: The count or dtype of the receive differs from that of a large
        message. For a small message the next operation raises.
    PeerDiedError: The peer's process ended, or it closed the communicator.
    TimeoutError: The peer did not receive the message before the deadline.

Cost: alpha + N beta; up to 64 KiB the call does not wait for the peer.)";

inline constexpr const char* kRecvDoc =
    R"(recv($self, x, peer=None, tag=0, *, async_op=False)
--

Receives into `x` the oldest message with this tag from rank `peer`.

Args:
    x: Contiguous writable array with the count and the dtype of the message; the shape may
        differ. The call waits for the earlier work of a device array's stream.
    peer: The rank that sends. None or pycoll.ANY_SOURCE: the rank whose message arrives
        first; `recv_any` and `Work.source` return it.
    tag: The sender's tag.
    async_op: Return a `Work` at once; `x` must not be used until the `Work` is done.

Returns:
    `x`, or a `Work`.

Raises:
    UsageError: `x` is not such an array, `peer` is not a rank, or `tag` is not valid.
    CollectiveMismatchError: The count or dtype of the message differs from that of `x`.
    PeerDiedError: The peer's process ended, or it closed the communicator. With any source:
        a rank's process ended, or all other ranks closed it.
    TimeoutError: No message arrived before the deadline.

Cost: alpha + N beta.)";

inline constexpr const char* kRecvAnyDoc =
    R"(recv_any($self, x, tag=0)
--

Receives into `x` the next message with this tag from any rank, and returns that rank.

Args:
    x: As for `recv`.
    tag: As for `recv`.

Returns:
    The rank that sent it, an int.

Raises:
    As `recv`.

Cost: alpha + N beta.)";

}  // namespace pycoll
