// What help(Communicator) says about send and recv. The first line is the signature, in the form
// that inspect.signature reads.
#pragma once

namespace pycoll {

inline constexpr const char* kSendDoc =
    R"(send($self, x, peer, tag=0, *, async_op=False)
--

Sends `x` to rank `peer`, which receives it with the same tag.

Args:
    x: Contiguous array of any shape and dtype, of the host or of a device (copied through host
        memory). Anything with the buffer protocol or DLPack; it may be read-only.
    peer: The rank that receives; may be this one.
    tag: An int, 0 or more. Messages of one tag arrive in the order in which they were sent.
    async_op: Return a `Work` at once; `x` must not be written until it is done.

Returns:
    None, or a `Work`. A small message may be on its way then; a large one has arrived.

Raises:
    UsageError: `x` is no such array, `peer` no rank, `tag` no tag.
    CollectiveMismatchError: The receive has another count or dtype, and the message was
        large; for a small one the next operation says so.
    PeerDiedError: The peer's process ended, or it closed the communicator.
    TimeoutError: Nobody received in time.

Cost: alpha + N beta; up to 64 KiB the peer need not be there.)";

inline constexpr const char* kRecvDoc =
    R"(recv($self, x, peer=None, tag=0, *, async_op=False)
--

Receives into `x` the oldest message with this tag from rank `peer`.

Args:
    x: Contiguous writable array with the count and the dtype of the message; the shape may
        differ. A device's array is filled when the call returns.
    peer: The rank that sends. None or pycoll.ANY_SOURCE: whichever comes first; `recv_any`
        and `Work.source` say which.
    tag: As the sender's.
    async_op: Return a `Work` at once; `x` must not be used until it is done.

Returns:
    `x`, or a `Work`.

Raises:
    UsageError: `x` is no such array, `peer` no rank, `tag` no tag.
    CollectiveMismatchError: The message has another count or dtype.
    PeerDiedError: The peer's process ended, or it closed the communicator; from any source:
        those of all other ranks.
    TimeoutError: No message came in time.

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
