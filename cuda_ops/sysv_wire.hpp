// sysv_wire.hpp: FastDeploy's output messages on a System V queue, byte for byte, and the queue.
//
// A message is `long mtype` (always 1 on this wire) and a payload of fixed length per variant,
// whatever the batch. All payload words are 4 bytes: int32, scores IEEE float32.
//
//   plain            words[0] +-message id   [1] rows          [2+i] token of row i
//   topk             as plain; row i column j at 2 + stride * i + j; scores and ranks behind
//   speculate        [0] [1]                 [2+i] accepted    [258 + 6i + j] token j of row i
//   speculate_topk   [0] [1] flag 3|4        [2] rows          [3+i] accepted; a record per row
//
// Four generations of senders: g1 and g2 take their key from ftok(), g3 and g4 from custom_ftok();
// g4 packs the number of columns T into a header word of the two topk messages (rows | T << 16,
// flag | T << 8), and strides the topk columns by T instead of 21. g4 is as FastDeploy's own Python
// reader shows it; its senders' source was not at hand.
#pragma once

#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tp::sysv {

constexpr int32_t most_rows = 512, most_speculate_rows = 256, wire_columns = 21,
                  wire_draft_tokens = 6;
constexpr int32_t preempted = -9, recovery = -3;

struct PlainMessage {
  int32_t words[2 + most_rows];
};
struct TopkMessage {
  int32_t words[2 + most_rows * wire_columns];
  float scores[most_rows * wire_columns];
  int32_t ranks[most_rows];
};
struct SpeculateMessage {
  int32_t words[2 + most_speculate_rows + most_speculate_rows * wire_draft_tokens];
};
struct SpeculateTopkRow {
  int32_t tokens[wire_draft_tokens * wire_columns];
  float scores[wire_draft_tokens * wire_columns];
  int32_t ranks[wire_draft_tokens];
};
struct SpeculateTopkMessage {
  int32_t words[3 + most_rows];
  SpeculateTopkRow rows[most_rows];
  int32_t tail; // the sender's struct is aligned to 8, and the padding is sent
};
static_assert(sizeof(PlainMessage) == 2056 && sizeof(TopkMessage) == 88072);
static_assert(sizeof(SpeculateMessage) == 7176 && sizeof(SpeculateTopkMessage) == 530448);

enum class Variant : uint32_t { plain, topk, speculate, speculate_topk };

[[nodiscard]] constexpr uint64_t payload_bytes(Variant v) noexcept {
  switch (v) {
  case Variant::plain:
    return sizeof(PlainMessage);
  case Variant::topk:
    return sizeof(TopkMessage);
  case Variant::speculate:
    return sizeof(SpeculateMessage);
  case Variant::speculate_topk:
    break;
  }
  return sizeof(SpeculateTopkMessage);
}

// FastDeploy's own reader also takes a speculate_topk message without its tail.
[[nodiscard]] constexpr uint64_t shortest_payload(Variant v) noexcept {
  return payload_bytes(v) - (v == Variant::speculate_topk ? sizeof(int32_t) : 0);
}

[[nodiscard]] constexpr int32_t row_limit(Variant v) noexcept {
  return v == Variant::speculate ? most_speculate_rows : most_rows;
}

// ---------------------------------------------------------------- barriers

// A message of ours in the same queue, without a payload: it always fits, and what was sent before
// it is received before it. Its number is in its type.
constexpr int64_t barrier_base = int64_t{1} << 62;
[[nodiscard]] constexpr int64_t barrier_type(uint64_t number) noexcept {
  return barrier_base + static_cast<int64_t>(number);
}
[[nodiscard]] constexpr bool is_barrier(int64_t type) noexcept { return type >= barrier_base; }
[[nodiscard]] constexpr uint64_t barrier_number(int64_t type) noexcept {
  return static_cast<uint64_t>(type - barrier_base);
}

// ---------------------------------------------------------------- keys

// What a queue refused, with errno and in words.
class SysvError : public std::runtime_error {
public:
  SysvError(const std::string &what, int code)
      : std::runtime_error(what + ": " + std::strerror(code)), code(code) {}
  const int code;
};

enum class Generation : uint32_t { g1 = 1, g2, g3, g4 };

// The key of queue `id`. libc's ftok keeps 8 bits of the id: ports equal modulo 256 collide;
// custom_ftok keeps 20 bits, but 8 of the inode and 4 of the device. FastDeploy's fallback for a
// folder that is not there is the key -1, where all such processes meet; here it is an error.
[[nodiscard]] inline key_t queue_key(const std::string &folder, uint32_t id, Generation of) {
  struct stat about;
  if (stat(folder.c_str(), &about) != 0)
    throw SysvError("no key from folder " + folder, errno);
  const auto device = static_cast<uint64_t>(about.st_dev),
             inode = static_cast<uint64_t>(about.st_ino);
  const uint64_t key = of < Generation::g3
                           ? (id & 0xff) << 24 | (device & 0xff) << 16 | (inode & 0xffff)
                           : (device & 0xf) << 28 | (inode & 0xff) << 20 | (id & 0xfffff);
  if (key == 0) // IPC_PRIVATE: each process would get a queue of its own
    throw SysvError("folder " + folder + " and id " + std::to_string(id) + " give the key 0",
                    EINVAL);
  return static_cast<key_t>(static_cast<uint32_t>(key));
}

// ---------------------------------------------------------------- the queue

// Design: one handle on a queue by its kernel id. Every failure is an exception with errno, but for
// those that a caller waits out (no message, no room, a signal), which are values.
class Queue {
public:
  // Opens the queue of `key`; makes it, for its owner alone, when there is none.
  explicit Queue(key_t key) : key_(key) {
    id_ = msgget(key, IPC_CREAT | IPC_EXCL | 0600);
    is_created_ = id_ >= 0;
    if (id_ < 0 && errno == EEXIST)
      id_ = msgget(key, 0600);
    if (id_ < 0)
      throw SysvError("queue of key " + name(), errno);
  }
  Queue(key_t key, int id) : key_(key), id_(id) {}

  // The same in one system call, for an op, which opens its queue at every call and so cares little
  // who has made it.
  [[nodiscard]] static Queue open(key_t key) {
    Queue queue(key, msgget(key, IPC_CREAT | 0600));
    if (queue.id_ < 0)
      throw SysvError("queue of key " + queue.name(), errno);
    return queue;
  }

  [[nodiscard]] int id() const noexcept { return id_; }
  [[nodiscard]] key_t key() const noexcept { return key_; }
  [[nodiscard]] bool is_created() const noexcept { return is_created_; }

  [[nodiscard]] std::string name() const {
    char text[16];
    std::snprintf(text, sizeof(text), "0x%08x", static_cast<unsigned>(key_));
    return text;
  }

  [[nodiscard]] msqid_ds facts() const {
    msqid_ds about;
    if (msgctl(id_, IPC_STAT, &about) != 0)
      throw SysvError("queue of key " + name(), errno);
    return about;
  }

  // Lets the queue hold `bytes`; one that was made before the limit was raised keeps its old one.
  void raise_to(uint64_t bytes) {
    msqid_ds about = facts();
    about.msg_qbytes = bytes;
    if (msgctl(id_, IPC_SET, &about) != 0)
      throw SysvError("queue of key " + name() + ", room for " + std::to_string(bytes) + " bytes",
                      errno);
  }

  // 1: sent; 0: no room for it now, or a signal came.
  [[nodiscard]] bool send(const void *message, uint64_t bytes, bool wait) {
    if (msgsnd(id_, message, bytes, wait ? 0 : IPC_NOWAIT) == 0)
      return true;
    if (errno == EAGAIN || errno == EINTR)
      return false;
    throw SysvError("send of " + std::to_string(bytes) + " bytes to the queue of key " + name(),
                    errno);
  }

  // What a receive found: bytes of the payload, or why there are none.
  static constexpr int64_t nothing = -1, too_long = -2;
  [[nodiscard]] int64_t receive(void *message, uint64_t room, int flags) {
    const ssize_t got = msgrcv(id_, message, room, 0, flags);
    if (got >= 0)
      return got;
    if (errno == ENOMSG || errno == EINTR)
      return nothing;
    if (errno == E2BIG)
      return too_long;
    throw SysvError("receive from the queue of key " + name(), errno);
  }

  void remove() {
    if (msgctl(id_, IPC_RMID, nullptr) != 0 && errno != EINVAL && errno != EIDRM)
      throw SysvError("removal of the queue of key " + name(), errno);
  }

private:
  key_t key_;
  int id_ = -1;
  bool is_created_ = false;
};

} // namespace tp::sysv
