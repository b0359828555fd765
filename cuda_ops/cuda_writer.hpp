// cuda_writer.hpp: the engine's end for tensors in a GPU's memory. A save launches the pack kernel
// in the caller's stream and returns; copy and publication follow in a stream of our own, so that
// the caller's stream waits for neither.
//
//   caller's stream   ... model ... | pack | event | ... next step ...
//   our stream                             | wait for the event | copy to the slot | publish
//
// Of a pipeline with the source cuda-ipc the step is not copied: its body stays in the ring on the
// device, which is exported, and only its head goes to the slot. The reader fetches the body.
//
// A save inside a stream capture becomes part of the graph. There the pack kernel fills the slot
// itself, through mapped memory, since a copy's address is fixed when it is captured;
// begin_replay() takes the slot and writes the ticket before each replay.
#pragma once

#include <optional>
#include <tuple>

#include "device.hpp"
#include "output_ops.hpp"
#include "pack.hpp"

namespace tp {

// Who says "published" once a step is in its slot.
enum class CudaPublish {
  host_function, // a thread of the driver, which also wakes the reader
  stream_write,  // the GPU, which cannot: the reader must poll
};

// Design: one thread at a time calls in (the caller's lock); the host function runs on a thread of
// the driver and touches `next_to_publish_` and the segment only. Between claim and publication a
// step is ours. Tickets are numbered as steps are.
class CudaWriter {
public:
  CudaWriter(const Driver &driver, Writer &writer, const SourceMap &source, int ordinal,
             const std::string &image, CudaPublish publish)
      : driver_(driver), writer_(writer), source_(source), publish_(publish), ordinal_(ordinal),
        is_exported_(source.head().kind == TP_SOURCE_CUDA_IPC),
        epoch_(get(source.head().writer_epoch)), columns_(source.sizes.max_num_seqs),
        next_to_publish_(writer.published()), checked_(writer.published()),
        device_(driver, ordinal) {
    const tp_sizes &sizes = source.sizes;
    const auto current = device_.current();
    pack_ = device_.load(image, "tp_pack");
    device_.pin(&source.head(), source.plan.end);
    segment_ = device_.address_of(&source.head());
    tickets_ = device_.allocate_host(columns_.end * sizes.source_slots);
    device_tickets_ = device_.address_of(tickets_);
    staging_bytes_ = source.slot_size * sizes.source_slots;
    // A handle of the driver's opens whole pages of the device: nobody else's data may be there.
    const uint64_t page = is_exported_ ? uint64_t{2} << 20 : 1;
    staging_ = device_.allocate((staging_bytes_ + sizeof(PackState) + page - 1) / page * page);
    copies_ = device_.make_stream();
    for (uint32_t i = 0; i < sizes.source_slots; ++i)
      packed_.push_back(device_.make_event(is_exported_ ? CUDA_EVENT_INTERPROCESS : 0));
    put_state();
    if (is_exported_)
      export_ring();
  }
  ~CudaWriter() {
    if (!is_closed_)
      drain();
  }

  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

  // Saves one step of tensors on this device, of which rows, generations, states and positions may
  // also be on the CPU (`on_host`: PACK_HAS_*). Call only when there is space and the writer has
  // published or given us everything before. Throws what an earlier step met (then this one is not
  // saved), OpArgumentError, CudaError.
  void save(const SaveArguments &a, uint32_t on_host, CudaStream stream) {
    raise_if_broken();
    const Writer::Shape shape = Writer::check(a, source_.sizes);
    const auto current = device_.current();
    PackArguments args = arguments(a, on_host, shape);
    if (is_capturing(stream)) {
      capture(args, a, on_host, stream);
      return;
    }
    collect();
    const uint64_t sequence = writer_.published();
    PackTicket &mine = ticket(sequence);
    fill_ticket(mine, a, on_host, shape.n);
    aim(mine, sequence, staged(sequence));
    if (last_stream_ && *last_stream_ != stream) { // packed one after another, in any streams
      if (was_replay_)                             // which was launched after we have seen it last
        driver_.check("cuEventRecord", driver_.cuEventRecord(event(sequence - 1), *last_stream_));
      driver_.check("cuStreamWaitEvent", driver_.cuStreamWaitEvent(stream, event(sequence - 1), 0));
    }
    launch(args, stream);
    writer_.claim(); // from here on the step is on its way, and a failure cannot be undone
    last_stream_ = stream;
    was_replay_ = false;
    breaking([&] {
      driver_.check("cuEventRecord", driver_.cuEventRecord(event(sequence), stream));
      driver_.check("cuStreamWaitEvent", driver_.cuStreamWaitEvent(copies_, event(sequence), 0));
      if (!is_exported_) {
        const StepColumns most(shape.n, shape.n * shape.depth, shape.width, args.flags);
        driver_.check("cuMemcpyDtoHAsync",
                      driver_.cuMemcpyDtoHAsync_v2(&source_.slot(sequence), staged(sequence),
                                                   most.end, copies_));
      }
      publish(copies_, sequence);
    });
    beat();
  }

  // Takes the next step for the replay of a captured save, which the caller launches next, in
  // `stream`. Only rows and generations of `a` are looked at, both on the CPU.
  void begin_replay(const SaveArguments &a, CudaStream stream) {
    raise_if_broken();
    collect();
    const uint64_t n = static_cast<uint64_t>(a.generations.shape[0]);
    if (n > source_.sizes.max_num_seqs) // a ticket has room for so many
      throw OpArgumentError("generations", "generations has " + std::to_string(n) +
                                               " rows, max_num_seqs is " +
                                               std::to_string(source_.sizes.max_num_seqs));
    const uint64_t sequence = writer_.published();
    PackTicket &mine = ticket(sequence);
    fill_ticket(mine, a, UINT32_MAX, n);
    if (last_stream_)
      follow(stream, sequence - 1);
    aim(mine, sequence, is_exported_ ? staged(sequence) : segment_ + offset_of(sequence));
    mine.is_replay = 1;
    writer_.claim();
    last_stream_ = stream;
    was_replay_ = true;
    beat();
  }

  // Whether every step is published. Throws what a step met.
  [[nodiscard]] bool is_settled() {
    raise_if_broken();
    {
      const auto current = device_.current();
      const int code = driver_.cuStreamQuery(copies_);
      if (code != CUDA_OK && code != CUDA_NOT_READY)
        breaking([&] { throw driver_.error("cuStreamQuery", code); });
    }
    collect();
    return observe(source_.head().published) == writer_.published();
  }

  // The writer has saved a step from the CPU itself.
  void note_host_save() {
    const auto current = device_.current();
    next_to_publish_ = checked_ = writer_.published();
    breaking([&] { put_state(); });
  }

  // Takes the exported ring back; true once no reader has it open. The steps in it are copied then.
  [[nodiscard]] bool withdraw() noexcept {
    if (!is_exported_ || is_closed_)
      return true;
    tp_source &head = source_.head();
    if (observe(head.released) != writer_.published())
      return false;
    publish_epoch(0);
    ring_bell(head.reader_bell);
    return observe(source_.exported().attached) != epoch_;
  }

  // Lets the GPU finish and releases all that was taken of it. Throws CudaError when that failed;
  // everything else is released all the same.
  void close() {
    if (is_closed_)
      return;
    is_closed_ = true;
    if (is_exported_)
      publish_epoch(0);
    const int drained = drain(), released = device_.release();
    driver_.check("cuCtxSynchronize", drained);
    driver_.check("the release of the device", released);
  }

private:
  [[nodiscard]] PackTicket &ticket(uint64_t sequence) const noexcept {
    return *reinterpret_cast<PackTicket *>(
        tickets_ + (sequence & (source_.sizes.source_slots - 1)) * columns_.end);
  }
  [[nodiscard]] CudaPointer staged(uint64_t sequence) const noexcept {
    return staging_ + (sequence & (source_.sizes.source_slots - 1)) * source_.slot_size;
  }
  [[nodiscard]] CudaEvent event(uint64_t sequence) const noexcept {
    return packed_[sequence & (source_.sizes.source_slots - 1)];
  }
  [[nodiscard]] uint64_t offset_of(uint64_t sequence) const noexcept {
    return static_cast<uint64_t>(reinterpret_cast<uint8_t *>(&source_.slot(sequence)) -
                                 reinterpret_cast<uint8_t *>(&source_.head()));
  }

  void raise_if_broken() const {
    if (broken_)
      throw CudaError(*broken_);
  }
  // What fails in here leaves a step half done: every later call says so.
  template <class Act> void breaking(Act &&act) {
    try {
      act();
    } catch (const CudaError &e) {
      broken_.emplace(e);
      throw;
    }
  }

  // A replay publishes in its own stream: that must not overtake the step before it.
  void follow(CudaStream stream, uint64_t sequence) {
    const CudaStream before = was_replay_ ? *last_stream_ : copies_;
    if (before == stream)
      return;
    const auto current = device_.current();
    driver_.check("cuEventRecord", driver_.cuEventRecord(event(sequence), before));
    driver_.check("cuStreamWaitEvent", driver_.cuStreamWaitEvent(stream, event(sequence), 0));
  }

  // Where the kernel puts the step.
  void aim(PackTicket &ticket, uint64_t sequence, CudaPointer destination) const noexcept {
    ticket.destination = destination;
    ticket.head_copy = is_exported_ ? segment_ + offset_of(sequence) : 0;
    ticket.device_epoch = is_exported_ ? epoch_ : 0;
  }

  void export_ring() {
    tp_export &to = source_.exported();
    const auto handle_to = [](uint8_t *at, const CudaIpcHandle &handle) {
      std::memcpy(at, handle.bytes, sizeof(handle.bytes));
    };
    CudaIpcHandle handle{};
    driver_.check("cuIpcGetMemHandle", driver_.cuIpcGetMemHandle(&handle, staging_));
    handle_to(to.memory, handle);
    for (size_t i = 0; i < packed_.size(); ++i) {
      driver_.check("cuIpcGetEventHandle", driver_.cuIpcGetEventHandle(&handle, packed_[i]));
      handle_to(source_.exported_event(i), handle);
    }
    const CudaUuid uuid = device_.uuid();
    std::memcpy(to.device_uuid, uuid.bytes, sizeof(uuid.bytes));
    to.ring_bytes = staging_bytes_;
    to.slot_bytes = source_.slot_size;
    to.num_slots = source_.sizes.source_slots;
    to.layout_version = TP_LAYOUT_VERSION;
    publish_epoch(epoch_);
  }
  void publish_epoch(uint32_t epoch) const noexcept {
    // SYNC POINT: exported ring - release: handles and sizes are written before
    tp::publish(source_.exported().epoch, uint64_t{epoch});
  }

  // In our own stream, which has nothing to do then: a plain copy would wait for the model's.
  void put_state() {
    PackState state{};
    state.next_ticket = writer_.published();
    state.saved_tokens = writer_.saved_tokens();
    state.error = PACK_NO_ERROR;
    driver_.check(
        "cuMemcpyHtoDAsync",
        driver_.cuMemcpyHtoDAsync_v2(staging_ + staging_bytes_, &state, sizeof(state), copies_));
    driver_.check("cuStreamSynchronize", driver_.cuStreamSynchronize(copies_));
  }

  [[nodiscard]] bool is_capturing(CudaStream stream) const {
    int status = 0;
    driver_.check("cuStreamIsCapturing", driver_.cuStreamIsCapturing(stream, &status));
    return status != 0;
  }

  [[nodiscard]] static PackColumn column_of(const Tensor &t) noexcept {
    return {t.data, {t.stride[0], t.stride[1], t.stride[2]}, t.dtype};
  }
  [[nodiscard]] PackArguments arguments(const SaveArguments &a, uint32_t on_host,
                                        const Writer::Shape &shape) const noexcept {
    // The kernel finds columns of the CPU in its ticket, and must not touch their own memory.
    const auto unless = [on_host](uint32_t column, const Tensor &t) {
      return on_host & column ? PackColumn{} : column_of(t);
    };
    PackArguments args{};
    args.tokens = column_of(a.tokens);
    args.accept_num = column_of(a.accept_num);
    args.topk_ids = column_of(a.topk_ids);
    args.logprobs = column_of(a.vectors.is_there() ? a.vectors : a.logprobs);
    args.ranks = column_of(a.ranks);
    args.rows = unless(PACK_HAS_ROWS, a.rows);
    args.generations = unless(PACK_HAS_GENERATIONS, a.generations);
    args.states = unless(PACK_HAS_STATES, a.states);
    args.positions = unless(PACK_HAS_POSITIONS, a.positions);
    args.num_rows = static_cast<uint32_t>(shape.n);
    args.depth = static_cast<uint32_t>(shape.depth);
    args.width = static_cast<uint32_t>(shape.width);
    args.flags = Writer::flags_of(a);
    args.message_flag = a.message_flag;
    args.counts = a.counts;
    args.has_wire_values = a.has_wire_values;
    args.max_num_seqs = source_.sizes.max_num_seqs;
    args.num_tickets = source_.sizes.source_slots;
    args.state = reinterpret_cast<PackState *>(staging_ + staging_bytes_);
    args.tickets = reinterpret_cast<uint8_t *>(device_tickets_);
    return args;
  }

  void fill_ticket(PackTicket &to, const SaveArguments &a, uint32_t on_host, uint64_t n) const {
    uint32_t given = 0;
    if (a.rows.is_there() && on_host & PACK_HAS_ROWS) {
      Writer::read_rows(a.rows, column<uint32_t>(to, columns_.rows), n, source_.sizes);
      given |= PACK_HAS_ROWS;
    }
    if (on_host & PACK_HAS_GENERATIONS) {
      Writer::read_generations(a.generations, column<int32_t>(to, columns_.generations), n);
      given |= PACK_HAS_GENERATIONS;
    }
    if (a.states.is_there() && on_host & PACK_HAS_STATES) {
      Writer::read_states(a.states, column<uint8_t>(to, columns_.states), n);
      given |= PACK_HAS_STATES;
    }
    if (a.positions.is_there() && on_host & PACK_HAS_POSITIONS) {
      Writer::copy_column("positions", column<int32_t>(to, columns_.positions), a.positions, n);
      given |= PACK_HAS_POSITIONS;
    }
    to.sequence = writer_.published();
    to.saved_ns = now_ns();
    to.num_rows = static_cast<uint32_t>(n);
    to.columns = given;
    to.is_replay = 0;
    to.error = PACK_NO_ERROR;
  }

  void launch(PackArguments &args, CudaStream stream) const {
    void *parameters[] = {&args};
    driver_.check("cuLaunchKernel",
                  driver_.cuLaunchKernel(pack_, pack_blocks(args.num_rows), 1, 1, PACK_THREADS, 1,
                                         1, 0, stream, parameters, nullptr));
  }

  void capture(PackArguments &args, const SaveArguments &a, uint32_t on_host, CudaStream stream) {
    for (const auto &[name, t, column] :
         {std::tuple{"states", &a.states, PACK_HAS_STATES},
          std::tuple{"positions", &a.positions, PACK_HAS_POSITIONS}})
      if (t->is_there() && on_host & column)
        throw OpArgumentError(name, std::string(name) + " lies on the CPU: every replay of the "
                                                        "graph would have these; give a tensor "
                                                        "on the device");
    args.is_captured = 1;
    if (publish_ == CudaPublish::stream_write) // its value would be fixed in the graph
      args.published = reinterpret_cast<uint64_t *>(published_on_device());
    launch(args, stream);
    if (publish_ == CudaPublish::host_function)
      driver_.check("cuLaunchHostFunc",
                    driver_.cuLaunchHostFunc(stream, &CudaWriter::publish_next, this));
  }

  void publish(CudaStream stream, uint64_t sequence) {
    if (publish_ == CudaPublish::host_function)
      driver_.check("cuLaunchHostFunc",
                    driver_.cuLaunchHostFunc(stream, &CudaWriter::publish_next, this));
    else
      driver_.check("cuStreamWriteValue64", driver_.cuStreamWriteValue64_v2(
                                                stream, published_on_device(), sequence + 1, 0));
  }
  [[nodiscard]] CudaPointer published_on_device() const noexcept {
    return segment_ + offsetof(tp_source, published);
  }

  // On a thread of the driver, in the order of the steps; no call of CUDA is allowed here.
  static void publish_next(void *self) noexcept {
    auto &w = *static_cast<CudaWriter *>(self);
    const uint64_t sequence = w.next_to_publish_++;
    w.source_.slot(sequence).saved_ns = now_ns(); // now the step exists, at the call it did not
    fault::point("writer.filled");
    Writer::publish_below(w.source_.head(), sequence + 1);
  }

  void beat() const noexcept {
    put(source_.head().beat_ns, now_ns());
    put(source_.head().busy, uint64_t{0});
  }

  // Looks at the verdicts of steps that are published; throws the first bad one.
  void collect() {
    const uint64_t published = observe(source_.head().published);
    while (checked_ < published) {
      const PackTicket &done = ticket(checked_++);
      writer_.set_saved_tokens(done.saved_tokens);
      if (done.error != PACK_NO_ERROR)
        refuse(done);
    }
  }

  [[noreturn]] void refuse(const PackTicket &t) const {
    const auto kind = static_cast<PackError>(t.error >> 40);
    const std::string begin =
        "step " + std::to_string(t.sequence) + ", which was saved before, was made empty: ";
    if (kind == PackError::ticket)
      throw OpArgumentError(
          "step", begin + "it is not the step that was begun last; every begin_step(replay_in=) "
                          "needs one replay of a captured save, of as many rows or more");
    const auto [name, wanted] = expected(kind);
    throw OpArgumentError(name,
                          begin + name + " holds " +
                              (t.is_unsigned ? std::to_string(t.value)
                                             : std::to_string(static_cast<int64_t>(t.value))) +
                              " (element " + std::to_string(t.error & ((uint64_t{1} << 40) - 1)) +
                              "), " + wanted);
  }

  // The argument that an error is about, and what its values must be.
  [[nodiscard]] std::pair<const char *, std::string> expected(PackError kind) const {
    const std::string int32 = "which is outside int32";
    switch (kind) {
    case PackError::rows_outside:
      return {"rows", int32};
    case PackError::rows_range:
      return {"rows",
              "must be 0 to max_num_seqs - 1 = " + std::to_string(source_.sizes.max_num_seqs - 1)};
    case PackError::generations_outside:
      return {"generations", int32};
    case PackError::generations_range:
      return {"generations", "must be 0 (padded) or an admission's"};
    case PackError::states_outside:
    case PackError::states_range:
      return {"states", "must be 0 to 3"};
    case PackError::positions_outside:
      return {"positions", int32};
    case PackError::accept_outside:
      return {"accept_num", int32};
    case PackError::accept_range:
      return {"accept_num", "must be 0 to the columns of tokens"};
    case PackError::ids_outside:
      return {"topk_ids", int32};
    case PackError::ranks_outside:
      return {"ranks", int32};
    case PackError::tokens_range:
      return {"tokens", "must be 0 or more; use states= for rows without a token"};
    default:
      return {"tokens", int32};
    }
  }

  // Waits for all of the device, the caller's streams too: a pack may be due there, or a replay.
  int drain() noexcept {
    try {
      const auto current = device_.current();
      return driver_.cuCtxSynchronize();
    } catch (const CudaError &e) {
      return e.code;
    }
  }

  const Driver &driver_;
  Writer &writer_;
  const SourceMap &source_;
  const CudaPublish publish_;
  const int ordinal_;
  const bool is_exported_;
  const uint32_t epoch_; // whose ring it is, while it is exported
  const TicketColumns columns_;
  uint64_t next_to_publish_; // the host function's, but for note_host_save() while none is due
  uint64_t checked_;         // steps below it are reported
  std::optional<CudaError> broken_;
  std::optional<CudaStream> last_stream_; // of the last pack
  bool was_replay_ = false;               // and whether the caller launched it
  bool is_closed_ = false;
  void *pack_ = nullptr;
  CudaPointer segment_ = 0, device_tickets_ = 0, staging_ = 0;
  uint64_t staging_bytes_ = 0;
  uint8_t *tickets_ = nullptr;
  CudaStream copies_ = nullptr;
  std::vector<CudaEvent> packed_;
  Device device_; // last: released first
};

} // namespace tp
