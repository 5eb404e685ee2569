// Frames that have crashed a rank or changed its memory, or would without a check, one by one. Each
// attack returns what is wrong, or nothing.
#pragma once

#include <string>
#include <vector>

#include "executor/links.h"
#include "frame_sender.h"

namespace pycoll {

struct Attack {
  const char* name;
  std::string (*run)(FrameWorld& world, FrameSender& one, FrameSender& two);
  bool over_mpi = false;  // else over TCP
};

inline std::string closes(const FrameWorld& world, int rank) {
  return world.is_closed(rank) ? "" : "the link to rank " + std::to_string(rank) + " is open";
}
inline std::string stays(const FrameWorld& world, int rank) {
  return world.is_closed(rank) ? "the link to rank " + std::to_string(rank) + " is closed" : "";
}
inline void put(std::string& bytes, size_t at, const void* value, size_t size) {
  bytes.replace(at, size, static_cast<const char*>(value), size);
}
/// Sends a record of rank 1 that has passed through `change`.
template <class Change>
std::string send_record(FrameWorld& world, FrameSender& one, Change&& change) {
  CallRecord record = FrameWorld::record(1);
  world.segment().publish(1, record);
  Frame frame = one.state(FrameKind::kTell);
  const size_t at =
      frame.payload.find(std::string(reinterpret_cast<const char*>(&record), sizeof(record)));
  if (at == frame.payload.npos) return "the state does not contain the record";
  change(record);
  record.sequence = 2;
  put(frame.payload, at, &record, sizeof(record));
  one.send(frame);
  return closes(world, 1);
}
/// Sends frames to rank 1, which reads none of them, until its link ends.
inline std::string send_unread(FrameWorld& world) {
  world.network().stop_reading(1);
  size_t nbytes = 0;
  while (!world.is_closed(1) && nbytes < 2 * kMaxUnsentBytes) {
    nbytes += world.send_copy(1, kMaxPayloadBytes);
    world.step();
  }
  const bool is_full = world.state_of(1) == HostLinks::Peer::kFull && nbytes > kMaxUnsentBytes / 2;
  return is_full ? stays(world, 2) : "after " + std::to_string(nbytes >> 20) + " MiB: no end";
}
/// Sends slots to rank 1, which reads them late, and changes each payload at once. A socket takes
/// the first ones, a part of another one, and no more.
inline std::string send_changing(FrameWorld& world, bool to_memory) {
  constexpr size_t kBytes = 64 << 10;
  constexpr int kNumFrames = 8;
  world.network().received(1);  // what the world has sent by itself
  std::vector<std::byte> payload(kBytes);
  std::vector<std::byte> memory(kNumFrames * kBytes);
  for (int i = 0; i < kNumFrames; ++i) {
    payload.assign(kBytes, std::byte(i));
    world.send_slot(1, payload, to_memory ? Rest::copied_to(&memory[i * kBytes]) : Rest::copied());
    payload.assign(kBytes, std::byte{0xff});
  }
  std::string bytes;
  for (std::string more; !(more = world.network().received(1)).empty(); world.step()) bytes += more;
  constexpr size_t kFrameBytes = sizeof(FrameHeader) + kBytes;
  if (bytes.size() != kNumFrames * kFrameBytes) return std::to_string(bytes.size()) + " bytes";
  for (int i = 0; i < kNumFrames; ++i) {
    const std::string sent(kBytes, static_cast<char>(i));
    if (bytes.compare(i * kFrameBytes + sizeof(FrameHeader), kBytes, sent) != 0) {
      return "frame " + std::to_string(i) + " has changed";
    }
  }
  return stays(world, 1);
}
/// Sends slots, long and short ones in turn, and reads them, some at a time.
inline std::string send_slots(FrameWorld& world, FrameSender& one) {
  constexpr size_t kLong = 50'000;
  constexpr int kUnread = 5;
  Links links(world.segment(), 0, ProtocolKind::kSimple);
  RecvEnd& reader = links.recv[1];
  std::vector<std::string> sent;
  for (int i = 0; i < 4 * kMaxSlots; ++i) {
    Frame frame = one.slot(ProtocolKind::kSimple, i % 3 == 0 ? 100 : kLong);
    frame.payload.assign(frame.payload.size(), static_cast<char>('a' + i % 26));
    sent.push_back(frame.payload);
    one.send(frame);
    if (sent.size() < kUnread) continue;
    for (const std::string& payload : sent) {
      if (!reader.has_full_slot()) return "no slot has come before " + std::to_string(i);
      if (std::memcmp(reader.place(payload.size(), {}), payload.data(), payload.size()) != 0) {
        return "a slot before " + std::to_string(i) + " has other bytes";
      }
      reader.release();
      world.proxy()->released(ProtocolKind::kSimple, 1);
    }
    sent.clear();
  }
  return stays(world, 1);
}
/// Sends slots that rank 0 expects in an array, and others; a part of one comes too late.
inline std::string send_expected(FrameWorld& world, FrameSender& one, bool in_parts) {
  constexpr size_t kLong = 50'000;
  constexpr uint32_t kMark = 1;
  Links links(world.segment(), 0, ProtocolKind::kSimple);
  RecvEnd& reader = links.recv[1];
  GuardedArray array(kLong);
  const auto expect = [&](size_t nbytes, uint64_t sequence, uint32_t mark) {
    world.proxy()->expect(1, {array.data(), nbytes, sequence, mark});
  };
  const auto read_next = [&](const Frame& frame, bool is_there) -> std::string {
    if (!reader.has_full_slot()) return "a slot has not come";
    const std::byte* at = reader.place(kLong, {});
    if ((at == array.data()) != is_there) return "a slot is in the wrong place";
    if (std::memcmp(at, frame.payload.data(), kLong) != 0) return "a slot has other bytes";
    if (!array.is_intact(/*whole=*/!is_there)) return "bytes have changed that no slot has";
    reader.release();
    world.proxy()->expect_no_more(1);
    world.proxy()->released(ProtocolKind::kSimple, 1);
    array.clear();
    return "";
  };
  const auto send_next = [&](bool is_there) {
    const Frame frame = one.slot(ProtocolKind::kSimple, kLong);
    one.send(frame);
    return read_next(frame, is_there);
  };
  std::string wrong;
  for (int i = 0; i < 2 * kMaxSlots && wrong.empty(); ++i) {
    const uint64_t sequence = reader.sequence();
    if (i % 4 == 0) expect(kLong, sequence, kMark);
    if (i % 4 == 1) expect(kLong, sequence + 1, kMark);  // of a later message
    if (i % 4 == 2) expect(kLong, sequence, kMark + 1);  // of another call
    if (i % 4 == 3) expect(kLong - 1, sequence, kMark);
    wrong = send_next(/*is_there=*/i % 4 == 0);
  }
  if (!wrong.empty() || !in_parts) return wrong.empty() ? stays(world, 1) : wrong;
  const HostLinks::RunningCall running(world.proxy()->host_links());
  // The next one is told where it goes although its header came with the end of the last one.
  const Frame first = one.slot(ProtocolKind::kSimple, kLong);
  one.count(first);
  const Frame second = one.slot(ProtocolKind::kSimple, kLong);
  one.count(second);
  const std::string bytes = second.bytes();
  expect(kLong, reader.sequence(), kMark);
  world.deliver_once(1, first.bytes() + bytes.substr(0, 200));
  wrong = read_next(first, /*is_there=*/true);
  if (!wrong.empty()) return wrong;
  expect(kLong, reader.sequence(), kMark);
  world.deliver_once(1, "");
  if (array.is_intact(/*whole=*/true)) return "a second slot does not begin in the array";
  // A call that has failed gives its array back.
  world.proxy()->expect_no_more(1);
  array.clear();
  world.deliver(1, bytes.substr(200));
  if (!array.is_intact(/*whole=*/true)) return "an array has changed that was given back";
  return stays(world, 1);
}
/// Sends a frame behind a long slot: it waits for the slot's reader, while a collective runs.
inline std::string send_behind_slot(FrameWorld& world, FrameSender& one) {
  const auto has_joined = [&] { return world.proxy()->missing() == std::vector<int>{2}; };
  {
    const HostLinks::RunningCall running(world.proxy()->host_links());
    const Frame slot = one.slot(ProtocolKind::kSimple, 50'000);
    world.deliver_once(1, slot.bytes() + one.frame(FrameKind::kJoin).bytes());
    if (has_joined()) return "the frame behind a long slot has not waited";
  }
  return has_joined() ? stays(world, 1) : "the end of a collective leaves a frame behind a slot";
}
/// Announces the large message from rank 1 and returns how rank 0 wants its parts.
inline FrameSender::Pull begin_parts(FrameSender& sender, size_t nbytes) {
  sender.send(sender.announce(nbytes, 2));
  return sender.pulls.empty() ? FrameSender::Pull{} : sender.pulls.front();
}

inline const std::vector<Attack>& attacks() {
  using World = FrameWorld;
  using Sender = FrameSender;
  static const std::vector<Attack> all = {
      {"payloads that change while the link keeps copies",
       [](World& world, Sender&, Sender&) { return send_changing(world, /*to_memory=*/false); }},
      {"payloads that change while their slots keep copies",
       [](World& world, Sender&, Sender&) { return send_changing(world, /*to_memory=*/true); }},
      {"unknown kind",
       [](World& world, Sender& one, Sender&) {
         one.send(one.frame(static_cast<FrameKind>(99)));
         return closes(world, 1);
       }},
      {"unknown kind of an unknown group",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.frame(static_cast<FrameKind>(99));
         frame.header.group = 7;
         one.send(frame);
         return closes(world, 1);
       }},
      {"heartbeat with a payload",
       [](World& world, Sender& one, Sender&) {
         one.send(one.frame(FrameKind::kHeartbeat, "x"));
         return closes(world, 1);
       }},
      {"slot of an unknown protocol without a payload",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.slot(ProtocolKind::kSimple, 0);
         frame.header.protocol = 200;
         frame.header.sequence = 1;
         one.send(frame);
         return closes(world, 1);
       }},
      {"slot without a payload before its turn",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.slot(ProtocolKind::kSimple, 0);
         frame.header.sequence = 5;
         one.send(frame);
         return closes(world, 1);
       }},
      {"slots without a payload beyond the ring",
       [](World& world, Sender& one, Sender&) {
         for (int i = 0; i <= kMaxSlots; ++i) one.send(one.slot(ProtocolKind::kSimple, 0));
         return closes(world, 1);
       }},
      {"lines without a payload",
       [](World& world, Sender& one, Sender&) {
         one.send(one.frame(FrameKind::kLines));
         return closes(world, 1);
       }},
      {"header with fewer lines than the frame",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.eager(3000, 1);
         frame.payload[20] = 0;  // MessageHeader::num_lines
         one.send(frame);
         return closes(world, 1);
       }},
      {"header with more lines than the frame",
       [](World& world, Sender& one, Sender&) {
         MessageHeader header = Sender::message(MessageKind::kEager, 24, 0);
         header.num_lines = 60'000;
         one.send(one.lines(header));
         return closes(world, 1);
       }},
      {"skip that does not end at the ring's end",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.skip();
         const uint16_t lines = 9;
         put(frame.payload, 20, &lines, sizeof(lines));
         one.send(frame);
         return closes(world, 1);
       }},
      {"lines that leave no room for the flag behind them",
       [](World& world, Sender& one, Sender&) {
         const uint64_t total = world.segment().mailbox(1, 0).num_lines;
         const size_t body = 32 << 10;
         // Nothing matches these messages, and only a pending operation has them read.
         while (one.has_room(1 + body / 64)) {
           const Frame frame = one.lines(Sender::message(MessageKind::kEager, body, 70, body),
                                         std::string(body, 'e'));
           world.network().received(1);
           size_t sent = 0;
           if (!world.network().send(1, frame.bytes(), &sent)) return std::string("no room");
           one.count(frame);
           world.only_poll();
         }
         const uint64_t rest = (total - one.lines_out() % total - 1) * 64;
         world.network().received(1);
         size_t sent = 0;
         world.network().send(
             1,
             one.lines(Sender::message(MessageKind::kEager, rest, 70, rest), std::string(rest, 'e'))
                 .bytes(),
             &sent);
         world.only_poll();
         return closes(world, 1);
       }},
      {"eager message of 2^46 bytes that no receive matches",
       [](World& world, Sender& one, Sender&) {
         one.send(one.lines(Sender::message(MessageKind::kEager, uint64_t{1} << 46, 77)));
         return closes(world, 1);
       }},
      {"eager message with more bytes than its lines",
       [](World& world, Sender& one, Sender&) {
         one.send(one.lines(Sender::message(MessageKind::kEager, 100'000, 2)));
         return closes(world, 1);
       }},
      {"eager message of an unknown dtype",
       [](World& world, Sender& one, Sender&) {
         MessageHeader header = Sender::message(MessageKind::kEager, 24, 0);
         header.dtype = 99;
         one.send(one.lines(header));
         return closes(world, 1);
       }},
      {"eager messages beyond the budget",
       [](World& world, Sender& one, Sender&) {
         for (int i = 0; i < 200 && !world.is_closed(1); ++i) {
           const size_t nbytes = 30'000;
           if (one.lines_to_end() < 1 + (nbytes + 63) / 64) one.send(one.skip());
           one.send(one.eager(nbytes, 78));
         }
         return closes(world, 1);
       }},
      {"part with an offset of 2^46",
       [](World& world, Sender& one, Sender&) {
         const Sender::Pull pull = begin_parts(one, 100'000);
         one.send(one.part(pull.send_id, pull.recv_id, uint64_t{1} << 46, 64));
         return closes(world, 1);
       }},
      {"part before the start of the array",
       [](World& world, Sender& one, Sender&) {
         const Sender::Pull pull = begin_parts(one, 100'000);
         one.send(one.part(pull.send_id, pull.recv_id, static_cast<uint64_t>(-64), 64));
         return closes(world, 1);
       }},
      {"part beyond the end of the array",
       [](World& world, Sender& one, Sender&) {
         const Sender::Pull pull = begin_parts(one, 100'000);
         for (size_t at = 0; at < 90'000; at += 30'000) {
           one.send(one.part(pull.send_id, pull.recv_id, at, 30'000));
         }
         one.send(one.part(pull.send_id, pull.recv_id, 90'000, 30'000));
         return closes(world, 1);
       }},
      {"part for a receive from another rank",
       [](World& world, Sender& one, Sender& two) {
         const Sender::Pull pull = begin_parts(two, 70'000);
         one.send(one.part(pull.send_id, pull.recv_id, 0, 64));
         const Operation& receive = operations()[kReceiveFrom2];
         const std::string changed =
             receive.array->is_intact(true) ? "" : "a receive from rank 2 has changed";
         return changed + closes(world, 1) + stays(world, 2);
       }},
      {"part of an unknown receive",
       [](World& world, Sender& one, Sender&) {
         one.send(one.part(1, 12'345, 0, 64));
         return closes(world, 1);
       }},
      {"answer to a send to another rank",
       [](World& world, Sender& one, Sender& two) {
         two.receive();
         if (two.sends_to_me.empty()) return std::string("rank 0 has announced nothing");
         one.send(one.answer(MessageKind::kTaken, two.sends_to_me.front()));
         const bool over = operations()[kLargeSendTo2].op.is_over();
         return closes(world, 1) + stays(world, 2) + (over ? "; the send is over" : "");
       }},
      {"two requests for the parts of one send",
       [](World& world, Sender& one, Sender&) {
         one.receive();
         const uint64_t send = one.sends_to_me.front();
         // With a full mailbox, rank 0 still has parts to send.
         for (int i = 0; i < 4; ++i) world.post_extra_send(1, 60'000);
         one.send(one.answer(MessageKind::kPull, send));
         one.send(one.answer(MessageKind::kPull, send));
         for (int i = 0; i < 8; ++i) one.send(one.mail());
         return closes(world, 1);
       }},
      {"send that is taken while its parts are sent",
       [](World& world, Sender& one, Sender&) {
         one.receive();
         const uint64_t send = one.sends_to_me.front();
         for (int i = 0; i < 4; ++i) world.post_extra_send(1, 60'000);
         one.send(one.answer(MessageKind::kPull, send));
         one.send(one.answer(MessageKind::kTaken, send));
         const bool over = operations()[kLargeSend].op.is_over();
         one.send(one.mail());
         one.send(one.mail());
         return over && world.is_closed(1) ? "the send is over" : closes(world, 1);
       }},
      {"head beyond what was posted",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.frame(FrameKind::kCredit);
         frame.header.heads[0] = 1;
         one.send(frame);
         return closes(world, 1);
       }},
      {"head of a mailbox beyond what was sent",
       [](World& world, Sender& one, Sender&) {
         one.receive();
         Frame frame = one.mail();
         frame.header.word += 100;
         one.send(frame);
         return closes(world, 1);
       }},
      {"delivered bytes beyond what was sent",
       [](World& world, Sender& one, Sender&) {
         one.receive();
         Frame frame = one.mail();
         frame.header.more += 1;
         one.send(frame);
         return closes(world, 1);
       }},
      {"frame of a rank that is no member",
       [](World& world, Sender&, Sender&) {
         Sender four(world, 4);
         four.send(four.frame(FrameKind::kLeft));
         return closes(world, 4) + stays(world, 1);
       }},
      {"early join of a rank that is no member",
       [](World& world, Sender& one, Sender&) {
         world.drop_proxy();
         Sender four(world, 4);
         four.send(four.frame(FrameKind::kJoin));
         one.send(one.frame(FrameKind::kJoin));
         world.make_proxy();
         return stays(world, 1) +
                (world.proxy()->missing() == std::vector<int>{2} ? "" : "; rank 1 has not joined");
       }},
      {"joins of very many communicators",
       [](World& world, Sender& one, Sender&) {
         for (uint64_t group = 1; group < 3000 && !world.is_closed(1); ++group) {
           Frame frame = one.frame(FrameKind::kJoin);
           frame.header.group = group;
           one.send(frame);
         }
         return closes(world, 1);
       }},
      {"payload whose header came before its communicator",
       [](World& world, Sender& one, Sender&) {
         const std::string bytes = one.eager(24, 0).bytes();
         world.drop_proxy();
         world.deliver(1, bytes.substr(0, sizeof(FrameHeader)));
         world.make_proxy();
         world.deliver(1, bytes.substr(sizeof(FrameHeader)));
         const bool arrived = operations()[0].op.is_over() ||
                              load_acquire(world.segment().mailbox(1, 0).lines->flag) != 0;
         return std::string(arrived ? "a message without a checked header has arrived" : "");
       }},
      {"long message of a communicator that closes meanwhile",
       [](World& world, Sender& one, Sender&) {
         const std::string bytes = one.slot(ProtocolKind::kSimple, 100'000).bytes();
         world.deliver(1, bytes.substr(0, bytes.size() / 2));
         world.drop_proxy();  // and the memory of the message
         world.deliver(1, bytes.substr(bytes.size() / 2));
         one.send(one.frame(FrameKind::kJoin));
         world.make_proxy();
         return stays(world, 1) +
                (world.proxy()->missing() == std::vector<int>{2} ? "" : "; rank 1 has not joined");
       }},
      {"record with 200 dimensions",
       [](World& world, Sender& one, Sender&) {
         return send_record(world, one, [](CallRecord& record) { record.num_dims = 200; });
       }},
      {"record of an unknown collective",
       [](World& world, Sender& one, Sender&) {
         return send_record(world, one, [](CallRecord& record) { record.collective = 99; });
       }},
      {"record of an unknown dtype",
       [](World& world, Sender& one, Sender&) {
         return send_record(world, one, [](CallRecord& record) { record.dtype = 255; });
       }},
      {"record of an unknown op",
       [](World& world, Sender& one, Sender&) {
         return send_record(world, one, [](CallRecord& record) { record.op = 255; });
       }},
      {"state of a call numbered 2^64 - 1",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.state(FrameKind::kTell);
         const uint64_t newest = ~uint64_t{0};
         put(frame.payload, 12, &newest, sizeof(newest));
         one.send(frame);
         return closes(world, 1);
       }},
      {"requests for states by a rank that does not read",
       [](World& world, Sender& one, Sender&) {
         constexpr int kRequests = 10'000;
         const std::string request = one.state(FrameKind::kAsk).bytes();
         for (int i = 0; i < kRequests; ++i) world.deliver(1, request);
         for (int i = 0; i < 1000; ++i) {
           one.receive();
           world.step();
         }
         const int answers = one.num_tells;
         const bool good = answers > 0 && answers < kRequests / 2;
         return stays(world, 1) + (good ? "" : "; answers: " + std::to_string(answers));
       }},
      {"name of continuation bytes",
       [](World& world, Sender& one, Sender&) {
         WireWriter bytes;
         bytes.number(uint64_t{1}).number(int32_t{1}).number(uint64_t{0}).number(uint64_t{0});
         bytes.number(int64_t{0}).number(uint32_t{1}).number(uint16_t{1});
         bytes.text(std::string(121, '\x80')).number(uint32_t{0});
         one.send(one.frame(FrameKind::kTell, bytes.bytes()));
         const std::string_view kept = world.segment().names(1).read(1);
         const bool plain = kept.find_first_not_of('?') == kept.npos;
         return stays(world, 1) + (plain ? "" : "; the name is no text");
       }},
      {"name that a terminal would obey",
       [](World& world, Sender& one, Sender&) {
         WireWriter bytes;
         bytes.number(uint64_t{1}).number(int32_t{1}).number(uint64_t{0}).number(uint64_t{0});
         bytes.number(int64_t{0}).number(uint32_t{1}).number(uint16_t{1});
         bytes.text("\x1b[2J\xc2\x9b caf\xc3\xa9 \xed\xa0\x80").number(uint32_t{0});
         one.send(one.frame(FrameKind::kTell, bytes.bytes()));
         const std::string_view kept = world.segment().names(1).read(1);
         return stays(world, 1) + (kept == "?[2J?? caf\xc3\xa9 ???" ? "" : std::string(kept));
       }},
      {"failure without a code",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.failure(FailureCode::kAborted);
         frame.payload[0] = 0;
         one.send(frame);
         return closes(world, 1);
       }},
      {"failure of an unknown code",
       [](World& world, Sender& one, Sender&) {
         one.send(one.failure(static_cast<FailureCode>(77)));
         return closes(world, 1);
       }},
      {"mismatch of an unknown dtype",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.failure(FailureCode::kMessageMismatch);
         MessageMismatch mismatch;
         mismatch.sent_dtype = 255;
         const size_t behind = 4 + sizeof(MessageRecord) + 4;  // the record and no names
         put(frame.payload, frame.payload.size() - behind - sizeof(mismatch), &mismatch,
             sizeof(mismatch));
         one.send(frame);
         return closes(world, 1);
       }},
      {"message record numbered 2^64 - 1",
       [](World& world, Sender& one, Sender&) {
         Frame frame = one.failure(FailureCode::kTimeout);
         const uint64_t number = ~uint64_t{0};
         put(frame.payload, frame.payload.size() - 4 - sizeof(MessageRecord), &number,
             sizeof(number));
         one.send(frame);
         return closes(world, 1);
       }},
      {"slots that are read late",
       [](World& world, Sender& one, Sender&) { return send_slots(world, one); }},
      {"slots over MPI that are read late",
       [](World& world, Sender& one, Sender&) { return send_slots(world, one); },
       /*over_mpi=*/true},
      {"slots that are expected in an array",
       [](World& world, Sender& one, Sender&) { return send_expected(world, one, true); }},
      {"slots over MPI that are expected in an array",
       [](World& world, Sender& one, Sender&) { return send_expected(world, one, false); },
       /*over_mpi=*/true},
      {"frame behind a long slot that a collective reads",
       [](World& world, Sender& one, Sender&) { return send_behind_slot(world, one); }},
      {"frames that a rank does not read",
       [](World& world, Sender&, Sender&) { return send_unread(world); }},
      {"frames over MPI that a rank does not read",
       [](World& world, Sender&, Sender&) { return send_unread(world); },
       /*over_mpi=*/true},
  };
  return all;
}

}  // namespace pycoll
