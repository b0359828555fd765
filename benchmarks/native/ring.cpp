// ring.cpp: what benchmarks/ring.py measures in C++: the ring of cuda_ops/ring.hpp, by loops in C++
// and by calls from Python, and a floor to hold it against: memcpy, and the least ring that two
// cursors and a futex allow. The floor is written for this file and shares no code with the ring.
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ring.hpp"

namespace py = pybind11;

namespace {

constexpr tp::Patience patience{1000, 100'000'000}; // as the roles wait; a stop is seen in 0.1 s
constexpr uint64_t kLine = 128;                     // the prefetcher pairs cache lines

// ---------------------------------------------------------------- ours

// A step of one row and `payload` bytes: the slot's header is written as the reader does.
[[nodiscard]] tp_sizes sizes_of(uint32_t consumers, uint32_t slots, uint64_t payload) {
  tp_sizes s{};
  s.max_num_seqs = s.max_draft_tokens = s.num_decoders = 1;
  s.num_decoders = consumers;
  s.ring_slots = slots;
  s.output_slots = s.source_slots = 2;
  s.command_slots = s.max_eos_ids = 1;
  s.block_size = 16;
  s.max_request_id_bytes = 8;
  s.max_pooling_floats = static_cast<uint32_t>(payload / 4);
  return s;
}

class Ours {
public:
  Ours(uint8_t *memory, uint32_t consumers, uint32_t slots, uint64_t payload)
      : core(memory, sizes_of(consumers, slots, payload)), payload(payload) {}

  [[nodiscard]] static uint64_t bytes(uint32_t consumers, uint32_t slots, uint64_t payload) {
    return tp::CorePlan(sizes_of(consumers, slots, payload)).end;
  }

  [[nodiscard]] uint64_t offset(uint64_t slot) const noexcept {
    return core.plan.slots + slot * core.slot_size + sizeof(tp_step);
  }

  class Sender {
  public:
    explicit Sender(const Ours &ring) : ring_(ring), producer_(ring.core) {}
    [[nodiscard]] bool try_claim() noexcept { return (slot_ = producer_.try_claim()) != nullptr; }
    void claim() noexcept {
      while (slot_ == nullptr)
        slot_ = producer_.claim(patience);
    }
    [[nodiscard]] uint8_t *place() const noexcept {
      return tp::column<uint8_t>(*slot_, sizeof(tp_step));
    }
    [[nodiscard]] uint64_t number() const noexcept {
      return producer_.cursor() & (ring_.core.sizes.ring_slots - 1);
    }
    void publish() noexcept {
      producer_.publish();
      slot_ = nullptr;
    }

  private:
    const Ours &ring_;
    tp::Producer producer_;
    tp_step *slot_ = nullptr;
  };

  class Receiver {
  public:
    Receiver(const Ours &ring, uint32_t k)
        : ring_(ring), bell_(ring.core.role(TP_ROLE_DECODER + k).bell), consumer_(ring.core, k, 0) {
    }
    [[nodiscard]] bool try_poll() noexcept { return (slot_ = consumer_.try_poll()) != nullptr; }
    void poll() noexcept {
      while (slot_ == nullptr)
        tp::wait_for(bell_, TP_WAIT_INPUT, patience, [this]() noexcept { return try_poll(); });
    }
    [[nodiscard]] const uint8_t *place() const noexcept {
      return tp::column<uint8_t>(*slot_, sizeof(tp_step));
    }
    [[nodiscard]] uint64_t number() const noexcept {
      return consumer_.next() & (ring_.core.sizes.ring_slots - 1);
    }
    void release() noexcept {
      consumer_.release(consumer_.next() + 1);
      slot_ = nullptr;
    }

  private:
    const Ours &ring_;
    tp_bell &bell_;
    tp::Consumer consumer_;
    const tp_step *slot_ = nullptr;
  };

  const tp::Core core;
  const uint64_t payload;
};

// ---------------------------------------------------------------- the floor

// A word on a line of its own, and how many sleep until it moves.
struct alignas(kLine) Mark {
  std::atomic<uint32_t> at{0};
  std::atomic<uint32_t> sleepers{0};

  void store(uint32_t value) noexcept {
    at.store(value); // seq_cst: it is stored before `sleepers` is looked at
    if (sleepers.load() != 0)
      tp::futex_wake(reinterpret_cast<uint32_t &>(at));
  }

  template <class Moved> void wait(Moved &&moved) noexcept {
    const uint64_t begun = tp::now_ns();
    while (!moved() && tp::now_ns() - begun < patience.spin_ns)
      tp::pause();
    for (int yields = 0; yields < 16 && !moved(); ++yields)
      sched_yield();
    while (!moved()) {
      sleepers.fetch_add(1);
      const uint32_t seen = at.load();
      if (!moved())
        tp::futex_wait(reinterpret_cast<uint32_t &>(at), seen, patience.timeout_ns);
      sleepers.fetch_sub(1);
    }
  }
};

// Cursors count modulo 2^32; nothing else is kept: no heartbeat, no stamps, no counters.
class Floor {
public:
  Floor(uint8_t *memory, uint32_t consumers, uint32_t slots, uint64_t payload)
      : head(reinterpret_cast<Mark *>(memory)), tails(head + 1),
        slots_(memory + (1 + consumers) * sizeof(Mark)), stride_(tp::align_up(payload, kLine)),
        consumers(consumers), slots(slots), payload(payload) {}

  [[nodiscard]] static uint64_t bytes(uint32_t consumers, uint32_t slots, uint64_t payload) {
    return (1 + consumers) * sizeof(Mark) + slots * tp::align_up(payload, kLine);
  }

  [[nodiscard]] uint8_t *slot(uint32_t sequence) const noexcept {
    return slots_ + (sequence & (slots - 1)) * stride_;
  }

  class Sender {
  public:
    explicit Sender(const Floor &ring) : ring_(ring) {}
    [[nodiscard]] bool try_claim() noexcept {
      while (slowest_ < ring_.consumers && has_room(slowest_))
        ++slowest_;
      return slowest_ == ring_.consumers;
    }
    void claim() noexcept {
      while (!try_claim())
        ring_.tails[slowest_].wait([this]() noexcept { return has_room(slowest_); });
    }
    [[nodiscard]] uint8_t *place() const noexcept { return ring_.slot(next_); }
    void publish() noexcept {
      ring_.head->store(++next_);
      slowest_ = 0;
    }

  private:
    [[nodiscard]] bool has_room(uint32_t k) const noexcept {
      return next_ - ring_.tails[k].at.load() < ring_.slots;
    }
    const Floor &ring_;
    uint32_t next_ = 0, slowest_ = 0;
  };

  class Receiver {
  public:
    Receiver(const Floor &ring, uint32_t k) : ring_(ring), tail_(ring.tails[k]) {}
    [[nodiscard]] bool try_poll() const noexcept { return ring_.head->at.load() != next_; }
    void poll() noexcept {
      ring_.head->wait([this]() noexcept { return try_poll(); });
    }
    [[nodiscard]] const uint8_t *place() const noexcept { return ring_.slot(next_); }
    void release() noexcept { tail_.store(++next_); }

  private:
    const Floor &ring_;
    Mark &tail_;
    uint32_t next_ = 0;
  };

  Mark *const head, *const tails;

private:
  uint8_t *const slots_;
  const uint64_t stride_;

public:
  const uint32_t consumers, slots;
  const uint64_t payload;
};

// ---------------------------------------------------------------- loops in C++

template <class Ring> void put(typename Ring::Sender &sender, const uint8_t *from, uint64_t bytes) {
  if (!sender.try_claim())
    sender.claim();
  std::memcpy(sender.place(), from, bytes);
  sender.publish();
}

template <class Ring> void get(typename Ring::Receiver &receiver, uint8_t *to, uint64_t bytes) {
  if (!receiver.try_poll())
    receiver.poll();
  std::memcpy(to, receiver.place(), bytes);
  receiver.release();
}

template <class Ring> class Sender {
public:
  explicit Sender(const Ring &ring) : ring_(ring), sender_(ring), from_(ring.payload, 1) {}

  // Sends `count` payloads.
  void send_many(uint64_t count) {
    const py::gil_scoped_release release;
    while (count-- > 0)
      put<Ring>(sender_, from_.data(), from_.size());
  }

  // From Python, the copy API: one payload.
  void send(py::handle payload) {
    Py_buffer view;
    if (PyObject_GetBuffer(payload.ptr(), &view, PyBUF_SIMPLE) != 0)
      throw py::error_already_set();
    wait();
    std::memcpy(sender_.place(), view.buf, std::min<uint64_t>(view.len, ring_.payload));
    sender_.publish();
    PyBuffer_Release(&view);
  }

  // From Python, the view API: the number of the slot to fill, then publish().
  uint64_t claim() {
    wait();
    return sender_.number();
  }
  void publish() { sender_.publish(); }

  template <class> friend class Receiver;

private:
  void wait() {
    if (sender_.try_claim())
      return;
    const py::gil_scoped_release release;
    sender_.claim();
  }

  const Ring &ring_;
  typename Ring::Sender sender_;
  std::vector<uint8_t> from_;
};

template <class Ring> class Receiver {
public:
  Receiver(const Ring &ring, uint32_t k) : ring_(ring), receiver_(ring, k), to_(ring.payload) {}

  // Receives `count` payloads.
  void receive_many(uint64_t count) {
    const py::gil_scoped_release release;
    while (count-- > 0)
      get<Ring>(receiver_, to_.data(), to_.size());
  }

  // Sends through `out` and waits for the answer here; returns nanoseconds of each round.
  std::vector<uint64_t> ping(Sender<Ring> &out, uint64_t count, uint64_t gap_ns) {
    const py::gil_scoped_release release;
    std::vector<uint64_t> took(count);
    for (uint64_t &t : took) {
      if (gap_ns != 0) {
        const timespec gap{0, static_cast<long>(gap_ns)};
        nanosleep(&gap, nullptr);
      }
      const uint64_t begun = tp::now_ns();
      put<Ring>(out.sender_, out.from_.data(), out.from_.size());
      get<Ring>(receiver_, to_.data(), to_.size());
      t = tp::now_ns() - begun;
    }
    return took;
  }

  // Answers `count` payloads.
  void pong(Sender<Ring> &out, uint64_t count) {
    const py::gil_scoped_release release;
    while (count-- > 0) {
      get<Ring>(receiver_, to_.data(), to_.size());
      put<Ring>(out.sender_, to_.data(), to_.size());
    }
  }

  // From Python, the copy API: one payload into a writable buffer.
  void receive_into(py::handle to) {
    Py_buffer view;
    if (PyObject_GetBuffer(to.ptr(), &view, PyBUF_WRITABLE) != 0)
      throw py::error_already_set();
    wait();
    std::memcpy(view.buf, receiver_.place(), std::min<uint64_t>(view.len, ring_.payload));
    receiver_.release();
    PyBuffer_Release(&view);
  }

  // From Python, the view API: the number of the slot to read in place, then release().
  uint64_t poll() {
    wait();
    return receiver_.number();
  }
  void release() { receiver_.release(); }

private:
  void wait() {
    if (receiver_.try_poll())
      return;
    const py::gil_scoped_release release;
    receiver_.poll();
  }

  const Ring &ring_;
  typename Ring::Receiver receiver_;
  std::vector<uint8_t> to_;
};

// Bytes per second of memcpy from one buffer of `bytes` into many, and out of them `copies - 1`
// times: what a hop through shared memory cannot go below, in one process.
double memcpy_speed(uint64_t bytes, uint32_t slots, uint32_t copies, uint64_t count) {
  const py::gil_scoped_release release;
  std::vector<uint8_t> from(bytes, 1), ring(bytes * slots, 2), to(bytes, 3);
  for (uint64_t warm = 0; warm < slots; ++warm)
    std::memcpy(&ring[warm * bytes], from.data(), bytes);
  const uint64_t begun = tp::now_ns();
  for (uint64_t i = 0; i < count; ++i) {
    uint8_t *slot = &ring[i % slots * bytes];
    std::memcpy(slot, from.data(), bytes);
    asm volatile("" : : "r"(slot) : "memory"); // the compiler must not drop a copy
    for (uint32_t c = 1; c < copies; ++c) {
      std::memcpy(to.data(), slot, bytes);
      asm volatile("" : : "r"(to.data()) : "memory");
    }
  }
  return static_cast<double>(count * bytes) * 1e9 / static_cast<double>(tp::now_ns() - begun);
}

// ---------------------------------------------------------------- Python

uint8_t *memory_of(const py::buffer &buffer, uint64_t needed) {
  const py::buffer_info info = buffer.request(true);
  if (static_cast<uint64_t>(info.size * info.itemsize) < needed)
    throw py::value_error("the buffer has " + std::to_string(info.size * info.itemsize) +
                          " bytes, needed are " + std::to_string(needed));
  return static_cast<uint8_t *>(info.ptr);
}

template <class Ring> py::class_<Ring> bind(py::module_ &m, const char *name) {
  py::class_<Ring> ring(m, name);
  ring.def(py::init(
               [](const py::buffer &memory, uint32_t consumers, uint32_t slots, uint64_t payload) {
                 return std::make_unique<Ring>(
                     memory_of(memory, Ring::bytes(consumers, slots, payload)), consumers, slots,
                     payload);
               }),
           py::keep_alive<1, 2>())
      .def_static("bytes", &Ring::bytes);
  py::class_<Sender<Ring>> sender(ring, "Sender");
  sender.def(py::init<const Ring &>(), py::keep_alive<1, 2>())
      .def("send_many", &Sender<Ring>::send_many);
  py::class_<Receiver<Ring>> receiver(ring, "Receiver");
  receiver.def(py::init<const Ring &, uint32_t>(), py::keep_alive<1, 2>())
      .def("receive_many", &Receiver<Ring>::receive_many)
      .def("ping",
           [](Receiver<Ring> &in, Sender<Ring> &out, uint64_t count, uint64_t gap_ns) {
             py::list took;
             for (const uint64_t t : in.ping(out, count, gap_ns))
               took.append(t);
             return took;
           })
      .def("pong", &Receiver<Ring>::pong);
  if constexpr (std::is_same_v<Ring, Ours>) {
    ring.def("offset", &Ours::offset);
    sender.def("send", &Sender<Ours>::send)
        .def("claim", &Sender<Ours>::claim)
        .def("publish", &Sender<Ours>::publish);
    receiver.def("receive_into", &Receiver<Ours>::receive_into)
        .def("poll", &Receiver<Ours>::poll)
        .def("release", &Receiver<Ours>::release);
  }
  return ring;
}

} // namespace

PYBIND11_MODULE(ring, m) {
  bind<Ours>(m, "Ours");
  bind<Floor>(m, "Floor");
  m.def("memcpy_speed", &memcpy_speed);
}
